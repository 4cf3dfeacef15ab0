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

    budget_bytes: most bytes to keep. `kept_bytes` are held now; `transient_builds` and `transient_bytes` count the
    expansions that did not fit and were therefore repeated per call.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.kept_bytes = 0
        self.transient_builds = 0
        self.transient_bytes = 0
        self._forms: dict[tuple[str, str], torch.Tensor] = {}

    def get(self, weight: Weight, form: str, build: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The `form` of `weight`, from the store or from `build`."""
        key = (weight.name, form)
        tensor = self._forms.get(key)
        if tensor is None:
            tensor = build()
            size = tensor.numel() * tensor.element_size()
            if self.kept_bytes + size <= self.budget_bytes:
                self._forms[key] = tensor
                self.kept_bytes += size
            else:
                self.transient_builds += 1
                self.transient_bytes += size
        return tensor
