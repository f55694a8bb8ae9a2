"""The registry of position methods: list, build, describe and register them by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from ..errors import InputError, shown
from .base import ModelShape, OffsetFunction, Place, Position, PositionRangeError, Sum, Work, check_value

__all__ = [
    "ModelShape",
    "OffsetFunction",
    "Place",
    "Position",
    "PositionRangeError",
    "Sum",
    "Work",
    "build_position",
    "describe",
    "own_name",
    "position_names",
    "register",
]

METHODS: dict[str, str | type[Position]] = {
    "none": "none:NoPosition",
    "sinusoidal": "sinusoidal:Sinusoidal",
    "learned": "learned:Learned",
    "shaw": "shaw:Shaw",
    "t5": "t5:T5",
    "floater": "floater:Floater",
    "synthesizer": "synthesizer:Synthesizer",
    "tupe": "tupe:Tupe",
    "rope": "rope:Rope",
    "tisa": "tisa:Tisa",
    "alibi": "alibi:Alibi",
    "kerple": "kerple:Kerple",
    "fire": "fire:Fire",
    "deberta": "deberta:Deberta",
    "cope": "cope:Cope",
    "transformer_xl": "transformer_xl:TransformerXL",
    "tisa2d": "tisa2d:Tisa2d",
    "grid_bias": "grid_bias:GridBias",
    "rope2d": "rope2d:Rope2d",
    "logn": "logn:Logn",
}
"""The class of each method by name, or "module:Class" for a class of this package that is imported on first use."""

ALIASES = {"nope": "none"}
"""Other names of methods, which users know from papers: NoPE, for no positional encoding."""

_SIZES = {field.name for field in fields(ModelShape)}
"""Options of :func:`build_position` that describe the model and not the method."""


def position_names() -> list[str]:
    """The names of all methods, in the order of the registry; :func:`build_position` also knows their aliases."""
    return list(METHODS)


def own_name(name: str) -> str:
    """Return the name of a method, or of several joined by "+", with the names of the registry instead of aliases."""
    return "+".join(ALIASES.get(part, part) for part in _parts(name))


def register(name: str, method: type[Position]) -> None:
    """Make ``method`` available under ``name`` everywhere: in models, in commands and in ``a+b`` compositions.

    Raises:
        ValueError: if the name is taken, or contains "+", "," or a blank.
        TypeError: if ``method`` is not a subclass of :class:`Position`.
    """
    if not name or any(mark in name for mark in "+, "):
        raise InputError("name", f"expected a word without '+', ',' or blanks, got {name!r}")
    if name in METHODS or name in ALIASES:
        raise InputError("name", f"{name!r} is taken by {METHODS[ALIASES.get(name, name)]}")
    if not (isinstance(method, type) and issubclass(method, Position)):
        raise TypeError(f"method: expected a subclass of Position, got {getattr(method, '__name__', method)}")
    METHODS[name] = method


def build_position(name: str | type[Position], *, hidden_size: int, num_heads: int, **options: Any) -> Position:
    """Build a position method, or several joined by "+".

    Args:
        name: one of :func:`position_names`, or a composition such as ``learned+tisa``, where each option goes to every
            part that has it; or a class, which need not be registered.
        hidden_size: width of the hidden states.
        num_heads: attention heads.
        options: other sizes, and the method's own options, as its class documents them. The sizes are those of
            :meth:`ModelShape.of`:

            - ``num_layers``: attention layers; a shared layer counts once per pass. 1 by default.
            - ``max_length``: the number of positions for methods that have a fixed number; 512 by default.
            - ``causal``: whether keys to the right are masked everywhere; False by default.
            - ``head_dim``: width of one head; hidden_size / num_heads by default.
            - ``embedding_size``: width at the input; hidden_size by default.
            - ``initializer_range``: standard deviation of the model's fresh weights, which learned and tupe follow;
              0.02 by default.
            - ``passes``: the index of the distinct layer behind each of ``num_layers``; by default all are distinct.
            - ``separate_cls``: whether the first token is [CLS], which pooling leaves alone; False by default.

    Raises:
        InputError: for an unknown name or a size that does not fit.
        TypeError: for an option that no part has.
    """
    sizes = {option: options.pop(option) for option in _SIZES & options.keys()}
    model = ModelShape.of(hidden_size=hidden_size, num_heads=num_heads, **sizes)
    classes = [name] if isinstance(name, type) else [_find(part) for part in _parts(name)]
    if len(set(classes)) < len(classes):
        raise InputError("position", f"{name!r} names a method twice")
    wanted = {option: value for part in classes for option, value in part.asks_of_others.items()}
    unused = set(options)
    parts = []
    for part in classes:
        own = _options(part)
        unused -= own.keys()
        given = {option: value for option, value in {**wanted, **options}.items() if option in own}
        _check_options(part, given)
        parts.append(part(model, **given))
    if unused:
        known = sorted(set().union(*(_options(part) for part in classes)))
        named = name if isinstance(name, str) else name.__name__
        raise TypeError(
            f"position {named!r} has no option {sorted(unused)[0]!r}; it has {', '.join(known) or 'no options'}"
        )
    return parts[0] if len(parts) == 1 else Sum(model, parts)


def describe(name: str) -> tuple[str, dict[str, Any]]:
    """Return the first line of a method's docstring, and its options with their defaults."""
    method = _find(name)
    return (inspect.getdoc(method) or "").partition("\n")[0], _options(method)


def _options(method: type[Position]) -> dict[str, Any]:
    """Return a method's options and their defaults, sorted by name."""
    parameters = inspect.signature(method.__init__).parameters
    return {
        name: parameter.default
        for name, parameter in sorted(parameters.items())
        if parameter.kind is parameter.KEYWORD_ONLY
    }


def _check_options(method: type[Position], given: Mapping[str, Any]) -> None:
    """Check the options of a method by its signature, since a stranger's config.json may give them.

    Raises:
        InputError: for a value of another kind, or a number beyond any use.
    """
    parameters = inspect.signature(method.__init__).parameters
    for option, value in given.items():
        check_value(option, value, str(parameters[option].annotation))


def _parts(name: str) -> list[str]:
    """Return the names of the methods that are joined by "+"."""
    return [part.strip() for part in name.split("+")] if isinstance(name, str) else [name]


def _find(name: str) -> type[Position]:
    """Return the class registered under ``name``."""
    if not isinstance(name, str):
        raise InputError("position", f"expected the name of a method, got {shown(name)}")
    name = ALIASES.get(name, name)
    if name not in METHODS:
        close = get_close_matches(name, [*METHODS, *ALIASES], n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ";"
        raise InputError(
            "position", f"unknown position method {shown(name)}{hint} known: {', '.join(METHODS)}, and a+b"
        )
    entry = METHODS[name]
    if isinstance(entry, str):
        module, _, attribute = entry.partition(":")
        entry = getattr(import_module(f"{__name__}.{module}"), attribute)
        assert isinstance(entry, type)
        assert issubclass(entry, Position)
    return entry
