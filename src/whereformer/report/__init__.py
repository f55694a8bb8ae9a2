"""Results as pictures: self-contained HTML pages for any browser, and a plot for a README."""

from __future__ import annotations

from .._extras import require

require("train", "jinja2", "matplotlib")

from .bench import write_plot  # noqa: E402
from .compare import write_report  # noqa: E402

__all__ = ["write_plot", "write_report"]
