"""Files that are never half written."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write ``path`` so that it is always either the old file or the whole new one; text as UTF-8."""
    partial = path.with_name(path.name + ".partial")
    if isinstance(content, bytes):
        partial.write_bytes(content)
    else:
        partial.write_text(content, encoding="utf-8")
    os.replace(partial, path)
