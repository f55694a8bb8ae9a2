"""``check_position`` tests the laws that every position method must keep, for authors of new methods.

Call ``check_position(MyMethod)`` in a test; it needs only torch.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional

from .kernels import Positions, PositionsLike, Term, attention
from .positions import Position, PositionRangeError, Site, build_position, check_name
from .positions.base import OffsetFunction

__all__ = ["check_position"]

WIDTH, HEADS, LAYERS, MAX_LENGTH = 16, 2, 4, 24
"""The sizes of the small model that a method is built for; no other axis before a parameter's layers has as many."""

_SIZES = {"hidden_size": WIDTH, "num_heads": HEADS, "num_layers": LAYERS, "max_length": MAX_LENGTH}
_BFLOAT16_ERROR = 0.06


def check_position(
    method: type[Position] | str,
    *,
    draw: Callable[[Position], None] | None = None,
    compiles: bool = False,
    **options: Any,
) -> None:
    """Check that a position method keeps the laws that attention, models and commands rely on.

    The method is built for a model of 4 layers of width 16 with 2 heads and ``max_length`` 24, and run by itself and in
    a layer of attention: with affine, strided, explicit and packed positions, at different lengths, in bfloat16 and
    beyond its range. The caller's random state is restored.

    Args:
        method: the class, registered or not, or a registered name such as "tisa" or "learned+tisa".
        draw: sets the parameters to the values to check with; by default numbers between 0.3 and 1 with random signs,
            so that none is special.
        compiles: also check that ``torch.compile`` takes the method as one graph, which takes some seconds.
        options: the method's own options, and sizes of :func:`whereformer.build_position`.

    Raises:
        AssertionError: for the first broken law, in one line: the method, the law and what is wrong.
        InputError: for a name that is not registered.
    """
    if isinstance(method, str):
        check_name(method, {**_SIZES, **options}["num_layers"])
    name = method if isinstance(method, str) else method.__name__
    laws = [*LAWS, *([_compiles] if compiles else [])]
    with torch.random.fork_rng(devices=[]):
        for law in laws:
            torch.manual_seed(0)
            title = (inspect.getdoc(law) or "").partition("\n")[0].rstrip(".")
            try:
                law(_Case(method, {**_SIZES, **options}, draw or spread))
            except AssertionError as error:
                raise AssertionError(f"{name} breaks the law {title!r}: {error}") from error
            except Exception as error:
                said = " ".join(str(error).split())
                raise AssertionError(f"{name} breaks the law {title!r}: {type(error).__name__}: {said}") from error


def spread(position: Position) -> None:
    """Draw every parameter far from its initial value, between 0.3 and 1 with a random sign, so that it matters."""
    for parameter in position.parameters():
        sign = torch.randint(2, parameter.shape) * 2 - 1
        torch.nn.init.uniform_(parameter, 0.3, 1.0).data.mul_(sign)


_OF_SITE = {field.name for field in fields(Site)}

_PROJECTIONS = torch.randn(3, WIDTH, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 4


def attend(
    position: Position,
    words: Tensor,
    query_positions: PositionsLike | None = None,
    key_positions: PositionsLike | None = None,
    *,
    rows: slice = slice(None),
    layer: int = 0,
    **options: Any,
) -> Tensor:
    """Run one attention layer around a method, with fixed projections.

    Args:
        position: the method, built for ``WIDTH`` and ``HEADS``.
        words: embeddings (batch, n, WIDTH).
        query_positions: the queries' positions; by default the keys'.
        key_positions: the keys' positions; 0 to n - 1 by default.
        rows: the words that are queries.
        layer: the number of the layer.
        options: of :func:`whereformer.attention`.

    Returns:
        (batch, n_q, WIDTH).
    """
    keys_at = Positions(0, 1, words.shape[1]) if key_positions is None else key_positions
    queries_at = keys_at if query_positions is None else query_positions
    words = words * position.embedding_scale
    keys = position.embed(words, keys_at)
    queries = position.embed(words[:, rows], queries_at)
    weights = _PROJECTIONS.to(words.device, words.dtype)
    projected = [
        functional.linear(hidden, weight).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        for hidden, weight in zip((queries, keys, keys), weights, strict=True)
    ]
    query, key, value = projected
    of_site = {name: options.pop(name) for name in _OF_SITE & options.keys()}
    site = position.share(Site(queries_at, keys_at, layer, **of_site))
    out = position.attend(queries, query, key, value, site, **options)
    return out.transpose(1, 2).flatten(2)


class _Case:
    """A method that is being checked."""

    def __init__(
        self,
        method: type[Position] | str,
        options: dict[str, Any],
        draw: Callable[[Position], None],
    ) -> None:
        self.method, self.options, self.draw = method, options, draw

    def build(self, dtype: torch.dtype = torch.float64) -> Position:
        """Build the method with parameters that all matter."""
        position = self.fresh().to(dtype)
        self.draw(position)
        return position

    def fresh(self) -> Position:
        """Build the method with its own initial values."""
        return build_position(self.method, **self.options)


def _words(length: int, batch: int = 2, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(batch, length, WIDTH, dtype=dtype)


def _heads(length: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Query, key and value, (3, 2, HEADS, length, head_dim)."""
    return torch.randn(3, 2, HEADS, length, WIDTH // HEADS, dtype=dtype)


def _tensors(terms: tuple[Term, ...]) -> list[Tensor]:
    return [tensor for term in terms for tensor in vars(term).values() if isinstance(tensor, Tensor)]


def _hooks(position: Position, words: Tensor, heads: Tensor, site: Site) -> list[Tensor]:
    """Return everything that a method's hooks return for a layer."""
    query, key, value = heads
    found = [position.embed(words, site.keys)]
    found += _tensors(position.terms(words, site))
    if position.content:
        found += _tensors(position.content_terms(query, key, site))
        found += position.rotate(query, key, value, site)
    return found


def _demand(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)


def _demand_close(actual: Tensor, expected: Tensor, what: str, tolerance: float = 1e-9) -> None:
    _demand(actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    if expected.numel():
        error = (actual.double() - expected.double()).abs().max().item()
        allowed = tolerance * max(1.0, expected.double().abs().max().item())
        _demand(error <= allowed, f"{what}: differs by {error:.3g}")


def _demand_finite(tensor: Tensor, what: str) -> None:
    _demand(bool(tensor.isfinite().all()), f"{what}: infinite or not a number")


def _keeps_shapes(case: _Case) -> None:
    """Hooks return what they should, in the shape and dtype of their input."""
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        position, words, heads = case.build(dtype), _words(7, dtype=dtype), _heads(7, dtype)
        at, query_at = Positions(0, 1, 7), Positions(4, 1, 3)
        hidden = position.embed(words, at)
        _demand(
            hidden.shape == words.shape and hidden.dtype == dtype,
            f"embed returned {tuple(hidden.shape)} in {hidden.dtype}, expected {tuple(words.shape)} in {dtype}",
        )
        query, key, value = heads[0][:, :, -3:], heads[1], heads[2]
        site = position.share(Site(query_at, at, 1))
        terms = {"terms": position.terms(hidden[:, -3:], site)}
        if position.content:
            terms["content_terms"] = position.content_terms(query, key, site)
            rotated = position.rotate(query, key, value, site)
            for name, old, new in zip(("query", "key", "value"), (query, key, value), rotated, strict=True):
                _demand(
                    new.shape == old.shape and new.dtype == dtype,
                    f"rotate returned a {name} of {tuple(new.shape)} in {new.dtype}, "
                    f"expected {tuple(old.shape)} in {dtype}",
                )
        for name, found in terms.items():
            _demand(isinstance(found, tuple), f"{name} returned a {type(found).__name__}, expected a tuple of terms")
            for term in found:
                _demand(isinstance(term, Term), f"{name} returned a {type(term).__name__} among its terms")
                term.check(2, HEADS, 3, 7, WIDTH // HEADS)
        _demand_finite(attend(position, words), f"attention in {dtype}")


def _leaves_its_input(case: _Case) -> None:
    """Hooks leave their input as it is."""
    position, words, heads, at = case.build(), _words(7), _heads(7), Positions(0, 1, 7)
    before = words.clone(), heads.clone()
    _hooks(position, words, heads, position.share(Site(at, at, 1)))
    _demand(torch.equal(words, before[0]), "a hook changed the hidden states in place")
    _demand(torch.equal(heads, before[1]), "a hook changed query, key or value in place")


def _needs_nothing_shared(case: _Case) -> None:
    """What layers share may be left out."""
    position, words, heads, at = case.build().eval(), _words(7), _heads(7), Positions(0, 1, 7)
    for layer in (0, LAYERS - 1):
        alone = _hooks(position, words, heads, Site(at, at, layer))
        for prepared in (None, position.prepare()):
            site = Site(at, at, layer)
            given = _hooks(position, words, heads, replace(site, shared=position.prepare_for(site, prepared)))
            for ours, theirs in zip(given, alone, strict=True):
                _demand_close(ours, theirs, f"layer {layer} with site.shared and without")


def _repeats_itself(case: _Case) -> None:
    """Evaluation is repeatable, and so is building."""
    position, words = case.build().eval(), _words(7)
    _demand(torch.equal(attend(position, words), attend(position, words)), "two runs in evaluation mode differ")
    states = []
    for _ in range(2):
        torch.manual_seed(5)
        states.append(case.fresh().state_dict())
    for name, tensor in states[0].items():
        _demand(torch.equal(tensor, states[1][name]), f"{name} differs after the same seed")


def _trains(case: _Case) -> None:
    """Every parameter has a finite gradient, and so do the hidden states."""
    position, at = case.build(), Positions(0, 1, 8)
    words, heads = _words(8).requires_grad_(), _heads(8)
    total = torch.zeros((), dtype=torch.float64)
    for layer in range(LAYERS):
        site = position.share(Site(at, at, layer))
        for tensor in _hooks(position, words, heads, site):
            total = total + (tensor * torch.randn(tensor.shape, dtype=torch.float64)).sum()
    named = {name: parameter for name, parameter in position.named_parameters() if parameter.numel()}
    found = torch.autograd.grad(total, list(named.values()), allow_unused=True) if named else ()
    for name, gradient in zip(named, found, strict=True):
        _demand(gradient is not None and bool((gradient != 0).any()), f"{name} has no gradient in any layer")
    out = sum(attend(position, words, layer=layer).square().sum() for layer in range(LAYERS))
    assert isinstance(out, Tensor)
    gradients = torch.autograd.grad(out, [words, *named.values()], allow_unused=True)
    for name, gradient in zip(("the hidden states", *named), gradients, strict=True):
        _demand(gradient is not None, f"{name}: no gradient through attention")
        assert gradient is not None
        _demand_finite(gradient, f"gradient of {name}")
    _demand(bool((gradients[0] != 0).any(-1).all()), "some hidden states have no gradient")


def _is_saved(case: _Case) -> None:
    """A state dict holds everything that is trained."""
    words, saved, loaded = _words(8), case.build().eval(), case.build().eval()
    loaded.load_state_dict(saved.state_dict())
    _demand_close(attend(loaded, words), attend(saved, words), "loaded from the other's state dict", 0.0)
    missing = {name for name, _ in saved.named_parameters()} - saved.state_dict().keys()
    _demand(not missing, f"the state dict lacks {', '.join(sorted(missing))}")


def _resets(case: _Case) -> None:
    """reset_parameters draws every parameter."""
    position = case.build()
    for parameter in position.parameters():
        torch.nn.init.constant_(parameter, math.nan)
    for module in position.modules():
        if isinstance(module, Position):
            module.reset_parameters()
    for name, parameter in position.named_parameters():
        _demand_finite(parameter, f"{name} after reset_parameters")
    _demand_finite(attend(position, _words(8)), "attention after reset_parameters")


def _keeps_loaded_weights(case: _Case) -> None:
    """reset_parameters sets values only by functions of torch.nn.init, which loaders switch off."""
    position = case.build()
    before = {name: parameter.detach().clone() for name, parameter in position.named_parameters()}
    off: dict[str, Any] = {name: lambda tensor, *_, **__: tensor for name in dir(torch.nn.init) if name.endswith("_")}
    with patch.multiple(torch.nn.init, **off):
        for module in position.modules():
            if isinstance(module, Position):
                module.reset_parameters()
    for name, parameter in position.named_parameters():
        told = f"{name} changes without them, so from_pretrained would lose its trained values"
        _demand(torch.equal(parameter, before[name]), told)


def _takes_offsets_of_any_shape(case: _Case) -> None:
    """The curve of an OffsetFunction takes offsets of any shape: explicit positions have a matrix of them."""
    position = case.build()
    if isinstance(position, OffsetFunction):
        shape = position.curve(torch.arange(-3, 3).view(2, 3)).shape
        _demand(shape == (HEADS, 2, 3), f"curve of (2, 3) offsets: shape {tuple(shape)}, expected {(HEADS, 2, 3)}")


def _takes_part_of_the_queries(case: _Case) -> None:
    """Queries may be any evenly spaced part of the sequence."""
    position, words = case.build().eval(), _words(9)
    whole = attend(position, words, layer=1)
    for start, stride in ((6, 1), (8, 1), (0, 1), (1, 3), (0, 2), (3, 5)):
        rows = slice(start, None, stride)
        at = Positions(start, stride, len(range(9)[rows]))
        found = attend(position, words, at, rows=rows, layer=1)
        _demand_close(found, whole[:, rows], f"queries at {start}, {start + stride}, ... of 9 tokens")


def _takes_explicit_positions(case: _Case) -> None:
    """Explicit positions are the same as affine ones, also by row of a batch and in packed documents."""
    position = case.build().eval()
    for at in (Positions(0, 1, 9), Positions(5, 1, 9), Positions(3, 2, 9)):
        words, ids = _words(9), at.values()
        expected = attend(position, words, at, at)
        for explicit in (ids, ids.unsqueeze(0), ids.expand(2, -1), ids.int()):
            found = attend(position, words, explicit, explicit)
            _demand_close(found, expected, f"explicit positions {tuple(explicit.shape)} in place of {at}")
        _demand_close(attend(position, words, at, ids), expected, f"explicit keys in place of {at}")
    places = [Positions(0, 1, 9), Positions(6, 1, 9), Positions(1, 2, 9)]
    words, rows = _words(9, batch=3), torch.stack([place.values() for place in places])
    together = attend(position, words, rows, rows)
    for row, place in enumerate(places):
        alone = attend(position, words[row : row + 1], place, place)
        _demand_close(together[row : row + 1], alone, f"a row of a batch at {place}")
    lengths = [4, 1, 5]
    words, ids = _words(10), torch.cat([torch.arange(length) for length in lengths])
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).expand(2, -1)
    packed = attend(position, words, ids, ids, query_documents=documents, key_documents=documents)
    parts = [attend(position, document) for document in words.split(lengths, 1)]
    _demand_close(packed, torch.cat(parts, 1), "documents packed into one row")


def _takes_any_length(case: _Case) -> None:
    """Sequences may be short, batches and queries may be empty."""
    position = case.build()
    for length in (1, 2):
        words = _words(length).requires_grad_()
        out = attend(position, words)
        out.square().sum().backward()
        _demand_finite(out, f"attention among {length} tokens")
        for name, tensor in (("the hidden states", words), *position.named_parameters()):
            if tensor.grad is not None:
                _demand_finite(tensor.grad, f"gradient of {name} among {length} tokens")
    found = attend(position, _words(5, batch=0)).shape
    _demand(found == (0, 5, WIDTH), f"an empty batch gave shape {tuple(found)}")
    found = attend(position, _words(5), Positions(5, 1, 0), rows=slice(5, None)).shape
    _demand(found == (2, 0, WIDTH), f"no queries gave shape {tuple(found)}")


def _knows_its_range(case: _Case) -> None:
    """Positions out of range are an error of type PositionRangeError, and all others give numbers."""
    position = case.build().eval()
    beyond, before = Positions(0, 1, 2 * MAX_LENGTH), Positions(-2, 1, 6)
    for what, at in (("beyond max_length", beyond), ("below 0", before)):
        words = _words(at.length)
        for places in (at, at.values(), at.values().expand(2, -1)):
            try:
                out = attend(position, words, places, places)
            except PositionRangeError:
                _demand(
                    at is before or not position.extrapolates or isinstance(places, Tensor),
                    "the method extrapolates, but positions beyond max_length raised a PositionRangeError",
                )
                continue
            except Exception as error:
                said = f"{type(error).__name__}: {' '.join(str(error).split())}"
                raise AssertionError(f"positions {what} raised {said}; raise a PositionRangeError") from error
            _demand_finite(out, f"attention at positions {what}")
            if at is beyond:
                last = Positions(at.last, 1, 1)
                end = attend(position, words, last, at, rows=slice(at.last, None))
                _demand_close(end, out[:, -1:], f"the last query alone, {what}")


def _takes_or_refuses_fractions(case: _Case) -> None:
    """Fractional positions give numbers, or an error of type TypeError."""
    position, words = case.build().eval(), _words(5)
    fractions = torch.tensor([0.0, 0.5, 1.75, 4.0, 4.25])
    try:
        out = attend(position, words, fractions, fractions)
    except TypeError as error:
        if position.fractional:
            raise AssertionError(f"the method takes fractional positions, but raised {error}") from error
        return
    _demand_finite(out, "attention at fractional positions")
    whole = torch.arange(5.0)
    _demand_close(attend(position, words, whole, whole), attend(position, words), "whole positions as float32")


def _is_shift_invariant(case: _Case) -> None:
    """The same number added to all positions changes nothing, where shift_invariant claims it."""
    position, words = case.build().eval(), _words(9)
    if not position.shift_invariant:
        return
    # Position 0 may be [CLS]'s.
    expected = attend(position, words, Positions(1, 1, 9), Positions(1, 1, 9), layer=1)
    for start in (3, 11):
        at = Positions(start, 1, 9)
        _demand_close(attend(position, words, at, at, layer=1), expected, f"positions from {start} instead of 1")


def _has_the_curve_that_it_adds(case: _Case) -> None:
    """A curve is what the method adds to scores."""
    position = case.build().eval()
    for layer in (0, 2):
        curve = position.curve(range(-5, 8), layer=layer)
        if curve is None:
            return
        _demand(curve.shape == (HEADS, 13), f"curve of 13 offsets: shape {tuple(curve.shape)}, expected {(HEADS, 13)}")
        some = position.curve([-5, 3], layer=layer)
        assert some is not None
        _demand_close(some, curve[:, [0, 8]], "curve at two of the offsets")
    if type(position).terms is not OffsetFunction.terms:
        return
    # Scores read off values that name their keys.
    at = Positions(4, 1, 9)
    offsets = at.values() - at.values().unsqueeze(-1)
    for places in (at, at.values()):
        (term,) = position.terms(_words(9), Site(places, places, 2))
        curve = position.curve(offsets.flatten(), layer=2)
        assert curve is not None
        weights = attention(None, None, torch.eye(9).double().expand(1, HEADS, -1, -1), (term,))
        _demand_close(weights[0], curve.unflatten(-1, (9, 9)).softmax(-1), "weights of the terms and of the curve")


def _is_exact_in_bfloat16(case: _Case) -> None:
    """bfloat16 rounds the output, never the positions."""
    position, words = case.build(torch.bfloat16).eval(), _words(8, dtype=torch.bfloat16)
    out = attend(position, words)
    exact = attend(position.double(), words.double())
    _demand_close(out, exact, "attention in bfloat16", _BFLOAT16_ERROR)
    # There bfloat16 has every fourth whole number.
    at = Positions(513, 1, 50)
    position, words, heads = case.build(torch.bfloat16).eval(), _words(50).bfloat16(), _heads(50).bfloat16()
    try:
        found = _hooks(position, words, heads, Site(at, at, 1))
    except PositionRangeError:
        return
    position = position.double()
    exact_found = _hooks(position, words.double(), heads.double(), Site(at, at, 1))
    for ours, theirs in zip(found, exact_found, strict=True):
        # A table may end where the precision does, and numbers that overflow can't be compared.
        if ours.shape == theirs.shape and theirs.isfinite().all():
            _demand_close(ours, theirs, f"positions from {at.start} in bfloat16", 20 * torch.finfo(torch.bfloat16).eps)


def _has_shapes_without_data(case: _Case) -> None:
    """On the meta device the method computes shapes, as counting its cost does."""
    position = case.build().to("meta")
    shape = attend(position, _words(5).to("meta")).shape
    _demand(shape == (2, 5, WIDTH), f"attention of (2, 5, {WIDTH}) gave shape {tuple(shape)}")


def _compiles(case: _Case) -> None:
    """torch.compile takes the method as one graph."""
    position, words = case.build().eval(), _words(6)

    def forward(words: Tensor) -> Tensor:
        return attend(position, words, layer=1)

    torch.compiler.reset()
    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    _demand_close(compiled(words), forward(words), "the compiled output")


LAWS: tuple[Callable[[_Case], None], ...] = (
    _keeps_shapes,
    _leaves_its_input,
    _needs_nothing_shared,
    _repeats_itself,
    _trains,
    _resets,
    _keeps_loaded_weights,
    _takes_offsets_of_any_shape,
    _is_saved,
    _takes_part_of_the_queries,
    _takes_explicit_positions,
    _takes_any_length,
    _knows_its_range,
    _takes_or_refuses_fractions,
    _is_shift_invariant,
    _has_the_curve_that_it_adds,
    _is_exact_in_bfloat16,
    _has_shapes_without_data,
)
"""What :func:`check_position` checks, in its order; the first line of each one's documentation is the law."""
