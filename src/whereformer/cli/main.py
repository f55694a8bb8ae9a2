"""Parse the command line and run a command. For bad input, print one line and exit with code 2."""

from __future__ import annotations

import inspect
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from textwrap import fill
from typing import Any, ClassVar

from ..errors import InputError, meant
from ..files import check_regular
from ..lab.recipe import Recipe
from ..recipes import RECIPES
from ..version import __version__
from .ending import ending
from .flags import parse

COMMANDS = {
    **{"translate train" if name == "translate" else name: f"recipes.{place}" for name, place in RECIPES.items()},
    "translate run": "cli.translate:TranslateRun",
    "run": "cli.main:RunFile",
    "check": "cli.check:Check",
    "demo": "cli.demo:Demo",
    "positions": "cli.positions:ListPositions",
}
"""Where the dataclass of each command's options is in this package."""


@dataclass(frozen=True)
class RunFile:
    """Run a recipe of your own: a Python file with one subclass of whereformer.lab.recipe.Recipe.

    Its fields are the options; `whereformer run FILE --help` shows them.
    """

    FLAGS: ClassVar = {"file": "FILE"}

    file: Path
    """The Python file. The recipe's options follow it."""

    @staticmethod
    def recipe(file: str) -> type[Recipe]:
        """Import a file, and return its recipe.

        Raises:
            InputError: if it is no Python file, or has none or several.
        """
        path = Path(file)
        check_regular("FILE", path)
        if path.suffix != ".py" or not path.stem.isidentifier():
            named = "letters, digits and underscores, such as my_recipe.py"
            raise InputError("FILE", f"expected a Python file with a name of {named}, got {file!r}")
        # Processes that train import it by this name.
        sys.path.insert(0, str(path.resolve().parent))
        module = import_module(path.stem)
        if Path(module.__file__ or "").resolve() != path.resolve():
            raise InputError("FILE", f"there is another module named {path.stem}; give the file another name")
        found = [
            kind
            for kind in vars(module).values()
            if isinstance(kind, type) and issubclass(kind, Recipe) and kind.__module__ == path.stem
        ]
        if len(found) != 1:
            raise InputError("FILE", f"expected one recipe in {file}, got {len(found)}")
        return found[0]

    def run(self, console: Any) -> None:
        """Refuse what comes before the file; the command line does the rest."""
        raise InputError("file", "expected the file first, and its options after it")


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the ``whereformer`` command."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    with ending():
        if given == ["--version"]:
            print(f"whereformer {__version__}")
            return
        kind, name, words = _command(given)
    with ending(kind):
        command = kind(**parse(kind, words, f"whereformer {name}"))
    execute(command, given)


def _command(given: Sequence[str]) -> tuple[type[Any], str, Sequence[str]]:
    """Return the class of the command that is named, its name, and the words that follow it."""
    for before, word in zip(["", *given], given, strict=False):
        if word.strip() == "" or re.fullmatch(r"--[^=]+=\s*", word):  # as a path, it would be the current folder
            raise InputError(None, f"got an empty word after {word.strip() or before or 'whereformer'}")
    if given[:1] in (["-h"], ["--help"]):
        usage = "usage: whereformer COMMAND OPTIONS; COMMAND --help lists them"
        print(usage, *map(_summary, COMMANDS), sep="\n")
        raise SystemExit(0)
    group = [each for each in COMMANDS if given and each.startswith(f"{given[0]} ")]
    if group and given[1:2] in ([], ["-h"], ["--help"]):
        print(*map(_summary, group), sep="\n")
        raise SystemExit(0)
    words = 2 if " ".join(given[:2]) in COMMANDS else 1  # of the name
    name, rest = " ".join(given[:words]), given[words:]
    if name not in COMMANDS:
        two = any(each.startswith(f"{name.lower()} ") for each in COMMANDS)  # then the second word is another one
        hint = meant(" ".join(given[: 1 + two]), COMMANDS)
        problem = f"unknown command {name!r}" if name else "expected a command"
        raise InputError(None, f"{problem}{hint or ';'} known: {', '.join(COMMANDS)}")
    kind = command_class(name)
    if name == "run" and rest and not rest[0].startswith("-"):
        return kind.recipe(rest[0]), f"run {rest[0]}", rest[1:]
    return kind, name, rest


def _summary(name: str) -> str:
    """Return the first paragraph of what a command says of itself, behind its name."""
    text = (inspect.getdoc(command_class(name)) or "").partition("\n\n")[0]
    return fill(text, 100, initial_indent=f"  {name:16}", subsequent_indent=" " * 18)


def command_class(name: str) -> type[Any]:
    """Import the class of a command's options."""
    found: type[Any] = resolve_name(f"whereformer.{COMMANDS[name]}")
    return found


def execute(command: Any, words: Sequence[str] = ()) -> None:
    """Run a command of some words. If it fails or is interrupted, print one line to stderr and exit with a code."""
    with ending(command):
        from .. import ranks
        from ..lab.terminal import output

        if ranks.size() > 1 and not getattr(command, "MANY", False):
            raise InputError(None, f"this command runs in one process, got {ranks.size()}; start it without a launcher")
        console = output(quiet=not ranks.is_main())
        if not isinstance(command, Recipe):
            if getattr(command, "plugin", None) is not None:  # whatever else waits for torch
                from ..lab.methods import load_plugin

                load_plugin(command.plugin)
            command.run(console)
            return
        report = command.start(command=shlex.join(["whereformer", *words]))
        console.print(report, highlight=False)
        if not getattr(command, "dry_run", False):
            place = command.out / "report"
            console.print(f"wrote {place}.html (open it in a browser) and {place}.md", highlight=False, soft_wrap=True)
        if report.problem:
            raise InputError(None, report.problem)
        ranks.leave()
