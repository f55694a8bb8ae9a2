"""Show dataclass fields as flags: argparse reads words by them and prints their help; errors have them as names."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import itertools
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from textwrap import fill
from types import NoneType
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin

from ..errors import InputError, short_repr
from ..lab.recipe import Recipe, default, flag, flags_of, hints, is_listed, own_first

SHOWN = {str: "TEXT", int: "INT", float: "FLOAT", Path: "PATH"}
"""Placeholders in the help, by type."""


class Parser(argparse.ArgumentParser):
    """argparse's, with errors of one line."""

    def error(self, message: str) -> NoReturn:
        """Raise an InputError."""
        raise InputError(None, message.removeprefix("argument "))


def parse(kind: type[Any], words: Sequence[str], prog: str) -> dict[str, Any]:
    """Return the options that stand in the words of a command, with the defaults that they bring with them.

    Args:
        kind: the dataclass of the command's options.
        words: what follows the command's name. The help is printed if it is among them.
        prog: the command, as the help shows it.

    Raises:
        InputError: for what is no option, or no value of one, and if one lacks that has no default.
        SystemExit: with code 0 after the help.
    """
    found, unknown = parser_of(kind, prog).parse_known_intermixed_args(words)
    if unknown:
        close = get_close_matches(unknown[0].partition("=")[0].lower(), flags_of(kind).values(), 1)
        hint = f"did you mean {close[0]}?" if close else f"{prog} --help lists them"
        raise InputError(None, f"unknown option or unexpected word {short_repr(unknown[0])}; {hint}")
    given = vars(found)
    options = {**(kind.usual(given) if issubclass(kind, Recipe) else {}), **given}
    for field in dataclasses.fields(kind):
        if field.name not in options and default(field) is dataclasses.MISSING:
            raise InputError(field.name, "the command needs it, got none")
    return options


def parser_of(kind: Any, prog: str) -> Parser:
    """Return the parser of a command."""
    flags, types, documentation = flags_of(kind), hints(kind), _documentation(kind)
    paragraphs = (inspect.getdoc(kind) or "").split("\n\n")
    parser = Parser(
        usage=" ".join([prog, "[-h] [OPTIONS]", *(word for word in flags.values() if not word.startswith("-"))]),
        description="\n\n".join(fill(part, shutil.get_terminal_size().columns) for part in paragraphs),
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=18),
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    for field in own_first(kind):
        name, word, usual = field.name, flags[field.name], default(field, None)
        told = _replace_names(documentation.get(name, ""), flags) + _in_words(usual)
        about: dict[str, Any] = {"help": told.replace("%", "%%")}
        inner = _given_type(types[name])
        if inner is bool:
            parser.add_argument(word, dest=name, action="store_false" if usual else "store_true", **about)
            continue
        listed, several = is_listed(types[name]), get_origin(inner) is tuple
        if several:
            inner = str if listed else get_args(inner)[0]
        choices = f"{{{','.join(map(str, get_args(inner)))}}}" if get_origin(inner) is Literal else None
        about["metavar"] = choices or ("A,B" if listed else SHOWN.get(inner))
        several = several and not listed
        if word.startswith("-"):
            parser.add_argument(word, dest=name, nargs="+" if several else None, **about)
        else:
            parser.add_argument(name, nargs="*" if several else "?", **about | {"metavar": word})
    return parser


def _given_type(hint: Any) -> Any:
    """Return the type of an option's value, without markers, and without None: an option that is left out has that."""
    kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    return next((part for part in get_args(kind) if NoneType in get_args(kind) and part is not NoneType), kind)


def _in_words(value: Any) -> str:
    """Return a default as the help tells it. Of an option without one, its text says what happens."""
    if value in (None, (), "") or isinstance(value, bool):
        return ""
    return f" (default: {','.join(map(str, value if isinstance(value, tuple) else (value,)))})"


def in_flags(error: InputError, command: Any) -> str:
    """Format an error for a command's user, with flags in place of the names of Python arguments."""
    flags = flags_of(command)
    reason = _replace_names(error.reason, flags)
    return reason if error.field is None else f"{flags.get(error.field, flag(error.field))}: {reason}"


def _replace_names(text: str, flags: Mapping[str, str]) -> str:
    """Replace names in backquotes by flags."""
    return re.sub("``?([a-z_]+)``?", lambda found: flags.get(found[1], found[0]), text)


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
