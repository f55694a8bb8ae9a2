"""The tables of an analysis, and the HTML page about what models learned about position."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from ...analysis.findings import AttentionFindings, HeadFindings, ModelFindings
from ...analysis.fit import TisaFit
from ...analysis.naming import RULES
from ...lab.report import figures, heads, page, panels
from ...lab.report.heatmaps import Heatmap, gradients, heatmap, limits
from ...lab.report.numbers import DASH, decimals, percent, plain, signed
from ...lab.sheet import Cell, Column, Row, Sheet
from . import pictures

if TYPE_CHECKING:
    from .results import AnalyzeResults

TEMPLATE = Path(__file__).with_suffix(".html.j2")
NAMES = ("previous token", "next token", "local window", "global", "position-blind")
"""Kinds of heads in the order of legends; other names follow."""
BLIND = "position-blind"

LARGE_MAP, CORNER = 256, 32
"""Pixels of the large matrices' side, and positions in the close-up of a head's scores."""
PIXELS = {50: 128, 160: 96, 500: 64, 10**9: 32}
"""Pixels of each head's matrix by the most heads on a page: pages of 12 layers with 12 heads stay below 5 MB."""
MOST_HEADS = 24
"""Up to this number of heads, each has its own line on a terminal; beyond it, each layer has one."""
DETAILED = 300
"""Up to this number of heads on a page, each is drawn with a close-up and all its fits."""


def sheets(results: AnalyzeResults) -> Sequence[Sheet]:
    """Return a table of models and, for a single model, one of its heads, or of its layers if it has many heads."""
    models = results.models
    missing = [f"{model.name}: {why}" for model in models for why in (model.no_table, model.no_heads) if why]
    found = [replace(models_sheet(models), notes=tuple(missing))]
    if len(models) == 1 and models[0].heads:
        found.append(heads_sheet(models[0], layers=len(models[0].heads) > MOST_HEADS))
    return found


def models_sheet(models: Sequence[ModelFindings]) -> Sheet:
    """Return a table with a row for each model, without the columns for which no model has anything."""
    toeplitz = [None if model.table is None else model.table.toeplitzness for model in models]
    columns = {
        Column("model", wraps=True): [
            Cell(model.name, order=model.name, link=f"model-{number}") for number, model in enumerate(models)
        ],
        Column("position", left=True, wraps=True): [Cell(model.position, order=model.position) for model in models],
        Column("step"): [_cell(model.step, "{:,}".format) for model in models],
        Column("score", first="descending"): [_cell(model.score, plain) for model in models],
        Column("length"): [_cell(model.length, "{:,}".format) for model in models],
        Column("Toeplitz", "of P", "descending"): [_cell(share) for share in toeplitz],
        Column("Toeplitz", "of heads", "descending"): [_cell(model.mean_of_heads) for model in models],
        Column("heads", "", "descending", left=True, wraps=True): [
            Cell(counted(model.heads) or DASH, order=len(model.heads)) for model in models
        ],
    }
    shown = {column: cells for column, cells in columns.items() if any(cell.order is not None for cell in cells)}
    return Sheet.of("Position", list(shown), list(zip(*shown.values(), strict=True)), sortable=True)


def heads_sheet(
    model: ModelFindings, name: str = "", looks: Mapping[str, figures.Series] | None = None, *, layers: bool = False
) -> Sheet:
    """Return a table with a row for each head.

    Args:
        model: the findings.
        name: the id of the heads' grid on a page.
        looks: the look of each kind of head on a page.
        layers: whether each row is a layer instead, with means over its heads.
    """
    most = max((len(head.fits) for head in model.heads), default=0)
    kernels = [count for count in range(1, most + 1) if count % 2 or most < 3]
    rows = []
    for number, layer in enumerate(model.by_layer.values()):
        for index, found in enumerate([layer] if layers else [[head] for head in layer]):
            first = found[0]
            look = None if looks is None else looks[first.name]
            place = len(found) if layers else first.head
            cells = [
                _cell(first.layer, str),
                Cell(str(place), order=place, link=f"{name}-{number}-{index}" if name else ""),
                Cell(counted(found) if layers else first.name, order=first.name, swatch=look),
                _cell(fmean(head.toeplitzness for head in found)),
                _cell(fmean(float(head.curve.max() - head.curve.min()) for head in found), "{:.2f}".format),
            ]
            shares = [
                fmean(float(head.fits[count - 1].explained) for head in found) if count <= len(first.fits) else None
                for count in kernels
            ]
            if model.attention is not None:
                shares.append(fmean(float(model.attention.explained[head.layer, head.head]) for head in found))
            cells += [Cell(percent(share), order=share) for share in shares]
            rows.append(Row(tuple(cells), "" if look is None else look.group))
    columns = [
        Column("layer"),
        Column("heads" if layers else "head"),
        Column("are" if layers else "is", left=True, wraps=layers),
        Column("Toeplitz", "of scores", "descending"),
        Column("range", first="descending"),
        *(Column(f"S={count}", first="descending") for count in kernels),
    ]
    said = [
        "range: the largest difference that position makes to a score",
        "Toeplitz: the share of a head's scores by position that a curve over offsets explains",
        "S: the share of the curve that this number of TISA kernels explains",
    ]
    if layers:
        said.insert(0, "means over heads")
    if model.attention is not None:
        columns.append(Column("measured", first="descending"))
        said.append("measured: the share of the variance of log attention weights in text that the offset explains")
    title, note = f"{'Layers' if layers else 'Heads'} of {model.name}", f"{'; '.join(said)}."
    return Sheet.of(title, columns, rows, notes=(note,), sortable=True, kind="head-table")


def _cell(number: float | None, show: Callable[[float], str] = decimals) -> Cell:
    return Cell(DASH if number is None else show(number), order=number)


def looks_of(names: Sequence[str]) -> dict[str, figures.Series]:
    """Return the look of each kind of head in ``names``, the same in every figure of the page."""
    # Each known kind keeps its hue, whichever other kinds there are.
    every = [*NAMES, *sorted(set(names) - set(NAMES))]
    by_name = dict(zip(every, figures.series(len(every), every.index(BLIND)), strict=True))
    return {name: look for name, look in by_name.items() if name in names}


def counted(found: Sequence[HeadFindings]) -> str:
    """Count the kinds of heads, as in "3 previous token, 1 global"."""
    counts = Counter(head.name for head in found)
    return ", ".join(f"{counts[name]} {name}" for name in looks_of(list(counts)))


def verdict(models: Sequence[ModelFindings]) -> str:
    """Summarize the page in one sentence, its headline."""
    if len(models) == 1:
        sentence = _summary(models[0])
        return sentence[0].upper() + sentence[1:]
    tables = [(model.table.toeplitzness, model) for model in models if model.table is not None]
    by_step = sorted((model.step, share) for share, model in tables if model.step is not None)
    if len(by_step) > 1:
        (first, before), (last, after) = by_step[0], by_step[-1]
        return f"Toeplitzness goes from {before:.2f} at step {first:,} to {after:.2f} at step {last:,}"
    if len(tables) > 1:
        (low, lowest), *_, (high, highest) = sorted(tables, key=lambda each: each[0])
        return (
            f"The position embeddings of {highest.name} are the most Toeplitz ({high:.2f}), those of {lowest.name} the "
            f"least ({low:.2f})"
        )
    return f"{len(models)} models: {counted([head for model in models for head in model.heads]) or 'no heads to name'}"


def _summary(model: ModelFindings) -> str:
    parts = []
    if model.table is not None:
        parts.append(f"position embeddings of Toeplitzness {model.table.toeplitzness:.2f}")
    if model.heads:
        count = len(model.heads)
        parts.append(f"{count} heads: {counted(model.heads)}" if count > 1 else f"its head is {model.heads[0].name}")
    return "; ".join(parts) or "nothing to see: position has no effect of its own"


def build_report(results: AnalyzeResults) -> str:
    """Build the page. Equal findings give identical pages."""
    models = results.models
    several = len(models) > 1
    return page.render(
        TEMPLATE,
        title=f"What did {'they' if several else models[0].name} learn about position?",
        sentences=results.sentences(),
        gradients=gradients(),
        models=_sections(models),
        comparison=models_sheet(models) if several else None,
        overviews=[
            (each.title, each.note, figures.draw(each.name, each.title, *pictures.SIZE, each.paint))
            for each in pictures.overviews(models)
        ],
        rules=RULES,
        facts_of={"Settings": {"text": results.text}, "Machine": results.machine},
        command=shlex.join(results.command),
    )


def _sections(models: Sequence[ModelFindings]) -> list[dict[str, Any]]:
    """Draw everything about each model."""
    named = [head.name for model in models for head in model.heads]
    looks = looks_of(named)
    pixels = next(size for most, size in PIXELS.items() if len(named) <= most)
    found = []
    for number, model in enumerate(models):
        counts, name = Counter(head.name for head in model.heads), f"model-{number}"
        section = {
            "id": name,
            "model": model,
            "summary": _summary(model),
            "counts": {kind: (look, counts[kind]) for kind, look in looks.items() if counts[kind]},
            "attention": None if model.attention is None else attention_grid(model.attention, f"{name}-attention"),
        }
        if model.table is not None:
            gram, part = model.table.gram, model.table.part
            ends = limits(gram.numpy())
            section["maps"] = {
                "P = E E\N{MODIFIER LETTER CAPITAL T}": heatmap(gram, pixels=LARGE_MAP, ends=ends),
                "its best Toeplitz part": heatmap(part, pixels=LARGE_MAP, ends=ends),
                "what is left": heatmap(gram - part, pixels=LARGE_MAP, center=0.0),
            }
        if model.heads:
            section["grid"] = head_grid(model, f"{name}-heads", looks, pixels, detailed=len(named) <= DETAILED)
            section["sheet"] = heads_sheet(model, f"{name}-heads", looks)
        found.append(section)
    return found


def head_grid(
    model: ModelFindings, name: str, looks: Mapping[str, figures.Series], pixels: int, *, detailed: bool
) -> Markup:
    """Draw all heads of a model; ``detailed`` adds close-ups and all fits."""
    offsets = heads.near(len(model.heads[0].curve))
    note = f"small: {offsets}; heights: each head's own range, but at least {pictures.LEAST:g}"
    rows: list[panels.Row] = []
    for layer, found in model.by_layer.items():
        drawn = []
        for head in found:
            fits = head.fits if detailed else head.fits[-1:]
            curve, spread = pictures.curve_of(head), head.spread if bool(head.spread.any()) else None
            measured = None if model.attention is None else float(model.attention.explained[layer, head.head])
            more = page.render(
                TEMPLATE.with_name("head.html.j2"),
                head=head,
                fits=[(fit.num_kernels, percent(float(fit.explained), 1), kernels_of(fit)) for fit in fits],
                measured=None if measured is None else percent(measured),
                spread=spread is not None,
            )
            drawing = panels.draw(
                head.offsets,
                curve,
                pictures.height_of(curve),
                label=f"Curve of layer {layer}, head {head.head}",
                spread=spread,
                others=[fit.curve(head.offsets) - (head.curve - curve)[0] for fit in fits],
            )
            drawn.append(
                panels.Panel(
                    f"layer {layer}",
                    f"head {head.head}",
                    looks[head.name],
                    head.name,
                    (decimals(head.toeplitzness, 2),),
                    drawing,
                    "mean score" if head.scores is not None else "added to scores",
                    maps_of(head, pixels, detailed=detailed),
                    Markup(more),
                )
            )
        rows.append(panels.Row(f"layer {layer}", "" if rows else note, tuple(drawn)))
    return panels.grid(rows, name, f"Heads of {model.name}")


def maps_of(head: HeadFindings, pixels: int, *, detailed: bool) -> tuple[tuple[str, Heatmap], ...]:
    """Draw a head's scores around their median, and for a long matrix also a close-up of its middle."""
    if head.scores is None:
        return ()
    scores = head.scores.double()
    found = [("scores: query down, key across", heatmap(scores, pixels=pixels, center=float(scores.median())))]
    if len(scores) > pixels and detailed:
        first = (len(scores) - CORNER) // 2
        middle = scores[first : first + CORNER, first : first + CORNER]
        caption = f"positions {first} to {first + CORNER - 1}, around their median"
        found.append((caption, heatmap(middle, pixels=CORNER, center=float(middle.median()), first=first)))
    return tuple(found)


def kernels_of(fit: TisaFit) -> str:
    """Format the kernels for people, strongest first."""
    parts = zip(fit.amplitude.tolist(), fit.sharpness.tolist(), fit.center.tolist(), strict=True)
    rounded = [
        [float(f"{number:.3g}") for number in kernel] for kernel in sorted(parts, key=lambda each: -abs(each[0]))
    ]
    return "; ".join(f"{signed(a)} at {signed(c)}, b {plain(abs(b))}" for a, b, c in rounded)


def attention_grid(attention: AttentionFindings, name: str) -> Markup:
    """Draw where the heads of every layer look in text."""
    shares = attention.shares.double().nan_to_num().tolist()
    label = "Mean attention, per head and offset"
    return heads.attention_shares(shares, figures.series(1)[0], name, label, attention.explained.tolist())
