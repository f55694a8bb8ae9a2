"""Reports of all studies: their sections, and how they are drawn."""

from __future__ import annotations

from ..._extras import require

require("train", "jinja2", "matplotlib")
