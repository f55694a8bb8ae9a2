"""HTML reports: one self-contained file each, for any browser."""

from __future__ import annotations

from .._extras import require

require("train", "jinja2", "matplotlib")

from .compare import write_report  # noqa: E402

__all__ = ["write_report"]
