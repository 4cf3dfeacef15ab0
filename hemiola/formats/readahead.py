"""Reading files into the page cache ahead of whoever maps them: a mapped page that is not there costs a wait each."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from mmap import MAP_PRIVATE, mmap
from pathlib import Path
from threading import Event

from hemiola.config.engine import available_memory

CHUNK_BYTES = 8 << 20
THREADS = 4


@contextmanager
def reading_ahead(files: Sequence[Path]) -> Iterator[None]:
    """Read `files` in order, in threads, while the body runs; what is left when it ends is not read.

    Nothing is read where the files would not fit into the memory that is free. A file that cannot be read is left to
    whoever maps it, and so is its error.
    """
    if sum(file.stat().st_size for file in files) > available_memory():
        yield
        return
    stop = Event()
    with ThreadPoolExecutor(THREADS) as threads:
        for part in range(THREADS):
            threads.submit(_read, files, part, stop)
        try:
            yield
        finally:
            stop.set()


def _read(files: Sequence[Path], part: int, stop: Event) -> None:
    """Every THREADS-th chunk of each file, from the part-th on.

    The bytes go to pages of their own, which the kernel has back at the end: a freed buffer of malloc's would stay
    with the thread's arena.
    """
    with mmap(-1, CHUNK_BYTES, MAP_PRIVATE) as buffer:
        for file in files:
            try:
                with file.open("rb", buffering=0) as stream:
                    size = os.fstat(stream.fileno()).st_size
                    for start in range(part * CHUNK_BYTES, size, THREADS * CHUNK_BYTES):
                        if stop.is_set():
                            return
                        os.preadv(stream.fileno(), [buffer], start)
            except OSError:
                continue
