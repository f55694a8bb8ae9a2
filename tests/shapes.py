"""Checks the shapes in the signatures of the package, by jaxtyping, whenever a test calls a function that has some.

Axes of one name have one size throughout a call. What is checked are calls that succeed: what does not fit is refused
by the package itself, with messages that have tests of their own. The package only names jaxtyping's types, in
annotations that nobody evaluates; here they are evaluated.
"""

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Union, get_args, get_origin

import jaxtyping
import torch
from jaxtyping import Float, jaxtyped
from torch import Tensor

from whereformer import position_names
from whereformer.positions import method_class
from whereformer.positions.base import PositionMethod

KINDS = {name: getattr(jaxtyping, name) for name in ("Bool", "Float", "Integer", "Real", "Shaped")}
HOOKS = ("embed", "vectors", "transform_qkv", "terms", "content_terms", "query_factor", "curve")
"""The hooks of position methods: those of every class have the shapes that ``PositionMethod`` gives."""


def shapes_of(owner: Any, namespace: dict[str, Any]) -> dict[str, Any]:
    """The annotations of a function or class that have shapes, by name."""
    annotations = getattr(owner, "__annotations__", {})
    return {
        name: eval(text, {**namespace, **KINDS})
        for name, text in annotations.items()
        if isinstance(text, str) and "[Tensor, '" in text
    }


def fits(value: Any, kind: Any) -> bool:
    """Whether a value is of a kind; axes are those of the context."""
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return any(fits(value, part) for part in get_args(kind))
    if origin is tuple:
        return isinstance(value, tuple) and all(map(fits, value, get_args(kind)))
    if origin is Sequence:
        # What an array of numbers has inside does not matter.
        return isinstance(value, Sequence | range) and (
            not any(isinstance(item, Tensor) for item in value) or all(fits(item, get_args(kind)[0]) for item in value)
        )
    return kind is Any or isinstance(value, kind)


def check(name: str, value: Any, kind: Any) -> None:
    shown = (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else type(value).__name__
    assert fits(value, kind), f"{name}: expected {kind}, got {shown}"


def bind(**axes: int) -> None:
    """Give axes of the context their sizes."""
    for name, size in axes.items():
        check(name, torch.empty(size, device="meta"), Float[Tensor, name])


def check_call(shapes: dict[str, Any], arguments: dict[str, Any], result: Any) -> None:
    with jaxtyped("context"):
        position = arguments.get("self")
        if isinstance(position, PositionMethod):
            model = position.model
            bind(**{name: getattr(model, name) for name in ("head_dim", "hidden_size", "embedding_size")})
            bind(heads=model.num_heads, value_dim=model.head_dim)
        for name, kind in shapes.items():
            value = result if name == "return" else arguments.get(name)
            # Who knows that a method does not look at hidden states may give empty ones.
            if not (name == "hidden" and isinstance(value, Tensor) and value.shape == (0,)):
                check(name, value, kind)


def checked(function: Callable[..., Any], shapes: dict[str, Any]) -> Callable[..., Any]:
    """The function, with the shapes of every call that succeeds checked."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def wrapper(*arguments: Any, **keywords: Any) -> Any:
        result = function(*arguments, **keywords)
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return result  # a program for other sizes too
        call = signature.bind(*arguments, **keywords)
        call.apply_defaults()
        check_call(shapes, call.arguments, result)
        return result

    wrapper.shapes_are_checked = True  # type: ignore[attr-defined]
    return wrapper


def functions_with_shapes() -> Iterator[tuple[Any, str, Callable[..., Any], dict[str, Any]]]:
    """The owner (a module or class), name, function and shapes of all in the modules that are imported."""
    for module in [module for name, module in sys.modules.items() if name.startswith("whereformer.")]:
        classes = [value for value in vars(module).values() if isinstance(value, type)]
        for owner in (module, *(cls for cls in classes if cls.__module__ == module.__name__)):
            for name, function in vars(owner).items():
                # A term that does not fit its call is refused there; dataclasses write their constructors.
                is_own = isinstance(function, types.FunctionType) and function.__module__ == module.__name__
                if is_own and not name.startswith("__"):
                    described = getattr(PositionMethod, name) if _is_hook(owner, name) else function
                    described = inspect.unwrap(described)
                    if shapes := shapes_of(described, described.__globals__):
                        yield owner, name, function, shapes


def _is_hook(owner: Any, name: str) -> bool:
    return name in HOOKS and isinstance(owner, type) and issubclass(owner, PositionMethod)


def install() -> None:
    """Check all of them from now on, in the modules that are imported."""
    for method in position_names():
        method_class(method)
    for owner, name, function, shapes in list(functions_with_shapes()):
        if function is PositionMethod.attend:
            continue  # It warns at the line that calls it; what it calls is checked.
        if isinstance(owner, type):
            setattr(owner, name, checked(function, shapes))
        else:
            _replace_everywhere(name, function, checked(function, shapes))


def _replace_everywhere(name: str, function: Callable[..., Any], wrapper: Callable[..., Any]) -> None:
    """Also where a module has imported it by its name."""
    for module in list(sys.modules.values()):
        if module.__name__.split(".")[0] in ("whereformer", "tests") and vars(module).get(name) is function:
            setattr(module, name, wrapper)
