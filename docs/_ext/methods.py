"""Directives for the pages of position methods: their options, measured facts and drawings come from the code.

Each directive has a method's name as its argument:

- ``method-options``: a table of its options, with defaults (``describe``) and meanings (the class' docstring).
- ``method-facts``: the measured behavior of a model with the method.
- ``method-drawing``: the numbers that position adds to the scores of each head.

``method-classes`` is the reference of all methods' classes.
"""

import inspect
import re
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from docutils import nodes
from docutils.statemachine import StringList
from matplotlib.figure import Figure
from sphinx.util.docutils import SphinxDirective
from tables import as_table, parameters

from whereformer import Encoder, EncoderConfig, PositionRangeError
from whereformer.positions import describe, method_class, position_names

HEADS, LENGTH = 4, 64
"""The sizes of the models that are drawn; their tokens have positions 0 .. LENGTH - 1."""

SHIFT = 1000
"""The number of tokens by which positions are shifted, to measure whether a method depends on them. It is more than the
threshold of fire."""

THEMES = {"light": ("#1f2328", "#d0d7de"), "dark": ("#d7dae0", "#454b54")}
"""The colors of text and of lines, by the site's theme."""


def encoder(name, length=LENGTH, max_length=LENGTH):
    """One newly initialized layer with a method, in float64, and ``length`` equal tokens."""
    torch.manual_seed(1)
    config = EncoderConfig(
        vocab_size=8,
        hidden_size=64,
        num_attention_heads=HEADS,
        blocks="1",
        position=name,
        max_position_embeddings=max_length,
        type_vocab_size=0,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        # Larger than usual, so that random parameters are visible.
        initializer_range=0.2,
    )
    return Encoder(config).double().eval(), torch.full((1, length), 5)


@torch.no_grad()
def scores(name):
    """Each head's scores for a sequence of equal tokens, (heads, n, n), minus the mean of each row."""
    model, words = encoder(name)
    weights = model(words, output_attentions=True).attentions[0][0]
    logs = weights.log()
    return (logs - logs.mean(-1, keepdim=True)).numpy()


@torch.no_grad()
def curves(name):
    """The number that each head adds at each offset, (heads, offsets); None if the method has no curve."""
    position = encoder(name)[0].position
    curve = position.curve(torch.arange(1 - LENGTH, LENGTH))
    return None if curve is None else curve.double().numpy()


@torch.no_grad()
def facts(name):
    """Rows of a table: a question and its answer."""
    model, words = encoder(name, 2 * LENGTH)
    try:
        model(words)
        beyond = "accepted"
    except PositionRangeError:
        beyond = "refused with `PositionRangeError`"
    first = torch.arange(LENGTH).unsqueeze(0)
    model, words = encoder(name, max_length=SHIFT + LENGTH)
    here, there = (model(words, position_ids=at, output_attentions=True).attentions[0] for at in (first, first + SHIFT))
    return [
        ("Parameters at BERT-base's sizes (12 layers, 512 positions)", f"{parameters(name):,}"),
        ("Positions from `max_length` on", beyond),
        (
            f"Attention when all positions from 0 on move by {SHIFT:,}",
            "stays the same" if torch.allclose(here, there, rtol=0, atol=1e-9) else "changes",
        ),
    ]


def draw(name, folder):
    """Write the drawing in the colors of both themes."""
    matrix, curve = scores(name), curves(name)
    offsets = np.arange(1 - LENGTH, LENGTH)
    middle = LENGTH // 2
    for theme, (ink, line) in THEMES.items():
        style: Any = {
            "svg.hashsalt": "whereformer",
            "font.size": 10,
            "axes.edgecolor": line,
            "axes.spines.top": False,
            "axes.spines.right": False,
            **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), ink),
        }
        with mpl.rc_context(style):
            figure = Figure(figsize=(8.4, 3.1), layout="constrained", facecolor="none")
            places = figure.add_gridspec(1, 2, width_ratios=(1.55, 1))
            right = figure.add_subplot(places[1])
            left = figure.add_subplot(places[0])
            left.set_facecolor("none")
            left.axvline(0, color=line, linewidth=0.8)
            for head in range(HEADS):
                if curve is None:
                    left.plot(np.arange(LENGTH) - middle, matrix[head, middle], label=f"head {head + 1}")
                else:
                    left.plot(offsets, curve[head], label=f"head {head + 1}")
            left.set_xlabel("offset = key position - query position, in tokens")
            left.set_ylabel("added to the score")
            left.legend(
                frameon=False, fontsize=8, ncols=4, labelcolor=ink, loc="lower center", bbox_to_anchor=(0.5, 1.0)
            )
            largest = max(np.abs(matrix[0]).max(), 1e-12)
            image = right.imshow(matrix[0], cmap="RdBu_r", vmin=-largest, vmax=largest, interpolation="nearest")
            right.set_xlabel("key position")
            right.set_ylabel("query position")
            right.set_title("scores of head 1", fontsize=10)
            bar = figure.colorbar(image, ax=right, shrink=0.8)
            bar.outline.set_visible(False)
            figure.savefig(folder / f"{name}-{theme}.svg", transparent=True, metadata={"Date": None})


def meanings(name):
    """The meaning of each option, from "Args" in the docstring of the class."""
    found, current = {}, None
    inside = False
    for line in (inspect.getdoc(method_class(name)) or "").splitlines():
        if re.match(r"\S", line):
            inside = line == "Args:"
        elif inside and (begins := re.match(r" {4}(\w+): (.*)", line)):
            current = begins[1]
            found[current] = begins[2]
        elif inside and current and line.strip():
            found[current] += " " + line.strip()
    return found


class MethodDirective(SphinxDirective):
    """The common part of the directives: the name of a method, and a result in Markdown."""

    required_arguments = 1

    def parsed(self, lines):
        """The nodes of some lines of Markdown."""
        container = nodes.container()
        self.state.nested_parse(StringList(lines, source=self.env.docname), self.content_offset, container)
        return container.children

    def run(self):
        name = self.arguments[0]
        self.env.note_dependency(inspect.getfile(describe))
        return self.parsed(self.lines(name))


class MethodClasses(SphinxDirective):
    """The reference of every method's class."""

    def run(self):
        classes = [method_class(name) for name in position_names()]
        lines = [f".. autoclass:: {found.__module__}.{found.__qualname__}" for found in classes]
        return self.parse_text_to_nodes("\n".join(lines) + "\n")


class MethodOptions(MethodDirective):
    """A table of a method's options."""

    def lines(self, name):
        options, meaning = describe(name)[1], meanings(name)
        if not options:
            return ["This method has no options."]
        missing = options.keys() - meaning.keys()
        if missing:
            raise self.error(f"{name}: {', '.join(sorted(missing))} not documented in the class' docstring")
        rows = [[f"`{option}`", f"`{options[option]!r}`", meaning[option]] for option in meaning if option in options]
        return as_table(["Option", "Default", "Meaning"], rows)


class MethodFacts(MethodDirective):
    """A table of the method's measured behavior."""

    def lines(self, name):
        return as_table(["Measured when this page was built", ""], [list(row) for row in facts(name)])


class MethodDrawing(MethodDirective):
    """The drawing, for both themes."""

    def lines(self, name):
        folder = Path(self.env.srcdir) / "_generated"
        folder.mkdir(exist_ok=True)
        draw(name, folder)
        if describe(name) and curves(name) is None:
            what = (
                "A newly initialized layer with the same token at every position: the scores of the query at "
                f"{LENGTH // 2} over the offset"
            )
        else:
            what = "`position.curve(offsets)` of a newly initialized layer"
        caption = f"{what} (left), and the scores of one head minus the mean of each row (right)."
        lines = []
        for theme in THEMES:
            lines += [
                f":::{{image}} /_generated/{name}-{theme}.svg",
                f":alt: The numbers that {name} adds to the scores of each head, over offsets and as a matrix",
                f":class: only-{theme} drawing",
                ":::",
            ]
        return [*lines, "", "{.caption}", caption]


def setup(app):
    """Register the directives."""
    app.add_directive("method-classes", MethodClasses)
    app.add_directive("method-options", MethodOptions)
    app.add_directive("method-facts", MethodFacts)
    app.add_directive("method-drawing", MethodDrawing)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
