"""RoPE: rotary position embeddings (Su et al. 2021)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..errors import InputError, shown
from ..kernels.precision import autocast_dtype
from ..kernels.terms import PositionsLike, position_values
from .base import ModelShape, PositionMethod, check_choice, check_value
from .rope_scaling import Scaling
from .site import Site

LAYOUTS = ("half", "interleaved")
ARRANGEMENTS = ("blocks", "interleaved", "axial")


class Turn(NamedTuple):
    """What features, and their partners in the pairs, are multiplied by: (n, rotary_dim) or (batch, 1, n, rotary_dim).

    Sines have the signs of :func:`rotated`. ``cos`` and ``sin`` are in the dtype that layers compute in, so that they
    are not cast for the query and the key of every layer; features in any other get the exact ones, in float64.
    """

    cos: Tensor
    sin: Tensor
    exact_cos: Tensor
    exact_sin: Tensor


Turns: TypeAlias = dict[float, Turn]
"""The turn for each base."""


class Rope(PositionMethod):
    """Rotates pairs of features of query and key by angles proportional to the position.

    Pair m turns by ``position * base ** (-2 m / rotary_dim)``, so that query . key depends on the offset alone. Only
    the first ``rotary_dim`` features of a head turn; the rest pass through.

    With ``sections``, positions may have several axes, such as the time, row and column of a patch: (batch, n, axes).
    Each pair then turns with one of them. A token of text has the same number on all axes, as positions (n,) and
    (batch, n) have; in ``blocks`` and ``interleaved`` it turns as without sections.

    Args:
        layout: the features that form pair m: "half", (m, m + rotary_dim / 2), as in GPT-NeoX and Llama; "interleaved",
            (2 m, 2 m + 1), as in RoFormer and GPT-J.
        base: sets the longest wavelength, ``2 pi * base ** (1 - 2 / rotary_dim)`` tokens. A list has one number per
            layer, repeated over the layers in turn (ModernBERT: 160000 where a layer attends to all, else 10000).
        rotary_dim: rotated features of each head, even; all by default.
        scaling: how angles change for text longer than was trained on: ``rope_type`` ("linear", "ntk", "yarn",
            "longrope", "llama3" or "proportional") and its numbers, such as ``factor``, with the names of transformers'
            ``rope_parameters`` (:class:`~whereformer.positions.rope_scaling.Scaling`).
        sections: the number of pairs that turn with each axis; together ``rotary_dim / 2``. None: one axis.
        arrangement: which pairs these are. "blocks": the first ones turn with axis 0, the next with axis 1 (Qwen2-VL).
            "interleaved": the axes take turns until each has its number, and axis 0 has the rest (Qwen3-VL, NeoMME).
            "axial": blocks, each of which has all wavelengths, ``base ** (-2 m / (rotary_dim / axes))``; sections are
            equal (DINOv3, EVA-02, the image encoder of Qwen2-VL).
    Extrapolation: any length and any real position, though angles beyond the trained length are untrained.
    Source: Su et al. (2021), arXiv 2104.09864, eq. 34; several axes: Wang et al. (2024), arXiv 2409.12191 (Qwen2-VL).
    """

    paper, year = "Su et al.", 2021
    shift_invariant = True
    needs_query_key = True
    rotates_any_heads = True

    def __init__(
        self,
        model: ModelShape,
        *,
        layout: str = "half",
        base: Sequence[float] | float = 10_000.0,
        rotary_dim: int | None = None,
        scaling: Mapping[str, Any] | None = None,
        sections: Sequence[int] | None = None,
        arrangement: str = "blocks",
    ) -> None:
        super().__init__(model)
        check_choice("layout", layout, LAYOUTS)
        check_choice("arrangement", arrangement, ARRANGEMENTS)
        rotary_dim = model.head_dim if rotary_dim is None else rotary_dim
        if rotary_dim % 2 or not 0 < rotary_dim <= model.head_dim:
            raise InputError("rotary_dim", f"expected an even number up to head_dim {model.head_dim}, got {rotary_dim}")
        bases = tuple(base) if isinstance(base, list | tuple) else (base,)
        if not bases:
            raise InputError("base", "expected at least one number, got none")
        for number in bases:
            check_value("base", number, "float")
            if number <= 0:
                raise InputError("base", f"expected a positive number, got {number}")
        self.layout = layout
        self.bases = tuple(map(float, bases[: model.num_layers]))
        self.rotary_dim, self.arrangement = rotary_dim, arrangement
        self.axis_of_pair = [] if sections is None else _axis_of_pair(sections, arrangement, rotary_dim // 2)
        self.sections, self.num_axes = sections, None if sections is None else len(sections)
        spectrum = rotary_dim // (self.num_axes or 1) if arrangement == "axial" else rotary_dim
        self.scaling = Scaling(scaling, rotary_dim=spectrum, max_length=model.max_length)
        if self.scaling.type == "yarn" and min(self.bases) <= 1:
            raise InputError("base", f"expected more than 1 with yarn, got {min(self.bases)}")

    def compute_shared(self, site: Site) -> tuple[Turns, Turns]:
        """Return the turns of queries and of keys."""
        turns = self._turns(site.query_positions)
        return turns, turns if site.transformed_key_positions is site.query_positions else self._turns(
            site.transformed_key_positions
        )

    def transform_qkv(self, query: Tensor, key: Tensor, value: Tensor, site: Site) -> tuple[Tensor, Tensor, Tensor]:
        query_turns, key_turns = self.get_shared(site)
        base = self.bases[site.layer % len(self.bases)]
        return rotated(query, query_turns[base], self.layout), rotated(key, key_turns[base], self.layout), value

    def _turns(self, positions: PositionsLike) -> Turns:
        """Return cosines and sines of these positions for each base."""
        device = positions.device if isinstance(positions, Tensor) else self._like.device
        if device.type == "mps":
            device = torch.device("cpu")  # MPS has no float64
        # Angles in float64: half precision has no whole numbers beyond 256 or 2048, and float32 angles drift.
        values = position_values(positions, device).to(torch.float64)
        values = values[..., self.axis_of_pair] if values.dim() == 3 else values.unsqueeze(-1)
        turns: Turns = {}
        for base in dict.fromkeys(self.bases):
            frequencies = self.scaling.frequencies(base, device).repeat(self.rotary_dim // self.scaling.rotary_dim)
            turns[base] = turn_by(values * frequencies, self.layout, self._like, self.scaling.attention_factor)
        return turns


def _axis_of_pair(sections: Any, arrangement: str, pairs: int) -> list[int]:
    """Return the axis that each pair turns with, (pairs,); the arguments are :class:`Rope`'s."""
    for number in sections if isinstance(sections, list | tuple) else [None]:
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise InputError("sections", f"expected a list of whole numbers from 1 on, got {shown(sections)}")
    num_axes = len(sections)
    if sum(sections) != pairs:
        raise InputError("sections", f"expected {pairs} pairs together, half of rotary_dim, got {shown(sections)}")
    if arrangement == "axial" and len({*sections}) > 1:
        raise InputError("sections", f"expected equal ones with 'axial', got {shown(sections)}")
    if arrangement != "interleaved":
        return [axis for axis, number in enumerate(sections) for _ in range(number)]
    if max(sections) > sections[0]:
        raise InputError("sections", f"expected none above the first with 'interleaved', got {shown(sections)}")
    chosen = [pair % num_axes if pair < num_axes * sections[pair % num_axes] else 0 for pair in range(pairs)]
    if (found := [chosen.count(axis) for axis in range(num_axes)]) != list(sections):
        raise InputError("sections", f"in turns, {shown(sections)} would be {found}; the first axis needs more")
    return chosen


def turn_by(angles: Tensor, layout: str, like: Tensor, factor: float = 1.0) -> Turn:
    """Return the turn by angles (n, pairs) or (batch, n, pairs) float64, where features like ``like`` are computed."""
    angles = angles if angles.dim() == 2 else angles.unsqueeze(1)
    cos, sin = angles.cos() * factor, angles.sin() * factor
    if layout == "half":
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    else:
        cos, sin = cos.repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2)
    dtype = like.dtype if like.dtype == torch.float64 else autocast_dtype(like.device) or like.dtype
    return Turn(cos.to(like.device, dtype), sin.to(like.device, dtype), cos, sin)


def rotated(features: Tensor, turn: Turn, layout: str) -> Tensor:
    """Turn pairs of features (..., n, head_dim); those beyond the pairs pass through.

    Of a pair (a, b), a becomes ``a cos - b sin`` and b becomes ``b cos + a sin``. ``layout`` is that of :class:`Rope`.
    """
    cos, sin = turn[:2] if turn.cos.dtype == features.dtype else turn[2:]
    cos, sin = cos.to(features.device, features.dtype), sin.to(features.device, features.dtype)
    width = cos.shape[-1]
    if width < features.shape[-1]:
        return torch.cat((rotated(features[..., :width], turn, layout), features[..., width:]), -1)
    if layout == "half":
        partners = features.roll(width // 2, -1)
    else:
        partners = features.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return torch.addcmul(features * cos, partners, sin)
