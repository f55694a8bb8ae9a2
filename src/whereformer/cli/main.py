"""Parse the command line and run a command. For bad input, print one line (or tyro's box) and exit with code 2."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Union, cast

import tyro

from .. import __version__
from ..errors import InputError
from ..files import real_folder
from ..lab import ranks
from .analyze import Analyze
from .bench import Bench
from .compare import Compare
from .cost import Cost
from .distill_positions import DistillPositions
from .ending import ending
from .export import Export
from .finetune import Finetune
from .flags import registry
from .positions import ListPositions
from .pretrain import Pretrain
from .probe import Probe
from .processes import check_processes
from .properties import Properties
from .terminal import output
from .translate import Translate

COMMANDS: dict[str, Callable[..., Any]] = {
    "compare": Compare,
    "probe": Probe,
    "bench": Bench,
    "pretrain": Pretrain,
    "finetune": Finetune,
    "translate": Translate,
    "analyze": Analyze,
    "distill-positions": DistillPositions,
    "properties": Properties,
    "export": Export,
    "cost": Cost,
    "positions": ListPositions,
}


LONGEST = 4096
"""The most characters of a word on the command line, which is what paths have. An error may show the whole word."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the ``whereformer`` command."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    with ending():
        if given == ["--version"]:
            print(f"whereformer {__version__}")
            return
        _check_words(given)
        command = _parse(given)
    execute(command)


def _check_words(given: Sequence[str]) -> None:
    """Check that no word is too long, and that a folder for results has a name.

    Raises:
        InputError: if not; it names the option.
    """
    for before, word in itertools.pairwise(["", *given]):
        if word == "--out=" or (before, word) == ("--out", ""):
            # As a path, it would be the current folder.
            raise InputError(None, "--out: expected a folder, got an empty name")
        if len(word) > LONGEST:
            option = next((text.partition("=")[0] for text in (word, before) if text.startswith("--")), "the command")
            raise InputError(None, f"{option}: expected at most {LONGEST} characters, got {len(word)}")


def _parse(given: Sequence[str]) -> Any:
    """Read the command line: the command, with its options as fields."""
    # In the list of commands each has one paragraph; the help of one command has all.
    parsers = (
        Annotated[
            Any,
            tyro.conf.subcommand(
                name, constructor=command, description=None if name in given[:1] else _summary(command)
            ),
        ]
        for name, command in COMMANDS.items()
    )
    return tyro.cli(
        cast(Any, Union[tuple(parsers)]),  # noqa: UP007  # the union of all commands
        prog="whereformer",
        description="Token positions as a swappable, inspectable and fast part of self-attention.",
        args=given,
        registry=registry(),
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
    )


def _summary(command: Callable[..., Any]) -> str:
    """Return the first paragraph of a command's docstring."""
    return (inspect.getdoc(command) or "").partition("\n\n")[0]


def execute(command: Any) -> None:
    """Run a command. If it fails or is interrupted, print one line to stderr and exit with a code."""
    with ending(command):
        check_processes(command)
        _followed(command).run(output(quiet=not ranks.is_main()))
        ranks.leave()


def _followed(command: Any) -> Any:
    """Return a command whose output folders are no links: a run stays where it began, whatever becomes of a link."""
    chosen = getattr(command, "command", None)  # of translate
    if dataclasses.is_dataclass(chosen):
        return dataclasses.replace(command, command=_followed(chosen))
    named = {name: getattr(command, name, None) for name in ("out", "cache")}
    real = {name: real_folder(path) for name, path in named.items() if isinstance(path, Path)}
    moved = {name: path for name, path in real.items() if path != named[name]}
    return dataclasses.replace(command, **moved) if moved else command
