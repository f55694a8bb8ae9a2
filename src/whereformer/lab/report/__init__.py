"""Parts that the HTML reports of all studies share: the page, its panels and its figures."""

from __future__ import annotations

from ..._extras import require

require("train", "jinja2", "matplotlib")
