"""The shell that reports have in common: style, script and how numbers are written."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

TEMPLATES = Path(__file__).parent / "templates"
"""What all pages are made of; a page's own template is beside the module that fills it."""


@dataclass(frozen=True)
class Column:
    """A column of a sortable table: its header with a line below it, and the direction in which it is sorted first."""

    name: str
    detail: str = ""
    first: str = "ascending"


@dataclass(frozen=True)
class Cell:
    """A cell of a sortable table: a number as text, a smaller line below it, what to sort by, and a note's number.

    Cells without a number to sort by stay last, in either direction.
    """

    text: str
    detail: str = ""
    order: float | str | None = None
    note: int | None = None

    @property
    def key(self) -> float | str:
        """What the page's script sorts by."""
        return "" if self.order is None else self.order


def render(template: Path, **content: Any) -> str:
    """A page from a template that extends ``page.html.j2``, or a part of one; all that is not Markup is escaped."""
    return _environment(template.parent).get_template(template.name).render(**content) + "\n"


@cache
def _environment(folder: Path) -> Environment:
    environment = Environment(
        loader=FileSystemLoader([folder, TEMPLATES]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(code=code, count=count, listed=listed)
    return environment


def count(number: int) -> str:
    """A whole number, its thousands apart."""
    return f"{number:,}"


def listed(words: list[Any]) -> str:
    """Words as in a sentence: a, b and c."""
    *first, last = map(str, words)
    return f"{', '.join(first)} and {last}" if first else last


def code(text: str) -> Markup:
    """Text in which ``double backticks`` mean code, as in docstrings."""
    parts = (
        Markup("<code>{}</code>").format(part) if odd % 2 else escape(part) for odd, part in enumerate(text.split("``"))
    )
    return Markup("").join(parts)
