"""What models hand to their layers as a mask: what they requested from transformers, without a matrix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    packed_sequence_mask_function,
    prepare_padding_mask,
    sdpa_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from ...errors import InputError
from ...kernels import Positions
from ...kernels.tracing import can_read
from ...positions import Site
from ...positions.visible_keys import positions_from_mask, positions_in_documents, steps_between_tokens
from ..checks import real_tokens


class NoTensorError(InputError, AttributeError):
    """A model does with its mask what only a tensor can do. ``hasattr`` is False then."""

    def __init__(self, what: str) -> None:
        super().__init__(
            "attention_mask", f"the model computes with its mask ({what}), but this attention makes no matrix of it"
        )

    def __reduce__(self) -> Any:
        return InputError, (self.field, self.reason)


class RequestedMask(NamedTuple):
    """The mask that a model requested from transformers, in place of a matrix.

    Only the attention function looks inside. A model that computes with its masks, as with tensors, stops with an error
    that says so. What moves or checkpoints a model's arguments looks into tuples.

    Args:
        n_k: the number of keys; the last of them is at the last query.
        first: the position of the first key: a cache that slides has dropped those before it.
        causal: whether later keys are masked.
        window: how far before and after itself a query attends; None without a window.
        real: (batch or 1, first + n_k) bool, which tokens of the whole text are no padding; None: all.
        documents: (batch, n_k), the texts of packed rows, which do not see each other; None: each row is one text.
        matrix: what else masks, (batch or 1, heads or 1, n_q, n_k): bool with True = may be attended, or numbers to
            add to scores.
    """

    n_k: int
    first: int = 0
    causal: bool = False
    window: tuple[int, int] | None = None
    real: Tensor | None = None
    documents: Tensor | None = None
    matrix: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        """Refuse what models ask of a tensor."""
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("ndim", "contiguous"):
            # What transformers asks of a mask that was made before the forward, as for a static cache.
            reason = "whereformer's attention takes no mask made before, as for a static cache"
            raise InputError("attention_mask", reason)
        raise NoTensorError(f"it reads its {name}")

    def __getitem__(self, at: Any) -> Any:
        """Refuse what models do that choose keys themselves, as of a matrix."""
        if isinstance(at, tuple):
            raise NoTensorError("it reads parts of it")
        return tuple.__getitem__(self, at)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Refuse functions of torch, except for scores + mask."""
        if function is Tensor.add and len(args) == 2 and isinstance(args[1], cls):
            return args[1].__radd__(args[0])
        raise NoTensorError(f"it calls {getattr(function, '__name__', function)}")

    def __radd__(self, scores: Tensor) -> Tensor:
        """Mask scores (batch, heads, n_q, n_k) of a layer that does not dispatch its attention, if it is padding."""
        if self._replace(n_k=0, first=0, real=None) != RequestedMask(0):
            raise InputError("attention_mask", "layers that add masks to scores themselves can have padding only")
        keys = self.key_mask(len(scores))
        return scores if keys is None else scores.masked_fill(~keys[:, None, None], torch.finfo(scores.dtype).min)

    def __eq__(self, value: object) -> bool:
        """Compare with a tuple, and refuse to compare with a number, as a matrix does element by element."""
        return tuple.__eq__(self, value) if isinstance(value, tuple | None) else _refuse_operator(self)

    def __ne__(self, value: object) -> bool:
        return not self == value

    def __hash__(self) -> int:
        return tuple.__hash__(self)

    def key_mask(self, batch: int) -> Tensor | None:
        """Return which keys are real, (batch, n_k); None if all are."""
        return None if self.real is None else self.real[:, self.first :].expand(batch, self.n_k)

    def site(self, query: Tensor, scale: float | None) -> Site:
        """Return where a query attends. A cache holds the earlier keys, so the queries are the last tokens."""
        (batch, _, n_q, _), n_k, first = query.shape, self.n_k, self.first
        keys = Positions(first, 1, n_k)
        return Site(
            keys if n_q == n_k else Positions(first + n_k - n_q, 1, n_q),
            keys,
            key_mask=self.key_mask(batch),
            causal=self.causal,
            window=self.window,
            scale=scale,
            query_documents=self.documents,
            key_documents=self.documents,
            num_dropped_keys=first if self.real is None or not first else self.real[:, :first].sum(1, keepdim=True),
        )

    def counted(self, site: Site) -> Site:
        """Return the site at positions that count real tokens alone, from 0 in each text."""
        if self.documents is not None:
            at, end = positions_in_documents(self.documents, self.key_mask(len(self.documents)))
            return replace(site, query_positions=at, key_positions=at, position_stop=end)
        places = None if self.real is None else positions_from_mask(self.real)
        if places is None:
            return site
        assert isinstance(site.query_positions, Positions)
        end = places.shape[1]
        return replace(
            site,
            query_positions=places[:, end - site.query_positions.length :],
            key_positions=places[:, end - self.n_k :],
            position_stop=end,
        )

    def hides_later_keys(self, n_q: int) -> bool:
        """Whether none of the queries, which are the last tokens, sees a later key."""
        if self.matrix is None:
            return self.causal
        keys = seen(self.matrix)
        return not bool(keys.expand(*keys.shape[:2], n_q, -1).triu(1 + keys.shape[3] - n_q).any())


def _refuse_operator(*_: Any) -> Any:
    raise NoTensorError("with an operator")


for _name in (
    "add", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "and", "rand", "or", "ror",
    "lt", "le", "gt", "ge", "neg", "invert", "float", "int",
):  # fmt: skip
    setattr(RequestedMask, f"__{_name}__", _refuse_operator)


def seen(matrix: Tensor) -> Tensor:
    """Return which keys are seen by which queries, of a mask that is bool or added to scores."""
    return matrix if matrix.dtype == torch.bool else matrix > torch.finfo(matrix.dtype).min / 2


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int,
    mask_function: Callable[..., Tensor],
    attention_mask: Tensor | None,
    **options: Any,
) -> RequestedMask:
    """A mask function of transformers: it returns what was asked for, with a matrix only for patterns of other kinds.

    Causality, windows, padding and the texts of packed rows need none.

    Raises:
        InputError: for a cache in which the last key is not the last query's.
    """
    asked, end = _recognized(mask_function, kv_length), kv_offset + kv_length
    covered = attention_mask is not None and attention_mask.shape[1] >= end
    ahead = asked is not None and asked.causal and not covered and q_offset + q_length < end
    if isinstance(q_offset, Tensor) or ahead:
        raise InputError("cache", "whereformer's attention needs a cache that grows, got a static one")
    if asked is None or ((asked.causal or asked.window) and q_offset + q_length != end):
        # Without these, None stands for what sdpa takes from the layer.
        options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        matrix = sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, **options)
        asked = RequestedMask(kv_length, matrix=matrix)
    real = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    return asked._replace(first=kv_offset, real=None if real is None else real_tokens(real[:, :end]))


def texts_by_positions(positions: Tensor, real: Tensor | None) -> Tensor | None:
    """Return the number of each token's text, (batch, n), by the positions of real tokens; None if a row is one text.

    As in transformers, a text goes on where positions go on by one. Where padding is hidden between two tokens, they
    may also go on by the distance between the two.

    Args:
        positions: (1 or batch, n), whole.
        real: (batch, n) bool, True = a token, False = padding; None: all are tokens.
    """
    steps, distances = steps_between_tokens(positions, real)
    begins = (steps != 1) & (steps != distances)
    return None if can_read(begins) and not begins.any() else begins.cumsum(1)


def _recognized(mask_function: Callable[..., Tensor], n_k: int) -> RequestedMask | None:
    """Return the mask of a function if it needs no matrix; None for others, and in compiled code for most."""
    if mask_function in (causal_mask_function, bidirectional_mask_function):
        return RequestedMask(n_k, causal=mask_function is causal_mask_function)
    # A compiler cannot look into functions.
    if torch.compiler.is_compiling():
        return None
    if parts := _parts(mask_function, sliding_window_causal_mask_function(ANY)):
        return RequestedMask(n_k, causal=True, window=(parts[0] - 1, 0))
    if parts := _parts(mask_function, sliding_window_bidirectional_mask_function(ANY)):
        return RequestedMask(n_k, window=(parts[0], parts[0]))
    # Releases of transformers join the two in either order, and older ones leave positions as they are.
    for within, apart in permutations(_parts(mask_function, and_masks(ANY, ANY)) or (), 2):
        if documents := _parts(apart, packed_sequence_mask_function(ANY)):
            inner = None if REMAP is None else _parts(within, REMAP(ANY, ANY))
            asked = _recognized(inner[0] if inner else within, n_k)
            return None if asked is None else asked._replace(documents=documents[0])
    return None


REMAP = getattr(masking_utils, "remap_positions_for_packed_sequence", None)
"""Lets a mask function see positions that start again with each text."""


class ANY:
    """Stands for whatever a mask function was made from."""


def _parts(one: Any, other: Any) -> list[Any] | None:
    """Return what one function was made from where the other has ANY.

    None if they differ in their code or in the functions that they were made from.
    """
    if other is ANY:
        return [one]
    if isinstance(one, FunctionType) and isinstance(other, FunctionType) and one.__code__ is other.__code__:
        one, other = (tuple(cell.cell_contents for cell in each.__closure__ or ()) for each in (one, other))
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        found: list[Any] = []
        for pair in zip(one, other, strict=True):
            if (parts := _parts(*pair)) is None:
                return None
            found += parts
        return found
    return [] if one is other else None
