"""What the reports of all experiments share: the page, its panels and figures."""

from __future__ import annotations

from .._extras import require

require("train", "jinja2", "matplotlib")
