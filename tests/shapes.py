"""Shapes of public functions as their docstrings give them, checked by jaxtyping whenever a test calls one.

Each function below stands for one of the package: its parameters are those that are checked, ``result`` is what came
out. Axes of one name have one size throughout a call. What is checked are calls that succeed: what does not fit is
refused by the package itself, with messages that have tests of their own.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from beartype import beartype
from jaxtyping import Bool, Float, Int, Integer, Shaped, jaxtyped
from torch import Tensor

from whereformer import build_position, position_names
from whereformer.kernels.terms import (
    DenseBias,
    DistanceDecay,
    FactorPair,
    OffsetBias,
    OffsetBias2d,
    OffsetKeys,
    OffsetQueries,
    OffsetValues,
    Positions,
)
from whereformer.positions.base import Position

Check = Callable[..., None]
FUNCTIONS: dict[str, Check] = {}
"""By the name of the function, or method, in its module: ``module:name`` or ``module:Class.name``."""
HOOKS: dict[str, Check] = {}
"""By the name of the hook, for all position methods."""


def shapes_of(name: str) -> Callable[[Check], Check]:
    """The decorated function gives the shapes of the one with this name."""

    def add(check: Check) -> Check:
        table = FUNCTIONS if ":" in name else HOOKS
        table[name] = jaxtyped(check, typechecker=beartype)
        return check

    return add


def fits(value: Any, kind: Any) -> None:
    assert isinstance(value, kind), f"expected {kind}, got {tuple(value.shape)} {value.dtype}"


# Axes that are bound in the check that calls this: jaxtyping looks for them there.
SHAPES_OF_TERMS = {
    OffsetBias: {"table": Float[Tensor, "heads _"]},
    OffsetBias2d: {"table": Float[Tensor, "heads _ _"], "prefix": Float[Tensor, "heads 3"] | None},
    OffsetKeys: {"table": Float[Tensor, "#heads _ head_dim"]},
    OffsetQueries: {"table": Float[Tensor, "#heads _ head_dim"]},
    OffsetValues: {"table": Float[Tensor, "#heads _ value_dim"]},
    FactorPair: {
        "query_factors": Float[Tensor, "#batch heads n_q _"],
        "key_factors": Float[Tensor, "#batch heads n_k _"],
    },
    DistanceDecay: {
        "query_levels": Float[Tensor, "#batch heads n_q"],
        "key_levels": Float[Tensor, "#batch heads n_k"],
    },
    DenseBias: {"scores": Float[Tensor, "_ #heads n_q n_k"]},
}
SHAPES_WITH_FACTORS = {
    OffsetKeys: {"table": Float[Tensor, "#heads _ _"], "query_factors": Float[Tensor, "#batch heads n_q _"]},
    OffsetQueries: {"table": Float[Tensor, "#heads _ _"], "key_factors": Float[Tensor, "#batch heads n_k _"]},
}


def terms_fit(terms: Sequence[Any]) -> None:
    for term in terms:
        factors = getattr(term, "factors", None)
        for name, shape in (SHAPES_OF_TERMS if factors is None else SHAPES_WITH_FACTORS)[type(term)].items():
            fits(getattr(term, name), shape)
        if factors is not None:
            assert term.table.shape[2] == factors.shape[3]
        if isinstance(term, FactorPair):
            assert term.query_factors.shape[3] == term.key_factors.shape[3]


def output_fits(result: Any, return_lse: bool, rows: str) -> None:
    """Check an output, which has the axes of ``rows`` and its width, and its log-sum-exps."""
    output, lse = result if return_lse else (result, None)
    fits(output, Float[Tensor, f"{rows} value_dim"])
    if lse is not None:
        fits(lse, Float[Tensor, rows])


QueryPositions = Positions | Shaped[Tensor, "n_q"] | Shaped[Tensor, "#batch n_q"] | None
KeyPositions = Positions | Shaped[Tensor, "n_k"] | Shaped[Tensor, "#batch n_k"] | None


@shapes_of("whereformer.kernels:attention")
def attention(
    query: Shaped[Tensor, "..."] | None,
    key: Shaped[Tensor, "..."] | None,
    value: Shaped[Tensor, "..."],
    terms: Sequence[Any],
    key_mask: Bool[Tensor, "batch n_k"] | None,
    sinks: Float[Tensor, "heads"] | None,
    query_positions: QueryPositions,
    key_positions: KeyPositions,
    query_documents: Integer[Tensor, "batch n_q"] | None,
    key_documents: Integer[Tensor, "batch n_k"] | None,
    return_lse: bool,
    result: Any,
) -> None:
    if value.is_nested:
        # Jaxtyping knows no ragged axis; the documents that they become are not checked either.
        assert (result[0] if return_lse else result).is_nested
        return
    if query is None:
        # Vectors of keys and of queries need a query and a key, or factors in their place.
        assert all(term.factors is not None for term in terms if isinstance(term, OffsetKeys | OffsetQueries))
        fits(value, Float[Tensor, "batch heads n_k value_dim"])
    else:
        fits(query, Float[Tensor, "batch heads n_q head_dim"])
        fits(key, Float[Tensor, "batch key_heads n_k head_dim"])
        fits(value, Float[Tensor, "batch key_heads n_k value_dim"])
    terms_fit(terms)
    output_fits(result, return_lse, "batch heads n_q")


@shapes_of("whereformer.kernels:attention_varlen")
def attention_varlen(
    query: Float[Tensor, "n_q heads head_dim"] | None,
    key: Float[Tensor, "n_k key_heads head_dim"] | None,
    value: Float[Tensor, "n_k key_heads value_dim"],
    terms: Sequence[Any],
    cu_seqlens_q: Integer[Tensor, "sequences"],
    cu_seqlens_k: Integer[Tensor, "sequences"] | None,
    return_lse: bool,
    result: Any,
) -> None:
    output_fits(result, return_lse, "n_q heads")


@shapes_of("whereformer.kernels:attention_weights")
def attention_weights(
    query: Float[Tensor, "batch heads n_q head_dim"] | None,
    key: Float[Tensor, "batch key_heads n_k head_dim"] | None,
    value: Float[Tensor, "batch key_heads n_k value_dim"],
    terms: Sequence[Any],
    result: Float[Tensor, "batch heads n_q n_k"],
) -> None:
    terms_fit(terms)


@shapes_of("embed")
def embed(
    self: Position,
    hidden: Float[Tensor, "batch n {self.model.embedding_size}"],
    positions: Positions | Shaped[Tensor, "n"] | Shaped[Tensor, "#batch n"],
    result: Float[Tensor, "batch n {self.model.embedding_size}"],
) -> None:
    pass


@shapes_of("vectors")
def vectors(
    self: Position,
    positions: Positions | Shaped[Tensor, "n"] | Shaped[Tensor, "batch n"],
    result: Float[Tensor, "n _"] | Float[Tensor, "batch n _"] | None,
) -> None:
    pass


@shapes_of("rotate")
def rotate(
    self: Position,
    query: Float[Tensor, "batch {self.model.num_heads} n_q {self.model.head_dim}"],
    key: Float[Tensor, "batch key_heads n_k {self.model.head_dim}"],
    value: Float[Tensor, "batch key_heads n_k {self.model.head_dim}"],
    result: tuple[
        Float[Tensor, "batch {self.model.num_heads} n_q {self.model.head_dim}"],
        Float[Tensor, "batch key_heads n_k {self.model.head_dim}"],
        Float[Tensor, "batch key_heads n_k {self.model.head_dim}"],
    ],
) -> None:
    pass


@shapes_of("terms")
def terms(
    self: Position,
    # Who knows that a method does not look at it may give an empty one.
    hidden: Float[Tensor, "batch n_q {self.model.hidden_size}"] | Float[Tensor, "0"],
    place: Any,
    result: tuple[Any, ...],
) -> None:
    _terms_of_hook(self, place, result)


@shapes_of("content_terms")
def content_terms(
    self: Position,
    query: Float[Tensor, "batch {self.model.num_heads} n_q {self.model.head_dim}"],
    key: Float[Tensor, "batch _ _ {self.model.head_dim}"],
    place: Any,
    result: tuple[Any, ...],
) -> None:
    _terms_of_hook(self, place, result)


def _terms_of_hook(position: Position, place: Any, found: tuple[Any, ...]) -> None:
    """Its model and its place say more of the axes of its terms than its arguments do."""
    model, keys = position.model, place.keys
    n_k = keys.length if isinstance(keys, Positions) else keys.shape[-1]
    fits(torch.empty(model.num_heads, n_k, device="meta"), Float[Tensor, "heads n_k"])
    fits(torch.empty(model.head_dim, model.head_dim, device="meta"), Float[Tensor, "head_dim value_dim"])
    terms_fit(found)


@shapes_of("curve")
def curve(
    self: Position,
    offsets: Shaped[Tensor, "*offsets"] | Sequence[float | int],
    result: Float[Tensor, "{self.model.num_heads} *offsets"] | None,
) -> None:
    pass


@shapes_of("whereformer.models.pooling:Pooling.hidden")
def pooled_hidden(
    self: Any,
    hidden: Float[Tensor, "batch n width"],
    result: Float[Tensor, "batch {self.length(hidden.shape[1])} width"],
) -> None:
    pass


@shapes_of("whereformer.models.pooling:Pooling.sequence")
def pooled_sequence(self: Any, sequence: Any, result: Any) -> None:
    for tokens, axes in ((sequence, "batch n"), (result, "batch pooled")):
        for given in (tokens.key_mask, tokens.segments):
            if given is not None:
                fits(given, Shaped[Tensor, axes])


@shapes_of("whereformer.models.pooling:unpool")
def unpool(hidden: Float[Tensor, "batch n width"], length: int, result: Float[Tensor, "batch {length} width"]) -> None:
    pass


@shapes_of("whereformer.models.encoder:Encoder.forward")
def encoder(
    self: Any,
    input_ids: Int[Tensor, "batch n"] | None,
    attention_mask: Shaped[Tensor, "batch n"] | None,
    token_type_ids: Int[Tensor, "batch n"] | None,
    position_ids: Shaped[Tensor, "n"] | Shaped[Tensor, "#batch n"] | None,
    document_ids: Int[Tensor, "batch n"] | None,
    inputs_embeds: Float[Tensor, "batch n _"] | None,
    result: Any,
) -> None:
    if isinstance(result, tuple):
        return  # asked for by return_dict=False: the same tensors, without their names
    fits(result.last_hidden_state, Float[Tensor, "batch out width"])
    assert result.last_hidden_state.shape[2] == self.config.hidden_size
    for state in result.hidden_states or ():
        fits(state, Float[Tensor, "batch _ width"])
    for weights in result.attentions or ():
        fits(weights, Float[Tensor, "batch heads _ _"])


@shapes_of("whereformer.analysis.toeplitz:toeplitzness")
def toeplitzness(matrix: Any, result: Float[Tensor, "*matrices"]) -> None:
    fits(torch.as_tensor(matrix), Shaped[Tensor, "*matrices n n"])


@shapes_of("whereformer.analysis.toeplitz:toeplitz_part")
def toeplitz_part(matrix: Any, result: Float[Tensor, "*matrices n n"]) -> None:
    fits(torch.as_tensor(matrix), Shaped[Tensor, "*matrices n n"])


@shapes_of("whereformer.analysis.toeplitz:diagonal_means")
def diagonal_means(matrix: Any, result: Float[Tensor, "*matrices offsets"]) -> None:
    fits(torch.as_tensor(matrix), Shaped[Tensor, "*matrices n n"])
    fits(result, Float[Tensor, "*matrices 2*n-1"])


# --- putting them where the functions are


def checked(function: Callable[..., Any], check: Check) -> Callable[..., Any]:
    """The function, with the shapes of every call that succeeds checked."""
    signature = inspect.signature(function)
    wanted = [name for name in inspect.signature(check).parameters if name != "result"]

    @functools.wraps(function)
    def wrapper(*arguments: Any, **keywords: Any) -> Any:
        result = function(*arguments, **keywords)
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return result  # a program for other sizes too
        call = signature.bind(*arguments, **keywords)
        call.apply_defaults()
        given = call.arguments
        for parameter in signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                # Options that are passed on by their names.
                given = {**given[parameter.name], **given}
        check(**{name: given.get(name) for name in wanted}, result=result)
        return result

    wrapper.shapes_are_checked = True  # type: ignore[attr-defined]
    return wrapper


def install() -> None:
    """Check all of them from now on, in the modules that are imported."""
    for name, check in FUNCTIONS.items():
        module, _, path = name.partition(":")
        if module in sys.modules:
            owner, _, attribute = path.rpartition(".")
            if owner:
                of_class = getattr(sys.modules[module], owner)
                setattr(of_class, attribute, checked(getattr(of_class, attribute), check))
            else:
                _replace_everywhere(attribute, getattr(sys.modules[module], attribute), check)
    for method in position_names():
        build_position(method, hidden_size=8, num_heads=2)
    for of_class in _classes_below(Position):
        for name, check in HOOKS.items():
            if name in vars(of_class) and of_class.__module__.startswith("whereformer."):
                setattr(of_class, name, checked(vars(of_class)[name], check))


def _replace_everywhere(name: str, function: Callable[..., Any], check: Check) -> None:
    """Also where a module has imported it by its name."""
    wrapper = checked(function, check)
    for module in list(sys.modules.values()):
        if module.__name__.split(".")[0] in ("whereformer", "tests") and vars(module).get(name) is function:
            setattr(module, name, wrapper)


def _classes_below(base: type) -> list[type]:
    return [base, *(found for below in base.__subclasses__() for found in _classes_below(below))]
