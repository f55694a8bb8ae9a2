"""A recipe: the options of a study, which are its command line, its Python function, its settings and its record.

A recipe is a frozen dataclass. The docstring below a field is the help text of its flag. Markers in the field's
annotation say which values it takes, and whether it may differ when a run is continued.
"""

from __future__ import annotations

import builtins
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, asdict, dataclass, fields, replace
from functools import partial
from importlib.util import resolve_name as absolute_name
from pathlib import Path
from pkgutil import resolve_name
from tempfile import TemporaryDirectory
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, Union, get_args, get_origin, get_type_hints

from .._extras import STUDIES, require
from ..errors import InputError, join_words, short_repr, suggest
from .options import MOST_COUNT, MOST_RUNS, MOST_SEED, MOST_SIZE

if TYPE_CHECKING:
    from .report.report import Report
    from .run import Run


class _Lazy:
    """A module, or what a module has, that is imported on first use; or what ``names`` are imported from."""

    def __init__(self, name: str, *, names: bool = False) -> None:
        self._name, self._names = name, names

    def __getattr__(self, name: str) -> Any:
        return _Lazy(f"{self._name}.{name}") if self._names else getattr(resolve_name(self._name), name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return resolve_name(self._name)(*arguments, **options)


@contextmanager
def lazily(module: str) -> Iterator[None]:
    """Let what a module imports in this block wait for its first use, so that ``--help`` need not wait for torch.

    Names may be those of modules, of what is called, or of what only annotations need.
    """
    usual = builtins.__import__

    def note(name: str, known: Any = None, local: Any = None, names: Any = (), level: int = 0) -> Any:
        if known is None or known["__name__"] != module:  # something else, as in another thread
            return usual(name, known, local, names, level)
        return _Lazy(absolute_name("." * level + name, known["__package__"]), names=bool(names))

    builtins.__import__ = note  # type: ignore[assignment]  # it returns what stands for a module
    try:
        yield
    finally:
        builtins.__import__ = usual


class Free:
    """Marks an option that may differ when a run is continued, since it decides no number of a record."""


class Listed:
    """Marks several values that are separated by commas on the command line."""


@dataclass(frozen=True)
class Range:
    """Marks a number that lies between two others, ``ends`` included or not; of several numbers, each does."""

    low: float
    high: float
    ends: bool = True

    def check(self, name: str, value: Any) -> None:
        """Raise an InputError for another value."""
        for number in value if isinstance(value, tuple) else (value,):
            if (self.ends and self.low <= number <= self.high) or self.low < number < self.high:
                continue
            expected = f"{self.low:.10g} to {self.high:.10g}"
            if not self.ends:
                expected = f"a number above {self.low:g} and below {self.high:g}"
            elif self.high in (MOST_SIZE, MOST_COUNT):  # which few will ever meet
                expected = f"at most {self.high}" if number > self.high else f"at least {self.low}"
            raise InputError(name, f"expected {expected}, got {short_repr(number)}")


Between = partial(Range, ends=False)

RECIPE = "recipe name"
"""What records call it. The space keeps it apart from options."""

Schedule = Literal["linear", "cosine", "inverse_sqrt"]
Names = Annotated[tuple[str, ...], Listed]
Counts = Annotated[tuple[int, ...], Listed]
Numbers = Annotated[tuple[float, ...], Listed]


@dataclass(frozen=True, kw_only=True)
class WithPlugin:
    """Base class of options, of which one names a plugin. They have the declared types, and what markers ask for.

    Raises:
        InputError: if one has another value.
    """

    plugin: Annotated[Path | None, Free] = None
    """Your own Python file that registers position methods, which options and models can then name."""

    def __post_init__(self) -> None:
        defaults = {field.name: default(field) for field in fields(self)}
        for name, hint in hints(type(self)).items():
            value = _as_declared(name, hint, getattr(self, name))
            if value == () != defaults[name]:
                raise InputError(name, "expected at least one, got none")
            object.__setattr__(self, name, value)


@dataclass(frozen=True, kw_only=True)
class Recipe(WithPlugin):
    """Base class of recipes. A subclass has a NAME, its options, and :meth:`run`."""

    NAME: ClassVar[str]
    QUICK: ClassVar[dict[str, Any]] = {}
    """The defaults of options with ``quick``, if there is such an option."""
    FLAGS: ClassVar[dict[str, str]] = {}
    """Options whose flag does not follow from their name, such as a word without a flag."""
    MANY: ClassVar[bool] = False
    """Whether several processes of a launcher, such as torchrun, can do it together."""
    MAKES_FILES: ClassVar[bool] = False
    """Whether its files are what it is for, such as a model, so that the Python function needs the argument ``out``."""

    out: Annotated[Path, Free]
    """Folder for the results."""
    device: Annotated[Literal["auto", "cpu", "cuda"], Free] = "auto"
    """Where to compute. "auto" is a GPU if there is one."""
    keep_versions: Annotated[bool, Free] = False
    """Keep results, checkpoints and encoded text of other versions of whereformer. By default they are done again."""

    def __init_subclass__(cls) -> None:
        for name in {"help", "quiet"} & cls.__annotations__.keys():
            raise InputError(name, f"an option of {cls.__name__} needs another name; every recipe has this one")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check()

    @classmethod
    def usual(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the defaults that some options, not checked yet, bring with them, such as those of ``quick``."""
        return {} if options.get("quick", False) is False else cls.QUICK

    @property
    def small(self) -> bool:
        """Whether its models are so small that one keeps neither a second thread nor a GPU busy."""
        return False

    @property
    def outputs(self) -> tuple[str, ...]:
        """The paths of its results in its folder, besides records and report. Paths of folders end in "/".

        Writing there is tried before any work begins.
        """
        return ()

    def check(self) -> None:
        """Check what concerns several options. It imports no torch.

        Raises:
            InputError: if they do not fit each other.
        """

    def resolved(self) -> Self:
        """Return the recipe with whatever its options stand for, such as all methods for "all". It may import torch.

        Raises:
            InputError: if an option stands for nothing.
        """
        return self

    def run(self, run: Run) -> Report:
        """Do what the folder lacks, and return the report."""
        raise NotImplementedError

    def record(self) -> dict[str, Any]:
        """Return the options that decide a number, as JSON has them."""
        kinds = hints(type(self))
        options = {name: value for name, value in asdict(self).items() if Free not in get_args(kinds[name])}
        return {name: _in_json(value) for name, value in options.items()}

    def start(self, *, quiet: bool = False, command: str = "") -> Report:
        """Run the recipe in its folder, and write the report there, with the command that gave its options.

        Raises:
            InputError: if an option is bad, or the folder holds something else, or cannot be written.
            ImportError: if a module is missing, even if only the report needs it.
        """
        require("train", *STUDIES)
        from ..manifest import fingerprint_of_code
        from .methods import load_plugin
        from .run import VERSION, Run

        load_plugin(self.plugin)
        recipe = self.resolved()
        options, own = {RECIPE: self.NAME, **recipe.record()}, {"code": own_file(type(self)), "plugin": self.plugin}
        more: dict[str, Any] = {"jobs": getattr(recipe, "jobs", None), "small": recipe.small, "plugin": self.plugin}
        more |= {"keep_versions": recipe.keep_versions, "outputs": recipe.outputs}
        with Run(recipe.out, options, device=recipe.device, quiet=quiet, **more) as run:
            for what, file in own.items():
                if file is not None:
                    run.identify(VERSION + what, fingerprint_of_code(file))
            facts = {"Options": recipe.record(), "Machine": run.provenance["machine"]}
            report = with_versions(replace(recipe.run(run), command=command, facts=facts), run.by)
            if run.is_main:
                report.write(recipe.out)
        return report


def with_versions(report: Report, by: Mapping[str, Sequence[str]]) -> Report:
    """Return a report that says which versions of this package computed it, unless only this version did.

    Args:
        report: the report.
        by: the versions that computed each result.
    """
    from ..provenance import this_version
    from .sheet import Column, Sheet

    results: dict[str, list[str]] = {}
    for name, versions in by.items():
        results.setdefault(join_words(versions), []).append(name)
    if results.keys() <= {this_version()}:
        return report
    sentence = f"These results are of whereformer {'; '.join(results)}; the table of versions says which."
    columns = [Column("version"), Column("results", left=True, wraps=True)]
    rows = [(versions, ", ".join(names)) for versions, names in results.items()]
    sheet = Sheet.of("Versions of whereformer", columns, rows, folded=True)
    return replace(report, sentences=[*report.sentences, sentence], parts=[*report.parts, sheet])


@dataclass(frozen=True, kw_only=True)
class ManyRuns(Recipe):
    """Base class of recipes whose runs are independent of one another."""

    seed: Annotated[int, Range(0, MOST_SEED), Free] = 0
    """The first seed."""
    jobs: Annotated[int | None, Range(1, MOST_RUNS), Free] = None
    """How many runs at a time, each in a process of its own. Default: one for each GPU, or of small models four; on the
    CPU one, or of small models one for each core, but at most 8."""


@dataclass(frozen=True, kw_only=True)
class Trains(Recipe):
    """Base class of recipes that let people choose how a model is trained. Their :meth:`run` heeds ``dry_run``."""

    DRY: ClassVar = "A dry run: nothing was trained or written."

    dry_run: Annotated[bool, Free] = False
    """Check everything, show the plan and stop. Nothing is trained or written."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the arithmetic. bfloat16 is mixed precision, for GPUs and CPUs that are fast at it; the weights stay
    float32. "auto" is bfloat16 on a GPU."""
    schedule: Schedule = "linear"
    """How the learning rate goes on after the warm-up. It falls to zero in a line or along a cosine; inverse_sqrt: it
    falls with the inverse square root of the step."""

    def bfloat16(self, device: str) -> bool:
        """Return whether to compute in bfloat16."""
        return self.dtype == "bfloat16" or (self.dtype == "auto" and device == "cuda")

    def record(self) -> dict[str, Any]:
        from .options import find_device

        return {**super().record(), "dtype": "bfloat16" if self.bfloat16(find_device(self.device).type) else "float32"}

    def start(self, *, quiet: bool = False, command: str = "") -> Report:
        if not self.dry_run:
            return super().start(quiet=quiet, command=command)
        with TemporaryDirectory() as scratch:
            return Recipe.start(replace(self, out=Path(scratch)), quiet=quiet, command=command)


def function(kind: type[Recipe]) -> Callable[..., Report]:
    """Return a recipe as a Python function of its options, by name only.

    Without ``out``, nothing is kept but the report. ``quiet=True`` shows no progress.
    """

    def call(*, out: str | Path | None = None, quiet: bool = False, **options: Any) -> Report:
        if out is None and kind.MAKES_FILES:
            raise InputError("out", "expected a folder for the model, got None")
        with TemporaryDirectory() as scratch:
            return kind(**{**kind.usual(options), **options, "out": scratch if out is None else out}).start(quiet=quiet)

    options = dict(inspect.signature(kind).parameters)
    options["out"] = options["out"].replace(default=None)
    options["quiet"] = inspect.Parameter("quiet", inspect.Parameter.KEYWORD_ONLY, default=False, annotation="bool")
    call.__name__ = call.__qualname__ = kind.NAME.split()[0]
    call.__doc__ = inspect.getdoc(kind)
    call.__signature__ = inspect.Signature([*options.values()])  # type: ignore[attr-defined]  # a function may have one
    return call


def own_file(kind: type[Recipe]) -> Path | None:
    """Return the file of a recipe of the user's own; None for those of this package, and for those of a notebook."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    ours = kind.__module__.partition(".")[0] == __name__.partition(".")[0]
    return None if ours or file is None else Path(file)


def hints(kind: type[Any]) -> dict[str, Any]:
    """Return the annotation of each option, with its markers."""
    found = get_type_hints(kind, include_extras=True)
    return {field.name: found[field.name] for field in fields(kind)}


def is_listed(hint: Any) -> bool:
    """Return whether an option's values are separated by commas."""
    return Listed in get_args(hint)


def flag(name: str) -> str:
    """Return the flag of a field: ``--max-length`` for ``max_length``."""
    return f"--{name.replace('_', '-')}"


def flags_of(kind: Any) -> dict[str, str]:
    """Return flags by field name; of what is on by default, the flag that turns it off.

    ``FLAGS`` has those that don't follow from a field's name.
    """
    off = {field.name for field in fields(kind) if default(field, None) is True}
    usual = {field.name: flag(f"no_{field.name}" if field.name in off else field.name) for field in fields(kind)}
    return usual | getattr(kind, "FLAGS", {})


def default(field: Field[Any], without: Any = MISSING) -> Any:
    """Return a field's default, or ``without`` if it has none."""
    if field.default_factory is not MISSING:
        return field.default_factory()
    return without if field.default is MISSING else field.default


def own_first(kind: type[Any]) -> list[Field[Any]]:
    """Return the fields: those that the class declares itself, in its order, then those that it shares with others."""
    own = list(kind.__annotations__)
    return sorted(fields(kind), key=lambda field: own.index(field.name) if field.name in own else len(own))


def _in_json(value: Any) -> Any:
    """Return an option's value as JSON has it."""
    if isinstance(value, tuple):
        return [_in_json(part) for part in value]
    return str(value) if isinstance(value, Path) else value


def _as_declared(name: str, hint: Any, value: Any) -> Any:
    """Return a value of the declared type, for which text, a list or a whole number may stand, checked by its markers.

    None is always fine where it is declared.
    """
    kind, *markers = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    options = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    if value is None and NoneType in options:
        return None
    value = value.tolist() if hasattr(value, "tolist") else value  # numbers and arrays of numpy and torch
    if get_origin(options[0]) is tuple:
        value = _several(name, get_args(options[0])[0], value, commas=Listed in markers)
    else:
        value = _one(name, options[0], value)
    for marker in markers:
        if hasattr(marker, "check"):
            marker.check(name, value)
    return value


def _one(name: str, kind: Any, value: Any) -> Any:
    """Return a value of a type that is no tuple."""
    if get_origin(kind) is Literal:
        if value in get_args(kind):
            return value
        hint = suggest(str(value), get_args(kind))
        raise InputError(name, f"expected {', '.join(get_args(kind))}, got {short_repr(value)}{hint}")
    allowed = {int: (int, str), float: (float, int, str), str: (str, Path), Path: (str, Path)}.get(kind, (kind,))
    if isinstance(value, allowed) and isinstance(value, bool) == (kind is bool):
        try:
            return kind(value)
        except (ValueError, OverflowError):
            pass
    expected = {int: "a whole number", float: "a number"}.get(kind, kind.__name__)
    raise InputError(name, f"expected {expected}, got {short_repr(value)}")


def _several(name: str, kind: type, value: Any, *, commas: bool) -> tuple[Any, ...]:
    """Return distinct values of a type from a sequence, from one, or from text with commas."""
    parts = value.split(",") if commas and isinstance(value, str) else value
    parts = parts if isinstance(parts, list | tuple) else [parts]
    words = [part.strip() if isinstance(part, str) else part for part in parts]
    if "" in words and any(words):
        raise InputError(name, f"expected something between commas, got {short_repr(value)}")
    return tuple(dict.fromkeys(_one(name, kind, word) for word in words if word != ""))
