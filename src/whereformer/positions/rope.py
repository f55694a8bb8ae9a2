"""RoPE: rotary position embeddings (Su et al. 2021)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..checks import check_choice
from ..errors import InputError, short_repr
from ..kernels.precision import autocast_dtype
from ..kernels.terms import PositionsLike, position_values
from .base import ModelShape, PositionMethod, check_value
from .rope_scaling import Scaling
from .site import Site

LAYOUTS = ("half", "interleaved")
ARRANGEMENTS = ("blocks", "interleaved", "axial")


class Rotation(NamedTuple):
    """The factors on features and on their partners in the pairs: (n, rotary_dim) or (batch, 1, n, rotary_dim).

    Sines have the signs for :func:`rotate_features`. ``cos`` and ``sin`` have the dtype that layers compute in, so that
    they are not cast for the query and the key of every layer. Features in another dtype use the exact factors, which
    are float64.
    """

    cos: Tensor
    sin: Tensor
    exact_cos: Tensor
    exact_sin: Tensor


Rotations: TypeAlias = dict[float, Rotation]
"""The rotation for each base."""


class Rope(PositionMethod):
    """Rotates pairs of features of query and key by angles proportional to the position.

    Pair m is rotated by ``position * base ** (-2 m / rotary_dim)``, so that query . key depends only on the offset.
    The first ``rotary_dim`` features of a head are rotated; the rest pass through.

    With ``sections``, positions may have several axes, such as the time, row and column of a patch: (batch, n, axes).
    Each pair is then rotated by its position on one of them. Positions (n,) and (batch, n) are for tokens of text, with
    the same number on all axes; in ``blocks`` and ``interleaved`` such tokens are rotated as without sections.

    Args:
        layout: the features that form pair m: "half", (m, m + rotary_dim / 2), as in GPT-NeoX and Llama; "interleaved",
            (2 m, 2 m + 1), as in RoFormer and GPT-J.
        base: sets the longest wavelength, ``2 pi * base ** (1 - 2 / rotary_dim)`` tokens. A list has one number per
            layer, repeated over the layers in turn (ModernBERT: 160000 where a layer attends to all, else 10000).
        rotary_dim: the number of rotated features in each head, even; all by default.
        scaling: how angles change for texts longer than the training texts: ``rope_type`` ("linear", "ntk", "yarn",
            "longrope", "llama3" or "proportional") and its numbers, such as ``factor``, with the names of transformers'
            ``rope_parameters`` (:class:`~whereformer.positions.rope_scaling.Scaling`).
        sections: the number of pairs of each axis; together ``rotary_dim / 2``. None: one axis.
        arrangement: which pairs each axis has. "blocks": the first pairs are for axis 0, the next for axis 1
            (Qwen2-VL). "interleaved": one pair for each axis in turn until an axis has all its pairs; the rest are for
            axis 0 (Qwen3-VL, NeoMME). "axial": blocks, each with all wavelengths,
            ``base ** (-2 m / (rotary_dim / axes))``; sections are equal (DINOv3, EVA-02, the image encoder of
            Qwen2-VL).
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
        scaling: Mapping[str, object] | None = None,
        sections: Sequence[int] | None = None,
        arrangement: str = "blocks",
    ) -> None:
        super().__init__(model)
        check_choice("layout", layout, LAYOUTS)
        check_choice("arrangement", arrangement, ARRANGEMENTS)
        if rotary_dim is None and model.head_dim % 2:
            size = f"{model.head_dim} (by default, hidden_size / num_heads)"
            raise InputError("rotary_dim", f"expected an even number for pairs of features, got head_dim {size}")
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

    def compute_shared(self, site: Site) -> tuple[Rotations, Rotations]:
        """Return the rotations of queries and of keys."""
        rotations, key_positions = self._rotations(site.query_positions), site.transformed_key_positions
        if key_positions is site.query_positions:
            return rotations, rotations
        return rotations, self._rotations(key_positions)

    def transform_qkv(self, query: Tensor, key: Tensor, value: Tensor, site: Site) -> tuple[Tensor, Tensor, Tensor]:
        query_rotations, key_rotations = self.get_shared(site)
        base = self.bases[site.layer % len(self.bases)]
        query = rotate_features(query, query_rotations[base], self.layout)
        return query, rotate_features(key, key_rotations[base], self.layout), value

    def _rotations(self, positions: PositionsLike) -> Rotations:
        """Return cosines and sines of these positions for each base."""
        device = positions.device if isinstance(positions, Tensor) else self._like.device
        if device.type == "mps":
            device = torch.device("cpu")  # MPS has no float64
        # Angles in float64: half precision lacks integers beyond 256 or 2048, and float32 angles drift.
        values = position_values(positions, device).to(torch.float64)
        values = values[..., self.axis_of_pair] if values.dim() == 3 else values.unsqueeze(-1)
        rotations: Rotations = {}
        for base in dict.fromkeys(self.bases):
            frequencies = self.scaling.frequencies(base, device).repeat(self.rotary_dim // self.scaling.rotary_dim)
            angles = values * frequencies
            rotations[base] = rotation_by(angles, self.layout, self._like, self.scaling.attention_factor)
        return rotations


def _axis_of_pair(sections: Any, arrangement: str, num_pairs: int) -> list[int]:
    """Return the axis of each pair; the arguments are options of :class:`Rope`."""
    for number in sections if isinstance(sections, list | tuple) and sections else [None]:
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise InputError("sections", f"expected a list of integers from 1 on, got {short_repr(sections)}")
    num_axes = len(sections)
    is_interleaved = arrangement == "interleaved"
    for is_wrong, expected in (
        (sum(sections) != num_pairs, f"{num_pairs} pairs together, half of rotary_dim"),
        (arrangement == "axial" and len({*sections}) > 1, "equal numbers with 'axial'"),
        (is_interleaved and max(sections) > sections[0], "no number above the first with 'interleaved'"),
    ):
        if is_wrong:
            raise InputError("sections", f"expected {expected}, got {short_repr(sections)}")
    if not is_interleaved:
        return [axis for axis, number in enumerate(sections) for _ in range(number)]
    axes = [pair % num_axes if pair < num_axes * sections[pair % num_axes] else 0 for pair in range(num_pairs)]
    counts = [axes.count(axis) for axis in range(num_axes)]
    if counts != list(sections):
        reason = f"'interleaved' would give the axes {counts} pairs, got {short_repr(sections)}"
        raise InputError("sections", f"{reason}; the first axis needs more")
    return axes


def rotation_by(angles: Tensor, layout: str, like: Tensor, factor: float = 1.0) -> Rotation:
    """Return the rotation by angles (n, pairs) or (batch, n, pairs) float64, for the device and dtype of ``like``."""
    angles = angles if angles.dim() == 2 else angles.unsqueeze(1)
    cos, sin = angles.cos() * factor, angles.sin() * factor
    if layout == "half":
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    else:
        cos, sin = cos.repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2)
    dtype = like.dtype if like.dtype == torch.float64 else autocast_dtype(like.device) or like.dtype
    return Rotation(cos.to(like.device, dtype), sin.to(like.device, dtype), cos, sin)


def rotate_features(features: Tensor, rotation: Rotation, layout: str) -> Tensor:
    """Rotate pairs of features (..., n, head_dim); features beyond the pairs pass through.

    In a pair (a, b), a becomes ``a cos - b sin`` and b becomes ``b cos + a sin``. ``layout`` is the option of
    :class:`Rope`.
    """
    cos, sin = rotation[:2] if rotation.cos.dtype == features.dtype else rotation[2:]
    cos, sin = cos.to(features.device, features.dtype), sin.to(features.device, features.dtype)
    width = cos.shape[-1]
    if width < features.shape[-1]:
        return torch.cat((rotate_features(features[..., :width], rotation, layout), features[..., width:]), -1)
    if layout == "half":
        partners = features.roll(width // 2, -1)
    else:
        partners = features.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return torch.addcmul(features * cos, partners, sin)
