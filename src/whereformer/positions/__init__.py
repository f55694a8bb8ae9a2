"""The registry of position methods: list, build, describe and register them by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields
from fnmatch import fnmatchcase
from functools import partial
from importlib import import_module
from typing import Any

from ..errors import InputError, meant, shown
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
"""The class of each method by name, or "module:Class" for a class of this package that is imported on first use."""

ALIASES = {"nope": "none"}
"""Other names of methods, which users know from papers: NoPE, for no positional encoding."""

_SIZES = {field.name for field in fields(ModelShape)}
"""Options of :func:`build_position` that describe the model and not the method."""


def position_names(pattern: str | None = None) -> list[str]:
    """The names of all methods in the registry's order, or of those that match a pattern as file names do: "rope*".

    An alias that matches stands for its method. What a method can do are attributes of its class,
    :func:`~whereformer.positions.method_class`.
    """
    if not isinstance(pattern, str | None):
        raise InputError("pattern", f"expected a text such as 'rope*', got {shown(pattern)}")
    names = {name: [name, *(alias for alias, meant in ALIASES.items() if meant == name)] for name in METHODS}
    return [name for name in METHODS if pattern is None or any(fnmatchcase(each, pattern) for each in names[name])]


def canonical_name(name: str) -> str:
    """Return the name of a method, or of several joined by "+" and "/", with the registry's names in place of aliases.

    A pattern whose places are all the same is that method in all layers.
    """
    places = ["+".join(parts) for parts in layer_pattern(name)]
    return places[0] if len(set(places)) == 1 else "/".join(places)


def layer_pattern(name: str) -> list[list[str]]:
    """Return the methods, by the registry's names, at each place of a pattern over layers; most have one place."""
    if not isinstance(name, str):
        raise InputError("position", f"expected the name of a method, got {shown(name)}")
    places = [[part.strip() for part in place.split("+")] for place in name.split("/")]
    if not all(map(all, places)):
        raise InputError("position", f"a method's name is missing in {shown(name)}; that of no method is 'none'")
    return [[ALIASES.get(part, part) for part in parts] for parts in places]


def component_names(name: str) -> list[str]:
    """Return the distinct methods that a name joins by "+" and "/", in order, by the registry's names."""
    return list(dict.fromkeys(part for parts in layer_pattern(name) for part in parts))


def register(name: str, method: type[PositionMethod]) -> None:
    """Make ``method`` available under ``name`` in this process: in models, in studies and in ``a+b`` compositions.

    A class of the same module and qualified name, as of a notebook's cell that runs again, replaces the first one.
    Commands, and the processes that studies start, run a file that calls it: ``--plugin FILE``, or ``plugin=FILE``.

    Raises:
        ValueError: if the name is taken, or contains "+", "/", "," or a blank.
        TypeError: if ``method`` is not a subclass of :class:`PositionMethod`.
    """
    if not name or any(mark in name for mark in "+/, "):
        raise InputError("name", f"expected a word without '+', '/', ',' or blanks, got {name!r}")
    if not (isinstance(method, type) and issubclass(method, PositionMethod)):
        raise TypeError(f"method: expected a subclass of PositionMethod, got {getattr(method, '__name__', method)}")
    first = METHODS.get(ALIASES.get(name, name))
    names = [(getattr(each, "__module__", ""), getattr(each, "__qualname__", "")) for each in (first, method)]
    # A function may make several classes of one name.
    if first is not None and (names[0] != names[1] or "<locals>" in method.__qualname__):
        raise InputError("name", f"{name!r} is taken by {first}")
    METHODS[name] = method


def build_position(
    name: str | type[PositionMethod], *, hidden_size: int, num_heads: int, **options: Any
) -> PositionMethod:
    """Build a position method, several joined by "+", or different ones by layer.

    Args:
        name: one of :func:`position_names`; or a composition such as ``learned+tisa``; or a pattern over layers such as
            ``rope/rope/rope/none``, which is repeated to the depth; or a class, which need not be registered. In a
            pattern every method has parameters for its own layers only. A method that acts on the embeddings is below
            all layers, so it stands at every place: ``learned+tisa/learned``.
        hidden_size: width of the hidden states.
        num_heads: attention heads.
        options: other sizes, and the method's own options, as its class documents them. Each goes to every part that
            has it; an option with the name of a part is a dictionary, and goes to this part alone:
            ``tisa={"num_kernels": 3}``. The sizes are those of :class:`ModelShape`:

            - ``num_layers``: attention layers; a shared layer counts once per pass. 1 by default.
            - ``max_length``: the number of positions for methods that have a fixed number; 512 by default.
            - ``causal``: whether keys to the right are masked everywhere, also by ``attend``; False by default.
            - ``head_dim``: width of one head; hidden_size / num_heads by default.
            - ``embedding_size``: width at the input; hidden_size by default.
            - ``initializer_range``: standard deviation of the model's fresh weights, which learned and tupe follow;
              0.02 by default.
            - ``layer_of_pass``: for each of ``num_layers``, the index of its layer; by default all are distinct.
            - ``separate_cls``: whether the first token is [CLS], which pooling leaves alone; False by default.

    Raises:
        InputError: for an unknown name, a size that does not fit, or methods that do not go together.
        TypeError: for an option that no part has.
    """
    sizes = {option: options.pop(option) for option in _SIZES & options.keys()}
    model = ModelShape(hidden_size=hidden_size, num_heads=num_heads, **sizes)
    if isinstance(name, type):
        if not issubclass(name, PositionMethod):
            raise InputError("position", f"expected a method's name or a class of PositionMethod, got {name.__name__}")
        named, places = {name.__name__: name}, [[name.__name__]]
    else:
        check_name(name)
        places = layer_pattern(name)
        named = {part: method_class(part) for parts in places for part in parts}
    given = _sort_options(name if isinstance(name, str) else name.__name__, named, options)
    asked = {option: value for method in named.values() for option, value in method.options_for_others.items()}

    def build(part: str, model: ModelShape) -> PositionMethod:
        method = named[part]
        own = {option: value for option, value in asked.items() if option in _options(method)} | given[part]
        _check_options(method, own)
        return method(model, **own)

    used = dict.fromkeys(part for parts in places[: model.num_layers] for part in parts)
    if len(used) == 1:
        return build(next(iter(used)), model)
    return CompositeMethod(model, {part: partial(build, part) for part in used}, places)


def check_name(name: str, options: Mapping[str, Any] | None = None) -> None:
    """Check without building anything that methods of this name exist, each once at a place.

    Their constructors check the values of ``options`` further; here they have to fit the signatures.

    Raises:
        InputError: if not.
        TypeError: for an option that no method has.
    """
    places = layer_pattern(name)
    for parts in places:
        if len({method_class(part) for part in parts}) < len(parts):
            raise InputError("position", f"{name!r} names a method twice")
    for part in filter(_embeds, component_names(name)):
        if not all(part in parts for parts in places):
            reason = "acts on the embeddings, below all layers, so it must stand at every place of"
            raise InputError("position", f"{part} {reason} {name!r}")
    if options:
        named = {part: method_class(part) for part in component_names(name)}
        for part, own in _sort_options(name, named, options).items():
            _check_options(named[part], own)


def _embeds(name: str) -> bool:
    return method_class(name).embed is not PositionMethod.embed


def method_class(name: str) -> type[PositionMethod]:
    """Return the class of a method, whose attributes are facts about it.

    Raises:
        InputError: for an unknown name.
    """
    if not isinstance(name, str):
        raise InputError("position", f"expected the name of a method, got {shown(name)}")
    name = ALIASES.get(name, name)
    if name not in METHODS:
        known = f"known: {', '.join(METHODS)}, a+b, and what a `plugin` registers"
        hint = meant(name, [*METHODS, *ALIASES])
        raise InputError("position", f"unknown position method {shown(name)}{hint or ';'} {known}")
    entry = METHODS[name]
    if isinstance(entry, str):
        module, _, attribute = entry.partition(":")
        entry = getattr(import_module(f"{__name__}.{module}"), attribute)
        assert isinstance(entry, type)
        assert issubclass(entry, PositionMethod)
    return entry


def describe(name: str) -> tuple[str, dict[str, Any]]:
    """Return the first line of a method's docstring, and its options with their defaults."""
    method = method_class(name)
    return (inspect.getdoc(method) or "").partition("\n")[0], _options(method)


def _sort_options(
    name: str, methods: Mapping[str, type[PositionMethod]], options: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return the options of each method: those that it has, and after them those that are given for it alone.

    Raises:
        InputError: for a method's name with anything but a dictionary.
        TypeError: for an option that no method has.
    """
    known = {part: _options(method) for part, method in methods.items()}
    found: dict[str, dict[str, Any]] = {part: {} for part in methods}
    alone = []
    for option, value in options.items():
        having = [part for part in methods if option in known[part]]
        if option in methods and isinstance(value, Mapping):
            alone.append((option, value))
        elif option in methods and not having:
            raise InputError(option, f"expected a dictionary with options of this method alone, got {shown(value)}")
        elif not having:
            every = sorted(set().union(*known.values()))
            raise TypeError(f"position {name!r} has no option {option!r}; it has {', '.join(every) or 'no options'}")
        for part in having:
            found[part][option] = value
    for part, own in alone:
        if unknown := sorted(own.keys() - known[part].keys(), key=str):
            raise TypeError(
                f"position {part!r} has no option {unknown[0]!r}; it has {', '.join(known[part]) or 'no options'}"
            )
        found[part] |= own
    return found


def _options(method: type[PositionMethod]) -> dict[str, Any]:
    """Return a method's options and their defaults, sorted by name."""
    parameters = inspect.signature(method.__init__).parameters
    return {
        name: parameter.default
        for name, parameter in sorted(parameters.items())
        if parameter.kind is parameter.KEYWORD_ONLY
    }


def _check_options(method: type[PositionMethod], given: Mapping[str, Any]) -> None:
    """Check the options of a method by its signature, since config.json, which is untrusted, may give them.

    Raises:
        InputError: for a value of another kind, or a number beyond any use.
    """
    parameters = inspect.signature(method.__init__).parameters
    for option, value in given.items():
        check_value(option, value, str(parameters[option].annotation))
