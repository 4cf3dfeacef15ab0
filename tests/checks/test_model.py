"""Public bug reports about the model's mathematics and its weights, as passing checks through LLM."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hemiola import LLM, SamplingParams
from hemiola.errors import ConfigError
from hemiola.formats.weight import ExpertBank, Weight
from hemiola.model.mixers.mamba2 import Mamba2Mixer
from hemiola.model.mixers.moe import MoEMixer
from hemiola.model.nemotron_h import NemotronH
from tests.support import oracle
from tests.support.recurrence import Recurrence, Weights
from tests.support.tiny_checkpoint import write_tiny_checkpoint
from tests.support.variants import tiny
from tests.support.witness import Seen, Witness, widest

Folder = Callable[..., Path]
BOUND = 1e-4
STRONG: dict[str, Any] = {"conv_gain": 30.0}  # with slow decay, which is the default: a wrong state changes the logits


def ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 512, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def watch(folder: Path, prompts: list[list[int]], num_tokens: int = 1, **settings: Any) -> list[Seen]:
    """What a float32 engine computes for prompts that arrive together."""
    llm = LLM(folder, dtype="float32", **settings)
    witness = Witness(llm.loaded.engine)
    llm.generate(prompts, SamplingParams(max_tokens=num_tokens, ignore_eos=True))
    return [witness.seen[f"request-{index}.0"] for index in range(len(prompts))]


def assert_same_states(seen: Seen, reference: Recurrence) -> None:
    for layer, state in reference.ssm.items():
        for got, want in ((seen.ssm[layer], state), (seen.conv[layer], reference.conv[layer])):
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


@pytest.mark.parametrize(
    ("pattern", "overrides"),
    [
        ("MEM*E-", {}),
        ("ME*M", {"n_routed_experts": 16, "n_group": 4, "topk_group": 2, "moe_latent_size": 32, "n_groups": 8}),
        ("M*-", {"use_conv_bias": False, "n_groups": 1}),
    ],
)
def test_the_reference_itself_equals_transformers(tmp_path: Path, pattern: str, overrides: dict[str, Any]) -> None:
    model = oracle.build(oracle.config(pattern, **overrides))
    reference = Recurrence(Weights(oracle.save(model, tmp_path)))
    prompt = ids(37)
    assert (reference.read(prompt) - oracle.logits(model, prompt)).abs().max() < BOUND


# B1


def weights_of(thing: object, seen: set[int]) -> Iterator[Weight]:
    """Every Weight that an object graph of the package's own objects holds."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, Weight):
        yield thing
        return
    if isinstance(thing, list | tuple | ExpertBank):
        parts = list(thing)
    else:
        names = [*getattr(thing, "__dict__", ()), *getattr(type(thing), "__slots__", ())]
        parts = [getattr(thing, name) for name in names] if type(thing).__module__.startswith("hemiola.model") else []
    for part in parts:
        yield from weights_of(part, seen)


def live_parameters(model: NemotronH) -> dict[str, Tensor]:
    """All parameters of a live model by the name of the tensor they come from."""
    live: dict[str, Tensor] = {"backbone.norm_f.weight": model.norm_f}
    for weight in weights_of(model, set()):
        live[f"{weight.name}.weight"] = weight.data
        tensor_scale = "weight_scale" if weight.block_scale is None else "weight_scale_2"
        for name, value in (("input_scale", weight.input_scale), (tensor_scale, weight.scale)):
            if value is not None:
                live[f"{weight.name}.{name}"] = torch.tensor(value)
        if weight.block_scale is not None:
            live[f"{weight.name}.weight_scale"] = weight.block_scale
    for index, layer in enumerate(model.layers):
        name, mixer = f"backbone.layers.{index}", layer.mixer
        live[f"{name}.norm.weight"] = layer.norm_weight
        if isinstance(mixer, MoEMixer):
            live[f"{name}.mixer.gate.e_score_correction_bias"] = mixer.router.correction_bias
        if isinstance(mixer, Mamba2Mixer):
            p = mixer.parameters
            assert p.conv_bias is not None
            live |= {
                f"{name}.mixer.conv1d.weight": p.conv_weight[:, None],
                f"{name}.mixer.conv1d.bias": p.conv_bias,
                f"{name}.mixer.A_log": p.A,
                f"{name}.mixer.D": p.D,
                f"{name}.mixer.dt_bias": p.dt_bias,
                f"{name}.mixer.norm.weight": p.norm_weight,
            }
    return live


def as_declared(name: str, stored: Tensor, dtype: torch.dtype) -> Tensor:
    """What the loader says it makes of a tensor: linears as stored, vectors cast, A = -exp(A_log)."""
    leaf = name.rpartition(".")[2]
    if leaf == "A_log":
        return -torch.exp(stored.float())
    if leaf in ("D", "dt_bias", "e_score_correction_bias"):
        return stored.float()
    is_vector = stored.dim() == 1 or ".conv1d." in name
    return stored.to(dtype) if is_vector and not leaf.endswith("scale") else stored


def bits(tensor: Tensor) -> Tensor:
    return tensor.flatten().contiguous().view(torch.uint8)


@pytest.mark.parametrize(
    ("scheme", "dtype"), [("f32", "float32"), ("bf16", "float32"), ("bf16", "bf16"), ("lightning", "bf16")]
)
def test_b1_every_live_parameter_is_the_files(tiny_folder: Folder, scheme: str, dtype: str) -> None:
    """Before and after it has run, and the second time that it is loaded in one process, too."""
    folder = tiny_folder("MEM*E-", scheme)
    stored: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        stored |= load_file(file)
    for _ in range(2):
        llm = LLM(folder, dtype=dtype)
        for _ in range(2):
            live = live_parameters(llm.loaded.engine.model)
            assert live.keys() == stored.keys()
            for name, tensor in stored.items():
                want = as_declared(name, tensor, {"float32": torch.float32, "bf16": torch.bfloat16}[dtype])
                assert live[name].dtype == want.dtype, name
                assert torch.equal(bits(live[name]), bits(want)), name
            llm.generate([ids(20)], SamplingParams(max_tokens=3))


# B2


@pytest.mark.parametrize("limit", [[0.0, math.inf], [0.01, 0.1]], ids=["no clamp", "clamp"])
def test_b2_prefill_equals_the_recurrence_at_every_length(tiny_folder: Folder, limit: list[float]) -> None:
    folder = tiny_folder("M-M*-", overrides={"time_step_limit": limit}, **STRONG)
    prompt = ids(65)
    reference = Recurrence(Weights(folder))
    want = reference.read(prompt)
    for length in (1, 15, 16, 17, 31, 32, 33, 48, 65):
        (seen,) = watch(folder, [prompt[:length]], prefix_caching=False)
        assert seen.pieces == [length]
        assert widest(seen, want) < BOUND, f"length {length}"
    assert_same_states(seen, reference)


def test_b2_the_clamp_bites(tiny_folder: Folder) -> None:
    """Without it, the clamped model's reference is far away; so the check above sees a missing clamp."""
    folder = tiny_folder("M-M*-", overrides={"time_step_limit": [0.01, 0.1]}, **STRONG)
    prompt = ids(33)
    (seen,) = watch(folder, [prompt])
    unclamped = Recurrence(Weights(folder), dt_limit=(0.0, math.inf))
    assert widest(seen, unclamped.read(prompt)) > 1000 * BOUND


# B3 and B8


@pytest.mark.parametrize("pattern", ["M-M*-", "MEM*E"])
@pytest.mark.parametrize("pieces", [[40], [13, 27], [1, 39], [39, 1], [4] * 10, [1] * 40], ids=str)
def test_b3_a_prompt_in_pieces_equals_the_whole(tiny_folder: Folder, pattern: str, pieces: list[int]) -> None:
    """Logits of every token, conv state and SSM state; the engine's scheduler is told the pieces."""
    folder = tiny_folder(pattern, **STRONG)
    prompt = ids(40)
    llm = LLM(folder, dtype="float32")
    engine = llm.loaded.engine
    witness, todo = Witness(engine), list(pieces)
    engine.scheduler._chunk = lambda request, budget: todo.pop(0)  # type: ignore[method-assign]
    llm.generate([prompt], SamplingParams(max_tokens=1))
    seen = witness.seen["request-0.0"]
    assert seen.pieces == pieces
    reference = Recurrence(Weights(folder))
    assert widest(seen, reference.read(prompt)) < BOUND
    assert_same_states(seen, reference)


@pytest.mark.parametrize("budget", [10, 24, 25, 40, 2048])
def test_b8_a_budget_off_the_chunk_grid(tiny_folder: Folder, budget: int) -> None:
    """100 tokens alone, and 37, 5 and 58 packed: tokens and states of the unsplit run, which are the reference's."""
    folder = tiny_folder("M-M*-", **STRONG)
    weights, count = Weights(folder), 4
    for prompts in ([ids(100)], [ids(37, 1), ids(5, 2), ids(58, 3)]):
        for prompt, seen in zip(prompts, watch(folder, prompts, count, max_num_batched_tokens=budget), strict=True):
            assert budget > 100 or max(seen.pieces) <= budget
            reference = Recurrence(weights)
            assert widest(seen, reference.read(seen.ids)) < BOUND
            assert_same_states(seen, reference)
            assert seen.ids[len(prompt) :] == Recurrence(weights).greedy(prompt, count)[: count - 1]


# B4


@pytest.mark.parametrize("pattern", ["M-M*-", "MEM*E", "M*", "-M", "M-ME*"])
def test_b4_every_pattern_loads_and_generates(tiny_folder: Folder, pattern: str) -> None:
    folder, prompt = tiny_folder(pattern, **STRONG), ids(20)
    llm = LLM(folder, dtype="float32")
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=5, ignore_eos=True))
    (choice,) = output.outputs
    assert choice.token_ids == Recurrence(Weights(folder)).greedy(prompt, 5)
    streamed = llm.stream(prompt, SamplingParams(max_tokens=5, ignore_eos=True))
    assert [token for delta in streamed for token in delta.new_ids] == choice.token_ids


@pytest.mark.parametrize(("pattern", "letter", "position"), [("M-X*-", "X", 2), ("m-M*", "m", 0), ("M-M|*", "|", 3)])
def test_b4_an_unknown_letter_is_refused(tmp_path: Path, pattern: str, letter: str, position: int) -> None:
    write_tiny_checkpoint(tmp_path, tiny("M-M*-"), "f32")
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"M-M*-"', f'"{pattern}"'))
    with pytest.raises(ConfigError) as error:
        LLM(tmp_path)
    assert f"unknown layer letter {letter!r}" in str(error.value)
    assert f"at position {position}" in str(error.value)


# B5


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_b5_the_gated_norm_is_per_group(tiny_folder: Folder, groups: int) -> None:
    """A mean over the full width gives another model as soon as there is more than one group."""
    folder = tiny_folder("M-M*-", overrides={"n_groups": groups})
    prompt = ids(20)
    (seen,) = watch(folder, [prompt])
    weights = Weights(folder)
    assert widest(seen, Recurrence(weights).read(prompt)) < BOUND
    full_width = widest(seen, Recurrence(weights, norm_groups=1).read(prompt))
    assert full_width > 1000 * BOUND if groups > 1 else full_width < BOUND
