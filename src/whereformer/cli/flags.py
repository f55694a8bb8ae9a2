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
from contextlib import nullcontext, suppress
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path
from textwrap import fill
from types import NoneType
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin

from ..errors import InputError, shown
from ..lab.recipe import Recipe, default, flag, flags_of, hints, in_words, is_listed, own_first

FILES = ("pairs", "references", "source", "target", "train", "plugin")
METAVARS = {
    **dict.fromkeys((*FILES, "validation", "validation_source", "validation_target"), "FILE"),
    **dict.fromkeys(("scores", "task", "tasks"), "A,B,C"),
    **dict.fromkeys(("blocks", "decoder_layers"), "LAYERS"),
    **dict.fromkeys(("kernels", "lengths"), "N,N"),
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


HELP = ("-h", "--help")


class Parser(argparse.ArgumentParser):
    """argparse's, with errors of one line."""

    def error(self, message: str) -> NoReturn:
        """Raise an InputError."""
        told = message.removeprefix("argument ").replace("ignored explicit argument", "takes no value, got")
        raise InputError(None, told)


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
    rest, given = [word for word in words if word not in HELP], {}
    asks = len(rest) < len(words)
    with suppress(InputError) if asks else nullcontext():
        found, unknown = parser_of(kind, prog).parse_known_intermixed_args(_joined(kind, rest))
        given = vars(found)
        if unknown:
            close = get_close_matches(unknown[0].partition("=")[0], flags_of(kind).values(), 1)
            hint = f"; did you mean {close[0]}?" if close else f"; {prog} --help lists them"
            what = "unknown option" if unknown[0].startswith("-") else "unexpected word"
            raise InputError(None, f"{what} {shown(unknown[0])}{hint}")
    usual = kind.usual({**given, **({"help": True} if asks else {})}) if issubclass(kind, Recipe) else {}
    if asks:
        print(parser_of(kind, prog, usual).format_help(), end="", flush=True)  # so that a full disk is an error
        raise SystemExit(0)
    options = {**usual, **given}
    for field in dataclasses.fields(kind):
        if field.name not in options and default(field) is dataclasses.MISSING:
            raise InputError(field.name, "the command needs it, got none")
    return options


def _joined(kind: type[Any], words: Sequence[str]) -> list[str]:
    """Return ``--steps=-1`` for ``--steps -1``: argparse takes a word that begins with a dash for a flag."""
    flags, types, found = flags_of(kind), hints(kind), list[str]()
    takes_one = {flags[name] for name, hint in types.items() if _given_type(hint) is not bool and not _has_words(hint)}
    for word in words:
        if found and found[-1] in takes_one and re.match("-[^-]", word):
            found[-1] += f"={word}"
        else:
            found.append(word)
    return found


def parser_of(kind: Any, prog: str, usual: Mapping[str, Any] | None = None) -> Parser:
    """Return the parser of a command. Its help shows the defaults of the fields, or those in ``usual``."""
    flags, types, documentation = flags_of(kind), hints(kind), _documentation(kind)
    placeholders = METAVARS | getattr(kind, "METAVARS", {})
    words = [_in_usage(field, types[field.name], flags[field.name]) for field in dataclasses.fields(kind)]
    paragraphs = (inspect.getdoc(kind) or "").split("\n\n")
    parser = Parser(
        usage=" ".join([prog, "[-h] [OPTIONS]", *filter(None, words)]),
        description="\n\n".join(fill(part, shutil.get_terminal_size().columns) for part in paragraphs),
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=18),
        argument_default=argparse.SUPPRESS,
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument(*HELP, action="store_true", help="show this help message and exit")
    for field in own_first(kind):
        name, word, hint, usually = field.name, flags[field.name], types[field.name], default(field, None)
        told = _replace_names(documentation.get(name, ""), flags) + _in_words((usual or {}).get(name, usually))
        about: dict[str, Any] = {"help": told.replace("%", "%%")}
        inner = _given_type(hint)
        if inner is bool:
            action = "store_false" if usually else "store_true"
            parser.add_argument(word, dest=name, action=action, **about)
            continue
        if get_origin(inner) is tuple:
            inner = str if is_listed(hint) else get_args(inner)[0]
        placeholder = placeholders.get(name) if inner in (str, Path) else None
        if get_origin(inner) is Literal:
            placeholder = f"{{{','.join(map(str, get_args(inner)))}}}"
        about |= {
            "type": partial(_read, inner),
            "metavar": placeholder or ("A,B" if is_listed(hint) else SHOWN.get(inner)),
        }
        several = _has_words(hint)
        if word.startswith("-"):
            parser.add_argument(word, dest=name, nargs="+" if several else None, **about)
        else:
            parser.add_argument(name, nargs="*" if several else "?", **about | {"metavar": word})
    return parser


def _in_usage(field: dataclasses.Field[Any], hint: Any, word: str) -> str:
    """Return how a line of usage shows an option that is a word without a flag; nothing for others."""
    if word.startswith("-"):
        return ""
    if _has_words(hint):
        return f"{word} [{word} ...]"
    return word if default(field) is dataclasses.MISSING else f"[{word}]"


def _given_type(hint: Any) -> Any:
    """Return the type of an option's value, without markers, and without None: an option that is left out has that."""
    kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    return next((part for part in get_args(kind) if NoneType in get_args(kind) and part is not NoneType), kind)


def _has_words(hint: Any) -> bool:
    """Return whether an option's values are several words."""
    return get_origin(_given_type(hint)) is tuple and not is_listed(hint)


def _read(kind: Any, word: str) -> Any:
    """Return a word as a value of a type."""
    choices = {str(choice): choice for choice in get_args(kind)}
    try:
        return choices[word] if choices else kind(word)
    except (KeyError, ValueError):
        expected = ", ".join(choices) or ("a whole number" if kind is int else "a number")
        raise argparse.ArgumentTypeError(f"expected {expected}, got {shown(word)}") from None


def _in_words(value: Any) -> str:
    """Return a default as the help tells it. Of an option without one, its text says what happens."""
    if value in (None, (), "") or isinstance(value, bool):
        return ""
    parts = value if isinstance(value, tuple) else (value,)
    return f" (default: {','.join(map(in_words, parts))})"


def in_flags(error: InputError, command: Any) -> str:
    """Format an error for a command's user, with flags in place of the names of Python arguments."""
    flags = flags_of(command)
    reason = _replace_names(error.reason, flags)
    return reason if error.field is None else f"{flags.get(error.field, flag(error.field))}: {reason}"


def _replace_names(text: str, flags: Mapping[str, str]) -> str:
    """Replace names in backquotes by flags."""
    return re.sub("``?([a-z_]+)``?", lambda found: flags.get(found[1], found[0]), text)


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
