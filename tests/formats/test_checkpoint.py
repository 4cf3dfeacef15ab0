"""Checkpoint: one file or many, mapped, aligned or not; everything that is wrong with the files in one error."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from hemiola.errors import CheckpointError
from hemiola.formats.checkpoint import INDEX, SINGLE, Checkpoint
from tests.support.damage import change_json, shard, truncate, weight_map
from tests.support.seeded_checkpoint import write_shards

TENSORS = {
    "a": torch.arange(12, dtype=torch.float32).view(3, 4),
    "b": torch.arange(5, dtype=torch.uint8),
    "c": torch.arange(6).bfloat16(),
    "d": torch.tensor(2.5),
    "e": torch.arange(8).to(torch.float8_e4m3fn),
    "f": torch.ones(0, 3),
}
NAMES_ON_DISK = {torch.float32: "F32", torch.uint8: "U8", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3"}


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    write_shards(tmp_path, TENSORS, 3)  # a, d / b, e / c, f
    return tmp_path


def as_bytes(tensor: Tensor) -> list[int]:
    return list(tensor.flatten().view(torch.uint8).tolist())


def write_by_hand(file: Path, tensors: dict[str, Tensor], padding: int) -> None:
    """A valid file whose payload starts `padding` bytes later, so that elements may lie anywhere."""
    entries, payload = {}, b""
    for name, tensor in tensors.items():
        data = bytes(as_bytes(tensor))
        offsets = [len(payload), len(payload) + len(data)]
        entries[name] = {"dtype": NAMES_ON_DISK[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        payload += data
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8 + padding)
    file.write_bytes(struct.pack("<Q", len(header)) + header + payload)


def test_shards_with_an_index(sharded: Path) -> None:
    checkpoint = Checkpoint.open(sharded)
    assert checkpoint.headers.keys() == TENSORS.keys()
    assert checkpoint.unread_files == ()
    for name, tensor in TENSORS.items():
        header = checkpoint.headers[name]
        assert (header.name, header.shape, header.nbytes) == (name, tuple(tensor.shape), tensor.nbytes)
        assert header.dtype == NAMES_ON_DISK[tensor.dtype]
        assert header.file.name == weight_map(sharded)[name]
        payload = header.file.read_bytes()[header.offset : header.offset + header.nbytes]
        assert list(payload) == as_bytes(tensor)
        assert torch.equal(checkpoint.tensor(name), tensor) or name == "e"
        assert as_bytes(checkpoint.tensor(name)) == as_bytes(tensor)


@pytest.mark.parametrize("file_name", [SINGLE, "weights.safetensors"])
def test_a_single_file(tmp_path: Path, file_name: str) -> None:
    save_file(TENSORS, tmp_path / file_name)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.headers.keys() == TENSORS.keys()
    assert torch.equal(checkpoint.tensor("a"), TENSORS["a"])


def test_the_index_wins_and_other_files_are_named(sharded: Path) -> None:
    save_file({"x": torch.zeros(1)}, sharded / "consolidated.safetensors")
    checkpoint = Checkpoint.open(sharded)
    assert checkpoint.unread_files == ("consolidated.safetensors",)
    assert "x" not in checkpoint.headers


@pytest.mark.parametrize("padding", range(8))
def test_payloads_that_are_not_aligned_are_copied_and_right(tmp_path: Path, padding: int) -> None:
    write_by_hand(tmp_path / SINGLE, {"b": TENSORS["b"], "a": TENSORS["a"], "c": TENSORS["c"]}, padding)
    checkpoint = Checkpoint.open(tmp_path)
    for name in "abc":
        tensor = checkpoint.tensor(name)
        assert tensor.data_ptr() % tensor.element_size() == 0
        assert torch.equal(tensor, TENSORS[name])
    first, second = checkpoint.tensor("a"), checkpoint.tensor("a")  # both alive, so that copies lie apart
    is_view = first.data_ptr() == second.data_ptr()
    assert is_view == ((5 + padding) % 4 == 0)


def test_tensors_are_views_that_outlive_the_checkpoint(sharded: Path) -> None:
    checkpoint = Checkpoint.open(sharded)
    tensor = checkpoint.tensor("a")
    assert tensor.data_ptr() == checkpoint.tensor("a").data_ptr()
    del checkpoint
    assert torch.equal(tensor, TENSORS["a"])


def test_mapping_reads_nothing(tmp_path: Path) -> None:
    """A gibibyte of holes: opening it and taking its tensor costs no private memory."""

    def private_kib() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("RssAnon")).split()[1])

    num_bytes = 2**30
    header = json.dumps({"w": {"dtype": "BF16", "shape": [num_bytes // 2], "data_offsets": [0, num_bytes]}}).encode()
    with (tmp_path / SINGLE).open("wb") as stream:
        stream.write(struct.pack("<Q", len(header) + -len(header) % 8) + header + b" " * (-len(header) % 8))
        stream.truncate(stream.tell() + num_bytes)
    before = private_kib()
    tensor = Checkpoint.open(tmp_path).tensor("w")
    assert tensor.nbytes == num_bytes
    assert private_kib() - before < 16 * 1024


def test_missing_and_truncated_shards_are_reported_together(sharded: Path) -> None:
    shard(sharded, 2).unlink()
    before, after = truncate(shard(sharded, 3), 5)
    with pytest.raises(CheckpointError) as error:
        Checkpoint.open(sharded)
    text = str(error.value)
    assert "missing shard (1): model-00002-of-00003.safetensors with 2 tensors (b, e)" in text
    expected = f"model-00003-of-00003.safetensors, expected {before} bytes and found {after}, cutting 1 tensors (c)"
    assert f"truncated shard (1): {expected}" in text


def test_a_shard_cut_inside_its_header(sharded: Path) -> None:
    file = shard(sharded, 1)
    truncate(file, file.stat().st_size - 20)
    with pytest.raises(CheckpointError, match=r"model-00001.*header is truncated.*found 20 bytes in the file"):
        Checkpoint.open(sharded)
    truncate(file, 15)
    with pytest.raises(CheckpointError, match="found 5 bytes in the file; expected at least 8 bytes"):
        Checkpoint.open(sharded)


def test_bytes_after_the_last_tensor_are_refused(sharded: Path) -> None:
    with shard(sharded, 1).open("ab") as stream:
        stream.write(b"xyz")
    with pytest.raises(CheckpointError, match=r"model-00001.*not a valid safetensors file"):
        Checkpoint.open(sharded)


@pytest.mark.parametrize("header", [b"{no json", b"[]", b'{"a": 3}', b'{"a": {"dtype": "F32", "shape": [2]}}'])
def test_a_damaged_header(tmp_path: Path, header: bytes) -> None:
    (tmp_path / SINGLE).write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(CheckpointError, match=r"model.safetensors: the safetensors header is damaged"):
        Checkpoint.open(tmp_path)


def test_a_header_whose_shape_and_bytes_disagree(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}).encode()
    (tmp_path / SINGLE).write_bytes(struct.pack("<Q", len(header)) + header + b"1234")
    with pytest.raises(CheckpointError, match=r"'a' is F32 \[2\] but occupies 4 bytes"):
        Checkpoint.open(tmp_path)


def test_index_and_shards_must_agree_both_ways(sharded: Path) -> None:
    def change(index: dict[str, dict[str, str]]) -> None:
        del index["weight_map"]["a"]
        index["weight_map"]["ghost"] = shard(sharded, 2).name

    change_json(sharded / INDEX, change)
    with pytest.raises(CheckpointError) as error:
        Checkpoint.open(sharded)
    assert "tensor in a shard but not in the index (1): a (model-00001-of-00003.safetensors)" in str(error.value)
    assert "tensor in the index but not in its shard (1): ghost (model-00002-of-00003" in str(error.value)


def test_a_tensor_in_two_shards(sharded: Path) -> None:
    save_file({"b": TENSORS["b"], "e": TENSORS["e"], "a": TENSORS["a"]}, shard(sharded, 2))
    with pytest.raises(CheckpointError, match=r"tensor in two shards \(1\): a in model-00001.* and model-00002"):
        Checkpoint.open(sharded)


def test_long_lists_are_cut_with_a_count(tmp_path: Path) -> None:
    write_shards(tmp_path, {f"t{index:03d}": torch.zeros(1) for index in range(50)}, 2)
    shard(tmp_path, 1).unlink()
    with pytest.raises(CheckpointError, match=r"with 25 tensors \(t000, .*, t038, and 5 more\)"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"metadata": {}}', '{"weight_map": {"a": "../a.safetensors"}}'])
def test_a_damaged_index(sharded: Path, text: str) -> None:
    (sharded / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match="cannot read the checkpoint's index"):
        Checkpoint.open(sharded)


def test_folders_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere: no such folder"):
        Checkpoint.open(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="no index and not one safetensors file; expected model"):
        Checkpoint.open(tmp_path)
    for name in ("x.safetensors", "y.safetensors"):
        save_file({"a": torch.zeros(1)}, tmp_path / name)
    with pytest.raises(CheckpointError, match=r"found x.safetensors, y.safetensors; expected model.safetensors.index"):
        Checkpoint.open(tmp_path)
