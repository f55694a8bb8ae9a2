"""Reports of all studies: what they are made of, and how it is drawn."""

from __future__ import annotations

from ..._extras import require

require("train", "jinja2", "matplotlib")
