"""The shard writer and the folder that appears whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hemiola.errors import CheckpointError
from hemiola.formats.safetensors import read_header
from hemiola.quantize.plan import StoredTensor
from hemiola.quantize.write import ShardWriter, appearing_whole, refuse_occupied

TENSORS = {
    "bytes": torch.arange(9, dtype=torch.uint8).view(3, 3),
    "codes": torch.arange(5, dtype=torch.uint8).view(torch.float8_e4m3fn),
    "half": torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "scalar": torch.tensor(0.25),
    "one": torch.tensor([3.0]),
}
DTYPES = {torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3", torch.bfloat16: "BF16", torch.float32: "F32"}
HEADERS = [StoredTensor(name, DTYPES[t.dtype], tuple(t.shape)) for name, t in TENSORS.items()]


def test_pieces_in_any_order_make_a_file_that_safetensors_reads(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "a.safetensors", HEADERS) as shard:
        shard.write("bytes", TENSORS["bytes"][:1])
        for name in ("half", "one", "scalar", "codes"):
            shard.write(name, TENSORS[name])
        shard.write("bytes", TENSORS["bytes"][1:])
    loaded = load_file(tmp_path / "a.safetensors")
    assert {name: (t.dtype, t.shape) for name, t in loaded.items()} == {
        name: (t.dtype, t.shape) for name, t in TENSORS.items()
    }
    for name, tensor in TENSORS.items():
        assert torch.equal(loaded[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    for header in read_header(tmp_path / "a.safetensors"):
        assert header.offset % TENSORS[header.name].element_size() == 0, "read in place, without a copy"


def test_a_tensor_left_incomplete_is_noticed(tmp_path: Path) -> None:
    def leave_bytes_out() -> None:
        with ShardWriter(tmp_path / "a", HEADERS) as shard:
            for name in ("half", "one", "scalar", "codes"):
                shard.write(name, TENSORS[name])

    with pytest.raises(AssertionError, match="not written whole"):
        leave_bytes_out()


@pytest.mark.parametrize("exists", [False, True])
def test_a_folder_appears_when_all_went_well(tmp_path: Path, exists: bool) -> None:
    target = tmp_path / "parents" / "model"
    stale = tmp_path / "parents" / "model.hemiola-partial"
    stale.mkdir(parents=True)
    (stale / "left-behind").write_text("x")
    if exists:
        target.mkdir()
    refuse_occupied(target)
    with appearing_whole(target) as partial:
        assert partial.parent == target.parent
        assert partial.name.startswith(target.name)
        assert list(partial.iterdir()) == []
        (partial / "new").write_text("y")
        assert target.exists() is exists
    assert [file.name for file in target.iterdir()] == ["new"]
    assert list(target.parent.iterdir()) == [target]


def test_nothing_stays_when_something_went_wrong(tmp_path: Path) -> None:
    def fail() -> None:
        with appearing_whole(tmp_path / "model") as partial:
            (partial / "config.json").write_text(json.dumps({}))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_an_occupied_destination_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="the destination exists; found a folder with files in it"):
        refuse_occupied(tmp_path)
    with pytest.raises(CheckpointError, match="the destination exists; found a file"):
        refuse_occupied(tmp_path / "file")
    refuse_occupied(tmp_path / "free")
