"""Write a file in one step, so that it is never left half written."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write ``path`` so that it always holds either the old content or all of the new. Text is written as UTF-8."""
    partial = path.with_name(path.name + ".partial")
    if isinstance(content, bytes):
        partial.write_bytes(content)
    else:
        partial.write_text(content, encoding="utf-8")
    os.replace(partial, path)
