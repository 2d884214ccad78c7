# Files with secrets: replaced as a whole, and readable by their owner alone from the first byte on.

from __future__ import annotations

import os
from pathlib import Path


def write_privately(path: Path, content: bytes, owner: tuple[int, int] | None = None) -> None:
    """Replace a file as a whole, readable by its owner (uid, gid) alone: a crash leaves the old content or the new."""
    draft = path.with_name(f".{path.name}.new")
    draft.unlink(missing_ok=True)  # another's mode would stay
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    if owner is not None:
        os.chown(draft, *owner)
    draft.replace(path)
