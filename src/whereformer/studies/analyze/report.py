"""The tables of an analysis, and the HTML page about what models learned about position."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from ...analysis.findings import AttentionFindings, HeadFindings, ModelFindings, TableFindings
from ...analysis.fit import TisaFit
from ...lab.report import figures, heads, page, panels
from ...lab.report.heatmaps import Heatmap, gradients, heatmap, limits
from ...lab.report.numbers import DASH, decimals, percent, plain, signed
from ...lab.report.panels import Panel
from ...lab.sheet import Cell, Column, Row, Sheet
from . import pictures
from .results import AnalyzeResults

TEMPLATE = Path(__file__).with_suffix(".html.j2")
NAMES = ("previous token", "next token", "local window", "global", "position-blind")
"""Kinds of heads in the order of legends; other names follow."""
BLIND = "position-blind"

LARGE_MAP, CORNER = 128, 32
"""Pixels of a matrix's side, and positions in the close-up of a head's scores."""
PIXELS = {50: 128, 160: 96, 500: 64, 10**9: 32}
"""Pixels of each head's matrix by the most heads on a page: pages of 12 layers with 12 heads stay below 5 MB."""
MOST_HEADS = 24
"""Up to this number of heads, each has its own line on a terminal; beyond it, each layer has one."""
DETAILED = 300
"""Up to this number of heads on a page, each is drawn with a close-up and all its fits."""

Floats = NDArray[np.float64]


def sheets(results: AnalyzeResults) -> list[Sheet]:
    """Return a table of models and, for a single model, one of its heads, or of its layers if it has many heads."""
    models = results.models
    missing = [f"{model.name}: {why}" for model in models for why in (model.no_table, model.no_heads) if why]
    found = [replace(models_sheet(models, results.score), notes=tuple(missing))]
    if len(models) == 1 and models[0].heads:
        found.append((heads_sheet if len(models[0].heads) <= MOST_HEADS else layers_sheet)(models[0]))
    return found


def models_sheet(models: Sequence[ModelFindings], score: str) -> Sheet:
    """Return a table with a row for each model."""
    with_step, with_score = (any(getattr(model, name) is not None for model in models) for name in ("step", "score"))
    rows = []
    for number, model in enumerate(models):
        toeplitz = [None if model.table is None else model.table.toeplitzness, pictures.mean_of_heads(model)]
        rows.append(
            [
                Cell(model.name, order=model.name, link=f"model-{number}"),
                Cell(model.position, order=model.position),
                *([_cell(model.step, 0)] if with_step else []),
                *([Cell(plain(model.score) if model.score is not None else DASH, order=model.score)] * with_score),
                Cell(f"{model.length:,}", order=model.length),
                *map(_cell, toeplitz),
                Cell(counted(model.heads) or DASH, order=len(model.heads)),
            ]
        )
    columns = [
        Column("model", wraps=True),
        Column("position", left=True, wraps=True),
        *([Column("step")] if with_step else []),
        *([Column(score, first="descending")] if with_score else []),
        Column("length"),
        Column("Toeplitz", "of P", "descending"),
        Column("Toeplitz", "of heads", "descending"),
        Column("heads", "", "descending", left=True, wraps=True),
    ]
    return Sheet.of("Position", columns, rows, sortable=True)


def heads_sheet(model: ModelFindings, name: str = "", looks: Mapping[str, figures.Series] | None = None) -> Sheet:
    """Return a table with a row for each head.

    Args:
        model: the findings.
        name: the id of the heads' grid on a page.
        looks: the look of each kind of head on a page.
    """
    kernels = _kernels(model)
    rows = []
    for number, layer in enumerate(by_layer(model.heads).values()):
        for index, head in enumerate(layer):
            look = None if looks is None else looks[head.name]
            span = float(head.curve.max() - head.curve.min())
            cells = (
                Cell(str(head.layer), order=head.layer),
                Cell(str(head.head), order=head.head, link=f"{name}-{number}-{index}" if name else ""),
                Cell(head.name, order=head.name, swatch=look),
                _cell(head.toeplitzness),
                Cell(decimals(span, 2), order=span),
                *_shares(model, [head], kernels),
            )
            rows.append(Row(cells, "" if look is None else look.group))
    first = (Column("layer"), Column("head"), Column("is", left=True))
    of_curve = (Column("range", "of curve", "descending"),)
    return Sheet.of(
        f"Heads of {model.name}",
        [*first, Column("Toeplitz", "of scores", "descending"), *of_curve, *_share_columns(model, kernels)],
        rows,
        notes=(f"range: the largest difference that position makes to a score. {_reading(model)}",),
        sortable=True,
        kind="head-table",
    )


def layers_sheet(model: ModelFindings) -> Sheet:
    """Return a table with a row for each layer, with means over its heads."""
    most = _kernels(model)[-1:]
    rows = []
    for layer, found in by_layer(model.heads).items():
        toeplitzness = _cell(fmean(head.toeplitzness for head in found))
        cells = (Cell(str(layer)), Cell(str(len(found))), Cell(counted(found)), toeplitzness)
        rows.append((*cells, *_shares(model, found, most)))
    first = (Column("layer"), Column("heads"), Column("are", left=True, wraps=True))
    columns = [*first, Column("Toeplitz", "of scores"), *_share_columns(model, most)]
    return Sheet.of(f"Layers of {model.name}", columns, rows, notes=(f"Means over heads. {_reading(model)}",))


def _kernels(model: ModelFindings) -> list[int]:
    """Return the numbers of kernels whose fits the tables show."""
    most = max((len(head.fits) for head in model.heads), default=0)
    return [count for count in range(1, most + 1) if count % 2 or most < 3]


def _share_columns(model: ModelFindings, kernels: Sequence[int]) -> list[Column]:
    fits = [Column(f"S = {count}", "explained", "descending") for count in kernels]
    return [*fits, *([Column("measured", "by offset", "descending")] if model.attention is not None else [])]


def _shares(model: ModelFindings, found: Sequence[HeadFindings], kernels: Sequence[int]) -> list[Cell]:
    """Return what kernels explain of these heads' curves, and the offset of their attention, on average."""
    shares = [
        fmean(float(head.fits[count - 1].explained) for head in found) if count <= len(found[0].fits) else None
        for count in kernels
    ]
    if model.attention is not None:
        shares.append(fmean(explained_by_offset(model.attention, head) for head in found))
    return [Cell(percent(share), order=share) for share in shares]


def _reading(model: ModelFindings) -> str:
    measured = "; measured: the share of the variance of log attention weights in text that the offset explains"
    return (
        "Toeplitz: the share of a head's scores by position that a curve over offsets explains; S: the share of the "
        f"curve that this number of TISA kernels explains{measured if model.attention is not None else ''}."
    )


def build_report(results: AnalyzeResults) -> str:
    """Build the page. Equal findings give identical pages."""
    models, facts = results.models, dict(results.facts)
    rules, _, command = facts.pop("rules", {}), facts.pop("notes", []), facts.pop("command", "")
    facts.pop("score", None)
    named = [head.name for model in models for head in model.heads]
    looks = looks_of(named)
    pixels = next(size for most, size in PIXELS.items() if len(named) <= most)
    groups = {name: value for name, value in facts.items() if isinstance(value, dict)}
    settings = {name: shown(value) for name, value in facts.items() if name not in groups}
    return page.render(
        TEMPLATE,
        title=f"What did {models[0].name if len(models) == 1 else 'they'} learn about position?",
        sentences=results.sentences(),
        gradients=gradients(),
        models=[
            section(model, f"model-{number}", looks, pixels, detailed=len(named) <= DETAILED)
            for number, model in enumerate(models)
        ],
        comparison=comparison(models, results.score) if len(models) > 1 else None,
        looks=looks,
        rules=rules,
        facts_of={
            **({"Settings": settings} if settings else {}),
            **{
                name.replace("_", " ").capitalize(): {key: shown(value) for key, value in group.items()}
                for name, group in groups.items()
            },
        },
        command=command if isinstance(command, str) else shlex.join(command),
    )


def shown(value: Any) -> Any:
    """Format a fact for people."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {shown(part)}" for name, part in value.items())
    if value is None or value == []:
        return DASH
    if isinstance(value, list | tuple):
        return ", ".join(str(shown(part)) for part in value)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else value


def looks_of(names: Sequence[str]) -> dict[str, figures.Series]:
    """Return the look of each kind of head in ``names``, the same in every figure of the page."""
    order = [name for name in NAMES if name in names] + sorted(set(names) - set(NAMES))
    # Each known kind keeps its hue, whichever other kinds there are.
    every = [*NAMES, *order[sum(name in NAMES for name in order) :]]
    by_name = dict(zip(every, figures.series(len(every), every.index(BLIND)), strict=True))
    return {name: by_name[name] for name in order}


def counted(found: Sequence[HeadFindings]) -> str:
    """Count the kinds of heads, as in "3 previous token, 1 global"."""
    counts = Counter(head.name for head in found)
    return ", ".join(f"{counts[name]} {name}" for name in looks_of(list(counts)))


def verdict(models: Sequence[ModelFindings]) -> str:
    """Summarize the page in one sentence, its headline."""
    tables = [(model, model.table) for model in models if model.table is not None]
    if len(models) == 1:
        sentence = "; ".join(_findings_of(models[0]))
        return sentence[0].upper() + sentence[1:]
    by_step = sorted((model.step, table.toeplitzness) for model, table in tables if model.step is not None)
    if len(by_step) > 1:
        (first, before), (last, after) = by_step[0], by_step[-1]
        return f"Toeplitzness goes from {before:.2f} at step {first:,} to {after:.2f} at step {last:,}"
    if len(tables) > 1:
        ranked = sorted(tables, key=lambda each: each[1].toeplitzness)
        (lowest, low), (highest, high) = ranked[0], ranked[-1]
        return (
            f"The position embeddings of {highest.name} are the most Toeplitz ({high.toeplitzness:.2f}), those of "
            f"{lowest.name} the least ({low.toeplitzness:.2f})"
        )
    return f"{len(models)} models: {counted([head for model in models for head in model.heads]) or 'no heads to name'}"


def _findings_of(model: ModelFindings) -> list[str]:
    parts = []
    if model.table is not None:
        parts.append(f"position embeddings of Toeplitzness {decimals(model.table.toeplitzness, 2)}")
    if model.heads:
        count = len(model.heads)
        parts.append(f"{count} heads: {counted(model.heads)}" if count > 1 else f"its head is {model.heads[0].name}")
    return parts or ["nothing to see: position has no effect of its own"]


@dataclass(frozen=True)
class TableSection:
    """P, its Toeplitz part and what is left."""

    toeplitzness: str
    maps: list[tuple[str, Heatmap]]


@dataclass(frozen=True)
class Section:
    """The part of the page about one model."""

    id: str
    model: ModelFindings
    summary: str
    table: TableSection | None
    grid: Markup | None
    counts: dict[str, tuple[figures.Series, int]]
    sheet: Sheet | None
    attention: Markup | None
    even_share: float


def section(
    model: ModelFindings, name: str, looks: dict[str, figures.Series], pixels: int, *, detailed: bool
) -> Section:
    """Draw everything about one model."""
    counts = Counter(head.name for head in model.heads)
    attention = model.attention
    return Section(
        name,
        model,
        "; ".join(_findings_of(model)),
        table_section(model.table) if model.table is not None else None,
        head_grid(model, f"{name}-heads", looks, pixels, detailed=detailed) if model.heads else None,
        {kind: (look, counts[kind]) for kind, look in looks.items() if counts[kind]},
        heads_sheet(model, f"{name}-heads", looks) if model.heads else None,
        attention_grid(attention, f"{name}-attention") if attention is not None else None,
        1 / model.length,
    )


def table_section(table: TableFindings) -> TableSection:
    """Draw P and its Toeplitz part on one scale, and what is left on a scale around 0."""
    ends = limits(table.gram.detach().double().cpu().numpy())
    maps = [
        ("P = E E\N{MODIFIER LETTER CAPITAL T}", heatmap(table.gram, pixels=2 * LARGE_MAP, ends=ends)),
        ("its best Toeplitz part", heatmap(table.part, pixels=2 * LARGE_MAP, ends=ends)),
        ("what is left", heatmap(table.gram - table.part, pixels=2 * LARGE_MAP, center=0.0)),
    ]
    return TableSection(decimals(table.toeplitzness), maps)


def by_layer(found: Sequence[HeadFindings]) -> dict[int, list[HeadFindings]]:
    """Group heads by layer, both in ascending order."""
    layers: dict[int, list[HeadFindings]] = {}
    for head in sorted(found, key=lambda head: (head.layer, head.head)):
        layers.setdefault(head.layer, []).append(head)
    return layers


def explained_by_offset(attention: AttentionFindings, head: HeadFindings) -> float:
    """Return the share of a head's measured attention that the offset explains."""
    return float(attention.explained[head.layer, head.head])


def head_grid(
    model: ModelFindings, name: str, looks: dict[str, figures.Series], pixels: int, *, detailed: bool
) -> Markup:
    """Draw all heads of a model."""
    rows: list[panels.Row] = []
    for layer, found in by_layer(model.heads).items():
        drawn = [_panel(head, looks[head.name], pixels, model.attention, detailed=detailed) for head in found]
        rows.append(panels.Row(f"layer {layer}", "" if rows else _small(model.heads[0]), tuple(drawn)))
    return panels.grid(rows, name, f"Heads of {model.name}")


def _small(head: HeadFindings) -> str:
    """Describe what the small panels show."""
    offsets = heads.near(len(head.curve))
    return f"small: {offsets}; heights: each head's own range, but at least {pictures.LEAST:g}"


def _panel(
    head: HeadFindings,
    look: figures.Series,
    pixels: int,
    attention: AttentionFindings | None,
    *,
    detailed: bool,
) -> Panel:
    offsets, curve = _numbers(head.offsets), pictures.curve_of(head)
    shift = float((_numbers(head.curve) - curve)[0])
    fits = head.fits if detailed else head.fits[-1:]
    fitted = [fitted_curve(fit, offsets) - shift for fit in fits]
    place = f"layer {head.layer}"
    label = f"Curve of {place}, head {head.head}"
    spread = _numbers(head.spread)
    drawn = panels.draw(
        offsets, curve, pictures.height_of(curve), label=label, spread=spread if spread.any() else None, others=fitted
    )  # fmt: skip
    measured = None if attention is None else percent(explained_by_offset(attention, head))
    more = page.render(
        TEMPLATE.with_name("head.html.j2"),
        head=head,
        fits=[(fit.amplitude.shape[-1], percent(float(fit.explained), 1), kernels_of(fit)) for fit in fits],
        measured=measured,
        shifted=head.scores is not None,
        spread=spread.any(),
    )
    return Panel(
        place,
        f"head {head.head}",
        look,
        head.name,
        (decimals(head.toeplitzness, 2),),
        drawn,
        "mean score" if head.scores is not None else "added to scores",
        maps_of(head, pixels, detailed=detailed),
        Markup(more),
    )


def maps_of(head: HeadFindings, pixels: int, *, detailed: bool) -> tuple[tuple[str, Heatmap], ...]:
    """Draw a head's scores around their median, and for a long matrix also a close-up of its middle."""
    if head.scores is None:
        return ()
    length = len(head.scores)
    center = float(head.scores.double().median())
    caption = "scores: query down, key across"
    found = [(caption, heatmap(head.scores, pixels=pixels, center=center))]
    if length > pixels and detailed:
        first = (length - CORNER) // 2
        middle = head.scores[first : first + CORNER, first : first + CORNER]
        caption = f"positions {first} to {first + CORNER - 1}, around their median"
        found.append((caption, heatmap(middle, pixels=CORNER, center=float(middle.double().median()), first=first)))
    return tuple(found)


def fitted_curve(fit: TisaFit, offsets: Floats) -> Floats:
    """Evaluate a head's fitted kernels at offsets, (m,)."""
    amplitude, sharpness, center = (
        _numbers(part)[:, None] for part in (fit.amplitude, fit.sharpness, fit.center)
    )  # fmt: skip
    kernels = amplitude * np.exp(-np.abs(sharpness) * (offsets - center) ** 2)
    return np.asarray(kernels.sum(0) + float(fit.constant))


def kernels_of(fit: TisaFit) -> str:
    """Format the kernels for people, strongest first."""
    parts = zip(*(_numbers(part) for part in (fit.amplitude, fit.sharpness, fit.center)), strict=True)
    ranked = sorted(parts, key=lambda kernel: -abs(kernel[0]))
    return "; ".join(f"{signed(_round(a))} at {signed(_round(c))}, b {plain(_round(abs(b)))}" for a, b, c in ranked)


def _round(number: float) -> float:
    return float(f"{number:.3g}")


def _numbers(tensor: Any) -> Floats:
    return np.asarray(tensor.detach().double().cpu().numpy())


def attention_grid(attention: AttentionFindings, name: str) -> Markup:
    """Draw where the heads of every layer look in text."""
    look = figures.series(1)[0]
    shares = np.nan_to_num(_numbers(attention.shares)).tolist()
    label = "Mean attention, per head and offset"
    return heads.attention_shares(shares, look, name, label, attention.explained.tolist())


@dataclass(frozen=True)
class ModelComparison:
    """The comparison of several models."""

    sheet: Sheet
    steps: Markup | None
    scatter: Markup | None
    correlation: str


def comparison(models: Sequence[ModelFindings], score: str) -> ModelComparison:
    """Compare the models in a table, over training, and with their scores."""
    points, measure = pictures.scatter_points(models)
    return ModelComparison(
        models_sheet(models, score),
        pictures.steps_drawing(models),
        pictures.scatter_drawing(points, measure, score),
        correlation(points),
    )


def correlation(points: Sequence[tuple[str, float, float]]) -> str:
    """Return Pearson's correlation and the number of points as text; "" for fewer than three points."""
    _, first, second = zip(*points, strict=True) if points else ((), (), ())
    if len(points) < 3 or len(set(first)) == 1 or len(set(second)) == 1:
        return ""
    return f"{decimals(float(np.corrcoef(first, second)[0, 1]), 2)} over {len(points)} models"


def _cell(number: float | None, digits: int = 3) -> Cell:
    return Cell(decimals(number, digits) if digits or number is None else f"{number:,}", order=number)
