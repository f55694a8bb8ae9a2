"""Small SVG pictures for the README and the site: as narrow as a phone, and light or dark as the reader's screen is."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

from whereformer.files import write_atomically

# Colors are classes of a style sheet, since other programs than browsers do not know CSS variables.
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1f2328 } .muted { fill: #59636e } .middle { text-anchor: middle }
.end { text-anchor: end } .good { fill: #0072b2 } .near { fill: #9ecae1 } .far { fill: #e8ebef } .unknown { fill: none }
.other { fill: #b0b7c0 } line { stroke: #59636e; stroke-dasharray: 4 3 }
.on-good { fill: #fff } .on-near { fill: #1f2328 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .muted { fill: #9198a1 } .near { fill: #2f5d7c } .far { fill: #262c36 }
  .other { fill: #656c76 } line { stroke: #9198a1 } .on-near { fill: #e6edf3 }
}
"""


def text(x: float, y: float, words: str, classes: str = "") -> str:
    """Return a line of text."""
    return f'<text x="{x:g}" y="{y:g}" class={quoteattr(classes)}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str) -> str:
    """Return a filled rectangle."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2" class="{kind}"/>'


def save(path: Path, width: int, height: int, label: str, parts: Iterable[str]) -> None:
    """Write a picture; ``label`` describes it for readers who can't see it."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    lines = [f'{head} role="img" aria-label={quoteattr(label)}>', f"<style>{STYLE}</style>", *parts, "</svg>", ""]
    write_atomically(path, "\n".join(lines))
