"""Show dataclass fields as flags: their help and placeholders for tyro, and their names in errors."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import sys
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
    UnsupportedTypeAnnotationError,
)

from ..errors import InputError
from ..lab.recipe import Recipe, default, flag, is_listed, own_first

PACKAGE = __name__.partition(".")[0]
FILES = ("pairs", "references", "source", "target", "train", "plugin")
METAVARS = {
    **dict.fromkeys((*FILES, "validation", "validation_source", "validation_target"), "FILE"),
    **dict.fromkeys(("scores", "task", "tasks"), "A,B,C"),
    **dict.fromkeys(("blocks", "decoder_layers"), "LAYERS"),
    **dict.fromkeys(("kernels", "lengths", "rate_factors"), "N,N"),
    "position": "METHOD",
    "column": "NAME",
    "columns": "FROM,TO",
    "data": "PATH",
    "label": "COLUMN",
    "model": "PATH_OR_ID",
    "position_options": "JSON",
    "positions": "A,B,C+D",
    "text": "COLUMN[,COLUMN]",
    "tokenizer": "PATH_OR_ID",
}
"""The placeholder for a flag's value in --help, by field name, for fields that are text or a path."""

SHOWN = {str: "TEXT", int: "INT", float: "FLOAT", Path: "PATH"}
"""Placeholders by type, for all other fields."""


def registry(usual: Mapping[str, Any]) -> ConstructorRegistry:
    """Return the rules by which tyro shows our dataclasses, which know nothing of tyro.

    A recipe becomes a dictionary of its options, since tyro would hide what a recipe says of a bad one.

    Args:
        usual: defaults of a recipe that are not those of its fields.
    """
    found = ConstructorRegistry()
    found.struct_rule(partial(_dataclass_rule, usual))
    found.primitive_rule(_optional_rule)
    return found


def in_flags(error: InputError, command: Any) -> str:
    """Format an error for a command's user, with flags in place of the names of Python arguments."""
    flags = flags_of(command)
    reason = _replace_names(error.reason, flags)
    return reason if error.field is None else f"{flags.get(error.field, flag(error.field))}: {reason}"


def flags_of(command: Any) -> dict[str, str]:
    """Return a command's flags by field name. ``FLAGS`` has those that don't follow from a field's name."""
    flags: dict[str, str] = {}
    for field in dataclasses.fields(command):
        value = getattr(command, field.name, None)
        flags |= flags_of(value) if dataclasses.is_dataclass(value) else {field.name: flag(field.name)}
    return flags | getattr(command, "FLAGS", {})


def _replace_names(text: str, flags: dict[str, str]) -> str:
    """Replace names in backquotes by flags."""
    return re.sub("``?([a-z_]+)``?", lambda found: flags.get(found[1], found[0]), text)


def _dataclass_rule(usual: Mapping[str, Any], info: StructTypeInfo) -> StructConstructorSpec | None:
    """Describe a dataclass of ours as tyro's own rule does, but with our help texts and placeholders."""
    kind: Any = info.type
    recipe = _is_recipe(kind)
    if not recipe and (not dataclasses.is_dataclass(kind) or kind.__module__.partition(".")[0] != PACKAGE):
        return None  # tyro's own dataclasses
    hints, documentation = get_type_hints(kind, include_extras=True), _documentation(kind)
    flags = {name: flag(name) for name in hints} | getattr(kind, "FLAGS", {})
    metavars = METAVARS | getattr(kind, "METAVARS", {})
    defaults = {
        field.name: _as_word(hints[field.name], usual.get(field.name, default(field, tyro.MISSING_NONPROP)))
        for field in dataclasses.fields(kind)
    }
    return StructConstructorSpec(
        dict if recipe else kind,
        tuple(
            StructFieldSpec(
                field.name,
                _with_looks(hints[field.name], metavars.get(field.name), defaults[field.name], flags[field.name]),
                defaults[field.name],
                # Without a help text, tyro uses the docstring of a group's class.
                _replace_names(documentation[field.name], flags) if field.name in documentation else None,
            )
            for field in own_first(kind)
        ),
    )


def _is_recipe(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Recipe)


def _optional_rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | UnsupportedTypeAnnotationError | None:
    """Describe a type or None as the type alone: an option that is left out is None, and nobody has to write that."""
    kinds = [kind for kind in get_args(info.type) if kind is not type(None)]
    if info.type_origin not in (Union, UnionType) or len(kinds) != 1 or len(get_args(info.type)) != 2:
        return None  # no type or None
    found = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(kinds[0], info.markers))
    if isinstance(found, UnsupportedTypeAnnotationError):
        return found
    return dataclasses.replace(
        found,
        is_instance=lambda value: value is None or found.is_instance(value),
        str_from_instance=lambda value: [] if value is None else found.str_from_instance(value),
    )


def _with_looks(hint: Any, metavar: str | None, default: Any, flag: str) -> Any:
    """Annotate a field's type with its placeholder and default for --help; the type's own annotations have priority."""
    inner, *said = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    # The help text itself says what happens if the option is left out.
    note = "" if default in (None, (), "") or isinstance(default, bool) else None
    if is_listed(hint):
        return Annotated[str, tyro.conf.arg(metavar=metavar or "A,B", help_behavior_hint=note)]
    shown = _metavar(inner, metavar)
    if not flag.startswith("-"):  # a word without a flag
        shown = f"{flag} [{flag} ...]" if get_origin(inner) is tuple else f"[{flag}]" if default is None else flag
        said.append(tyro.conf.Positional)
    if get_origin(inner) in (tuple, UnionType):  # tyro would import typeguard to check the default
        inner = Annotated[object, ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(inner, set()))]
    return Annotated[(inner, tyro.conf.arg(metavar=shown, help_behavior_hint=note), *said)]


def _as_word(hint: Any, default: Any) -> Any:
    """Return a default as the command line has it: of values separated by commas, one word, which the recipe reads."""
    if not (is_listed(hint) and isinstance(default, tuple)):
        return default
    return ",".join(f"{value:g}" if isinstance(value, float) else str(value) for value in default)


def _metavar(kind: Any, named: str | None) -> str | None:
    kinds = [part for part in get_args(kind) if part not in (type(None), Ellipsis)]
    if get_origin(kind) is tuple:
        shown = _metavar(kinds[0], named)
        return f"{shown} [{shown} ...]"
    if len(kinds) == 1:
        return _metavar(kinds[0], named)
    return (named if kind in (str, Path) else None) or SHOWN.get(kind)


@cache
def _documentation(kind: type) -> dict[str, str]:
    """Return the docstring below each field of a dataclass, as one line."""
    found = {}
    for base in reversed(kind.__mro__[:-1]):
        module = ast.parse(inspect.getsource(sys.modules[base.__module__]))  # much faster than to find the class's own
        tree = next(each for each in ast.walk(module) if isinstance(each, ast.ClassDef) and each.name == base.__name__)
        for field, below in itertools.pairwise(tree.body):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = " ".join(text.split())
    return found
