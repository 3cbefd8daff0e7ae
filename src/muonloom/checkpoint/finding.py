"""Which checkpoints lie in a directory, and which is the newest."""

from __future__ import annotations

import os
from pathlib import Path

from muonloom.checkpoint.manifest import FILE_NAME, read_manifest
from muonloom.errors import CheckpointError

LATEST = "latest"


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """Return the newest finished checkpoint in `directory`, or None where there is none.

    That is the one that the file ``latest`` names; where it names none, the one that was saved last.
    """
    folder = Path(directory)
    try:
        name = os.fsdecode((folder / LATEST).read_bytes()).rstrip("\n")
        is_one = Path(name).name == name and name not in ("", ".", "..")
        if is_one and (folder / name / FILE_NAME).is_file():
            return folder / name
    except (OSError, ValueError):  # no file can have such a name
        pass
    return next(iter(checkpoints_in(folder)), None)


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the finished checkpoints in a directory, the newest first.

    Damaged ones are not among them, and links are not: what they lead to may be among them itself.
    """
    found: list[tuple[float, int, Path]] = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if (path / FILE_NAME).is_file() and not path.is_symlink():
            try:
                manifest = read_manifest(path)
            except CheckpointError:
                continue
            found.append((manifest.created_s, manifest.step, path))
    return [path for _, _, path in sorted(found, reverse=True)]
