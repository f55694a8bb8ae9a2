"""``check_position`` tests the laws that every position method must keep, for authors of new methods.

Call ``check_position(MyMethod)`` in a test; it needs only torch.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeAlias
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from ..kernels import Positions, PositionsLike, Term, attention
from ..kernels.call import check_term
from . import PositionMethod, PositionRangeError, Site, build_position, check_name
from .base import OffsetFunction

__all__ = ["check_position"]

WIDTH, HEADS, LAYERS, MAX_LENGTH = 16, 2, 4, 24
"""The sizes of the small model that a method is built for; no other axis before a parameter's layers has as many."""

_SIZES = {"hidden_size": WIDTH, "num_heads": HEADS, "num_layers": LAYERS, "max_length": MAX_LENGTH}
_BFLOAT16_ERROR = 0.06
_FAR_OFFSETS = (-1001, -517, -259, 0, 1, 259, 517, 1001)
"""Offsets of which bfloat16 rounds the far ones."""

_Build: TypeAlias = Callable[..., PositionMethod]
"""What builds the method, with parameters that all matter, in float64 or the dtype that it gets."""


def check_position(method: type[PositionMethod] | str, *, compiles: bool = False, **options: Any) -> None:
    """Check that a position method keeps the laws that attention, models and commands rely on.

    The method is built for a model of 4 layers of width 16 with 2 heads and ``max_length`` 24, and run by itself and in
    a layer of attention: with affine, strided, explicit and packed positions, at different lengths, in bfloat16 and
    beyond its range. Its parameters are numbers between 0.3 and 1 with random signs, so that none is special. The
    caller's random state is restored.

    Args:
        method: the class, registered or not, or a registered name such as "tisa" or "learned+tisa".
        compiles: also check that ``torch.compile`` takes the method as one graph, which takes some seconds.
        options: the method's own options, and sizes of :func:`whereformer.build_position`.

    Raises:
        AssertionError: for the first broken law, in one line: the method, the law and what is wrong.
        InputError: for a name that is not registered.
    """
    sizes = {**_SIZES, **options}
    if isinstance(method, str):
        check_name(method)
    name = method if isinstance(method, str) else method.__name__

    def build(dtype: torch.dtype = torch.float64) -> PositionMethod:
        position = build_position(method, **sizes).to(dtype)
        spread(position)
        return position

    with torch.random.fork_rng(devices=[]):
        for law in (*LAWS, *([_compiles] if compiles else [])):
            torch.manual_seed(0)
            title = (inspect.getdoc(law) or "").partition("\n")[0].rstrip(".")
            try:
                law(build)
            except Exception as error:
                kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
                said = " ".join(str(error).split())
                raise AssertionError(f"{name} breaks the law {title!r}: {kind}{said}") from error


def spread(position: PositionMethod) -> None:
    """Draw every parameter far from its initial value, between 0.3 and 1 with a random sign, so that it matters."""
    for parameter in position.parameters():
        sign = torch.randint(2, parameter.shape) * 2 - 1
        torch.nn.init.uniform_(parameter, 0.3, 1.0).data.mul_(sign)


_OF_SITE = {field.name for field in fields(Site)}

_PROJECTIONS = torch.randn(3, WIDTH, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 4


def attend(
    position: PositionMethod,
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
    site = position.with_shared(Site(queries_at, keys_at, layer, **of_site))
    out = position.attend(queries, query, key, value, site, **options)
    return out.transpose(1, 2).flatten(2)


def _words(length: int, batch: int = 2, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(batch, length, WIDTH, dtype=dtype)


def _heads(length: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Query, key and value, (3, 2, HEADS, length, head_dim)."""
    return torch.randn(3, 2, HEADS, length, WIDTH // HEADS, dtype=dtype)


def _tensors(terms: tuple[Term, ...]) -> list[Tensor]:
    return [tensor for term in terms for tensor in vars(term).values() if isinstance(tensor, Tensor)]


def _hooks(position: PositionMethod, words: Tensor, heads: Tensor, site: Site) -> list[Tensor]:
    """Return everything that a method's hooks return for a layer."""
    query, key, value = heads
    found = [position.embed(words, site.key_positions)]
    found += _tensors(position.terms(words, site))
    if position.uses_query_key:
        found += _tensors(position.content_terms(query, key, site))
        found += position.transform_qkv(query, key, value, site)
    return found


def _demand(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)


def _demand_like(actual: Tensor, expected: Tensor, what: str) -> None:
    """Demand another tensor's shape and dtype."""
    found, wanted = (f"{tuple(tensor.shape)} in {tensor.dtype}" for tensor in (actual, expected))
    _demand(found == wanted, f"{what} {found}, expected {wanted}")


def _demand_close(actual: Tensor, expected: Tensor, what: str, tolerance: float = 1e-9) -> None:
    _demand(actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    if expected.numel():
        error = (actual.double() - expected.double()).abs().max().item()
        allowed = tolerance * max(1.0, expected.double().abs().max().item())
        _demand(error <= allowed, f"{what}: differs by {error:.3g}")


def _demand_finite(tensor: Tensor, what: str) -> None:
    _demand(bool(tensor.isfinite().all()), f"{what}: infinite or not a number")


def _keeps_shapes(build: _Build) -> None:
    """Hooks return what they should, in the shape and dtype of their input, which stays as it is."""
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        position, words, heads = build(dtype), _words(7, dtype=dtype), _heads(7, dtype)
        before = words.clone(), heads.clone()
        site = position.with_shared(Site(Positions(4, 1, 3), Positions(0, 1, 7), 1))
        hidden = position.embed(words, site.key_positions)
        _demand_like(hidden, words, "embed returned")
        given = heads[0][:, :, -3:], heads[1], heads[2]
        terms = {"terms": position.terms(hidden[:, -3:], site)}
        if position.uses_query_key:
            terms["content_terms"] = position.content_terms(*given[:2], site)
            for name, old, new in zip(
                ("query", "key", "value"), given, position.transform_qkv(*given, site), strict=True
            ):
                _demand_like(new, old, f"transform_qkv returned a {name} of")
        for name, found in terms.items():
            _demand(isinstance(found, tuple), f"{name} returned a {type(found).__name__}, expected a tuple of terms")
            for term in found:
                _demand(isinstance(term, Term), f"{name} returned a {type(term).__name__} among its terms")
                check_term(term, 2, HEADS, 3, 7, WIDTH // HEADS, words.device)
        _demand(torch.equal(words, before[0]), "a hook changed the hidden states in place")
        _demand(torch.equal(heads, before[1]), "a hook changed query, key or value in place")
        _demand_finite(attend(position, words), f"attention in {dtype}")


def _needs_nothing_shared(build: _Build) -> None:
    """What layers share may be left out."""
    position, words, heads, at = build().eval(), _words(7), _heads(7), Positions(0, 1, 7)
    for layer in (0, LAYERS - 1):
        site = Site(at, at, layer)
        given, alone = (_hooks(position, words, heads, each) for each in (position.with_shared(site), site))
        for ours, theirs in zip(given, alone, strict=True):
            _demand_close(ours, theirs, f"layer {layer} with site.shared and without")


def _trains(build: _Build) -> None:
    """Every parameter has a finite gradient, and so do the hidden states."""
    position, words = build(), _words(8).requires_grad_()
    named = {"the hidden states": words, **{name: each for name, each in position.named_parameters() if each.numel()}}
    loss = torch.stack([attend(position, words, layer=layer).square().sum() for layer in range(LAYERS)]).sum()
    found = torch.autograd.grad(loss, list(named.values()), materialize_grads=True)
    for name, gradient in zip(named, found, strict=True):
        _demand(bool(gradient.any()), f"{name} has no gradient in any layer")
        _demand_finite(gradient, f"gradient of {name}")
    _demand(bool(found[0].any(-1).all()), "some hidden states have no gradient")


def _is_saved(build: _Build) -> None:
    """A state dict holds everything that is trained, and evaluation is repeatable."""
    words, saved, loaded = _words(8), build().eval(), build().eval()
    loaded.load_state_dict(saved.state_dict())
    _demand_close(attend(loaded, words), attend(saved, words), "loaded from the other's state dict", 0.0)


def _resets(build: _Build) -> None:
    """reset_parameters draws every parameter, only by functions of torch.nn.init, which loaders switch off."""
    position = build()
    before = {name: parameter.detach().clone() for name, parameter in position.named_parameters()}
    methods = [module for module in position.modules() if isinstance(module, PositionMethod)]
    off: dict[str, Any] = {name: lambda tensor, *_, **__: tensor for name in dir(torch.nn.init) if name.endswith("_")}
    with patch.multiple(torch.nn.init, **off):
        for method in methods:
            method.reset_parameters()
    for name, parameter in position.named_parameters():
        told = f"{name} changes without them, so from_pretrained would lose its trained values"
        _demand(torch.equal(parameter, before[name]), told)
        torch.nn.init.constant_(parameter, math.nan)
    drawn = []
    for _ in range(2):
        torch.manual_seed(5)
        for method in methods:
            method.reset_parameters()
        drawn.append([parameter.detach().clone() for parameter in position.parameters()])
    for name, *both in zip(before, *drawn, strict=True):
        _demand_finite(both[0], f"{name} after reset_parameters")
        _demand(torch.equal(*both), f"{name} differs after the same seed")
    _demand_finite(attend(position, _words(8)), "attention after reset_parameters")


def _takes_part_of_the_queries(build: _Build) -> None:
    """Queries may be any evenly spaced part of the sequence."""
    position, words = build().eval(), _words(9)
    whole = attend(position, words, layer=1)
    for start, stride in ((6, 1), (8, 1), (0, 1), (1, 3), (0, 2), (3, 5)):
        rows = slice(start, None, stride)
        at = Positions(start, stride, len(range(9)[rows]))
        found = attend(position, words, at, rows=rows, layer=1)
        _demand_close(found, whole[:, rows], f"queries at {start}, {start + stride}, ... of 9 tokens")


def _takes_explicit_positions(build: _Build) -> None:
    """Explicit positions are the same as affine ones, also by row of a batch and in packed documents."""
    position, words = build().eval(), _words(9, batch=3)
    places = [Positions(0, 1, 9), Positions(6, 1, 9), Positions(1, 2, 9)]
    expected = [attend(position, words, at, at) for at in places]
    for at, alone in zip(places, expected, strict=True):
        ids = at.values()
        for explicit in (ids, ids.unsqueeze(0), ids.expand(3, -1), ids.int()):
            found = attend(position, words, explicit, explicit)
            _demand_close(found, alone, f"explicit positions {tuple(explicit.shape)} in place of {at}")
        _demand_close(attend(position, words, at, ids), alone, f"explicit keys in place of {at}")
    rows = torch.stack([at.values() for at in places])
    each_row = torch.stack([alone[row] for row, alone in enumerate(expected)])
    _demand_close(attend(position, words, rows, rows), each_row, "rows of a batch in different places")
    lengths = [3, 1, 5]
    ids = torch.cat([torch.arange(length) for length in lengths])
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).expand(3, -1)
    packed = attend(position, words, ids, ids, query_documents=documents, key_documents=documents)
    parts = [attend(position, document) for document in words.split(lengths, 1)]
    _demand_close(packed, torch.cat(parts, 1), "documents packed into one row")


def _ignores_padding(build: _Build) -> None:
    """Padding changes nothing and has no gradient, on the right or, where positions say so, on the left."""
    position, words = build().eval(), _words(5)
    expected = attend(position, words)
    at = torch.arange(-3, 9)
    padded = torch.cat((100 * _words(3), words, 100 * _words(4)), 1).requires_grad_()
    mask, ids = ((at >= 0) & (at < 5)).expand(2, -1), at.clamp(min=0).expand(2, -1)
    on_the_right = attend(position, padded[:, 3:], key_mask=mask[:, 3:])[:, :5]
    _demand_close(on_the_right, expected, "with padding on the right")
    found = attend(position, padded, ids, ids, key_mask=mask)[:, 3:8]
    _demand_close(found, expected, "with padding on both sides")
    (gradient,) = torch.autograd.grad((found + on_the_right).square().sum(), padded)
    _demand(not gradient[~mask].any(), "padding has a gradient")


def _takes_any_length(build: _Build) -> None:
    """Sequences may be short, batches and queries may be empty."""
    position = build()
    for length in (1, 2):
        words = _words(length).requires_grad_()
        out = attend(position, words)
        named = {"the hidden states": words, **dict(position.named_parameters())}
        gradients = torch.autograd.grad(out.square().sum(), list(named.values()), materialize_grads=True)
        for name, tensor in zip(("attention", *named), (out, *gradients), strict=True):
            _demand_finite(tensor, f"{name} or its gradient among {length} tokens")
    nothing = attend(position, _words(5), Positions(5, 1, 0), rows=slice(5, None))
    for found, expected in ((attend(position, _words(5, batch=0)), _words(5, batch=0)), (nothing, _words(0))):
        _demand_like(found, expected, "an empty batch, or no queries, gave")


def _knows_its_range(build: _Build) -> None:
    """Positions out of range are an error of type PositionRangeError, and all others give numbers."""
    position = build().eval()
    beyond, before = Positions(0, 1, 2 * MAX_LENGTH), Positions(-2, 1, 6)
    for at in (beyond, before):
        for places in (at, at.values(), at.values().expand(2, -1)):
            try:
                _demand_finite(attend(position, _words(at.length), places, places), f"attention at {at}")
            except PositionRangeError:
                _demand(
                    places is not beyond or not position.extrapolates,
                    "the method extrapolates, but positions beyond max_length raised a PositionRangeError",
                )


def _takes_or_refuses_fractions(build: _Build) -> None:
    """Fractional positions give numbers, or an error of type TypeError."""
    position, words = build().eval(), _words(5)
    fractions, whole = torch.tensor([0.0, 0.5, 1.75, 4.0, 4.25]), torch.arange(5.0)
    try:
        for layer in range(LAYERS):
            _demand_finite(attend(position, words, fractions, fractions, layer=layer), "attention at such positions")
    except TypeError as error:
        _demand(not position.accepts_fractional, f"the method takes fractional positions, but raised {error}")
        return
    _demand(position.accepts_fractional, "the method takes no fractional positions, but did not refuse them")
    _demand_close(attend(position, words, whole, whole), attend(position, words), "whole positions as float32")


def _is_shift_invariant(build: _Build) -> None:
    """The same number added to all positions changes nothing, where shift_invariant claims it."""
    position, words = build().eval(), _words(9)
    for stride in (1, 3) if position.shift_invariant else ():
        # Position 0 may be that of [CLS].
        at = Positions(0, stride, 9)
        expected = attend(position, words, at, at, layer=1)
        for start in (-2, 3, 400):
            moved = Positions(start, stride, 9)
            for places in (moved, moved.values()):
                found = attend(position, words, places, places, layer=1)
                _demand_close(found, expected, f"positions from {start} instead of 0")


def _says_whether_it_acts_on_content(build: _Build) -> None:
    """Query and key may be left out, unless needs_query_key says that the method acts on them."""
    position, words, (query, key, value), at = build().eval(), _words(7), _heads(7), Positions(0, 1, 7)
    if position.needs_query_key or not position.uses_query_key:
        return
    words = position.embed(words, at)
    for layer in range(LAYERS):
        site = Site(at, at, layer)
        found, expected = position.transform_qkv(query, key, value, site), (query, key)
        for name, ours, theirs in zip(("query", "key"), found, expected, strict=False):
            _demand(torch.equal(ours, theirs), f"transform_qkv changes the {name}")
        _demand(position.content_terms(query, key, site) == (), "content_terms returned terms")
        nothing = torch.zeros_like(query)
        expected_out = position.attend(words, nothing, nothing, value, site)
        _demand_close(position.attend(words, None, None, value, site), expected_out, "attention without query and key")


def _has_the_curve_that_it_adds(build: _Build) -> None:
    """A curve is what the method adds to scores, for offsets of any shape."""
    position = build().eval()
    at = Positions(4, 1, 9)
    offsets = at.values() - at.values().unsqueeze(-1)
    curve = position.curve(offsets, layer=2)
    if curve is None:
        return
    expected = (HEADS, 9, 9)
    _demand(curve.shape == expected, f"curve of (9, 9) offsets: shape {tuple(curve.shape)}, expected {expected}")
    row = position.curve([0, 3], layer=2)
    assert row is not None
    _demand_close(row, curve[:, 0, [0, 3]], "curve at two of the offsets")
    if type(position).terms is not OffsetFunction.terms:
        return
    # Scores read off values that name their keys.
    for places in (at, at.values()):
        terms = position.terms(_words(9), Site(places, places, 2))
        weights = attention(None, None, torch.eye(9).double().expand(1, HEADS, -1, -1), terms)
        _demand_close(weights[0], curve.softmax(-1), "weights of the terms and of the curve")


class _Widening(TorchDispatchMode):
    """Computes in float64 what asks for float32 by name; torch's default type is up to the caller."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wide = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
        return function(*args, **wide)


def _is_exact_in_float64(build: _Build) -> None:
    """In float64, curves, terms and features have the precision of float64."""
    position, words, heads, at = build().eval(), _words(9), _heads(9), Positions(4, 1, 9)

    def compute() -> list[Tensor]:
        results = [
            each for places in (at, at.values()) for each in _hooks(position, words, heads, Site(places, places, 1))
        ]
        curve = position.curve(_FAR_OFFSETS, layer=1)
        return results if curve is None else [*results, curve]

    results, default = compute(), torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Widening():  # type: ignore[no-untyped-call]
            exact = compute()
    finally:
        torch.set_default_dtype(default)
    for ours, theirs in zip(results, exact, strict=True):
        _demand_close(ours, theirs, "a tensor, beside the same with all operations in float64,", 1e-13)


def _is_exact_in_bfloat16(build: _Build) -> None:
    """bfloat16 rounds the output, never the positions."""
    position, words, heads = build(torch.bfloat16).eval(), _words(50).bfloat16(), _heads(50).bfloat16()
    out, near, far = attend(position, words[:, :8]), Positions(513, 1, 50), Positions(1001, 1, 50)
    # From 512 on, bfloat16 has every fourth whole number.
    sites = {"positions from 513": Site(near, near, 1), "offsets near 1001": Site(far, Positions(0, 1, 50), 1)}
    results = {}
    for name, site in sites.items():
        try:
            results[name] = _hooks(position, words, heads, site)
        except PositionRangeError:
            continue
    curve = position.curve(_FAR_OFFSETS, layer=1)
    position, words, heads = position.double(), words.double(), heads.double()
    _demand_close(out, attend(position, words[:, :8]), "attention in bfloat16", _BFLOAT16_ERROR)
    for name, tensors in results.items():
        for ours, theirs in zip(tensors, _hooks(position, words, heads, sites[name]), strict=True):
            # A table may end where the precision does, and numbers that overflow can't be compared.
            if ours.shape == theirs.shape and theirs.isfinite().all():
                _demand_close(ours, theirs, f"{name} in bfloat16", 20 * torch.finfo(torch.bfloat16).eps)
    if curve is not None:
        exact = position.curve(_FAR_OFFSETS, layer=1)
        assert exact is not None
        _demand_close(curve, exact, "the curve of parameters in bfloat16, which is at least float32,", 1e-5)


def _has_shapes_without_data(build: _Build) -> None:
    """On the meta device the method computes shapes, as counting its cost does."""
    position = build().to("meta")
    shape = attend(position, _words(5).to("meta")).shape
    _demand(shape == (2, 5, WIDTH), f"attention of (2, 5, {WIDTH}) gave shape {tuple(shape)}")


def _compiles(build: _Build) -> None:
    """torch.compile takes the method as one graph, with its gradients."""
    position, words = build(), _words(6).requires_grad_()

    def forward(words: Tensor) -> Tensor:
        return attend(position, words, layer=1)

    torch.compiler.reset()
    results = []
    for function in (forward, torch.compile(forward, fullgraph=True, backend="aot_eager")):
        out, leaves = function(words), [words, *position.parameters()]
        # Not a plain sum: its gradient would be a constant that hides mistakes.
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
        results.append([out, *torch.autograd.grad((out * weights).sum(), leaves, materialize_grads=True)])
    for expected, found in zip(*results, strict=True):
        _demand_close(found, expected, "compiled outputs or gradients")


LAWS: tuple[Callable[[_Build], None], ...] = (
    _keeps_shapes,
    _needs_nothing_shared,
    _trains,
    _resets,
    _is_saved,
    _takes_part_of_the_queries,
    _takes_explicit_positions,
    _ignores_padding,
    _takes_any_length,
    _knows_its_range,
    _takes_or_refuses_fractions,
    _is_shift_invariant,
    _says_whether_it_acts_on_content,
    _has_the_curve_that_it_adds,
    _is_exact_in_float64,
    _is_exact_in_bfloat16,
    _has_shapes_without_data,
)
"""What :func:`check_position` checks, in its order; the first line of each one's documentation is the law."""
