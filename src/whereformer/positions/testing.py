"""``check_position``: tests the laws that every position method must keep, for authors of new methods.

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

from ..kernels import Positions, PositionsLike, Term, attention
from ..kernels.make_call import check_term
from ..kernels.torch_private import TorchDispatchMode
from . import PositionMethod, PositionRangeError, Site, build_position, check_name
from .base import OffsetFunction

__all__ = ["check_position"]

WIDTH, HEADS, LAYERS, MAX_LENGTH = 16, 2, 4, 24
"""The sizes of the small model that a method is built for."""

_SIZES = {"hidden_size": WIDTH, "num_heads": HEADS, "num_layers": LAYERS, "max_length": MAX_LENGTH}
_BFLOAT16_ERROR = 0.06
_FAR_OFFSETS = (-1001, -517, -259, 0, 1, 259, 517, 1001)
"""Near offsets, and far ones that bfloat16 would round."""

_Build: TypeAlias = Callable[..., PositionMethod]
"""A function that builds the method in float64, or in the dtype that it gets, with :func:`randomize_parameters`."""


def check_position(method: type[PositionMethod] | str, *, compiles: bool = False, **options: Any) -> None:
    """Check that a position method keeps the laws that attention, models and commands rely on.

    The method is built for a model of 4 layers of width 16 with 2 heads and ``max_length`` 24. It runs by itself and in
    a layer of attention, with affine, strided, explicit and packed positions, at different lengths, in bfloat16 and
    beyond its range. Its parameters are numbers between 0.3 and 1 with random signs, so that none is special. The
    caller's random state is restored.

    Args:
        method: the class, registered or not, or a registered name such as "tisa" or "learned+tisa".
        compiles: also check that ``torch.compile`` compiles the method as one graph, which needs several seconds.
        options: the method's options, and sizes of :func:`whereformer.build_position`.

    Raises:
        AssertionError: for the first broken law, in one line: the method, the law and the difference.
        InputError: for a name that is not registered.
    """
    sizes = {**_SIZES, **options}
    if isinstance(method, str):
        check_name(method)
    name = method if isinstance(method, str) else method.__name__

    def build(dtype: torch.dtype = torch.float64) -> PositionMethod:
        position = build_position(method, **sizes).to(dtype)
        randomize_parameters(position)
        return position

    with torch.random.fork_rng(devices=[]):
        for law in (*LAWS, *([_compiles] if compiles else [])):
            torch.manual_seed(0)
            title = (inspect.getdoc(law) or "").partition("\n")[0].rstrip(".")
            try:
                law(build)
            except Exception as error:
                kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
                message = " ".join(str(error).split())
                raise AssertionError(f"{name} breaks the law {title!r}: {kind}{message}") from error


def randomize_parameters(position: PositionMethod) -> None:
    """Draw every parameter between 0.3 and 1 with a random sign, so that all of them change the results."""
    for parameter in position.parameters():
        sign = torch.randint(2, parameter.shape) * 2 - 1
        torch.nn.init.uniform_(parameter, 0.3, 1.0).data.mul_(sign)


_SITE_FIELDS = {field.name for field in fields(Site)}

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
    """Run one attention layer with a method and fixed projections.

    Args:
        position: the method, built for ``WIDTH`` and ``HEADS``.
        words: embeddings (batch, n, WIDTH).
        query_positions: the positions of the queries; by default the positions of the keys.
        key_positions: the positions of the keys; 0 to n - 1 by default.
        rows: the indices of the words that are queries; the result is (batch, n_q, WIDTH).
        layer: the index of the layer.
        options: fields of the site and arguments of :func:`whereformer.attention`.
    """
    if key_positions is None:
        key_positions = Positions(0, 1, words.shape[1])
    if query_positions is None:
        query_positions = key_positions
    words = words * position.embedding_scale
    keys = position.embed(words, key_positions)
    queries = position.embed(words[:, rows], query_positions)
    weights = _PROJECTIONS.to(words.device, words.dtype)
    query, key, value = (
        functional.linear(hidden, weight).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        for hidden, weight in zip((queries, keys, keys), weights, strict=True)
    )
    site_fields = {name: options.pop(name) for name in _SITE_FIELDS & options.keys()}
    site = position.with_shared(Site(query_positions, key_positions, layer, **site_fields))
    out = position.attend(queries, query, key, value, site, **options)
    return out.transpose(1, 2).flatten(2)


def _words(length: int, batch: int = 2, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(batch, length, WIDTH, dtype=dtype)


def _heads(length: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return a random query, key and value, (3, 2, HEADS, length, head_dim)."""
    return torch.randn(3, 2, HEADS, length, WIDTH // HEADS, dtype=dtype)


def _tensors(terms: tuple[Term, ...]) -> list[Tensor]:
    return [tensor for term in terms for tensor in vars(term).values() if isinstance(tensor, Tensor)]


def _hooks(position: PositionMethod, words: Tensor, heads: Tensor, site: Site) -> list[Tensor]:
    """Return all tensors that a method's hooks return for a layer."""
    query, key, value = heads
    results = [position.embed(words, site.key_positions)]
    results += _tensors(position.terms(words, site))
    if position.uses_query_key:
        results += _tensors(position.content_terms(query, key, site))
        results += position.transform_qkv(query, key, value, site)
    return results


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def _require_like(actual: Tensor, expected: Tensor, what: str) -> None:
    """Require that a tensor has the shape and dtype of another one."""
    actual_kind, expected_kind = (f"{tuple(tensor.shape)} in {tensor.dtype}" for tensor in (actual, expected))
    _require(actual_kind == expected_kind, f"{what} {actual_kind}, expected {expected_kind}")


def _require_close(actual: Tensor, expected: Tensor, what: str, tolerance: float = 1e-9) -> None:
    _require(actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    if expected.numel():
        error = (actual.double() - expected.double()).abs().max().item()
        allowed = tolerance * max(1.0, expected.double().abs().max().item())
        _require(error <= allowed, f"{what}: differs by {error:.3g}")


def _require_finite(tensor: Tensor, what: str) -> None:
    _require(bool(tensor.isfinite().all()), f"{what}: infinite or not a number")


def _keeps_shapes(build: _Build) -> None:
    """Hooks return the declared types, in the shape and dtype of their input, which they do not change."""
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        position, words, heads = build(dtype), _words(7, dtype=dtype), _heads(7, dtype)
        words_before, heads_before = words.clone(), heads.clone()
        site = position.with_shared(Site(Positions(4, 1, 3), Positions(0, 1, 7), 1))
        hidden = position.embed(words, site.key_positions)
        _require_like(hidden, words, "embed returned")
        inputs = {"query": heads[0][:, :, -3:], "key": heads[1], "value": heads[2]}
        terms = {"terms": position.terms(hidden[:, -3:], site)}
        if position.uses_query_key:
            terms["content_terms"] = position.content_terms(inputs["query"], inputs["key"], site)
            outputs = position.transform_qkv(**inputs, site=site)
            for (name, before), after in zip(inputs.items(), outputs, strict=True):
                _require_like(after, before, f"transform_qkv returned a {name} of")
        for name, returned in terms.items():
            kind = type(returned).__name__
            _require(isinstance(returned, tuple), f"{name} returned a {kind}, expected a tuple of terms")
            for term in returned:
                _require(isinstance(term, Term), f"{name} returned a {type(term).__name__} among its terms")
                check_term(term, 2, HEADS, 3, 7, WIDTH // HEADS, words.device)
        _require(torch.equal(words, words_before), "a hook changed the hidden states in place")
        _require(torch.equal(heads, heads_before), "a hook changed query, key or value in place")
        _require_finite(attend(position, words), f"attention in {dtype}")


def _works_without_shared_results(build: _Build) -> None:
    """The results that layers share may be left out."""
    position, words, heads, positions = build().eval(), _words(7), _heads(7), Positions(0, 1, 7)
    for layer in (0, LAYERS - 1):
        site = Site(positions, positions, layer)
        with_shared = _hooks(position, words, heads, position.with_shared(site))
        without_shared = _hooks(position, words, heads, site)
        for actual, expected in zip(with_shared, without_shared, strict=True):
            _require_close(actual, expected, f"layer {layer} with site.shared and without")


def _trains(build: _Build) -> None:
    """Every parameter has a finite gradient, and so do the hidden states."""
    position, words = build(), _words(8).requires_grad_()
    leaves = {"the hidden states": words}
    leaves |= {name: parameter for name, parameter in position.named_parameters() if parameter.numel()}
    loss = torch.stack([attend(position, words, layer=layer).square().sum() for layer in range(LAYERS)]).sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    for name, gradient in zip(leaves, gradients, strict=True):
        _require(bool(gradient.any()), f"{name} has no gradient in any layer")
        _require_finite(gradient, f"gradient of {name}")
    _require(bool(gradients[0].any(-1).all()), "some hidden states have no gradient")


def _saves_its_state(build: _Build) -> None:
    """A state dict holds everything that is trained, and evaluation is repeatable."""
    words, saved, loaded = _words(8), build().eval(), build().eval()
    loaded.load_state_dict(saved.state_dict())
    _require_close(attend(loaded, words), attend(saved, words), "loaded from the state dict", 0.0)


def _resets(build: _Build) -> None:
    """reset_parameters draws every parameter, only by functions of torch.nn.init, which loaders switch off."""
    position = build()
    before = {name: parameter.detach().clone() for name, parameter in position.named_parameters()}
    methods = [module for module in position.modules() if isinstance(module, PositionMethod)]
    unchanged: dict[str, Any] = {
        name: lambda tensor, *_, **__: tensor for name in dir(torch.nn.init) if name.endswith("_")
    }
    with patch.multiple(torch.nn.init, **unchanged):
        for method in methods:
            method.reset_parameters()
    for name, parameter in position.named_parameters():
        message = f"{name} changes without them, so from_pretrained would lose its trained values"
        _require(torch.equal(parameter, before[name]), message)
        torch.nn.init.constant_(parameter, math.nan)
    draws = []
    for _ in range(2):
        torch.manual_seed(5)
        for method in methods:
            method.reset_parameters()
        draws.append([parameter.detach().clone() for parameter in position.parameters()])
    for name, *both in zip(before, *draws, strict=True):
        _require_finite(both[0], f"{name} after reset_parameters")
        _require(torch.equal(*both), f"{name} differs after the same seed")
    _require_finite(attend(position, _words(8)), "attention after reset_parameters")


def _accepts_part_of_the_queries(build: _Build) -> None:
    """Queries may be any evenly spaced part of the sequence."""
    position, words = build().eval(), _words(9)
    expected = attend(position, words, layer=1)
    for start, stride in ((6, 1), (8, 1), (0, 1), (1, 3), (0, 2), (3, 5)):
        rows = slice(start, None, stride)
        query_positions = Positions(start, stride, len(range(9)[rows]))
        actual = attend(position, words, query_positions, rows=rows, layer=1)
        _require_close(actual, expected[:, rows], f"queries at {start}, {start + stride}, ... of 9 tokens")


def _accepts_explicit_positions(build: _Build) -> None:
    """Explicit positions are the same as affine ones, also by row of a batch and in packed documents."""
    position, words = build().eval(), _words(9, batch=3)
    sequences = [Positions(0, 1, 9), Positions(6, 1, 9), Positions(1, 2, 9)]
    outputs = [attend(position, words, affine, affine) for affine in sequences]
    for affine, expected in zip(sequences, outputs, strict=True):
        ids = affine.values()
        for explicit in (ids, ids.unsqueeze(0), ids.expand(3, -1), ids.int()):
            actual = attend(position, words, explicit, explicit)
            _require_close(actual, expected, f"explicit positions {tuple(explicit.shape)} instead of {affine}")
        _require_close(attend(position, words, affine, ids), expected, f"explicit keys instead of {affine}")
    rows = torch.stack([affine.values() for affine in sequences])
    expected = torch.stack([output[row] for row, output in enumerate(outputs)])
    _require_close(attend(position, words, rows, rows), expected, "rows of a batch with different positions")
    lengths = [3, 1, 5]
    ids = torch.cat([torch.arange(length) for length in lengths])
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).expand(3, -1)
    packed = attend(position, words, ids, ids, query_documents=documents, key_documents=documents)
    parts = [attend(position, document) for document in words.split(lengths, 1)]
    _require_close(packed, torch.cat(parts, 1), "documents packed into one row")


def _ignores_padding(build: _Build) -> None:
    """Padding changes nothing and has no gradient, on the right or, with explicit positions, on the left."""
    position, words = build().eval(), _words(5)
    expected = attend(position, words)
    positions = torch.arange(-3, 9)
    padded = torch.cat((100 * _words(3), words, 100 * _words(4)), 1).requires_grad_()
    mask, ids = ((positions >= 0) & (positions < 5)).expand(2, -1), positions.clamp(min=0).expand(2, -1)
    right_padded = attend(position, padded[:, 3:], key_mask=mask[:, 3:])[:, :5]
    _require_close(right_padded, expected, "with padding on the right")
    both_padded = attend(position, padded, ids, ids, key_mask=mask)[:, 3:8]
    _require_close(both_padded, expected, "with padding on both sides")
    (gradient,) = torch.autograd.grad((both_padded + right_padded).square().sum(), padded)
    _require(not gradient[~mask].any(), "padding has a gradient")


def _accepts_any_length(build: _Build) -> None:
    """Sequences may be short, batches and queries may be empty."""
    position = build()
    for length in (1, 2):
        words = _words(length).requires_grad_()
        out = attend(position, words)
        leaves = {"the hidden states": words, **dict(position.named_parameters())}
        gradients = torch.autograd.grad(out.square().sum(), list(leaves.values()), materialize_grads=True)
        for name, tensor in zip(("attention", *leaves), (out, *gradients), strict=True):
            _require_finite(tensor, f"{name} or its gradient among {length} tokens")
    _require_like(attend(position, _words(5, batch=0)), _words(5, batch=0), "an empty batch gave")
    no_queries = attend(position, _words(5), Positions(5, 1, 0), rows=slice(5, None))
    _require_like(no_queries, _words(0), "an empty sequence of queries gave")


def _knows_its_range(build: _Build) -> None:
    """Positions out of range are an error of type PositionRangeError, and all others give numbers."""
    position = build().eval()
    beyond, before = Positions(0, 1, 2 * MAX_LENGTH), Positions(-2, 1, 6)
    for affine in (beyond, before):
        for positions in (affine, affine.values(), affine.values().expand(2, -1)):
            try:
                _require_finite(attend(position, _words(affine.length), positions, positions), f"attention at {affine}")
            except PositionRangeError:
                _require(
                    positions is not beyond or not position.extrapolates,
                    "the method extrapolates, but positions beyond max_length raised a PositionRangeError",
                )


def _accepts_or_refuses_fractions(build: _Build) -> None:
    """Fractional positions give numbers, or an error of type TypeError."""
    position, words = build().eval(), _words(5)
    fractions, integers = torch.tensor([0.0, 0.5, 1.75, 4.0, 4.25]), torch.arange(5.0)
    try:
        for layer in range(LAYERS):
            _require_finite(attend(position, words, fractions, fractions, layer=layer), "attention at such positions")
    except TypeError as error:
        _require(not position.accepts_fractional, f"the method accepts fractional positions, but raised {error}")
        return
    _require(position.accepts_fractional, "the method does not accept fractional positions, but raised no error")
    _require_close(attend(position, words, integers, integers), attend(position, words), "integer positions as float32")


def _is_shift_invariant(build: _Build) -> None:
    """The same number added to all positions changes nothing, where shift_invariant claims it."""
    position, words = build().eval(), _words(9)
    for stride in (1, 3) if position.shift_invariant else ():
        # Position 0 may be the position of [CLS].
        first = Positions(0, stride, 9)
        expected = attend(position, words, first, first, layer=1)
        for start in (-2, 3, 400):
            moved = Positions(start, stride, 9)
            for positions in (moved, moved.values()):
                actual = attend(position, words, positions, positions, layer=1)
                _require_close(actual, expected, f"positions from {start} instead of 0")


def _states_whether_it_acts_on_query_and_key(build: _Build) -> None:
    """Query and key may be left out, unless needs_query_key states that the method acts on them."""
    position, words, (query, key, value), positions = build().eval(), _words(7), _heads(7), Positions(0, 1, 7)
    if position.needs_query_key or not position.uses_query_key:
        return
    words = position.embed(words, positions)
    for layer in range(LAYERS):
        site = Site(positions, positions, layer)
        new_query, new_key, _ = position.transform_qkv(query, key, value, site)
        _require(torch.equal(new_query, query), "transform_qkv changes the query")
        _require(torch.equal(new_key, key), "transform_qkv changes the key")
        _require(position.content_terms(query, key, site) == (), "content_terms returned terms")
        zeros = torch.zeros_like(query)
        expected = position.attend(words, zeros, zeros, value, site)
        _require_close(position.attend(words, None, None, value, site), expected, "attention without query and key")


def _adds_its_curve(build: _Build) -> None:
    """A curve holds the numbers that the method adds to scores, for offsets of any shape."""
    position = build().eval()
    affine = Positions(4, 1, 9)
    offsets = affine.values() - affine.values().unsqueeze(-1)
    curve = position.curve(offsets, layer=2)
    if curve is None:
        return
    expected = (HEADS, 9, 9)
    _require(curve.shape == expected, f"curve of (9, 9) offsets: shape {tuple(curve.shape)}, expected {expected}")
    row = position.curve([0, 3], layer=2)
    assert row is not None
    _require_close(row, curve[:, 0, [0, 3]], "curve at two of the offsets")
    if type(position).terms is not OffsetFunction.terms:
        return
    # With one-hot values, the output shows the weight of each key.
    for positions in (affine, affine.values()):
        terms = position.terms(_words(9), Site(positions, positions, 2))
        weights = attention(None, None, torch.eye(9).double().expand(1, HEADS, -1, -1), terms)
        _require_close(weights[0], curve.softmax(-1), "weights of the terms and of the curve")


class _Widening(TorchDispatchMode):
    """Replaces float32 in the arguments of operations by float64; the caller sets torch's default dtype."""

    def __torch_dispatch__(self, function: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
        return function(*args, **kwargs)


def _is_exact_in_float64(build: _Build) -> None:
    """In float64, curves, terms and features have the precision of float64."""
    position, words, heads, affine = build().eval(), _words(9), _heads(9), Positions(4, 1, 9)

    def compute() -> list[Tensor]:
        results = []
        for positions in (affine, affine.values()):
            results += _hooks(position, words, heads, Site(positions, positions, 1))
        curve = position.curve(_FAR_OFFSETS, layer=1)
        return results if curve is None else [*results, curve]

    results, default = compute(), torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Widening():  # type: ignore[no-untyped-call]
            exact = compute()
    finally:
        torch.set_default_dtype(default)
    for actual, expected in zip(results, exact, strict=True):
        _require_close(actual, expected, "a tensor, compared to the same with all operations in float64,", 1e-13)


def _is_exact_in_bfloat16(build: _Build) -> None:
    """bfloat16 rounds the output, never the positions."""
    position, words, heads = build(torch.bfloat16).eval(), _words(50).bfloat16(), _heads(50).bfloat16()
    out, near, far = attend(position, words[:, :8]), Positions(513, 1, 50), Positions(1001, 1, 50)
    # From 512 on, bfloat16 has only every fourth integer.
    sites = {"positions from 513": Site(near, near, 1), "offsets near 1001": Site(far, Positions(0, 1, 50), 1)}
    results = {}
    for name, site in sites.items():
        try:
            results[name] = _hooks(position, words, heads, site)
        except PositionRangeError:
            continue
    curve = position.curve(_FAR_OFFSETS, layer=1)
    position, words, heads = position.double(), words.double(), heads.double()
    _require_close(out, attend(position, words[:, :8]), "attention in bfloat16", _BFLOAT16_ERROR)
    for name, tensors in results.items():
        for actual, expected in zip(tensors, _hooks(position, words, heads, sites[name]), strict=True):
            # The length of a table may depend on the precision, and numbers that overflow can't be compared.
            if actual.shape == expected.shape and expected.isfinite().all():
                _require_close(actual, expected, f"{name} in bfloat16", 20 * torch.finfo(torch.bfloat16).eps)
    if curve is not None:
        exact = position.curve(_FAR_OFFSETS, layer=1)
        assert exact is not None
        _require_close(curve, exact, "the curve of parameters in bfloat16, which is at least float32,", 1e-5)


def _has_shapes_without_data(build: _Build) -> None:
    """On the meta device the method computes shapes, which the count of its cost needs."""
    position = build().to("meta")
    shape = attend(position, _words(5).to("meta")).shape
    _require(shape == (2, 5, WIDTH), f"attention of (2, 5, {WIDTH}) gave shape {tuple(shape)}")


def _compiles(build: _Build) -> None:
    """torch.compile compiles the method as one graph, with its gradients."""
    position, words = build(), _words(6).requires_grad_()

    def forward(words: Tensor) -> Tensor:
        return attend(position, words, layer=1)

    torch.compiler.reset()
    results = []
    for function in (forward, torch.compile(forward, fullgraph=True, backend="aot_eager")):
        out, leaves = function(words), [words, *position.parameters()]
        # Not a plain sum: its gradient would be a constant, which hides mistakes.
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
        results.append([out, *torch.autograd.grad((out * weights).sum(), leaves, materialize_grads=True)])
    for expected, actual in zip(*results, strict=True):
        _require_close(actual, expected, "compiled outputs or gradients")


LAWS: tuple[Callable[[_Build], None], ...] = (
    _keeps_shapes,
    _works_without_shared_results,
    _trains,
    _resets,
    _saves_its_state,
    _accepts_part_of_the_queries,
    _accepts_explicit_positions,
    _ignores_padding,
    _accepts_any_length,
    _knows_its_range,
    _accepts_or_refuses_fractions,
    _is_shift_invariant,
    _states_whether_it_acts_on_query_and_key,
    _adds_its_curve,
    _is_exact_in_float64,
    _is_exact_in_bfloat16,
    _has_shapes_without_data,
)
"""The checks of :func:`check_position`, in order; the first line of a check's docstring is the law."""
