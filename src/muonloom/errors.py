"""Exceptions, and the one shape of their messages: who, got, wanted, remedy."""

from __future__ import annotations


class ConfigError(ValueError):
    """A configuration file that cannot be used; the message leads with the key or the path."""


class StaleMasterError(RuntimeError):
    """A weight was written from outside, so that its FP32 master no longer describes it."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message leads with the file or the parameter."""


class LostRanksError(RuntimeError):
    """Ranks that did not take part in a collective within the timeout of their process group.

    Attributes:
        ranks: which, as `torch.distributed` numbers all processes; empty where that is not known.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


def complaint(name: str, *, got: object, wanted: object, remedy: str) -> str:
    """Return one line that leads with the parameter's (or option's) name."""
    return f"{name}: got {got}; wanted {wanted}. {remedy}"
