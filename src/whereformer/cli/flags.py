"""Build argparse flags from dataclass fields, and put them into help texts and error messages."""

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
from functools import cache, partial
from pathlib import Path
from textwrap import fill
from types import NoneType
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin

from ..errors import InputError, short_repr
from ..lab.recipe import Recipe, default, find_flags, flag, hints, is_comma_separated, sort_fields

SHOWN = {str: "TEXT", int: "INT", float: "FLOAT", Path: "PATH"}
"""Placeholders in the help, by type."""
GROUPS = {
    "text and other input": "model data tasks task column columns characters references documents validation train "
    "text label regression train_rows tokenizer vocab_size scores",
    "model": "positions position position_options plugin kernels max_kernels size preset blocks encoder_layers "
    "decoder_layers length lengths max_length hidden_size embedding_size intermediate_size num_heads norm windows",
    "training": "quick minutes steps epochs seeds seed batch_size batch_tokens accumulate learning_rate rate_factors "
    "kernel_learning_rate warmup schedule dropout label_smoothing causal objective mask_rate hide_masked grow average",
    "output": "out dry_run beams length_penalty every keep cache report_to",
    "machine": "device jobs ray threads dtype compile",
}
"""The groups of options in the help, and the options of each, the usual ones first. Others are in a group before."""


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
        InputError: for an unknown option, an option without a value, or a missing option that has no default.
        SystemExit: with code 0 after the help.
    """
    arguments, unknown = build_parser(kind, prog).parse_known_intermixed_args(words)
    if unknown:
        close = get_close_matches(unknown[0].partition("=")[0].lower(), find_flags(kind).values(), 1)
        hint = f"did you mean {close[0]}?" if close else f"{prog} --help lists them"
        raise InputError(None, f"unknown option or unexpected word {short_repr(unknown[0])}; {hint}")
    options = vars(arguments)
    if issubclass(kind, Recipe):
        options = {**kind.defaults_for(options), **options}
    for field in dataclasses.fields(kind):
        if field.name not in options and default(field) is dataclasses.MISSING:
            raise InputError(field.name, "this option is required")
    return options


def build_parser(kind: Any, prog: str) -> Parser:
    """Build the parser of a command."""
    flags, types, documentation = find_flags(kind), hints(kind), _documentation(kind)
    usage = " ".join([prog, "[-h] [OPTIONS]", *(word for word in flags.values() if not word.startswith("-"))])
    example = f"Example: {getattr(kind, 'EXAMPLE', prog)}\n\nusage: {usage}\n\n"
    parser = Parser(
        usage=argparse.SUPPRESS,
        description=example + fill_paragraphs(inspect.getdoc(kind) or ""),
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=18),
        argument_default=argparse.SUPPRESS,
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
    groups = {title: parser.add_argument_group(title) for title in ("options", *GROUPS)}
    titles = {name: title for title, names in GROUPS.items() for name in names.split()}
    order = [*titles]
    for field in sorted(sort_fields(kind), key=lambda field: order.index(field.name) if field.name in titles else -1):
        name, word, field_default = field.name, flags[field.name], default(field, None)
        group = groups[titles.get(name, "options")]
        text = _replace_names(documentation.get(name, ""), flags) + _format_default(field_default)
        options: dict[str, Any] = {"help": text.replace("%", "%%")}
        inner = _value_type(types[name])
        if inner is bool:
            group.add_argument(word, dest=name, action="store_false" if field_default else "store_true", **options)
            continue
        has_commas, is_several = is_comma_separated(types[name]), get_origin(inner) is tuple
        if is_several:
            inner = str if has_commas else get_args(inner)[0]
        choices = f"{{{','.join(map(str, get_args(inner)))}}}" if get_origin(inner) is Literal else None
        options["metavar"] = choices or ("A,B" if has_commas else SHOWN.get(inner))
        is_several = is_several and not has_commas
        if word.startswith("-"):
            group.add_argument(word, dest=name, nargs="+" if is_several else None, **options)
        else:
            group.add_argument(name, nargs="*" if is_several else "?", **options | {"metavar": word})
    return parser


def fill_paragraphs(text: str, **indents: Any) -> str:
    """Wrap paragraphs at the terminal's width, with the indents of :func:`textwrap.fill`."""
    width = shutil.get_terminal_size().columns
    return "\n\n".join(fill(paragraph, width, **indents) for paragraph in text.split("\n\n"))


def _value_type(hint: Any) -> Any:
    """Return the type of an option's value, without markers, and without None, the value of a missing option."""
    kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    return next((part for part in get_args(kind) if NoneType in get_args(kind) and part is not NoneType), kind)


def _format_default(value: Any) -> str:
    """Format a default for the help. If an option has none, its help text describes what happens without it."""
    if value in (None, (), "") or isinstance(value, bool):
        return ""
    return f" (default: {','.join(map(str, value if isinstance(value, tuple) else (value,)))})"


def format_error(error: InputError, command: Any) -> str:
    """Format an error for a command's user, with flags in place of the names of Python arguments."""
    flags = find_flags(command)
    reason = _replace_names(error.reason, flags)
    return reason if error.field is None else f"{flags.get(error.field, flag(error.field))}: {reason}"


def _replace_names(text: str, flags: Mapping[str, str]) -> str:
    """Replace names in backquotes by flags."""
    return re.sub("``?([a-z_]+)``?", lambda match: flags.get(match[1], match[0]), text)


@cache
def _documentation(kind: type) -> dict[str, str]:
    """Return the docstring below each field of a dataclass, as one line."""
    documentation = {}
    for base in reversed(kind.__mro__[:-1]):
        module = ast.parse(inspect.getsource(sys.modules[base.__module__]))  # much faster than the class's source
        classes = (node for node in ast.walk(module) if isinstance(node, ast.ClassDef))
        tree = next(node for node in classes if node.name == base.__name__)
        for field, below in itertools.pairwise(tree.body):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    documentation[name] = " ".join(text.split())
    return documentation
