"""Who may import what, and what must appear nowhere. Imports inside functions and under TYPE_CHECKING count too."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "hemiola"

# Room (a folder or a module of the package) -> the rooms that it may import besides itself.
BELOW_CONFIG = {"errors", "tap"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "tap": set(),
    "config": BELOW_CONFIG,
    "formats": {*BELOW_CONFIG, "config"},
    "text": {"errors", "config"},
    "kernels": set(),
    "ops": {*BELOW_CONFIG, "formats", "kernels"},
    "model": {*BELOW_CONFIG, "config", "formats", "ops"},
    "cache": {*BELOW_CONFIG, "config", "model"},
    "engine": {*BELOW_CONFIG, "config", "formats", "ops", "model", "cache"},
    "structured": {"errors", "config", "engine", "text"},
    "simulate": {*BELOW_CONFIG, "config", "model", "cache", "engine"},
    "evidence": {"errors", "config", "formats", "ops", "engine", "loading", "llm"},
}
TOP = {
    *("loading", "front", "llm", "quantize", "inspect", "synthetic", "bench", "doctor"),
    *("serve", "load", "selftest", "cli", "__init__", "__main__"),
}
ROOMS = set(ALLOWED) | TOP

# What other packages a room may not use.
NO_TORCH = {
    "engine/scheduler.py",
    "engine/request.py",
    "cache/pool.py",
    "cache/budget.py",
    "cache/blocks.py",
    "errors.py",
}
ONLY_IN = {
    "triton": ("kernels/", "doctor.py"),
    "pynvml": ("bench/",),
    "huggingface_hub": ("formats/hub.py",),
    "tokenizers": ("text/",),
    "jinja2": ("text/",),
    "typer": ("cli/",),
    "fastapi": ("serve/",),
    "uvicorn": ("serve/",),
    "prometheus_client": ("serve/",),
    "llguidance": ("structured/",),
    "rich": ("cli/", "inspect.py", "loading.py", "llm.py", "simulate/table.py"),
    "transformers": ("evidence/oracle.py",),
    "os": ("config/", "formats/", "quantize/", "cli/"),
}
# Compositions inside ops: the experts are made of the linears and the activation, on either arm, the decode step's
# reference of its three parts, and what begins or ends with a norm of that and what it is joined to.
OPS_SHARED = {"table", "kept", "resident", "layout", "epilogue"}
OPS_COMPOSED = {
    "moe_experts": {"linear", "linear_fp8", "linear_nvfp4"},
    "mamba2_update": {"causal_conv1d", "ssd_update", "gated_rms_norm"},
    "norm_route": {"rms_norm", "moe_route"},
    "experts_norm": {"moe_experts", "rms_norm"},
    "norm_linears": {"rms_norm", "linear", "linear_fp8", "linear_nvfp4"},
}


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def room_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module that an import statement anywhere in the tree may load, dotted."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def breaches(name: str, source: str) -> list[str]:
    """What the file `name` (relative to the package) does that its room may not."""
    found = []
    path = PACKAGE / name
    room = room_of(path)
    for module in imports(ast.parse(source)):
        top, *rest = module.split(".")
        if top == "hemiola" and rest and rest[0] in ROOMS:
            target = rest[0]
            if target != room and room not in TOP and target not in ALLOWED[room]:
                found.append(f"{room} imports {target}")
            if target in {"cli", "__main__"} and room not in {"cli", "__main__"}:
                found.append("cli is imported")
            if target == "evidence" and room not in {"evidence", "bench", "selftest", "cli"}:
                found.append("evidence is imported")
            if room == "cache" and target == "model" and rest[1:2] not in ([], ["specs"]):
                found.append(f"cache imports model.{rest[1]}")
            if room == "ops" and path.stem != "__init__" and target == "ops" and len(rest) > 1:
                # A device variant may use what its own op's file defines.
                is_device = name.startswith("ops/device/")
                allowed = OPS_SHARED | OPS_COMPOSED.get(path.stem, set()) | ({path.stem} if is_device else set())
                imported = rest[1]
                if is_device and imported == "device":  # another variant's file, or the package in its name
                    imported = rest[2] if len(rest) > 2 else path.stem
                if imported not in allowed:
                    found.append(f"op file {path.stem} imports ops.{imported}")
            if room == "ops" and target == "kernels" and not name.startswith("ops/device/"):
                found.append("a kernel outside of ops/device")
        if top == "torch" and (name in NO_TORCH or room in {"config", "text"}):
            found.append("torch")
        if module.startswith("torch.cuda") and room in {"config", "formats", "model", "cache"}:
            found.append("torch.cuda")
        if top in ONLY_IN and not name.startswith(ONLY_IN[top] or "-"):
            found.append(top)
    return found


@pytest.mark.parametrize("path", files(), ids=name_of)
def test_imports_follow_the_layers(path: Path) -> None:
    assert room_of(path) in ROOMS, f"{room_of(path)} is in no layer: give it one here"
    assert breaches(name_of(path), path.read_text()) == []


@pytest.mark.parametrize(
    ("name", "source", "breach"),
    [
        ("ops/linear.py", "from hemiola.config.engine import EngineConfig", "ops imports config"),
        ("ops/linear.py", "def f():\n    from hemiola.model import batch", "ops imports model"),
        ("ops/linear.py", "from hemiola.ops.rms_norm import rms_norm", "op file linear imports ops.rms_norm"),
        ("ops/linear.py", "from hemiola.ops import rms_norm", "op file linear imports ops.rms_norm"),
        ("formats/weight.py", "if TYPE_CHECKING:\n    import hemiola.ops.table", "formats imports ops"),
        ("kernels/nvfp4.py", "from hemiola.errors import ConfigError", "kernels imports errors"),
        ("ops/linear.py", "from hemiola.kernels import nvfp4", "a kernel outside of ops/device"),
        ("ops/device/linear.py", "import triton", "triton"),
        ("ops/device/linear.py", "from hemiola.ops.rms_norm import rms_norm", "op file linear imports ops.rms_norm"),
        ("ops/device/linear.py", "from hemiola.ops.device import rms_norm", "op file linear imports ops.rms_norm"),
        ("ops/linear.py", "from hemiola.ops.device import linear", "op file linear imports ops.device"),
        ("model/linear.py", "from hemiola.kernels.launch import capability", "model imports kernels"),
        ("cache/pool.py", "from hemiola.model.batch import ForwardBatch", "cache imports model.batch"),
        ("cache/pool.py", "import torch", "torch"),
        ("engine/scheduler.py", "import torch.nn", "torch"),
        ("text/chat.py", "from hemiola.engine.request import Request", "text imports engine"),
        ("model/batch.py", "import triton", "triton"),
        ("model/batch.py", "import torch.cuda", "torch.cuda"),
        ("llm.py", "from hemiola.cli import main", "cli is imported"),
        ("llm.py", "from hemiola.evidence import gate", "evidence is imported"),
        ("evidence/gate.py", "from hemiola.model.nemotron_h import NemotronH", "evidence imports model"),
        ("model/nemotron_h.py", "import os", "os"),
        ("engine/engine.py", "import transformers", "transformers"),
    ],
)
def test_each_rule_bites(name: str, source: str, breach: str) -> None:
    assert breach in breaches(name, source)


KERNELS = sorted((PACKAGE / "kernels").glob("*.py"))


def unchecked(source: str) -> list[str]:
    """Functions that no type checker looks into, besides kernels: those without an annotation."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    return [
        f.name
        for f in functions
        if f.returns is None and not any("triton.jit" in ast.unparse(decorator) for decorator in f.decorator_list)
    ]


@pytest.mark.parametrize("path", KERNELS, ids=name_of)
def test_launchers_are_typed(path: Path) -> None:
    assert unchecked(path.read_text()) == []


def test_an_untyped_launcher_is_found() -> None:
    kernel = "@triton.jit(do_not_specialize=['n'])\ndef _kernel(x_ptr, n): pass\n"
    assert unchecked(f"{kernel}def launch(x): pass\ndef other(x) -> None: pass") == ["launch"]


FORBIDDEN = {
    r"os\.environ|os\.getenv|os\.putenv": ("config/",),
    r"(?<![\w.])print\(": (),
    r"make_block_ptr": (),
    r"\bTODO\b|\bFIXME\b|\bXXX\b": (),
}


def swallows(handler: ast.ExceptHandler) -> bool:
    """Catches everything, and is not a roll-back (`except BaseException`) that ends by raising the same again."""
    caught = ast.unparse(handler.type) if handler.type else ""
    last = handler.body[-1]
    rolls_back = caught == "BaseException" and isinstance(last, ast.Raise) and last.exc is None
    return (not caught or re.search(r"\b(Base)?Exception\b", caught) is not None) and not rolls_back


def forbidden(name: str, source: str) -> list[str]:
    found = [p for p, where in FORBIDDEN.items() if not name.startswith(where or "-") and re.search(p, source)]
    handlers = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ExceptHandler))
    return found + [f"line {handler.lineno} catches everything" for handler in handlers if swallows(handler)]


@pytest.mark.parametrize("path", files(), ids=name_of)
def test_nothing_forbidden_in_the_text(path: Path) -> None:
    assert forbidden(name_of(path), path.read_text()) == []
    assert path.stem not in {"utils", "common", "base", "misc", "helpers"}, "name what it holds"


@pytest.mark.parametrize(
    ("name", "source", "count"),
    [
        ("ops/table.py", "try:\n    pass\nexcept Exception:\n    pass", 1),
        ("ops/table.py", "try:\n    pass\nexcept:\n    pass", 1),
        ("ops/table.py", "try:\n    pass\nexcept (OSError, Exception):\n    raise", 1),
        ("ops/table.py", "try:\n    pass\nexcept BaseException:\n    pass", 1),
        ("ops/table.py", "try:\n    pass\nexcept BaseException:\n    undo()\n    raise", 0),
        ("ops/table.py", "try:\n    pass\nexcept OSError:\n    pass", 0),
        ("model/load.py", "os.environ['X']", 1),
        ("config/engine.py", "os.environ['X']", 0),
        ("engine/engine.py", "print(1)", 1),
        ("cli/inspect.py", "print(1)", 1),
        ("cli/inspect.py", "console.print(1)", 0),
        ("inspect.py", "console.print(1); pprint(2)", 0),
    ],
)
def test_each_pattern_bites(name: str, source: str, count: int) -> None:
    assert len(forbidden(name, source)) == count
