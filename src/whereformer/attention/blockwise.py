"""Attention with position terms in O(n) extra memory, forward and backward, in plain PyTorch on any device.

Scores exist one tile at a time, in memory that is used again. The forward keeps the output and the softmax's norm;
the backward makes each tile anew from them. Scores and everything that is summed over many of them are float32 (or
float64); bfloat16 input is multiplied as bfloat16 only where torch's own attention does so too, after the softmax.

Scores are in units of log2 here, because exp2 is several times as fast as exp.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from . import short
from .call import Call
from .dropout import keep_mask
from .groups import Groups, chunks, cut
from .pieces import Piece
from .precision import without_autocast
from .problem import ARGUMENTS, GRADIENTS, LN2, LOG2E, Problem, register_gradients
from .tables import Grid, GridBias, GridRows, Listed, Rows, Tables
from .tiles import Scratch, Span, Tile
from .workspace import Workspace, add_product, onednn_suits

TILE = 2**18
"""Scores in a tile, per thread: few enough to stay in a core's cache, many enough to make each operation worth it."""

FUSED_NUMBERS = 2**18
"""Numbers in the query of a block that torch's fused kernel computes."""

LONGEST_ROW = 1024
"""Columns of a tile at most."""

FEWEST_ROWS = 64
"""Rows of a tile at least, where there are so many."""

MORE_GROUPS = 4
"""Times as many items and heads go together where tables of vectors are long, and so fewer rows of each."""

NARROWEST_TAIL = 512
"""Columns beyond a table's reach that are worth a tile of their own."""


def attend(call: Call) -> Tensor:
    """The attention output, (batch, heads, n_q, value_dim) in the value's dtype."""
    with without_autocast(call.value.device):
        problem = Problem.of(call)
        output, _ = _forward(*replace(problem, keeps_weights=short.takes(problem)).arguments())
        return output


class Block(Groups):
    """A piece's work on some of its batch items and heads, with all that does not change from tile to tile.

    Tensors are (groups, rows, dim), a group for each item and head; those with a row per query in reverse order.
    """

    def __init__(
        self,
        problem: Problem,
        piece: Piece,
        tables: Tables,
        workspace: Workspace,
        tile_size: int,
        batch: range,
        heads: range,
    ) -> None:
        super().__init__(batch, heads, workspace)
        self.tile_size = tile_size
        self.problem, self.piece, self.tables = problem, piece, tables
        self.turn = torch.arange(len(piece.queries) - 1, -1, -1, device=problem.value.device)
        dtype, self.narrow = problem.dtype, _product_dtype(problem)
        self.onednn = _piece_by_onednn(problem, piece)
        self.value = self.key_rows("value", problem.value, dtype)
        # Content and factors side by side: one product makes both scores.
        query_features, key_features = [], []
        self.query: Tensor | None = None
        if problem.query is not None and problem.key is not None:
            self.query = self.query_rows("query", problem.query, dtype).mul_(problem.scale * LOG2E)
            query_features.append(self.query)
            key_features.append(self.key_rows("key", problem.key, dtype))
        if problem.query_factors is not None and problem.key_factors is not None:
            query_features.append(self.query_rows("query_factors", problem.query_factors, dtype).mul_(LOG2E))
            key_features.append(self.key_rows("key_factors", problem.key_factors, dtype))
        self.query_features, self.key_features = _side_by_side(query_features), _side_by_side(key_features)
        self.narrow_value = workspace.converted("value", self.value, self.narrow)

    def key_rows(self, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """The block's part of (1 or batch, heads, n_k, dim), (groups, keys, dim): a view if it can be."""
        part = self.part_of(tensor)[:, :, self.piece.keys.start : self.piece.keys.stop]
        if part.dtype == dtype and part.is_contiguous() and part.shape[0] == len(self.batch):
            return part.flatten(0, 1)
        rows = self.workspace.get(name, (self.groups, *part.shape[2:]), dtype)
        self.by_head(rows).copy_(part)
        return rows

    def query_rows(self, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """The block's part of (1 or batch, heads, n_q, dim), (groups, queries, dim), reversed: memory of its own."""
        part = self.part_of(tensor)[:, :, self.piece.queries.start : self.piece.queries.stop]
        part = part.expand(len(self.batch), -1, -1, -1).flatten(0, 1)
        rows = self.workspace.get(name, tuple(part.shape), part.dtype)
        torch.index_select(part, 1, self.turn, out=rows)
        return self.workspace.converted(name, rows, dtype)

    def narrow_query_features(self, dtype: torch.dtype) -> Tensor:
        """The features of queries as they came, neither scaled nor in units of log2."""
        features = {"query": self.problem.query, "query_factors": self.problem.query_factors}
        rows = _side_by_side(
            [self.query_rows(name, tensor, dtype) for name, tensor in features.items() if tensor is not None]
        )
        assert rows is not None
        return rows

    def put_queries(self, rows: Tensor, whole: Tensor) -> None:
        """Write (groups, queries, dim), reversed, to its place in a contiguous (batch, heads, n_q, dim)."""
        target = self.part_of(whole)[:, :, self.piece.queries.start : self.piece.queries.stop]
        # Several batch items come with all their heads, so that this is a view.
        target = target.view(self.groups, *target.shape[2:])
        torch.index_select(self.workspace.converted("put", rows, whole.dtype), 1, self.turn, out=target)

    def reversed(self, queries: range) -> slice:
        """Where a range of queries stands among reversed rows."""
        length = len(self.piece.queries)
        return slice(length - queries.stop, length - queries.start)

    def fill_scores(self, tile: Tile, table: Rows | None, per_offset: Tensor | None, shift: Tensor | None) -> None:
        """Write a tile's scores, less ``shift`` (groups, rows, 1); ``per_offset`` is what queries make of ``table``."""
        span, scores, tables = tile.span, tile.scores, self.tables
        by_head = self.by_head(scores)
        # What all scores of a row have in common
        common = None if shift is None else -shift
        if per_offset is not None:
            common = per_offset[..., :1] if common is None else common + per_offset[..., :1]
        if tables.bias is None:
            scores.zero_() if common is None else scores.copy_(common.expand_as(scores))
        elif common is None:
            by_head.copy_(tables.bias.tile(span, self.heads))
        else:
            torch.add(tables.bias.tile(span, self.heads), self.by_head(common), out=by_head)
        if self.query_features is not None and self.key_features is not None:
            keys = self.key_features[:, span.keys.start : span.keys.stop]
            add_product(scores, self.query_features[:, self.reversed(span.queries)], keys.mT, self.workspace)
        if per_offset is not None and table is not None:
            table.spread(per_offset - per_offset[..., :1], tile)
        if self.problem.dense is not None:
            added = self.dense_part(self.problem.dense, span).flip(-2)
            # The lowest of numbers, which masks often hold, is to stay finite in units of log2.
            added = added.to(scores.dtype)
            lowest = torch.finfo(scores.dtype).min / 4
            by_head.add_(torch.where(added.isinf(), added, added.clamp(lowest, -lowest)), alpha=LOG2E)
        for allowed in self.masks(span):
            by_head.masked_fill_(~allowed, -torch.inf)

    def dense_part(self, dense: Tensor, span: Span) -> Tensor:
        """A tile's part of (1 or batch, heads, n_q, n_k), a view; rows in their own order."""
        rows = self.piece.queries[span.queries.start : span.queries.stop]
        columns = self.piece.keys[span.keys.start : span.keys.stop]
        return self.part_of(dense)[:, :, rows.start : rows.stop, columns.start : columns.stop]

    def masks(self, span: Span) -> Iterator[Tensor]:
        """Which pairs of a tile may attend, each broadcastable to (batch, heads, rows, columns)."""
        piece, first = self.piece, self.batch.start - self.piece.batch.start
        items = slice(first, first + len(self.batch))
        queries, keys = slice(span.queries.start, span.queries.stop), slice(span.keys.start, span.keys.stop)
        if piece.key_mask is not None:
            yield piece.key_mask[items, None, None, keys]
        if piece.query_documents is not None and piece.key_documents is not None:
            documents = piece.query_documents[items, None, queries].flip(-1)
            yield documents.unsqueeze(-1) == piece.key_documents[items, None, None, keys]
        if self.problem.causal and isinstance(self.tables.layout, Listed):
            yield self.tables.layout.offsets(span) <= 0

    def factor(self, tile: Tensor) -> Tensor:
        """A tile as a factor of the products after the softmax."""
        if self.onednn and not tile.is_contiguous():
            return self.workspace.get("weights", tuple(tile.shape), tile.dtype).copy_(tile)
        return self.workspace.converted("weights", tile, self.narrow)

    def kept(self, span: Span) -> Tensor | None:
        """What dropout multiplies a tile's weights by, (groups, rows, columns)."""
        problem = self.problem
        if problem.dropout_keys is None:
            return None
        rows = self.piece.queries[span.queries.start : span.queries.stop]
        columns = self.piece.keys[span.keys.start : span.keys.stop]
        keys = self.part_of(problem.dropout_keys)[..., rows.start : rows.stop].flip(-1).flatten(0, 1)
        kept = keep_mask(keys, torch.arange(columns.start, columns.stop, device=keys.device), problem.dropout_p)
        return kept.to(problem.dtype) / (1.0 - problem.dropout_p)


def _side_by_side(features: list[Tensor]) -> Tensor | None:
    if not features:
        return None
    return features[0] if len(features) == 1 else torch.cat(features, -1)


def _blocks(problem: Problem, workspace: Workspace, *, forward: bool) -> Iterator[tuple[Tables, bool, Iterator[Block]]]:
    """For each piece its tables, whether torch's fused kernel can do it, and its blocks."""
    heads, dim = problem.value.shape[1], max(1, problem.value.shape[3])
    for piece in problem.pieces():
        if not (piece.batch and heads and piece.queries and piece.keys):
            continue
        tables = Tables(problem, piece)
        fused = forward and _is_fused(problem, piece, tables)
        tile_size = _tile_size(problem, piece, forward)
        if fused:
            groups = max(1, FUSED_NUMBERS // (len(piece.queries) * dim))
        else:
            groups = max(1, tile_size // (len(piece.queries) * len(piece.keys)))
            if any(isinstance(table, GridRows) and len(table.window) > len(piece.keys) for table in tables.rows()):
                # Few rows of many heads reach less of a long table than many rows of few heads.
                groups *= MORE_GROUPS
        yield (
            tables,
            fused,
            (
                Block(problem, piece, tables, workspace, tile_size, batch, some_heads)
                for batch, some_heads in cut(piece.batch, heads, groups)
            ),
        )


def _tile_size(problem: Problem, piece: Piece, forward: bool) -> int:
    """Scores in a tile; oneDNN multiplies larger ones faster, and the forward has one where the backward has two."""
    size = TILE * torch.get_num_threads()
    return 2 * size if forward and _piece_by_onednn(problem, piece) else size


def _row_spans(block: Block, bands: list[range]) -> Iterator[tuple[range, list[Span]]]:
    """The tiles of a block, row of tiles by row of tiles; keys that no query of the row may attend are left out.

    ``bands`` are the values of m (see :class:`Grid`) that tables tell apart: tiles beyond them are cheaper.
    """
    n_q, n_k = len(block.piece.queries), len(block.piece.keys)
    rows = max(FEWEST_ROWS, block.tile_size // (block.groups * min(n_k, LONGEST_ROW)))
    grid = block.tables.layout
    for queries in chunks(range(n_q), rows):
        end = n_k
        cuts: list[int] = []
        if isinstance(grid, Grid):
            if block.problem.causal:
                end = max(0, min(n_k, grid.past(queries)))
            if bands:
                low = min(band.start for band in bands) + grid.step * queries.start
                high = max(band.stop for band in bands) + grid.step * (queries.stop - 1)
                cuts = [cut for cut in (low, high) if NARROWEST_TAIL <= cut <= end - NARROWEST_TAIL]
        edges = [0, *cuts, end]
        spans = [
            Span(queries, keys)
            for start, stop in pairwise(edges)
            if stop > start
            for keys in chunks(range(start, stop), LONGEST_ROW)
        ]
        yield queries, spans


def _piece_by_onednn(problem: Problem, piece: Piece) -> bool:
    """Whether oneDNN computes all of a piece's products, except the smallest."""
    sizes = len(piece.queries), len(piece.keys), problem.value.shape[3]
    return onednn_suits(_product_dtype(problem), problem.value.device, *sizes)


def _product_dtype(problem: Problem) -> torch.dtype:
    """Of the products after the softmax: the input's where the device multiplies it fast."""
    dtype, on_cpu = problem.value.dtype, problem.value.device.type == "cpu"
    if dtype == torch.bfloat16 and on_cpu:
        fast = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return dtype if fast else problem.dtype
    return problem.dtype if on_cpu else dtype


@torch.library.custom_op("whereformer::blockwise_forward", mutates_args=(), schema=f"({ARGUMENTS}) -> (Tensor, Tensor)")
def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    problem = Problem(*arguments)
    with without_autocast(problem.value.device):
        return short.forward(problem) if problem.keeps_weights else forward(problem)


@_forward.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    problem = Problem(*arguments)
    return problem.new_output(), short.new_weights(problem) if problem.keeps_weights else _new_norm(problem)


def _new_norm(problem: Problem) -> Tensor:
    """Memory for what normalises rows: (batch, heads, n_q, 2), ``weight = exp2(score - norm[0]) / norm[1]``.

    The two are apart where products are wide, because their sum would round: a shift and a sum of weights.
    """
    return problem.value.new_empty(*problem.value.shape[:2], problem.n_q, 2, dtype=problem.dtype)


def forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """The output, and what normalised its rows, see ``_new_norm``: an infinite shift where a row may attend nothing."""
    output, norm = problem.new_output(), _new_norm(problem)
    if problem.has_gaps():
        output.zero_()
        norm.fill_(torch.inf)
    workspace = Workspace(output.device)
    for tables, fused, blocks in _blocks(problem, workspace, forward=True):
        bands = tables.bands()
        step = tables.step if bands else 0
        groups = 0
        for block in blocks:
            if fused:
                _forward_fused(block, output, norm)
                continue
            size = (block.groups, len(block.piece.queries))
            total = workspace.get("total", (*size, problem.value.shape[3]), problem.dtype)
            block_norm = workspace.get("norm", (*size, 2), problem.dtype)
            row_spans = list(_row_spans(block, bands))
            if groups != block.groups:
                groups = block.groups
                scratch = Scratch.for_spans(
                    block.groups, row_spans, step, partial(workspace.get, "scores", dtype=problem.dtype), block.onednn
                )
            for queries, spans in row_spans:
                rows = block.reversed(queries)
                _forward_rows(block, scratch, queries, spans, total[:, rows], block_norm[:, rows])
            block.put_queries(total, output)
            block.put_queries(block_norm, norm)
    workspace.close()
    return output, norm


def _is_fused(problem: Problem, piece: Piece, tables: Tables) -> bool:
    """Whether torch's own attention does the forward of a piece: it takes a bias that is a view of any strides."""
    query, value = problem.query, problem.value
    return (
        query is not None
        and isinstance(tables.bias, GridBias)
        and all(other is None for other in (tables.keys, tables.values, problem.query_factors, problem.dense))
        and all(other is None for other in (problem.seed, piece.key_mask, piece.query_documents))
        # It would compute what causality forbids; and in bfloat16, or by oneDNN's products, we are faster.
        and not problem.causal
        and not _piece_by_onednn(problem, piece)
        and value.device.type == "cpu"
        and value.dtype == problem.dtype
        and query.shape[3] == value.shape[3]
    )


def _forward_fused(block: Block, output: Tensor, norm: Tensor) -> None:
    """The outputs of a block and their norm, by torch's fused kernel, which gives the logsumexp of scores."""
    bias, query, key, heads = block.tables.bias, block.query, block.key_features, block.heads
    assert isinstance(bias, GridBias)
    assert query is not None
    assert key is not None
    values = bias.natural[heads.start : heads.stop]
    size = (len(block.batch), len(heads), query.shape[1], key.shape[1])
    total, ends = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *(block.by_head(rows) for rows in (query, key, block.value)),
        attn_mask=values.as_strided(size, (0, values.stride(0), bias.grid.step, 1)),
        scale=LN2,
    )
    block.put_queries(total.flatten(0, 1), output)
    shift = ends.flatten(0, 1) * LOG2E
    block.put_queries(torch.stack((shift, torch.ones_like(shift)), -1), norm)


def _forward_rows(
    block: Block, scratch: Scratch, queries: range, spans: list[Span], total: Tensor, norm: Tensor
) -> None:
    """The outputs of some queries into ``total`` (groups, rows, value_dim), by a softmax that goes tile by tile."""
    workspace = block.workspace
    total.zero_()
    norm.fill_(torch.inf)
    keys, values = block.tables.of_rows(queries)
    from_keys = from_values = None
    if keys is not None and block.query is not None:
        from_keys = block.per_offset(block.query[:, block.reversed(queries)], keys)
    if values is not None:
        from_values = total.new_zeros(*total.shape[:2], values.vectors.shape[1])
    # Finite also where all scores of a row are -inf, so that their exponentials are zeros.
    lowest = torch.finfo(total.dtype).min / 2
    highest = weight = None
    for span in spans:
        tile = scratch.tile(block.groups, span)
        scores = tile.scores
        block.fill_scores(tile, keys, from_keys, None)
        high = scores.amax(-1, keepdim=True).clamp_(min=lowest)
        if highest is not None and weight is not None:
            high = torch.maximum(high, highest)
            shrink = (highest - high).exp2_()
            weight *= shrink
            total *= shrink
            if from_values is not None:
                from_values *= shrink
        sums = scores.sub_(high).exp2_().sum(-1, keepdim=True)
        weight = sums if weight is None else weight.add_(sums)
        highest = high
        kept = block.kept(span)
        if kept is not None:
            scores *= kept
        weights = workspace.converted("weights", scores, block.narrow_value.dtype)
        add_product(total, weights, block.narrow_value[:, span.keys.start : span.keys.stop], workspace)
        if from_values is not None and values is not None:
            values.collect(tile, from_values)
    if highest is None or weight is None:
        return
    if from_values is not None and values is not None:
        total += block.from_offsets(from_values, values)
    empty = weight == 0
    weight.masked_fill_(empty, 1.0)
    highest.masked_fill_(empty, torch.inf)
    total /= weight
    if block.narrow_value.dtype == total.dtype:
        torch.cat((highest, weight), -1, out=norm)
    else:
        torch.cat((highest + weight.log2(), torch.ones_like(weight)), -1, out=norm)


@torch.library.custom_op(
    "whereformer::blockwise_backward",
    mutates_args=(),
    schema=f"(Tensor output_gradient, Tensor output, Tensor kept, bool[] needed, {ARGUMENTS}) -> Tensor[]",
)
def _backward(
    output_gradient: Tensor, output: Tensor, kept: Tensor, needed: list[bool], *arguments: Any
) -> list[Tensor]:
    problem = Problem(*arguments)
    with without_autocast(problem.value.device):
        if problem.keeps_weights:
            return short.backward(problem, output_gradient, kept, needed)
        return backward(problem, output_gradient, output, kept, needed)


@_backward.register_fake
def _(output_gradient: Tensor, output: Tensor, kept: Tensor, needed: list[bool], *arguments: Any) -> list[Tensor]:
    return Problem(*arguments).new_gradients(needed)


def backward(
    problem: Problem, output_gradient: Tensor, output: Tensor, norm: Tensor, needed: list[bool]
) -> list[Tensor]:
    """The gradients of the inputs in ``GRADIENTS`` that are needed, in that order."""
    gradients = problem.new_gradients(needed)
    names = [name for name, need in zip(GRADIENTS, needed, strict=True) if need]
    into = dict(zip(names, gradients, strict=True))
    for name, gradient in into.items():
        if problem.has_gaps() or name not in ("query", "key", "value"):
            gradient.zero_()
    workspace = Workspace(output.device)
    for tables, _, blocks in _blocks(problem, workspace, forward=False):
        bands = tables.bands(bias="bias" in into)
        groups = 0
        for block in blocks:
            row_spans = list(_row_spans(block, bands))
            if groups != block.groups:
                groups = block.groups
                memories = {
                    "scores": tables.step if tables.bands() else 0,
                    "scores_gradient": tables.step if bands else 0,
                }
                scratch, gradient_scratch = (
                    Scratch.for_spans(
                        groups, row_spans, step, partial(workspace.get, name, dtype=problem.dtype), block.onednn
                    )
                    for name, step in memories.items()
                )
            block_backward = BlockBackward(block, into, output_gradient, output, norm)
            for queries, spans in row_spans:
                block_backward.add_rows(scratch, gradient_scratch, queries, spans)
            block_backward.finish()
        for name, table in (("bias", tables.bias), ("keys", tables.keys), ("values", tables.values)):
            if table is not None and name in into:
                table.add_to(into[name])
    workspace.close()
    return gradients


class BlockBackward:
    """The gradients of one block."""

    def __init__(
        self, block: Block, into: dict[str, Tensor], output_gradient: Tensor, output: Tensor, norm: Tensor
    ) -> None:
        self.block, self.into = block, into
        problem, workspace = block.problem, block.workspace
        dtype, narrow = problem.dtype, block.narrow
        self.gradient = block.query_rows("output_gradient", output_gradient, dtype)
        self.shift, weight = block.query_rows("norm", norm, dtype).split(1, -1)
        # Divided here, weights need not be divided one by one.
        self.gradient /= weight
        delta = block.query_rows("output", output, dtype).mul_(self.gradient).sum(-1, keepdim=True)
        self.minus_delta = delta.neg_()
        self.value_gradient = self._sums("value", block.value)
        self.narrow_gradient = workspace.converted("output_gradient", self.gradient, narrow)
        self.features: tuple[Tensor, Tensor] | None = None
        if block.query_features is not None and block.key_features is not None:
            # Scaled queries would be rounded once more than the input was; so in narrow products it stands as it came.
            queries, self.scales = block.query_features, (LN2, LN2)
            if narrow != dtype:
                queries, self.scales = block.narrow_query_features(narrow), (problem.scale, 1.0)
            self.features = queries, workspace.converted("key_features", block.key_features, narrow)
            self.features_gradient = (
                workspace.zeros("query_features_gradient", tuple(block.query_features.shape), dtype),
                self._sums("key", block.key_features),
            )

    def _sums(self, name: str, rows: Tensor) -> Tensor:
        """Zeros to sum a gradient in, (groups, keys, dim): the gradient itself where it can be."""
        if self.block.onednn:
            # So ``add_product`` makes sums of products with a transposed tile.
            groups, keys, dim = rows.shape
            return self.block.workspace.zeros(f"{name}_gradient", (groups, dim, keys), rows.dtype).mT
        into = self.into.get(name)
        if into is not None and into.dtype == rows.dtype and into.shape[3] == rows.shape[2]:
            where = self.block.piece.keys
            return self.block.part_of(into)[:, :, where.start : where.stop].view(rows.shape).zero_()
        return self.block.workspace.zeros(f"{name}_gradient", tuple(rows.shape), rows.dtype)

    def add_rows(self, scratch: Scratch, gradient_scratch: Scratch, queries: range, spans: list[Span]) -> None:
        """Add what some queries contribute to all gradients."""
        block, into, workspace = self.block, self.into, self.block.workspace
        bias, (keys_table, values_table) = block.tables.bias, block.tables.of_rows(queries)
        rows = block.reversed(queries)
        gradient, minus_delta, shift = self.gradient[:, rows], self.minus_delta[:, rows], self.shift[:, rows]
        from_keys = from_values = None
        if keys_table is not None and block.query is not None:
            from_keys = block.per_offset(block.query[:, rows], keys_table)
            keys_gradient = torch.zeros_like(from_keys)
        if values_table is not None:
            from_values = block.per_offset(gradient, values_table)
            values_weights = torch.zeros_like(from_values)
        for span in spans:
            keys = slice(span.keys.start, span.keys.stop)
            tile, gradient_tile = scratch.tile(block.groups, span), gradient_scratch.tile(block.groups, span)
            weights, scores_gradient = tile.scores, gradient_tile.scores
            block.fill_scores(tile, keys_table, from_keys, shift)
            weights.exp2_()
            kept = block.kept(span)
            # First the gradient of the weights less delta, then of the scores: weights times that.
            common = minus_delta if kept is None else torch.zeros_like(minus_delta)
            if values_table is not None and from_values is not None:
                common = common + from_values[..., :1]
            scores_gradient.copy_(common.expand_as(weights))
            add_product(scores_gradient, gradient, block.value[:, keys].mT, workspace)
            if values_table is not None and from_values is not None:
                values_table.spread(from_values - from_values[..., :1], gradient_tile)
            if kept is not None:
                scores_gradient.mul_(kept).add_(minus_delta)
            scores_gradient.mul_(weights)
            if kept is not None:
                weights *= kept
            add_product(
                self.value_gradient[:, keys],
                block.factor(weights).mT,
                self.narrow_gradient[:, rows],
                workspace,
            )
            if values_table is not None and "values" in into:
                values_table.collect(tile, values_weights)
            if bias is not None and "bias" in into:
                bias.collect(gradient_tile, block.heads)
            if keys_table is not None:
                keys_table.collect(gradient_tile, keys_gradient)
            if "dense" in into:
                by_head = block.by_head(scores_gradient).flip(-2)
                part = block.dense_part(into["dense"], span)
                part += by_head if len(part) == len(by_head) else by_head.sum(0, keepdim=True)
            if self.features is not None:
                query_features, key_features = self.features
                narrow_gradient = block.factor(scores_gradient)
                add_product(self.features_gradient[0][:, rows], narrow_gradient, key_features[:, keys], workspace)
                add_product(self.features_gradient[1][:, keys], narrow_gradient.mT, query_features[:, rows], workspace)
        if keys_table is not None and block.query is not None:
            width = block.query.shape[2]
            self.features_gradient[0][:, rows, :width] += block.from_offsets(keys_gradient, keys_table)
            if "keys" in into:
                block.collect_vectors(keys_table, keys_gradient, block.query[:, rows] * LN2)
        if values_table is not None and "values" in into:
            block.collect_vectors(values_table, values_weights, gradient)

    def finish(self) -> None:
        """Put what was summed where it belongs."""
        block, problem = self.block, self.block.problem
        self._put("value", self.value_gradient, block.piece.keys)
        if self.features is None:
            return
        from_queries, from_keys = self.features_gradient
        width = 0 if problem.query is None else problem.query.shape[3]
        from_keys[..., :width] *= self.scales[0]
        from_keys[..., width:] *= self.scales[1]
        if width < from_queries.shape[2]:
            self._put("query_factors", from_queries[..., width:].flip(1), block.piece.queries)
            self._put("key_factors", from_keys[..., width:], block.piece.keys)
        self._put("key", from_keys[..., :width], block.piece.keys)
        if "query" in self.into:
            block.put_queries(from_queries[..., :width].mul_(problem.scale), self.into["query"])

    def _put(self, name: str, rows: Tensor, where: range) -> None:
        if name not in self.into:
            return
        target = self.block.part_of(self.into[name])[:, :, where.start : where.stop]
        rows = self.block.by_head(rows)
        if name in ("key", "value"):
            if target.data_ptr() != rows.data_ptr():
                target.copy_(rows)
        else:
            # Factors may be shared by the batch.
            target += rows if len(target) == len(rows) else rows.sum(0, keepdim=True)


register_gradients(_forward, _backward)
