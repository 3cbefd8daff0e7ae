"""Handles of what can be ended: by a call, or as a context manager on leaving."""

from __future__ import annotations

from types import TracebackType
from typing import Self


class RemovableContext:
    """Ends something by `remove`; as a context manager, on leaving."""

    def remove(self) -> None:
        """End it."""
        raise AssertionError("each kind of handle ends its own")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.remove()
