"""Parse the command line and run a command. For bad input, print one line (or tyro's box) and exit with code 2."""

from __future__ import annotations

import inspect
import itertools
import re
import sys
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, Union, cast

import tyro

from .. import __version__, recipes, studies
from ..errors import InputError
from ..lab.recipe import Recipe
from ..lab.study import Study
from .ending import ending
from .flags import registry

if TYPE_CHECKING:
    from ..lab.terminal import Terminal

COMMANDS: dict[str, str | None] = {
    "compare": None,
    "probe": None,
    "pretrain": None,
    "finetune": None,
    "translate": "translate:Translate",
    "analyze": None,
    "extend": None,
    "run": "run:RunFile",
    "cost": "cost:Cost",
    "positions": "positions:ListPositions",
}
"""Where the dataclass of each command's options is in this package; None for a recipe or a study."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the ``whereformer`` command."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    with ending():
        if given == ["--version"]:
            print(f"whereformer {__version__}")
            return
        kind, found = _parse(given)
    with ending(kind):
        command = kind(**found) if isinstance(found, dict) else found
    execute(command)


def _parse(given: Sequence[str]) -> tuple[Any, Any]:
    """Read the command line. Return the command's class, and the command or, of a recipe, a dictionary of options."""
    for before, word in itertools.pairwise(["", *given]):
        if word.strip() == "" or re.fullmatch(r"--[^=]+=\s*", word):  # an empty path would be the current folder
            raise InputError(None, f"{word.strip().rstrip('=') or before}: got an empty word".lstrip(": "))
    name, *options = given or [""]
    rules: Any = {
        "registry": registry(quick="--quick" in options),
        "config": (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
    }
    if name in COMMANDS:
        kind = command_class(name)
        if name == "run" and options and not options[0].startswith("-"):
            kind, name, options = kind.recipe(options[0]), f"run {options[0]}", options[1:]
        description = inspect.getdoc(kind) if issubclass(kind, Recipe) else None
        found = tyro.cli(kind, description=description, prog=f"whereformer {name}", args=options, **rules)
        found = getattr(found, "command", found)  # of those of translate, the one that was chosen
        if not isinstance(found, dict):
            return found, found
        return kind if issubclass(kind, Recipe) else recipes.recipe_class(name), found
    parsers = []
    for each in COMMANDS:
        kind = command_class(each)
        summary = (inspect.getdoc(kind) or "").partition("\n\n")[0]
        parsers.append(Annotated[Any, tyro.conf.subcommand(each, constructor=kind, description=summary)])
    found = tyro.cli(
        cast(Any, Union[tuple(parsers)]),  # noqa: UP007  # the union of all commands
        prog="whereformer",
        description="Token positions as a swappable, inspectable and fast part of self-attention.",
        args=given,
        **rules,
    )
    return found, found


def command_class(name: str) -> type[Any]:
    """Import the class of a command's options."""
    place = COMMANDS[name]
    if place is None:
        return recipes.recipe_class(name) if name in recipes.RECIPES else studies.options(name)
    module, _, found = place.partition(":")
    command: type[Any] = getattr(import_module(f"whereformer.cli.{module}"), found)
    return command


def execute(command: Any) -> None:
    """Run a command. If it fails or is interrupted, print one line to stderr and exit with a code."""
    with ending(command):
        from ..lab import ranks
        from ..lab.terminal import output

        if ranks.size() > 1 and not getattr(command, "MANY", False):
            spread = "; `jobs` spreads its runs over processes" if hasattr(command, "jobs") else ""
            problem = f"this command runs in one process, got {ranks.size()}; start it without a launcher{spread}"
            raise InputError(None, problem)
        console = output(quiet=not ranks.is_main())
        if isinstance(command, Recipe):
            run_recipe(command, console)
        elif isinstance(command, Study):
            run_study(command, console)
        else:
            command.run(console)
        ranks.leave()


def run_recipe(recipe: Recipe, console: Terminal) -> None:
    """Run a recipe, and print its report and where it is."""
    from ..lab.terminal import say

    report = recipe.start()
    console.print(report, highlight=False)
    if getattr(recipe, "dry_run", False):
        return
    say(console, f"wrote {recipe.out / 'report.html'} (open it in a browser) and {recipe.out / 'report.md'}")
    if report.problem:
        raise InputError(None, report.problem)


def run_study(study: Study, console: Terminal) -> None:
    """Do a study, and print its results and the files that have them."""
    from ..lab.study import do
    from ..lab.terminal import Bar, say

    with Bar(console) as progress:
        results, written = do(study, progress)
    console.print(results, highlight=False)
    near = [path for path in written if path.parent == study.out]
    deep = Counter(path.parent for path in written if path.parent != study.out)
    names = [
        *(f"{path} (open it in a browser)" if path.suffix == ".html" else str(path) for path in near),
        *(f"{count} files in {folder}" for folder, count in deep.items()),
    ]
    if names:
        *files, last = names
        say(console, f"wrote {', '.join(files)}{' and ' if files else ''}{last}")
        if usage := study.usage():
            say(console, f"\n{usage}")
    if problem := results.problem():
        raise problem
