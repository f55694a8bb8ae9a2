"""The settings of :mod:`whereformer.kernels.tuning` to measure, with values to try and calls to measure them on.

A setting's values are compared on calls that they compute in different ways.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels import OffsetBias, attention, tuning
from ...kernels.cpu.products import linear
from ...kernels.torch_private import has_onednn_linear
from .cases import Case, make_problem
from .ways import backend, make_step

LONG = 8192
"""At this number of tokens, tiles of ``tile_scores`` have fewer than ``tile_rows`` rows."""

ALWAYS = 2**62
"""A threshold of scores that no call reaches."""

Value = Hashable
Step = Callable[[], object]


class TunedWay(NamedTuple):
    """A way to compute a call: a backend, and changes to the tuning."""

    backend: str
    changes: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Workload:
    """A call that the values of a setting compute in different ways.

    Args:
        label: a name for people.
        work: roughly how long it takes, relative to others.
        prepare: makes its tensors, and returns a function that makes a backend's step.
        ways: the way that each value uses.
    """

    label: str
    work: int
    prepare: Callable[[], Callable[[str], Step]]
    ways: Mapping[Value, TunedWay]


@dataclass(frozen=True)
class TunedSetting:
    """A field of ``Tuning``, or one of its dtypes, with the values to try; ``now`` is the current value."""

    field: str
    now: Value
    workloads: Sequence[Workload]
    dtype: torch.dtype | None = None

    @property
    def label(self) -> str:
        """The setting's name, such as "fused_dtypes bfloat16"."""
        return self.field if self.dtype is None else f"{self.field} {name_of(self.dtype)}"

    @property
    def values(self) -> list[Value]:
        """The values to try, in ascending order."""
        return list(self.workloads[0].ways)


@dataclass(frozen=True)
class TuneSizes:
    """The sizes of the measurement: rounds, batch (for up to 256 tokens), heads; ``quick`` uses fewer lengths."""

    rounds: int
    quick: bool
    batch: int = 4
    heads: int = 12
    head_dim: int = 64
    longest: int = LONG
    """The longest call, in tokens."""


def settings(sizes: TuneSizes) -> list[TunedSetting]:
    """Return all settings that can be measured on this machine."""
    now = tuning.current()
    found = []
    parts = (_shortest, _tiles, _by_dtype, _bands, _by_onednn)
    for setting in (each for part in parts for each in part(sizes, now)):
        calls = [workload for workload in setting.workloads if len(set(workload.ways.values())) > 1]
        if calls:
            found.append(replace(setting, workloads=calls))
    return found


def _values(*values: int, now: int) -> list[int]:
    return sorted({*values, now})


def _powers(first: int, last: int, step: int, now: int) -> list[int]:
    return _values(*(2**power for power in range(first, last + 1, step)), now=now)


def _up_to(values: Sequence[int], n: int, below: TunedWay, above: TunedWay) -> dict[Value, TunedWay]:
    """Return the way of each value of a threshold (in scores per head) for a call of n tokens."""
    return {value: below if n * n <= value else above for value in values}


def _shortest(sizes: TuneSizes, now: tuning.Tuning) -> Iterator[TunedSetting]:
    """Up to how many scores per head are written out, and up to how many the backward reuses the forward's weights."""
    values = _powers(11, 15, 2 if sizes.quick else 1, now.written_out_scores)
    ways = partial(_up_to, values, below=TunedWay("reference"), above=TunedWay("blockwise"))
    kinds = [(kind, torch.float32, training) for kind in ("bias", "shaw") for training in (False, True)]
    kinds.append(("bias", torch.bfloat16, False))
    lengths = [n for n in map(math.isqrt, values) if n <= sizes.longest]
    calls = [_call(sizes, kind, n, training, ways(n), dtype=dtype) for n in lengths for kind, dtype, training in kinds]
    yield TunedSetting("written_out_scores", now.written_out_scores, calls)

    values = _powers(12, 16, 2 if sizes.quick else 1, now.half_written_out_scores)
    ways = partial(_up_to, values, below=TunedWay("reference"), above=TunedWay("blockwise"))
    lengths = [n for n in map(math.isqrt, values) if n <= sizes.longest]
    calls = [_call(sizes, "bias", n, True, ways(n), dtype=torch.bfloat16) for n in lengths]
    yield TunedSetting("half_written_out_scores", now.half_written_out_scores, calls)

    values = _powers(14, 18, 2 if sizes.quick else 1, now.kept_scores)
    keep, again = (TunedWay("blockwise", (("kept_scores", scores),)) for scores in (ALWAYS, 0))
    lengths = [n for n in map(math.isqrt, values) if n <= sizes.longest]
    calls = [_call(sizes, kind, n, True, _up_to(values, n, keep, again)) for n in lengths for kind in ("bias", "shaw")]
    yield TunedSetting("kept_scores", now.kept_scores, calls)


def _tiles(sizes: TuneSizes, now: tuning.Tuning) -> Iterator[TunedSetting]:
    """How many scores a tile has."""

    def ways(field: str, values: Sequence[int]) -> dict[Value, TunedWay]:
        kept = ALWAYS if field == "kept_tile_scores" else 0
        return {value: TunedWay("blockwise", ((field, value), ("kept_scores", kept))) for value in values}

    for field, lengths in (
        ("kept_tile_scores", [128] if sizes.quick else [91, 128, 256]),
        ("tile_scores", [512] if sizes.quick else [300, 512, 1024]),
    ):
        tried = ways(field, _powers(16, 20, 2 if sizes.quick else 1, getattr(now, field)))
        lengths = [n for n in lengths if n <= sizes.longest]
        calls = [_call(sizes, kind, n, True, tried) for n in lengths for kind in ("bias", "shaw", "factors")]
        yield TunedSetting(field, getattr(now, field), calls)
    if not sizes.quick:
        # With so many keys, tiles of tile_scores have fewer rows. One head only, because these calls take long.
        tried = ways("tile_rows", _values(32, 64, 128, now=now.tile_rows))
        calls = [
            _call(sizes, kind, LONG, False, tried, heads=1) for kind in ("factors", "shaw") if sizes.longest >= LONG
        ]
        yield TunedSetting("tile_rows", now.tile_rows, calls)


def _by_dtype(sizes: TuneSizes, now: tuning.Tuning) -> Iterator[TunedSetting]:
    """What torch's own kernels compute for calls with only an ``OffsetBias``."""
    dtypes = [torch.float32, torch.bfloat16, *([] if sizes.quick else [torch.float16])]
    lengths = [n for n in ((512,) if sizes.quick else (128, 256, 512, 1024)) if n <= sizes.longest]
    for dtype in dtypes:
        ways: dict[Value, TunedWay] = {
            yes: TunedWay("blockwise", (("fused_dtypes", frozenset({dtype} if yes else ())),)) for yes in (False, True)
        }
        calls = [_call(sizes, "bias", n, False, ways, dtype=dtype) for n in lengths]
        yield TunedSetting("fused_dtypes", dtype in now.fused_dtypes, calls, dtype)
    # Up to kept_scores, the backward of float32 works differently.
    lengths = [n for n in ((512,) if sizes.quick else (300, 512, 1024)) if n <= sizes.longest]
    for dtype in dtypes:
        fused = frozenset({dtype} & now.fused_dtypes)
        ways = {
            False: TunedWay("blockwise", (("fused_dtypes", fused), ("fused_backward_dtypes", frozenset()))),
            True: TunedWay(
                "blockwise", (("fused_dtypes", frozenset({dtype})), ("fused_backward_dtypes", frozenset({dtype})))
            ),
        }
        calls = [_call(sizes, "bias", n, True, ways, dtype=dtype, fixed=True) for n in lengths]
        yield TunedSetting("fused_backward_dtypes", dtype in now.fused_backward_dtypes, calls, dtype)
    values = _powers(14, 18, 2 if sizes.quick else 1, now.unturned_scores)
    calls = []
    for dtype in (dtype for dtype in dtypes if dtype in now.fused_dtypes):
        in_order, turned = (TunedWay("blockwise", (("unturned_scores", scores),)) for scores in (ALWAYS, 0))
        for n in (n for n in map(math.isqrt, values) if n <= sizes.longest):
            calls.append(_call(sizes, "bias", n, False, _up_to(values, n, in_order, turned), dtype=dtype))
    yield TunedSetting("unturned_scores", now.unturned_scores, calls)


def _bands(sizes: TuneSizes, now: tuning.Tuning) -> Iterator[TunedSetting]:
    """How short a table must be for its gradient to come from its band, and how many queries a band has at a time."""
    length = 129
    lengths = [n for n in ((1024,) if sizes.quick else (512, 1024, LONG)) if n <= sizes.longest]
    for field, dtype in (("band_share", torch.float32), ("half_band_share", torch.bfloat16)):
        if dtype not in now.fused_dtypes & now.fused_backward_dtypes:
            continue
        band, rows = (TunedWay("blockwise", ((field, share), ("kept_scores", 0))) for share in (1.0, 0.0))
        values = sorted({0.0, 0.06, 0.12, 0.25, 0.5, getattr(now, field)})
        calls = []
        for n in lengths:
            share = (length + now.band_rows) / n
            prepare = partial(_short, sizes.heads, n, sizes.head_dim, length, dtype)
            ways: dict[Value, TunedWay] = {value: band if share <= value else rows for value in values}
            label = f"{length} offsets {name_of(dtype)} n={n} training"
            calls.append(Workload(label, 3 * sizes.heads * n * n, prepare, ways))
        yield TunedSetting(field, getattr(now, field), calls)
    tried: dict[Value, TunedWay] = {
        rows: TunedWay("blockwise", (("band_rows", rows), ("band_share", 1.0), ("kept_scores", 0)))
        for rows in _values(64, 128, 256, now=now.band_rows)
    }
    prepare = partial(_short, sizes.heads, 1024, sizes.head_dim, length, torch.float32)
    calls = [Workload(f"{length} offsets float32 n=1024 training", 3 * sizes.heads * 1024**2, prepare, tried)]
    yield TunedSetting("band_rows", now.band_rows, calls if sizes.longest >= 1024 else [])


def _by_onednn(sizes: TuneSizes, now: tuning.Tuning) -> Iterator[TunedSetting]:
    """Whether oneDNN multiplies float32, and from which sizes on that makes us faster than torch's attention."""
    if not (has_onednn_linear() and torch.backends.mkldnn.is_available()):
        return
    ways: dict[Value, TunedWay] = {
        yes: TunedWay("blockwise", (("onednn", yes), ("kept_scores", 0))) for yes in (False, True)
    }
    rows, width = 512, sizes.heads * sizes.head_dim
    yield TunedSetting(
        "onednn",
        now.onednn,
        [
            Workload(f"linear {rows} x {width}", rows * width, partial(_linear, rows, width), ways),
            *(_call(sizes, "bias", n, True, ways) for n in (512,) if n <= sizes.longest),
        ],
    )
    if not now.onednn:
        return
    torchs, ours = TunedWay("auto", (("onednn_scores", ALWAYS),)), TunedWay("blockwise")

    def from_on(field: str, values: Sequence[int], sizes_of: Callable[[int], tuple[int, int, int]]) -> TunedSetting:
        """Return a setting that makes calls without terms ours from its value on."""
        calls = []
        for size in values:
            n_q, n_k, head_dim = sizes_of(size)
            if max(n_q, n_k) <= sizes.longest:
                tried: dict[Value, TunedWay] = {value: ours if size >= value else torchs for value in values}
                prepare = partial(_plain, sizes.heads, n_q, n_k, head_dim)
                calls.append(Workload(f"no terms, {n_q} x {n_k}", n_q * n_k, prepare, tried))
        return TunedSetting(field, getattr(now, field), calls)

    def square(scores: int) -> tuple[int, int, int]:
        n = math.isqrt(scores)
        return n, n, sizes.head_dim

    yield from_on("onednn_scores", _powers(14, 20, 2, now.onednn_scores), square)
    if not sizes.quick:
        yield from_on(
            "onednn_rows", _values(64, 128, 256, 512, now=now.onednn_rows), lambda n: (n, 2048, sizes.head_dim)
        )
        yield from_on(
            "onednn_head_dim", _values(16, 32, 64, 128, now=now.onednn_head_dim), lambda width: (512, 512, width)
        )


def _call(
    sizes: TuneSizes,
    kind: str,
    n: int,
    training: bool,
    ways: Mapping[Value, TunedWay],
    *,
    heads: int | None = None,
    dtype: torch.dtype = torch.float32,
    fixed: bool = False,
) -> Workload:
    """Make a workload from a case of the benchmark. With ``fixed``, the terms need no gradient, as in ALiBi."""
    batch = sizes.batch if n <= 256 else 1
    case = Case(kind, n, batch, heads or sizes.heads, sizes.head_dim, name_of(dtype), training)
    label = f"{kind}{', fixed' if fixed else ''} {case.dtype} n={n} {case.direction}"
    work = case.batch * case.heads * n * (n + 100) * (3 if training else 1)
    return Workload(label, work, partial(_prepare, case, fixed), ways)


def _prepare(case: Case, fixed: bool) -> Callable[[str], Step]:
    problem = make_problem(case, torch.device("cpu"))
    if fixed:
        for tensor in problem.parameters.values():
            tensor.requires_grad_(False)
    return lambda name: make_step(backend(name), problem)


def _plain(heads: int, n_q: int, n_k: int, head_dim: int) -> Callable[[str], Step]:
    query, key, value = (torch.randn(1, heads, n, head_dim, requires_grad=True) for n in (n_q, n_k, n_k))
    seed = torch.randn(query.shape)
    return lambda name: lambda: _differentiate(attention(query, key, value, backend=name), (query, key, value), seed)


def _short(heads: int, n: int, head_dim: int, length: int, dtype: torch.dtype) -> Callable[[str], Step]:
    """Prepare training steps with a table of few offsets."""
    query, key, value = (torch.randn(1, heads, n, head_dim, dtype=dtype, requires_grad=True) for _ in range(3))
    table, seed = torch.randn(heads, length, requires_grad=True), torch.randn(query.shape, dtype=dtype)
    terms = (OffsetBias(table, -(length // 2)),)
    return lambda name: (
        lambda: _differentiate(attention(query, key, value, terms, backend=name), (query, key, value, table), seed)
    )


def _linear(rows: int, width: int) -> Callable[[str], Step]:
    inputs = [torch.randn(size, requires_grad=True) for size in ((rows, width), (width, width), (width,))]
    seed = torch.randn(rows, width)
    return lambda _: lambda: _differentiate(linear(*inputs), inputs, seed)


def _differentiate(output: Tensor, inputs: Sequence[Tensor], seed: Tensor) -> object:
    return torch.autograd.grad(output, inputs, seed)


def name_of(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype, such as "float32"."""
    return str(dtype).removeprefix("torch.")
