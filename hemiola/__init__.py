"""hemiola: an inference engine for NVIDIA's Nemotron-H family of hybrid language models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hemiola.config.engine import EngineConfig
    from hemiola.config.sampling import SamplingParams
    from hemiola.llm import LLM, CompletionOutput, RequestOutput

__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "EngineConfig", "RequestOutput", "SamplingParams", "__version__"]

_HOMES = {
    "LLM": "hemiola.llm",
    "CompletionOutput": "hemiola.llm",
    "RequestOutput": "hemiola.llm",
    "EngineConfig": "hemiola.config.engine",
    "SamplingParams": "hemiola.config.sampling",
}


def __getattr__(name: str) -> Any:
    """Public names are imported on first use: `import hemiola` itself loads neither torch nor a model."""
    if name not in _HOMES:
        raise AttributeError(f"module 'hemiola' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
