"""The shape of every study: options that say what is asked, a job that can be done, and results that can be shown.

A study is a dataclass whose fields are its options; the docstring below a field is its help text. The command line
reads its options as flags, and :func:`function` makes a Python function of it. :meth:`Study.job` checks the options
before anything is read or written. The job does the runs that its folder lacks, and returns its results.
"""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from tempfile import TemporaryDirectory
from types import UnionType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, get_args, get_origin, get_type_hints

from ..errors import InputError, shown
from .progress import Progress
from .ranks import is_main
from .recipe import default, flag, own_first

if TYPE_CHECKING:
    from .shown import Shown
    from .store import Results


class Job(Protocol):
    """A study's work, already checked. With the option ``dry_run``, it also has ``plan(folder, progress)``.

    That returns the :class:`~whereformer.lab.shown.Plan` of what ``run`` would do, and writes nothing.
    """

    def run(self, folder: Path, progress: Progress) -> Results:
        """Do the runs that the folder lacks, and return the results of all."""
        ...


@dataclass(frozen=True, kw_only=True)
class Study:
    """Base class of studies."""

    FLAGS: ClassVar[dict[str, str]] = {}
    """Flags that don't follow from a field's name."""
    METAVARS: ClassVar[dict[str, str]] = {}
    """Placeholders in ``--help`` that are not those of other commands."""
    MANY: ClassVar[bool] = False
    """Whether several processes of a launcher, such as torchrun, can do it together."""
    MAKES_FILES: ClassVar[bool] = False
    """Whether its files are what it is for, such as a model, so that a Python function needs the argument ``out``."""

    out: Path
    """Folder for the results."""

    def job(self) -> Job:
        """Check the options, and return the work to do.

        Raises:
            InputError: if an option has a bad value; it names the option.
        """
        raise NotImplementedError

    def usage(self) -> str:
        """Return what to do with the files, to show below their names; empty if there is nothing to say."""
        return ""


def command_line(options: Any, name: str) -> str:
    """Return the command line for a command's options, which shells read, with every option that is not the default."""
    return shlex.join([__name__.partition(".")[0], *name.split(), *_words(options, getattr(options, "FLAGS", {}))])


def _words(options: Any, flags: dict[str, str]) -> list[str]:
    words: list[str] = []
    for field in own_first(type(options)):
        value = getattr(options, field.name)
        if is_dataclass(value):
            words += _words(value, flags)
        elif value != default(field) and value is not None:
            switch = isinstance(value, bool)
            known = flags.get(field.name, flag(field.name if value or not switch else f"no_{field.name}"))
            listed = value if isinstance(value, tuple) else () if switch else (value,)
            if known.startswith("-"):
                words += [known, *map(str, listed)]
            else:  # words without a flag come first, where no flag takes them for its own
                words = [*map(str, listed), *words]
    return words


def do(study: Study, progress: Progress) -> tuple[Shown, list[Path]]:
    """Do a study in its folder, which is locked meanwhile, and save its results there.

    Returns:
        The results, and the files that they were saved to. Of several processes, one saves. A dry run returns the plan.

    Raises:
        InputError: if an option has a bad value, or the folder holds something else.
    """
    from .folder import open_folder
    from .shown import Shown

    job: Any = study.job()
    if getattr(study, "dry_run", False):
        return job.plan(study.out, progress) if is_main() else Shown(), []
    with open_folder(study.out):
        results = job.run(study.out, progress)
        return results, results.save(study.out) if is_main() else []


def function(study: type[Study], name: str) -> Callable[..., Any]:
    """Return a Python function that does a study.

    Its arguments are the study's options, by name only. An option whose text lists several things also takes a sequence
    of them. Without ``out``, nothing is kept but what the function returns; studies that make a model need it.
    ``quiet=True`` shows no progress.
    """
    options = {each.name: each for each in fields(study)}
    hints = get_type_hints(study)

    def call(*, out: str | Path | None = None, quiet: bool = False, **given: Any) -> Shown:
        from .terminal import Bar, output

        for each in given:
            if each not in options:
                close = get_close_matches(each, options, 1)
                hint = f"; did you mean {close[0]!r}?" if close else f"; expected some of {', '.join(options)}"
                raise InputError(each, f"{name} has no such option{hint}")
        for option in options.values():
            if option.name not in ("out", *given) and default(option) is MISSING:
                raise InputError(option.name, f"expected {option.type}, got none")
        if out is None and study.MAKES_FILES:
            raise InputError("out", "expected a folder for the model, got None")
        with ExitStack() as stack:
            folder = Path(stack.enter_context(TemporaryDirectory()) if out is None else out)
            named = {each: _option(options[each], hints[each], value) for each, value in given.items()}
            progress = Progress() if quiet else stack.enter_context(Bar(output()))
            results, _ = do(study(out=folder, **named), progress)
        return results

    call.__name__ = call.__qualname__ = name
    call.__doc__ = inspect.getdoc(study)
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter(
            each.name,
            keyword,
            default=None if each.name == "out" else default(each, inspect.Parameter.empty),
            annotation=each.type,
        )
        for each in options.values()
    ]
    quiet = inspect.Parameter("quiet", keyword, default=False, annotation="bool")
    call.__signature__ = inspect.Signature([*parameters, quiet])  # type: ignore[attr-defined]  # a function may have one
    return call


def _option(field: Field[Any], hint: Any, value: Any) -> Any:
    """Return the value of an option as its dataclass takes it."""
    several = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    for kind in get_args(hint) if isinstance(hint, UnionType) else (hint,):
        if type(value) is kind or (get_origin(kind) is Literal and value in get_args(kind)):
            return value
        if get_origin(kind) is tuple and (several or isinstance(value, str | Path)):
            listed, of = value if several else [value], get_args(kind)[0]
            if of is str or all(isinstance(each, str | Path) for each in listed):
                return tuple(map(of, listed))
        if kind in (Path, str) and isinstance(value, str | Path):  # a model is a folder or an id
            return kind(value)
        if kind is float and type(value) is int:
            return float(value)
        if kind is str and several:
            return ",".join(map(str, value))
    raise InputError(field.name, f"expected {field.type}, got {shown(value)}")
