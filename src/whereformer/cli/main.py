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

from .. import __version__, studies
from ..errors import InputError
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
    "cost": "cost:Cost",
    "positions": "positions:ListPositions",
}
"""Where the dataclass of each command's options is in this package; None for a study, which knows."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the ``whereformer`` command."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    with ending():
        if given == ["--version"]:
            print(f"whereformer {__version__}")
            return
        command = _parse(given)
    execute(command)


def _parse(given: Sequence[str]) -> Any:
    """Read the command line: the command, with its options as fields."""
    for before, word in itertools.pairwise(["", *given]):
        if word.strip() == "" or re.fullmatch(r"--[^=]+=\s*", word):  # an empty path would be the current folder
            raise InputError(None, f"{word.strip().rstrip('=') or before}: got an empty word".lstrip(": "))
    rules: Any = {"registry": registry(), "config": (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)}
    name, *options = given or [""]
    if name in COMMANDS:
        found = tyro.cli(command_class(name), prog=f"whereformer {name}", args=options, **rules)
        return getattr(found, "command", found)  # of those of translate, the one that was chosen
    parsers = []
    for each in COMMANDS:
        kind = command_class(each)
        summary = (inspect.getdoc(kind) or "").partition("\n\n")[0]
        parsers.append(Annotated[Any, tyro.conf.subcommand(each, constructor=kind, description=summary)])
    return tyro.cli(
        cast(Any, Union[tuple(parsers)]),  # noqa: UP007  # the union of all commands
        prog="whereformer",
        description="Token positions as a swappable, inspectable and fast part of self-attention.",
        args=given,
        **rules,
    )


def command_class(name: str) -> type[Any]:
    """Import the class of a command's options."""
    place = COMMANDS[name]
    if place is None:
        return studies.options(name)
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
        if isinstance(command, Study):
            run_study(command, console)
        else:
            command.run(console)
        ranks.leave()


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
