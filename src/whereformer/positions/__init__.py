"""The registry of position methods: list, build, describe and register them by name."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from fnmatch import fnmatchcase
from functools import partial
from importlib import import_module
from typing import Any

from ..errors import InputError, short_repr, suggest
from .base import ModelShape, OffsetFunction, PositionMethod, PositionRangeError, check_value
from .composite import CompositeMethod
from .site import Site

__all__ = [
    "CompositeMethod",
    "ModelShape",
    "OffsetFunction",
    "PositionMethod",
    "PositionRangeError",
    "Site",
    "build_position",
    "canonical_name",
    "check_name",
    "component_names",
    "describe",
    "layer_pattern",
    "method_class",
    "position_names",
    "register",
]

METHODS: dict[str, str | type[PositionMethod]] = {
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
    "transformer_xl": "transformer_xl:TransformerXL",
    "inkling": "inkling:Inkling",
    "fox": "fox:Fox",
    "logn": "logn:Logn",
}
"""The class of each method by name, or "module:Class" for a class of this package, which is imported on first use."""

ALIASES = {"nope": "none"}
"""Names of methods in papers: NoPE stands for no positional encoding."""

_OTHER_NAMES = {
    **dict.fromkeys(("rotary", "roformer", "xpos", "yarn", "ntk", "llama"), "'rope'"),
    **dict.fromkeys(("relative", "rpe"), "'shaw', 't5' or 'rope'"),
    "absolute": "'learned' or 'sinusoidal'",
    **dict.fromkeys(("bert", "gpt"), "'learned'"),
    **dict.fromkeys(("sin", "fourier", "vaswani"), "'sinusoidal'"),
    "bucket": "'t5'",
    "disentangled": "'deberta'",
    "linear": "'alibi'",
    **dict.fromkeys(("xl", "transformerxl"), "'transformer_xl'"),
    "forget": "'fox'",
}
"""For beginnings of words in other names of methods, families and models, the methods that an error suggests."""

_SIZES = {field.name for field in fields(ModelShape)}
"""Options of :func:`build_position` that describe the model and not the method."""


def position_names(pattern: str | None = None) -> list[str]:
    """Return the names of all methods in the registry's order, or of those that match a file name pattern: "rope*".

    An alias that matches stands for its method. The attributes of a method's class,
    :func:`~whereformer.positions.method_class`, are facts about the method.
    """
    if not isinstance(pattern, str | None):
        raise InputError("pattern", f"expected a text such as 'rope*', got {short_repr(pattern)}")
    if pattern is None:
        return list(METHODS)
    matches = {ALIASES.get(name, name) for name in (*METHODS, *ALIASES) if fnmatchcase(name, pattern)}
    return [name for name in METHODS if name in matches]


def canonical_name(name: str) -> str:
    """Return the name of a method, or of several joined by "+" and "/", with the registry's names instead of aliases.

    A pattern with the same methods for all layers becomes the name of these methods.
    """
    names = ["+".join(parts) for parts in layer_pattern(name)]
    return names[0] if len(set(names)) == 1 else "/".join(names)


def layer_pattern(name: str) -> list[list[str]]:
    """Return the names of the methods for each layer of a pattern; a name without "/" is a pattern of one layer.

    Aliases are replaced by the registry's names.
    """
    if not isinstance(name, str):
        raise InputError("position", f"expected the name of a method, got {short_repr(name)}")
    pattern = [[part.strip() for part in parts.split("+")] for parts in name.split("/")]
    if not all(map(all, pattern)):
        raise InputError("position", f"a method name is missing in {short_repr(name)}; 'none' means no positions")
    return [[ALIASES.get(part, part) for part in parts] for parts in pattern]


def component_names(name: str) -> list[str]:
    """Return the distinct methods that a name joins by "+" and "/", in order, by the registry's names."""
    return list(dict.fromkeys(part for parts in layer_pattern(name) for part in parts))


def register(name: str, method: type[PositionMethod]) -> None:
    """Make ``method`` available under ``name`` in this process: in models, in studies and in ``a+b`` compositions.

    A class with the same module and qualified name replaces the first one, so that a notebook cell can run again.
    Commands, and the processes that studies start, run a file that calls this: ``--plugin FILE``, or ``plugin=FILE``.

    Raises:
        ValueError: if the name is in use, or contains "+", "/", "," or a blank.
        TypeError: if ``method`` is not a subclass of :class:`PositionMethod`.
    """
    if not name or any(character in name for character in "+/, "):
        raise InputError("name", f"expected a word without '+', '/', ',' or blanks, got {name!r}")
    if not (isinstance(method, type) and issubclass(method, PositionMethod)):
        raise TypeError(f"method: expected a subclass of PositionMethod, got {getattr(method, '__name__', method)}")
    previous = METHODS.get(ALIASES.get(name, name))
    names = [(getattr(entry, "__module__", ""), getattr(entry, "__qualname__", "")) for entry in (previous, method)]
    # A function may define several classes with one name.
    if previous is not None and (names[0] != names[1] or "<locals>" in method.__qualname__):
        raise InputError("name", f"{name!r} is already the name of {previous}")
    METHODS[name] = method


def build_position(
    name: str | type[PositionMethod], *, hidden_size: int, num_heads: int, **options: Any
) -> PositionMethod:
    """Build a position method, several joined by "+", or different ones by layer.

    Args:
        name: one of :func:`position_names`; or a composition such as ``learned+tisa``; or a pattern over layers such as
            ``rope/rope/rope/none``, which is repeated to the depth; or a class, which need not be registered. In a
            pattern, every method has parameters for its own layers only. A method that acts on the embeddings is below
            all layers, so it must appear in every layer of the pattern: ``learned+tisa/learned``.
        hidden_size: width of the hidden states.
        num_heads: number of attention heads.
        options: the other fields of :class:`ModelShape`, such as ``num_layers``, ``max_length`` and ``causal``, and the
            options that the method's class documents. An option goes to every component that has it. An option with the
            name of a component is a dictionary, and goes only to this component: ``tisa={"num_kernels": 3}``.

    Raises:
        InputError: for an unknown name, a size that does not fit, or methods that do not go together.
        TypeError: for an option that no component has.
    """
    sizes = {option: options.pop(option) for option in _SIZES & options.keys()}
    model = ModelShape(hidden_size=hidden_size, num_heads=num_heads, **sizes)
    if isinstance(name, type):
        if not issubclass(name, PositionMethod):
            raise InputError("position", f"expected a method's name or a class of PositionMethod, got {name.__name__}")
        classes, pattern = {name.__name__: name}, [[name.__name__]]
    else:
        check_name(name)
        pattern = layer_pattern(name)
        classes = {part: method_class(part) for parts in pattern for part in parts}
    method_options = _sort_options(name if isinstance(name, str) else name.__name__, classes, options)
    options_for_others = {
        option: value for method in classes.values() for option, value in method.options_for_others.items()
    }

    def build(part: str, model: ModelShape) -> PositionMethod:
        method = classes[part]
        defaults = {option: value for option, value in options_for_others.items() if option in _options(method)}
        return method(model, **defaults | method_options[part])

    parts_in_use = dict.fromkeys(part for parts in pattern[: model.num_layers] for part in parts)
    if len(parts_in_use) == 1:
        return build(next(iter(parts_in_use)), model)
    return CompositeMethod(model, {part: partial(build, part) for part in parts_in_use}, pattern)


def check_name(name: str, options: Mapping[str, object] | None = None) -> None:
    """Check, without building anything, that the methods of a name exist, and that none is joined with itself.

    ``options`` must fit the signatures of the methods; only their constructors check the values fully.

    Raises:
        InputError: for a name or a value that does not fit.
        TypeError: for an option that no method has.
    """
    pattern = layer_pattern(name)
    for parts in pattern:
        if len({method_class(part) for part in parts}) < len(parts):
            raise InputError("position", f"{name!r} names a method twice")
    for part in component_names(name):
        acts_on_embeddings = method_class(part).embed is not PositionMethod.embed
        if acts_on_embeddings and not all(part in parts for parts in pattern):
            reason = "acts on the embeddings, so it must appear in every layer of"
            raise InputError("position", f"{part} {reason} {name!r}")
    if options:
        _sort_options(name, {part: method_class(part) for part in component_names(name)}, options)


def method_class(name: str) -> type[PositionMethod]:
    """Return the class of a method, whose attributes are facts about it.

    Raises:
        InputError: for an unknown name.
    """
    if not isinstance(name, str):
        raise InputError("position", f"expected the name of a method, got {short_repr(name)}")
    name = ALIASES.get(name, name)
    if name not in METHODS:
        known = f"known: {', '.join(METHODS)}, a+b, and the methods that a `plugin` registers"
        hint = suggest_methods(name)
        raise InputError("position", f"unknown position method {short_repr(name)}{hint or ';'} {known}")
    entry = METHODS[name]
    if isinstance(entry, str):
        module, _, attribute = entry.partition(":")
        entry = getattr(import_module(f"{__name__}.{module}"), attribute)
        assert isinstance(entry, type)
        assert issubclass(entry, PositionMethod)
    return entry


def suggest_methods(name: str) -> str:
    """Return an error's question "did you mean ...?", with the methods that an unknown name, such as "T5 bias", means.

    It is "" if no method is close.
    """
    names = {**{known: repr(known) for known in (*METHODS, *ALIASES)}, **_OTHER_NAMES}
    words = re.split(r"[-_ ]", name.lower())
    methods = next((names[known] for word in words for known in names if word.startswith(known)), None)
    return suggest(name, [*METHODS, *ALIASES]) if methods is None else f"; did you mean {methods}?"


def describe(name: str) -> tuple[str, dict[str, Any]]:
    """Return the first line of a method's docstring, and its options with their defaults."""
    method = method_class(name)
    return (inspect.getdoc(method) or "").partition("\n")[0], _options(method)


def _sort_options(
    name: str, methods: Mapping[str, type[PositionMethod]], options: Mapping[str, object]
) -> dict[str, dict[str, Any]]:
    """Return the options of each method: first those for every method that has them, then those only for this one.

    Values are checked by the annotations of the methods' signatures, since config.json, which is not trusted, may
    contain them.

    Raises:
        InputError: for a method's name with a value that is not a dictionary, and for a value of another type, a number
            that is not finite, or an integer beyond 2 ** 20.
        TypeError: for an option that no method has.
    """
    known = {part: _options(method) for part, method in methods.items()}
    method_options: dict[str, dict[str, Any]] = {part: {} for part in methods}
    separate_options = []
    for option, value in options.items():
        takers = [part for part in methods if option in known[part]]
        if option in methods and isinstance(value, Mapping):
            separate_options.append((option, value))
        elif option in methods and not takers:
            raise InputError(option, f"expected a dictionary with options of only this method, got {short_repr(value)}")
        elif not takers:
            known_names = sorted(set().union(*known.values()))
            raise TypeError(_no_option(name, option, known_names))
        for part in takers:
            method_options[part][option] = value
    for part, values in separate_options:
        if unknown := sorted(values.keys() - known[part].keys(), key=str):
            raise TypeError(_no_option(part, unknown[0], known[part]))
        method_options[part] |= values
    for part, method in methods.items():
        for option, value in method_options[part].items():
            check_value(option, value, str(inspect.signature(method.__init__).parameters[option].annotation))
    return method_options


def _no_option(name: str, option: str, known: Iterable[str]) -> str:
    """Return the error for an option that a position does not have."""
    return f"position {name!r} has no option {option!r}; it has {', '.join(known) or 'no options'}"


def _options(method: type[PositionMethod]) -> dict[str, Any]:
    """Return a method's options and their defaults, sorted by name."""
    parameters = inspect.signature(method.__init__).parameters
    return {
        name: parameter.default
        for name, parameter in sorted(parameters.items())
        if parameter.kind is parameter.KEYWORD_ONLY
    }
