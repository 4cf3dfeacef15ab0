"""Expanded forms of weights that the reference arm keeps between calls, counted in bytes and bounded.

A quantised weight is decoded, and a bfloat16 one widened for a float32 run, once; the result is kept until the budget
is full. A form that no longer fits is built for the call and dropped, and that is counted too: never silent.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from hemiola.formats.weight import Weight


class KeptForms:
    """Store of expanded weights of one engine, keyed by (weight name, form).

    device: where the engine's activations are, and the forms with them. budget_bytes: most bytes to keep. `kept_bytes`
    are held now; `transient_builds` and `transient_bytes` count the expansions that did not fit and were therefore
    repeated per call.
    """

    def __init__(self, budget_bytes: int, device: torch.device | str = "cpu") -> None:
        self.budget_bytes, self.device = budget_bytes, torch.device(device)
        self.kept_bytes = 0
        self.transient_builds = 0
        self.transient_bytes = 0
        self._forms: dict[tuple[str, str], torch.Tensor] = {}

    def get(self, weight: Weight, form: str, build: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The `form` of `weight`, from the store or from `build`."""
        key = (weight.name, form)
        tensor = self._forms.get(key)
        if tensor is None:
            tensor = build().to(self.device)
            size = tensor.numel() * tensor.element_size()
            if self.kept_bytes + size <= self.budget_bytes:
                self._forms[key] = tensor
                self.kept_bytes += size
            else:
                self.transient_builds += 1
                self.transient_bytes += size
        return tensor

    def data(self, weight: Weight) -> torch.Tensor:
        """A plain weight's own tensor, where the activations are."""
        return weight.data if weight.data.device == self.device else self.get(weight, "data", lambda: weight.data)
