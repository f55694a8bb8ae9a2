"""Models of images: tables over rows and columns (Swin, Swin v2, BEiT, Data2Vec-vision)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ....kernels import GridPositions, OffsetBias2d
from ..masks import BiasMask, Regions
from ..served import Served
from .heads import project_heads


def swin(
    own: Served, hidden_states: Tensor, attention_mask: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Compute Swin's attention within windows, the rows of the batch; the mask is what :func:`regions` returns."""
    layer = own.layer
    projections = layer.q_proj, layer.k_proj, layer.v_proj
    query, key, value = project_heads(hidden_states, layer.num_attention_heads, *projections)
    bias = layer.relative_position_bias
    out, weights = own.attend(
        query,
        key,
        value,
        (_table(bias.relative_position_bias_table, *bias.window_size),),
        None if attention_mask is None else Regions(attention_mask),
        scaling=layer.scaling,
        dropout=layer.attention_dropout,
        **options,
    )
    return layer.o_proj(out), weights


def swinv2(
    own: Served,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    output_attentions: bool | None = False,
    **options: Any,
) -> tuple[Tensor, ...]:
    """Compute Swin v2's attention: cosines with a learned scale, and a table that a small network computes."""
    layer = own.layer
    query, key, value = project_heads(hidden_states, layer.num_attention_heads, layer.query, layer.key, layer.value)
    scale = layer.logit_scale.clamp(max=math.log(1 / 0.01)).exp()
    table = 16 * layer.continuous_position_bias_mlp(layer.relative_coords_table).sigmoid()
    out, weights = own.attend(
        functional.normalize(query, dim=-1) * scale,
        functional.normalize(key, dim=-1),
        value,
        (_table(table.flatten(0, 2), *layer.window_size),),
        None if attention_mask is None else Regions(attention_mask),
        scaling=1.0,
        dropout=layer.dropout.p,
        output_attentions=output_attentions,
        **options,
    )
    return (out, weights) if weights is not None else (out,)


def regions(own: Served, height: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """Return the region of each token of shifted windows, (windows, window ** 2); None if windows are not shifted.

    A window that was shifted over the edge has tokens of opposite sides of the image. The models give pairs of two
    sides -100, which stands for never; here they are never attended to.
    """
    layer = own.layer
    size, shift = layer.window_size, layer.shift_size
    if shift <= 0:
        return None
    rows, columns = (
        (torch.arange(side, device=device) >= side - shift).view(-1, size).long() for side in (height, width)
    )
    # Where a window lies tells everything else, so two bits tell its regions apart.
    return (2 * rows[:, None, :, None] + columns[None, :, None, :]).reshape(-1, size * size)


def beit_bias(
    own: Served, window_size: tuple[int, int], interpolate_pos_encoding: bool = False, dim_size: int | None = None
) -> BiasMask:
    """Return BEiT's table over the offsets of an image's patches, and its numbers for [CLS].

    For an image of another size, the table is stretched. The models then stretch the matrix to the number of tokens,
    which it has already.
    """
    layer = own.layer
    rows, columns = (2 * side - 1 for side in layer.window_size)
    size = tuple(2 * side - 1 for side in window_size)
    table = layer.relative_position_bias_table
    # The sides are in this order there, too: one has to know that they differ to see that they are exchanged.
    cells = table[:-3].reshape(1, columns, rows, -1).permute(0, 3, 1, 2)
    cells = functional.interpolate(cells, size=size, mode="bilinear")[0].flatten(1).mT
    return BiasMask((_table(torch.cat([cells, table[-3:]]), *window_size, prefix=1),))


def data2vec(
    own: Served,
    hidden_states: Tensor,
    output_attentions: bool = False,
    relative_position_bias: BiasMask | None = None,
    interpolate_pos_encoding: bool = False,
    resolution: tuple[int, int] | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute Data2Vec-vision's attention; the bias comes from :func:`beit_bias`."""
    layer = own.layer
    query, key, value = project_heads(hidden_states, layer.num_attention_heads, layer.query, layer.key, layer.value)
    bias = relative_position_bias
    if layer.has_relative_position_bias:
        assert resolution is not None
        sides = tuple(side // layer.config.patch_size for side in resolution)
        table = layer.relative_position_bias(sides, interpolate_pos_encoding, dim_size=hidden_states.shape[1])
        bias = table if bias is None else table + bias
    return own.attend(
        query, key, value, (), bias, dropout=layer.dropout.p, output_attentions=output_attentions, **options
    )


def _table(table: Tensor, rows: int, columns: int, prefix: int = 0) -> OffsetBias2d:
    """Return the term of a table with a row for each offset of two cells, and three rows at its end for a prefix.

    Args:
        table: ((2 * rows - 1) * (2 * columns - 1), heads), by the query's row minus the key's, then by columns.
        rows, columns: the sides of the grid.
        prefix: the tokens before it; the last three rows are then in the order of :class:`OffsetBias2d`.
    """
    offsets = (2 * rows - 1) * (2 * columns - 1)
    cells = table[:offsets].view(2 * rows - 1, 2 * columns - 1, -1).flip(0, 1).permute(2, 0, 1)
    grid = GridPositions(rows, columns, prefix)
    return OffsetBias2d(cells, (1 - rows, 1 - columns), grid, grid, table[offsets:].mT if prefix else None)
