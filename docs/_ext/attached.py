"""The directive ``attached-models``: a table of what attach does with each configuration class of transformers.

Its data is in guides/attached-models.json, which sweep.py writes. The whole table is in the page;
_static/filter.js adds a field to search it and a menu to filter it.
"""

import json
from collections import Counter
from pathlib import Path

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

SCRIPT = "filter.js"
PAGE = "guides/attached-models"


def _table(header, rows):
    """A table whose cells are lists of nodes."""
    group = nodes.tgroup("", *(nodes.colspec(colwidth=1) for _ in header), cols=len(header))

    def row(cells):
        # Messages keep their quotes as they are.
        paragraphs = [nodes.paragraph("", "", *cell, support_smartquotes=False) for cell in cells]
        return nodes.row("", *(nodes.entry("", paragraph) for paragraph in paragraphs))

    group += nodes.thead("", row([[nodes.Text(title)] for title in header]))
    group += nodes.tbody("", *map(row, rows))
    return nodes.table("", group, classes=["filterable"])


def _details(row):
    """The parts that get a method, or the reason against it."""
    if row["outcome"] != "served":
        return [nodes.Text(row["why"])]
    if not row["parts"]:
        return [nodes.Text("the whole model")]
    literals = [nodes.literal("", part) for part in row["parts"]]
    return [node for literal in literals for node in (nodes.Text(", "), literal)][1:]


class AttachedModels(SphinxDirective):
    """The number of classes with each outcome, and the table."""

    def run(self):
        file = Path(self.env.doc2path(PAGE)).with_suffix(".json")
        self.env.note_dependency(file)
        data = json.loads(file.read_text(encoding="utf-8"))
        counts = Counter(row["outcome"] for row in data["outcomes"])
        tried = len(data["outcomes"]) - counts["no model"]
        parts = sum(bool(row.get("parts")) for row in data["outcomes"])
        missed = ", ".join(data["missed"])
        summary = (
            f"With transformers {data['transformers']}, {counts['served']} of {tried} configuration classes with "
            f"models are served, {parts} of them in parts. When the scores of one layer are multiplied by 1.01, "
            f"attach refuses every served model{f' except {missed}' if missed else ''}."
        )
        rows = [
            [[nodes.literal("", row["config"])], [nodes.Text(row["outcome"])], _details(row)]
            for row in data["outcomes"]
        ]
        table = _table(["Configuration", "Outcome", "Parts that get a method, or the reason"], rows)
        return [nodes.paragraph("", summary), table]


def _load(app, pagename, templatename, context, doctree):
    """Load the script in this page."""
    if pagename == PAGE:
        app.add_js_file(SCRIPT)


def setup(app):
    """Register the directive and the script."""
    app.add_directive("attached-models", AttachedModels)
    app.connect("html-page-context", _load)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
