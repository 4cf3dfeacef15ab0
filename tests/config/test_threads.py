"""The command line lets idle threads sleep and bounds kept products, and leaves a user's own choice alone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys
from hemiola import cli
cli.app = lambda **_: None
cli.main()
import os
assert "torch" not in sys.modules, "torch came first, so the setting came too late"
print(os.environ["OMP_WAIT_POLICY"], os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"], os.environ["LRU_CACHE_CAPACITY"])
"""
NAMES = ("OMP_WAIT_POLICY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


@pytest.mark.parametrize(("own", "expected"), [((), "PASSIVE 256 256"), (("ACTIVE", "9", "8"), "ACTIVE 9 8")])
def test_torch_is_told_before_it_comes_unless_the_user_has(own: tuple[str, ...], expected: str) -> None:
    env = {name: value for name, value in os.environ.items() if name not in NAMES}
    env |= dict(zip(NAMES, own, strict=False))
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected
