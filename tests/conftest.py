"""Fixtures that several rooms' tests share."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.support.seeded_checkpoint import write_seeded_checkpoint


@pytest.fixture(scope="session")
def seeded_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of the seeded checkpoint of a scheme, written once per session. Read only: copy it to damage it."""

    @cache
    def folder(scheme: str) -> Path:
        path = tmp_path_factory.mktemp("seeded") / scheme
        write_seeded_checkpoint(path, scheme)
        return path

    return folder
