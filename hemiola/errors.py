"""Every error that hemiola raises on purpose. Each says what was found, what was expected, where, and what to do."""

from __future__ import annotations


class HemiolaError(Exception):
    """Root of hemiola's errors.

    The message is built from its parts, so that no error can leave one out by accident of phrasing:
    `problem` (one clause), then, where they apply, `found`, `expected`, `where` (file, key, tensor, request) and
    `remedy` (one sentence). The parts stay readable as attributes.
    """

    def __init__(
        self,
        problem: str,
        *,
        found: object = None,
        expected: object = None,
        where: object = None,
        remedy: str | None = None,
    ) -> None:
        self.problem, self.found, self.expected, self.where, self.remedy = problem, found, expected, where, remedy
        text = problem if where is None else f"{where}: {problem}"
        if found is not None:
            text += f"; found {found}"
        if expected is not None:
            text += f"; expected {expected}"
        super().__init__(text + (f". {remedy}" if remedy else ""))


class ConfigError(HemiolaError):
    """A configuration (the model's or the engine's) is contradictory, incomplete or unsupported."""


class CheckpointError(HemiolaError):
    """A checkpoint on disk is incomplete, damaged, or disagrees with its configuration."""


class UnsupportedPath(HemiolaError):
    """No variant of an op can run a call on the arm that the policy asks for."""


class CapacityError(HemiolaError):
    """A request or a setting needs more memory than there is; the message carries the arithmetic."""


class RequestError(HemiolaError):
    """A request is malformed or out of range; only this request ends."""
