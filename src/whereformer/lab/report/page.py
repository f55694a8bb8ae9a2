"""Render report pages from templates, with filters for text and numbers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from ... import __version__

if TYPE_CHECKING:
    from ..sheet import Sheet

TEMPLATES = Path(__file__).parent / "templates"
"""Templates that all pages share. A page's own template is next to the module that fills it."""


def render(template: Path, **content: Any) -> str:
    """Render a template: a page that extends ``page.html.j2``, or a part of one. All text but Markup is escaped."""
    return _environment(template.parent).get_template(template.name).render(**content) + "\n"


def fragment(sentences: Sequence[str], sheets: Sequence[Sheet]) -> str:
    """Return sentences and tables as a part of a notebook's page, which brings its own style."""
    return render(TEMPLATES / "fragment.html.j2", sentences=sentences, sheets=sheets)


@cache
def _environment(folder: Path) -> Environment:
    environment = Environment(
        loader=FileSystemLoader([folder, TEMPLATES]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["version"] = __version__
    environment.filters["breakable"] = breakable
    return environment


def breakable(name: str) -> Markup:
    """Turn the name of a method into HTML that may start a new line after each "/" and "+"."""
    return escape(name).replace("/", Markup("/<wbr>")).replace("+", Markup("+<wbr>"))
