"""Parts that the HTML reports of all experiments share: the page, its panels and its figures."""

from __future__ import annotations

from ..._extras import require

require("train", "jinja2", "matplotlib")
