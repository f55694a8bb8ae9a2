"""Writes the tables and the number of methods in README.md and docs/methods/index.md from their classes.

Run: python docs/_ext/tables.py
"""

import sys
from pathlib import Path

import torch

from whereformer import build_position, position_names
from whereformer.positions import ALIASES, describe, method_class
from whereformer.positions.base import ACTS_ON

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- table of methods, by docs/_ext/tables.py -->\n", "<!-- end of the table -->\n"
BERT_BASE = {"hidden_size": 768, "num_heads": 12, "num_layers": 12, "max_length": 512}


def as_table(header, rows):
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines]


def parameters(name):
    """The number of a method's parameters at BERT-base's sizes."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build_position(name, **BERT_BASE).parameters())


def facts():
    """The table in README.md."""
    rows = []
    for name in position_names():
        method = method_class(name)
        aliases = "".join(f" or `{alias}`" for alias, other in ALIASES.items() if other == name)
        link = f"`{name}`" if name == "none" else f"[`{name}`](docs/methods/{name}.md)"
        acts_on = ", ".join(on for on in ACTS_ON if on in method.acts_on) or "nothing"
        beyond = "yes" if method.extrapolates else "no"
        rows.append([link + aliases, acts_on, f"{parameters(name):,}", beyond, f"{method.paper} {method.year}"])
    header = ["name", "acts on", "parameters in BERT-base", "beyond max_length", "paper"]
    return [f"There are {len(rows)} of them:", "", *as_table(header, rows)]


def summaries():
    """The table in docs/methods/index.md: the first line of each class."""
    names = [name for name in position_names() if name != "none"]
    rows = [[f"[`{name}`]({name}.md)", describe(name)[0].replace("``", "`")] for name in names]
    return [f"There are {len(rows)} methods, besides `none`:", "", *as_table(["Method", "Effect"], rows)]


TABLES = {"README.md": facts, "docs/methods/index.md": summaries}


def updated(page):
    """The text of a page with its table as it should be."""
    text = (ROOT / page).read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        sys.exit(f"{page}: expected a table between {BEGIN.strip()} and {END.strip()}")
    return f"{before}{begin}\n" + "\n".join(TABLES[page]()) + f"\n\n{end}{after}"


if __name__ == "__main__":
    for page in TABLES:
        (ROOT / page).write_text(updated(page), encoding="utf-8")
