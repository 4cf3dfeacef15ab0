"""Files are read ahead of who maps them: all of them, in threads, and only while there is memory and somebody waits."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from mmap import mmap
from pathlib import Path

import pytest

from hemiola.formats import readahead

CHUNK = 1 << 12


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What is read: (file, offset)."""
    seen: list[tuple[str, int]] = []
    original = os.preadv

    def preadv(fd: int, buffers: Sequence[mmap], offset: int) -> int:
        seen.append((Path(os.readlink(f"/proc/self/fd/{fd}")).name, offset))
        return original(fd, buffers, offset)

    monkeypatch.setattr(readahead.os, "preadv", preadv)
    monkeypatch.setattr(readahead, "CHUNK_BYTES", CHUNK)
    return seen


def files_of(folder: Path, *sizes: int) -> list[Path]:
    files = [folder / f"{index}.bin" for index in range(len(sizes))]
    for file, size in zip(files, sizes, strict=True):
        file.write_bytes(b"x" * size)
    return files


def test_every_byte_is_read_once(tmp_path: Path, reads: list[tuple[str, int]]) -> None:
    sizes = (5 * CHUNK + 3, 1, 9 * CHUNK)
    files = files_of(tmp_path, *sizes)
    expected = {(f.name, at) for f, size in zip(files, sizes, strict=True) for at in range(0, size, CHUNK)}
    with readahead.reading_ahead(files):
        deadline = time.monotonic() + 10
        while len(reads) < len(expected) and time.monotonic() < deadline:
            time.sleep(0.005)
    assert sorted(reads) == sorted(expected)


def test_it_ends_with_the_body(tmp_path: Path, reads: list[tuple[str, int]]) -> None:
    files = files_of(tmp_path, 4000 * CHUNK)
    with pytest.raises(KeyError), readahead.reading_ahead(files):
        raise KeyError
    assert len(reads) < 4000
    assert not [t for t in threading.enumerate() if t.name.startswith("ThreadPool")]


def test_nothing_is_read_without_room(
    tmp_path: Path, reads: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readahead, "available_memory", lambda: 2 * CHUNK)
    with readahead.reading_ahead(files_of(tmp_path, CHUNK, CHUNK, 1)):
        time.sleep(0.05)
    assert not reads


def test_a_file_that_is_gone_is_left_to_who_maps_it(tmp_path: Path, reads: list[tuple[str, int]]) -> None:
    files = files_of(tmp_path, CHUNK, CHUNK)
    sizes = {file: file.stat() for file in files}
    files[0].unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "stat", lambda self, **_: sizes[self])
        with readahead.reading_ahead(files):
            deadline = time.monotonic() + 10
            while not reads and time.monotonic() < deadline:
                time.sleep(0.005)
    assert {name for name, _ in reads} == {"1.bin"}


def own_memory() -> int:
    """Bytes of this process that are no file's."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024


def test_the_buffers_are_given_back(tmp_path: Path) -> None:
    """Of malloc's, up to one a thread would stay: once one has been freed, the next ones come from the arenas."""
    files = files_of(tmp_path, readahead.THREADS * readahead.CHUNK_BYTES)
    bytearray(readahead.CHUNK_BYTES)
    before = own_memory()
    for _ in range(4):
        with readahead.reading_ahead(files):
            time.sleep(0.05)
    assert own_memory() - before < readahead.CHUNK_BYTES // 2
