"""How a command ends: exit statuses, and one sentence on stderr instead of a traceback for what a user can mend."""

from __future__ import annotations

import os
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from hemiola.errors import HemiolaError

FAILED = 1  # the machine: a file that cannot be written, a full disk
REFUSED = 2  # the command: an option, a prompt, a checkpoint; also typer's status for wrong usage
INTERRUPTED = 128 + 2  # as a shell reports SIGINT
PIPE_CLOSED = 128 + 13  # as a shell reports SIGPIPE


class Commands(TyperGroup):
    """The group of all commands. Whatever else is raised is a defect of hemiola's and keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except HemiolaError as error:
            raise _ended(str(error), REFUSED) from error
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            _discard_output()
            raise typer.Exit(PIPE_CLOSED) from None
        except OSError as error:
            _discard_output()
            raise _ended(str(error), FAILED) from error
        return result


def _ended(message: str, status: int) -> typer.Exit:
    typer.echo(f"error: {message}", err=True)
    return typer.Exit(status)


def _discard_output() -> None:
    """Send what stdout still buffers nowhere, so that closing it at exit cannot fail again."""
    stdout = sys.__stdout__
    if stdout is not None and sys.stdout is stdout:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stdout.fileno())
