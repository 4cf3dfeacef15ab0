"""The command line lets idle threads sleep, and leaves a user's own choice alone."""

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
print(os.environ["OMP_WAIT_POLICY"])
"""


@pytest.mark.parametrize(("own", "expected"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_wait_passively_unless_told_otherwise(own: str | None, expected: str) -> None:
    env = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    env |= {} if own is None else {"OMP_WAIT_POLICY": own}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected
