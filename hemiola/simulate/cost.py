"""What a step costs, in the place of the model: a sum of a few linear terms, nothing overlapped.

    step_s = fixed_s + decode_row_s * decode rows + prefill_token_s * prefill tokens
           + (KV bytes read + state bytes moved on the device) / device_bytes_per_s
           + bytes swapped to or from the host / host_bytes_per_s

Every row reads the KV of its context once (the attention FLOPs of a prompt, which grow with its square, are left out),
and reads and writes its recurrent state; a request's first piece only writes it. A snapshot taken inside a step writes
one state, a copy on the device reads and writes one. Reading the weights is in fixed_s. What grows otherwise, such as
the number of distinct experts with the batch, is not modelled.

The defaults are assumptions, round numbers for a 30B-A3B model on one recent GPU, not measurements. README.md in this
folder has an example that is fitted to measurements, and its error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from hemiola.cache.budget import CachePlan
from hemiola.cache.movements import CopyState, Forget, LoadBlocks, LoadState, Movement, SaveBlocks, SaveState
from hemiola.config.engine import EngineConfig
from hemiola.config.reading import number, wrong
from hemiola.engine.scheduler import ScheduledRow
from hemiola.errors import ConfigError


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one step does. num_kv_tokens: of context read, summed over rows. state_bytes: moved on the device;
    host_bytes: over the link to the host."""

    num_decodes: int
    num_prefill_tokens: int
    num_kv_tokens: int
    state_bytes: int
    host_bytes: int


def measure(rows: Iterable[ScheduledRow], plan: CachePlan) -> StepWork:
    """The work of rows that are about to run, without copies."""
    num_decodes = num_prefill_tokens = num_kv_tokens = num_states = 0
    for row in rows:
        if row.is_decode:
            num_decodes += 1
        else:
            num_prefill_tokens += row.num_tokens
        num_kv_tokens += row.request.num_computed + row.num_tokens
        num_states += (2 if row.request.num_computed else 1) + len(row.marks)
    return StepWork(num_decodes, num_prefill_tokens, num_kv_tokens, num_states * plan.slot_bytes, 0)


def moved_bytes(movements: Iterable[Movement], plan: CachePlan) -> tuple[int, int]:
    """Bytes that copies move on the device (read and written), and over the link to the host."""
    device = host = 0
    for movement in movements:
        match movement:
            case CopyState():
                device += 2 * plan.slot_bytes
            case SaveState() | LoadState():
                host += plan.slot_bytes
            case SaveBlocks(blocks=blocks) | LoadBlocks(blocks=blocks):
                host += len(blocks) * plan.block_bytes
            case Forget():
                pass
    return device, host


@dataclass(frozen=True, slots=True)
class CostModel:
    """Times in seconds, speeds in bytes per second; see the module."""

    fixed_s: float
    decode_row_s: float
    prefill_token_s: float
    device_bytes_per_s: float
    host_bytes_per_s: float

    @classmethod
    def read(cls, given: object, config: EngineConfig, where: str) -> CostModel:
        """From the parsed JSON of a cost file; what it leaves out is assumed. The speeds of prefill and of the link to
        the host are then those by which the engine chooses between computing again and swapping.

        Raises: ConfigError naming the key.
        """
        values = {
            "fixed_s": 0.004,
            "decode_row_s": 50e-6,
            "prefill_token_s": 1 / config.prefill_tokens_per_s,
            "device_bytes_per_s": 4e12,
            "host_bytes_per_s": config.host_bytes_per_s,
        }
        if not isinstance(given, Mapping):
            raise wrong(given, "an object of keys", where)
        if unknown := sorted(given.keys() - values.keys()):
            raise ConfigError("unknown key", found=", ".join(unknown), expected=", ".join(values), where=where)
        values |= {name: number(value, f"{where}: {name}") for name, value in given.items()}
        for field in fields(cls):
            value, is_speed = values[field.name], field.name.endswith("_per_s")
            if value < 0.0 or value == math.inf or (is_speed and value == 0.0):
                expected = "a finite number above 0" if is_speed else "a finite number, 0 or more"
                raise wrong(value, expected, f"{where}: {field.name}")
        if values["fixed_s"] + values["decode_row_s"] == 0.0 or values["fixed_s"] + values["prefill_token_s"] == 0.0:
            raise ConfigError("steps would take no time", expected="fixed_s above 0", where=where)
        return cls(**values)

    def step_s(self, work: StepWork, plan: CachePlan) -> float:
        """Seconds that a step of this work takes."""
        kv_bytes = work.num_kv_tokens * plan.block_bytes / plan.block_size
        return (
            self.fixed_s
            + self.decode_row_s * work.num_decodes
            + self.prefill_token_s * work.num_prefill_tokens
            + (kv_bytes + work.state_bytes) / self.device_bytes_per_s
            + work.host_bytes / self.host_bytes_per_s
        )
