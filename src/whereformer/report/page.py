"""The shell that reports have in common: style, script and how numbers are written."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

_TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Column:
    """A column of a sortable table: its header with a line below it, and the direction in which it is sorted first."""

    name: str
    detail: str = ""
    first: str = "ascending"


def render(template: str, **content: Any) -> str:
    """A page from a template that extends ``page.html.j2``, or a part of one; all that is not Markup is escaped."""
    return _environment().get_template(template).render(**content) + "\n"


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
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
