"""The masks that models ask transformers for, described without a matrix where possible."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import permutations
from types import FunctionType
from typing import Any, NoReturn, TypeAlias

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
from ..checks import to_token_mask


class NotATensorError(InputError, AttributeError):
    """A model uses its mask as a tensor; as an AttributeError, it makes ``hasattr`` False."""


def _refuse(use: str) -> NoReturn:
    reason = f"the model {use} its mask, but whereformer's attention builds no mask matrix"
    raise NotATensorError("attention_mask", reason)


@dataclass(frozen=True, eq=False)
class MaskSpec:
    """The mask that a model asked transformers for, as a description instead of a matrix.

    Models pass it on to their layers, and only the attention function reads it. It is not a tensor: a model that uses
    it as one gets an error that says how. The one exception is ``scores + mask``, since layers that do not dispatch
    their attention get the same mask; for padding, this masks the scores.

    Args:
        n_k: the number of keys; the last key is at the last query.
        first: the position of the first key: a sliding cache has dropped the earlier keys.
        causal: whether later keys are masked.
        window: the largest distances before and after itself that a query attends to; None without a window.
        token_mask: (batch or 1, first + n_k) bool, True = a token, False = padding; None: all are tokens.
        documents: (batch, n_k), the texts of packed rows, which do not see each other; None: each row is one text.
        matrix: any other mask, (batch or 1, heads or 1, n_q, n_k): bool with True = may be attended, or numbers that
            are added to scores.
    """

    n_k: int
    first: int = 0
    causal: bool = False
    window: tuple[int, int] | None = None
    token_mask: Tensor | None = None
    documents: Tensor | None = None
    matrix: Tensor | None = None

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse the attributes of a tensor."""
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("ndim", "contiguous"):
            # transformers reads these of a mask that was prepared before the forward.
            reason = "masks prepared before the forward, as for a static cache, are not supported"
            raise InputError("attention_mask", reason)
        _refuse(f"reads the attribute {name!r} of")

    def __getitem__(self, index: object) -> NoReturn:
        """Refuse models that choose keys themselves, as from a matrix."""
        _refuse("indexes")

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., object], types: object, args: tuple[Any, ...] = (), kwargs: object = None
    ) -> Tensor:
        """Refuse torch's functions, except for ``scores + mask``."""
        if function is Tensor.add and len(args) == 2 and isinstance(args[1], cls):
            return args[1].__radd__(args[0])
        _refuse(f"calls {getattr(function, '__name__', function)} on")

    def __radd__(self, scores: Tensor) -> Tensor:
        """Mask scores (batch, heads, n_q, n_k) of a layer that does not dispatch its attention, if it is padding."""
        if self.causal or self.window or self.documents is not None or self.matrix is not None:
            raise InputError("attention_mask", "layers that add masks to scores themselves support only padding masks")
        keys = self.key_mask(len(scores))
        return scores if keys is None else scores.masked_fill(~keys[:, None, None], torch.finfo(scores.dtype).min)

    def __eq__(self, value: object) -> bool:
        """Whether ``value`` is this object; a number is refused, since a matrix compares its elements with it."""
        return self is value if isinstance(value, MaskSpec | None) else _refuse_operator(self)

    __hash__ = object.__hash__

    def identity(self) -> tuple[object, ...]:
        """Return the values that equal masks share, as long as their tensors live."""
        return self.n_k, self.first, self.causal, self.window, *map(id, (self.token_mask, self.documents, self.matrix))

    def key_mask(self, batch: int) -> Tensor | None:
        """Return which keys are tokens and not padding, (batch, n_k) bool; None if all are."""
        return None if self.token_mask is None else self.token_mask[:, self.first :].expand(batch, self.n_k)

    def site(self, query: Tensor, scale: float | None) -> Site:
        """Return the site of a call. A cache holds the earlier keys, so the queries are the last tokens."""
        (batch, _, n_q, _), n_k, first = query.shape, self.n_k, self.first
        keys = Positions(first, 1, n_k)
        num_dropped_keys: int | Tensor = first
        if self.token_mask is not None and first > 0:
            num_dropped_keys = self.token_mask[:, :first].sum(1, keepdim=True)
        return Site(
            keys if n_q == n_k else Positions(first + n_k - n_q, 1, n_q),
            keys,
            key_mask=self.key_mask(batch),
            causal=self.causal,
            window=self.window,
            scale=scale,
            query_documents=self.documents,
            key_documents=self.documents,
            num_dropped_keys=num_dropped_keys,
        )

    def with_token_positions(self, site: Site) -> Site:
        """Return the site with positions that count only tokens, not padding, from 0 in each text."""
        if self.documents is not None:
            positions, stop = positions_in_documents(self.documents, self.key_mask(len(self.documents)))
            return replace(site, query_positions=positions, key_positions=positions, position_stop=stop)
        all_positions = None if self.token_mask is None else positions_from_mask(self.token_mask)
        if all_positions is None:
            return site
        assert isinstance(site.query_positions, Positions)
        stop = all_positions.shape[1]
        return replace(
            site,
            query_positions=all_positions[:, stop - site.query_positions.length :],
            key_positions=all_positions[:, stop - self.n_k :],
            position_stop=stop,
        )

    def hides_later_keys(self, n_q: int) -> bool:
        """Whether none of the queries, which are the last tokens, sees a later key."""
        if self.matrix is None:
            return self.causal
        pairs = visible_pairs(self.matrix)
        return not bool(pairs.expand(*pairs.shape[:2], n_q, -1).triu(1 + pairs.shape[3] - n_q).any())


Mask: TypeAlias = Tensor | MaskSpec | None
"""The masks that layers pass to an attention function."""


def _refuse_operator(*_: object) -> NoReturn:
    _refuse("applies an operator to")


for _name in (
    "add", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "and", "rand", "or", "ror",
    "lt", "le", "gt", "ge", "neg", "invert", "float", "int",
):  # fmt: skip
    setattr(MaskSpec, f"__{_name}__", _refuse_operator)


def visible_pairs(matrix: Tensor) -> Tensor:
    """Return a mask that is bool or added to scores as bool, with True = the query sees the key."""
    return matrix if matrix.dtype == torch.bool else matrix > torch.finfo(matrix.dtype).min / 2


def make_mask_spec(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int,
    mask_function: Callable[..., Tensor],
    attention_mask: Tensor | None,
    **options: object,
) -> MaskSpec:
    """A mask function of transformers that returns a description; only patterns of other kinds become a matrix.

    Causality, windows, padding and the texts of packed rows need no matrix.

    Raises:
        InputError: for a cache whose last key is not at the last query.
    """
    mask_spec, end = _parse_mask_function(mask_function, kv_length), kv_offset + kv_length
    covers_all = attention_mask is not None and attention_mask.shape[1] >= end
    has_later_keys = mask_spec is not None and mask_spec.causal and not covers_all and q_offset + q_length < end
    if isinstance(q_offset, Tensor) or has_later_keys:
        raise InputError("cache", "expected a cache that grows, got a static one")
    if mask_spec is None or ((mask_spec.causal or mask_spec.window) and q_offset + q_length != end):
        # With these, sdpa_mask may return None, and torch's attention function then masks by an option of the layer.
        options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        matrix = sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, **options)
        mask_spec = MaskSpec(kv_length, matrix=matrix)
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    return replace(mask_spec, first=kv_offset, token_mask=None if padding is None else to_token_mask(padding[:, :end]))


def texts_by_positions(positions: Tensor, token_mask: Tensor | None) -> Tensor | None:
    """Return the number of each token's text, (batch, n), from the positions of tokens; None if a row is one text.

    As in transformers, a text goes on where the next position is larger by one. If there is padding between two tokens,
    it may also be larger by the distance between the tokens.

    Args:
        positions: (1 or batch, n), integers.
        token_mask: (batch, n) bool, True = a token, False = padding; None: all are tokens.
    """
    steps, distances = steps_between_tokens(positions, token_mask)
    begins = (steps != 1) & (steps != distances)
    return None if can_read(begins) and not begins.any() else begins.cumsum(1)


def _parse_mask_function(mask_function: Callable[..., Tensor], n_k: int) -> MaskSpec | None:
    """Return the description of a mask function without a matrix; None if it needs one, as most do in compiled code."""
    if mask_function in (causal_mask_function, bidirectional_mask_function):
        return MaskSpec(n_k, causal=mask_function is causal_mask_function)
    # A compiler cannot read the closures of functions.
    if torch.compiler.is_compiling():
        return None
    if sizes := _match(mask_function, sliding_window_causal_mask_function(ANY)):
        return MaskSpec(n_k, causal=True, window=(sizes[0] - 1, 0))
    if sizes := _match(mask_function, sliding_window_bidirectional_mask_function(ANY)):
        return MaskSpec(n_k, window=(sizes[0], sizes[0]))
    # Releases of transformers join the two functions in either order, and older ones do not remap positions.
    for within_text, same_text in permutations(_match(mask_function, and_masks(ANY, ANY)) or (), 2):
        if documents := _match(same_text, packed_sequence_mask_function(ANY)):
            remapped = None if REMAP is None else _match(within_text, REMAP(ANY, ANY))
            mask_spec = _parse_mask_function(remapped[0] if remapped else within_text, n_k)
            return None if mask_spec is None else replace(mask_spec, documents=documents[0])
    return None


REMAP = getattr(masking_utils, "remap_positions_for_packed_sequence", None)
"""Makes positions start again with each text, for the mask function that it wraps."""


class ANY:
    """A wildcard for a value in the closure of a mask function."""


def _match(value: object, pattern: object) -> list[Any] | None:
    """Return the values in a function's closure, nested ones too, at which the pattern's closure has ANY.

    None if the two differ in their code or in the rest of their closures.
    """
    if pattern is ANY:
        return [value]
    if isinstance(value, FunctionType) and isinstance(pattern, FunctionType) and value.__code__ is pattern.__code__:
        value, pattern = (
            tuple(cell.cell_contents for cell in function.__closure__ or ()) for function in (value, pattern)
        )
    if isinstance(value, tuple) and isinstance(pattern, tuple) and len(value) == len(pattern):
        matches: list[Any] = []
        for pair in zip(value, pattern, strict=True):
            if (inner_matches := _match(*pair)) is None:
                return None
            matches += inner_matches
        return matches
    return [] if value is pattern else None
