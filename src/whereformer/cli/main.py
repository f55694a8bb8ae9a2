"""Parse the command line and run a command. For bad input, print one line (or tyro's box) and exit with code 2."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Union, cast

import tyro
from rich.console import Console

from .. import __version__
from ..errors import InputError
from ..runs import ranks
from .analyze import Analyze
from .bench import Bench
from .compare import Compare
from .cost import Cost
from .distill_positions import DistillPositions
from .finetune import Finetune
from .flags import in_flags, registry
from .positions import ListPositions
from .pretrain import Pretrain
from .processes import check_processes, fail
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
    command = tyro.cli(
        cast(Any, Union[tuple(parsers)]),  # noqa: UP007  # the union of all commands
        prog="whereformer",
        description="Token positions as a swappable, inspectable and fast part of self-attention.",
        args=given,
        registry=registry(),
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
    )
    execute(command)


def _summary(command: Callable[..., Any]) -> str:
    """Return the first paragraph of a command's docstring."""
    return (inspect.getdoc(command) or "").partition("\n\n")[0]


def execute(command: Any) -> None:
    """Run a command. If it fails on bad input or is interrupted, print one line to stderr and exit with a code."""
    try:
        # Without markup, because paths may hold brackets.
        check_processes(command)
        quiet = not ranks.is_main()
        command.run(Console(markup=False, width=None if sys.stdout.isatty() else 100, quiet=quiet))
        ranks.leave()
    except InputError as error:
        raise SystemExit(fail(in_flags(error, command))) from None
    except OSError as error:
        raise SystemExit(fail(str(error))) from None
    except KeyboardInterrupt:
        raise SystemExit(fail("interrupted; finished work is kept, and the same command continues", 130)) from None
    except RuntimeError:
        # A process loses its connection to one that has failed, which has said why.
        if not ranks.another_failed():
            raise
        raise SystemExit(2) from None
