"""Every registered op has a reference, and a test file that calls it."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

from hemiola import ops
from hemiola.ops import registered_ops

HERE = Path(__file__).parent
OPS_FOLDER = Path(inspect.getfile(ops)).parent
NOT_OPS = {"__init__", "table", "kept", "resident", "layout", "epilogue", "ssd_update"}  # the last: part of an op


@pytest.mark.parametrize("op", sorted(registered_ops()))
def test_each_op_has_a_reference_that_its_test_file_calls(op: str) -> None:
    references = registered_ops()[op]["reference"]
    assert len(references) == 1, f"{op} has {len(references)} reference variants"
    run = references[0].run
    module = run.__module__.rsplit(".", 1)[1]
    tree = ast.parse((HERE / f"test_{module}.py").read_text())
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == f"hemiola.ops.{module}"
        for alias in node.names
    }
    assert run.__name__ in imported, f"test_{module}.py does not import {run.__name__}"
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    assert run.__name__ in used, f"test_{module}.py does not call {run.__name__}"


def test_each_file_of_the_folder_registers_an_op() -> None:
    files = {path.stem for path in OPS_FOLDER.glob("*.py")} - NOT_OPS
    modules = {
        variant.run.__module__.rsplit(".", 1)[1]
        for arms in registered_ops().values()
        for variants in arms.values()
        for variant in variants
    }
    assert files == modules


def test_each_op_file_states_its_contract() -> None:
    for path in OPS_FOLDER.glob("*.py"):
        if path.stem not in NOT_OPS:
            contract = ast.get_docstring(ast.parse(path.read_text())) or ""
            assert ":" in contract, f"{path.name} states no shapes"
            assert "eturns" in contract or "->" in contract or path.stem == "kv_write", path.name
