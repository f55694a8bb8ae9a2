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
from typing import Any, ClassVar

from ..errors import InputError, suggest
from ..files import check_regular
from ..lab.recipe import Recipe
from ..recipes import RECIPES
from ..version import __version__
from .exit_codes import exit_on_error
from .flags import fill_paragraphs, parse

COMMANDS = {
    **{"translate train" if name == "translate" else name: f"recipes.{path}" for name, path in RECIPES.items()},
    "translate run": "cli.translate:TranslateRun",
    "run": "cli.main:RunFile",
    "merge": "cli.merge:Merge",
    "check": "cli.check:Check",
    "demo": "cli.demo:Demo",
    "positions": "cli.positions:ListPositions",
}
"""Where the dataclass of each command's options is in this package."""


@dataclass(frozen=True)
class RunFile:
    """Run your own recipe: a Python file with one subclass of whereformer.lab.recipe.Recipe.

    Its fields are the options; `whereformer run FILE --help` shows them.
    """

    FLAGS: ClassVar = {"file": "FILE"}
    EXAMPLE: ClassVar = "whereformer run my_recipe.py --help"

    file: Path
    """The Python file. The recipe's options follow it."""

    @staticmethod
    def recipe(file: str) -> type[Recipe]:
        """Import a file, and return its recipe.

        Raises:
            InputError: if it is not a Python file, or does not have exactly one recipe.
        """
        path = Path(file)
        check_regular("FILE", path)
        if path.suffix != ".py" or not path.stem.isidentifier():
            allowed = "letters, digits and underscores, such as my_recipe.py"
            raise InputError("FILE", f"expected a Python file with a name of {allowed}, got {file!r}")
        # Processes that train import it by this name.
        sys.path.insert(0, str(path.resolve().parent))
        module = import_module(path.stem)
        if Path(module.__file__ or "").resolve() != path.resolve():
            raise InputError("FILE", f"another module is named {path.stem}; give the file another name")
        recipes = [
            kind
            for kind in vars(module).values()
            if isinstance(kind, type) and issubclass(kind, Recipe) and kind.__module__ == path.stem
        ]
        if len(recipes) != 1:
            raise InputError("FILE", f"expected one recipe in {file}, got {len(recipes)}")
        return recipes[0]

    def run(self, console: Any) -> None:
        """Refuse options before the file. With the file first, its recipe runs in place of this command."""
        raise InputError("file", "expected the file first, and its options after it")


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the ``whereformer`` command."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    with exit_on_error():
        if words == ["--version"]:
            print(f"whereformer {__version__}")
            return
        kind, name, options = _find_command(words)
    with exit_on_error(kind):
        command = kind(**parse(kind, options, f"whereformer {name}"))
    execute(command, words)


def _find_command(words: Sequence[str]) -> tuple[type[Any], str, Sequence[str]]:
    """Return the class of a command, its name, and the words that follow the name."""
    for before, word in zip(["", *words], words, strict=False):
        if word.strip() == "" or re.fullmatch(r"--[^=]+=\s*", word):  # as a path, it would be the current folder
            raise InputError(None, f"empty argument after {word.strip() or before or 'whereformer'}")
    if words[:1] in (["-h"], ["--help"]):
        usage = "usage: whereformer COMMAND OPTIONS (or COMMAND --help)"
        print("Example: whereformer compare --data my_texts/\n", usage, *map(_summary, COMMANDS), sep="\n")
        raise SystemExit(0)
    group = [command for command in COMMANDS if words and command.startswith(f"{words[0]} ")]
    if group and words[1:2] in ([], ["-h"], ["--help"]):
        print(*map(_summary, group), sep="\n")
        raise SystemExit(0)
    name_length = 2 if " ".join(words[:2]) in COMMANDS else 1
    name, rest = " ".join(words[:name_length]), words[name_length:]
    if name not in COMMANDS:
        has_second_word = any(command.startswith(f"{name.lower()} ") for command in COMMANDS)
        name = " ".join(words[: 1 + has_second_word])
        hint = suggest(name, COMMANDS)
        problem = f"unknown command {name!r}" if name else "expected a command"
        raise InputError(None, f"{problem}{hint or ';'} known: {', '.join(COMMANDS)}")
    kind = command_class(name)
    if name == "run" and rest and not rest[0].startswith("-"):
        return kind.recipe(rest[0]), f"run {rest[0]}", rest[1:]
    return kind, name, rest


def _summary(name: str) -> str:
    """Return a command's name and the first paragraph of its docstring."""
    text = (inspect.getdoc(command_class(name)) or "").partition("\n\n")[0]
    return fill_paragraphs(text, initial_indent=f"  {name:16}", subsequent_indent=" " * 18)


def command_class(name: str) -> type[Any]:
    """Import the class of a command's options."""
    return resolve_name(f"whereformer.{COMMANDS[name]}")


def execute(command: Any, words: Sequence[str] = ()) -> None:
    """Run a command. If it fails or is interrupted, print one line to stderr and exit with a code.

    ``words`` is the command line, for the report.
    """
    with exit_on_error(command):
        from .. import ranks
        from ..lab.terminal import output

        if ranks.size() > 1 and not getattr(command, "MANY", False):
            raise InputError(None, f"this command runs in one process, got {ranks.size()}; start it without a launcher")
        console = output(quiet=not ranks.is_main())
        if not isinstance(command, Recipe):
            if getattr(command, "plugin", None) is not None:
                from ..lab.methods import load_plugin

                load_plugin(command.plugin)
            command.run(console)
            return
        report = command.start(command=shlex.join(["whereformer", *words]))
        console.print(report, highlight=False)
        if report.next_command:
            console.print(report.format_next(), highlight=False, soft_wrap=True)
        if not getattr(command, "dry_run", False):
            path = command.out / "report"
            console.print(f"wrote {path}.html (open it in a browser) and {path}.md", highlight=False, soft_wrap=True)
        if report.problem:
            raise InputError(None, report.problem)
        ranks.leave()
