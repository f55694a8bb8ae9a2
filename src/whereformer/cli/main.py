"""The command line: parse, call, print. Bad input gives one line (or the parser's own box) and exit code 2."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Union, cast

import tyro
from rich.console import Console

from .. import __version__
from ..errors import InputError, fail
from .analyze import Analyze
from .bench import Bench
from .compare import Compare
from .cost import Cost
from .distill_positions import DistillPositions
from .finetune import Finetune
from .positions import ListPositions
from .pretrain import Pretrain
from .properties import Properties
from .translate import Translate

COMMANDS: dict[str, Callable[..., Any]] = {
    "compare": Compare,
    "bench": Bench,
    "pretrain": Pretrain,
    "finetune": Finetune,
    "translate": Translate,
    "analyze": Analyze,
    "distill-positions": DistillPositions,
    "properties": Properties,
    "cost": Cost,
    "positions": ListPositions,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the ``whereformer`` command."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given == ["--version"]:
        print(f"whereformer {__version__}")
        return
    # A list of commands has a paragraph of each; who asks for one of them wants all of it.
    parsers = (
        Annotated[
            Any,
            tyro.conf.subcommand(
                name, constructor=command, description=None if name in given[:1] else _summary(command)
            ),
        ]
        for name, command in COMMANDS.items()
    )
    command = tyro.cli(
        cast(Any, Union[tuple(parsers)]),  # noqa: UP007  # as many as there are commands
        prog="whereformer",
        description="Where a token is, as a swappable, inspectable, fast part of self-attention.",
        args=given,
    )
    execute(command)


def in_flags(error: InputError, command: Any) -> str:
    """An error as a command's user reads it: with flags where Python says names of arguments."""
    flags = flags_of(command)
    reason = re.sub("`([a-z_]+)`", lambda found: flags.get(found[1], found[0]), error.reason)
    if error.field is None:
        return reason
    return f"{flags.get(error.field, _flag(error.field))}: {reason}"


def flags_of(command: Any) -> dict[str, str]:
    """What the command line calls a command's fields, by name; FLAGS are those that are called otherwise."""
    flags: dict[str, str] = {}
    for field in dataclasses.fields(command):
        value = getattr(command, field.name)
        flags |= flags_of(value) if dataclasses.is_dataclass(value) else {field.name: _flag(field.name)}
    return flags | getattr(command, "FLAGS", {})


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _summary(command: Callable[..., Any]) -> str:
    """The first paragraph of what a command says of itself."""
    return (inspect.getdoc(command) or "").partition("\n\n")[0]


def execute(command: Any) -> None:
    """Run a command. If it cannot do its work, print one line to stderr and exit with a code."""
    try:
        # Without markup, because paths may hold brackets.
        command.run(Console(markup=False, width=None if sys.stdout.isatty() else 100))
    except InputError as error:
        raise SystemExit(fail(in_flags(error, command))) from None
    except OSError as error:
        raise SystemExit(fail(str(error))) from None
    except KeyboardInterrupt:
        raise SystemExit(fail("interrupted; what is finished is kept, the same command continues", 130)) from None
