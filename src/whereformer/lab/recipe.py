"""A recipe: the options of a study, which are its command line, its Python function, its settings and its record.

A recipe is a frozen dataclass. The docstring below a field is the help text of its flag. Markers in the field's
annotation say which values it accepts, and whether it may change when a run is continued.
"""

from __future__ import annotations

import inspect
import json
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, asdict, dataclass, fields, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, Union, get_args, get_origin, get_type_hints

from .._extras import STUDIES, require
from ..checks import check_choice, check_range, kind_error
from ..errors import InputError, short_repr, suggest
from .options import MAX_RUNS, MAX_SEED

if TYPE_CHECKING:
    from .report.report import Report
    from .run import Run


class LazyModule:
    """Stands for a module, which is imported when one of its names is first used.

    A recipe imports what needs torch this way, so that ``--help`` need not wait for it. Type checkers see the usual
    import, under ``TYPE_CHECKING``.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self._name), name)


def lazy_modules(*names: str) -> list[LazyModule]:
    """Return a :class:`LazyModule` for each of several modules of this package, such as "analysis.fit"."""
    return [LazyModule(f"{ROOT}.{name}") for name in names]


class MayChange:
    """Marks an option that may change when a run is continued: no recorded number depends on it, or the records have it
    elsewhere, as seeds in their keys, a plugin by its hash, and the kind of device that was used."""


class CommaSeparated:
    """Marks several values that are separated by commas on the command line."""


@dataclass(frozen=True)
class Range:
    """Marks a number, or several numbers, that must lie between two limits; ``ends``: whether limits are allowed."""

    low: float
    high: float
    ends: bool = True

    def check(self, name: str, value: object) -> None:
        """Raise an InputError for a number outside the range."""
        for number in value if isinstance(value, tuple) else (value,):
            check_range(name, number, self.low, self.high, ends=self.ends)


Between = partial(Range, ends=False)

ROOT = __name__.partition(".")[0]
RECIPE = "recipe name"
"""The key of a recipe's name among a record's options. The space keeps it apart from options."""

Schedule = Literal["linear", "cosine", "inverse_sqrt"]
Names = Annotated[tuple[str, ...], CommaSeparated]
Counts = Annotated[tuple[int, ...], CommaSeparated]
Numbers = Annotated[tuple[float, ...], CommaSeparated]


@dataclass(frozen=True, kw_only=True)
class WithPlugin:
    """Base class of options, among them a plugin. Their values are converted to the declared types.

    Raises:
        InputError: if a value is not of the declared type, or a marker forbids it.
    """

    plugin: Annotated[Path | None, MayChange] = None
    """Your own Python file that registers position methods, which options and models can then name."""

    def __post_init__(self) -> None:
        defaults = {field.name: default(field) for field in fields(self)}
        for name, hint in hints(type(self)).items():
            value = _convert(name, hint, getattr(self, name))
            if value == () != defaults[name]:
                raise InputError(name, "expected at least one, got none")
            object.__setattr__(self, name, value)


@dataclass(frozen=True, kw_only=True)
class Recipe(WithPlugin):
    """Base class of recipes. A subclass has a NAME, its options, and :meth:`run`."""

    NAME: ClassVar[str]
    EXAMPLE: ClassVar[str]
    """A command for the help to begin with."""
    QUICK: ClassVar[dict[str, Any]] = {}
    """The defaults of options with ``quick``, if the recipe has this option."""
    FLAGS: ClassVar[dict[str, str]] = {}
    """Options whose flag does not follow from their name, such as a word without a flag."""
    MANY: ClassVar[bool] = False
    """Whether several processes of a launcher, such as torchrun, can run it together."""
    MAKES_FILES: ClassVar[bool] = False
    """Whether it makes files, such as a model, that users keep: the Python function then needs the argument ``out``."""

    out: Annotated[Path, MayChange]
    """Folder for the results."""
    device: Annotated[Literal["auto", "cpu", "cuda"], MayChange] = "auto"
    """Where to compute. "auto" is a GPU if there is one. A folder with results is only continued on the same kind."""

    def __init_subclass__(cls) -> None:
        for name in {"help", "quiet"} & cls.__annotations__.keys():
            raise InputError(name, f"an option of {cls.__name__} needs another name; every recipe has this one")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check()

    @classmethod
    def defaults_for(cls, options: Mapping[str, object]) -> dict[str, Any]:
        """Return the defaults that follow from other options, which are not checked yet, such as ``quick``."""
        return {} if options.get("quick", False) is False else cls.QUICK

    @property
    def has_small_models(self) -> bool:
        """Whether its models are so small that one keeps neither a second thread nor a GPU busy."""
        return False

    @property
    def outputs(self) -> tuple[str, ...]:
        """The paths of its results in its folder, besides records and report. Paths of folders end in "/".

        They are checked before any work begins.
        """
        return ()

    def check(self) -> None:
        """Raise an InputError for options that do not fit each other. It does not import torch."""

    def resolve(self) -> Self:
        """Return the recipe with abbreviations written out, such as all methods for "all". It may import torch.

        An option that names something that does not exist raises an InputError.
        """
        return self

    def run(self, run: Run) -> Report:
        """Compute the results that the folder lacks, and return the report."""
        raise NotImplementedError

    def recorded_options(self) -> dict[str, object]:
        """Return the options on which a result depends, as JSON."""
        kinds = hints(type(self))
        options = {name: value for name, value in asdict(self).items() if MayChange not in get_args(kinds[name])}
        return dict(json.loads(json.dumps(options, default=str)))  # paths become text

    def format_command(self, **changes: object) -> str:
        """Return the command line of the recipe with some options changed, without those that have default values."""
        defaults = {field.name: default(field, None) for field in sort_fields(type(self))}
        options = {name: changes.get(name, getattr(self, name)) for name in defaults}
        for name, value in [*options.items()]:
            rest = {key: options[key] for key in options if key != name}
            if value == {**defaults, **self.defaults_for(rest)}[name]:  # defaults may follow from other options
                options = rest
        words, flags, types = ["whereformer", self.NAME], find_flags(type(self)), hints(type(self))
        for name, value in options.items():
            values = [*map(str, value)] if isinstance(value, tuple | list) else [str(value)]
            values = [",".join(values)] if is_comma_separated(types[name]) else values
            words += [flags[name], *([] if isinstance(value, bool) else values)]
        return shlex.join(words)

    def start(self, *, quiet: bool = False, command: str = "") -> Report:
        """Run the recipe in its folder, and write the report there, with the command that gave its options.

        Raises:
            InputError: if an option is bad, or the folder has results of another recipe or cannot be written.
            ImportError: if a module is missing, even if only the report needs it.
        """
        require("train", *STUDIES)
        from ..manifest import fingerprint_of_code
        from .methods import load_plugin
        from .run import VERSION, Run

        load_plugin(self.plugin)
        recipe = self.resolve()
        options = recipe.recorded_options()
        with Run(recipe, {RECIPE: self.NAME, **options}, quiet=quiet) as run:
            for name, file in {"code": find_user_file(type(self)), "plugin": self.plugin}.items():
                if file is not None:
                    run.record_hash(VERSION + name, fingerprint_of_code(file))
            facts = {"Options": options, "Machine": run.provenance["machine"]}
            report = recipe.run(run)
            methods = report.methods or str(getattr(recipe, "positions", getattr(recipe, "position", "")))
            guide = "" if find_user_file(type(self)) else f"guides/{self.NAME.split()[0]}"
            report = replace(report, command=command, facts=facts, methods=methods, guide=guide)
            if run.is_main:
                report.write(recipe.out)
        return report


@dataclass(frozen=True, kw_only=True)
class ManyRuns(Recipe):
    """Base class of recipes whose jobs are independent of one another."""

    seed: Annotated[int, Range(0, MAX_SEED), MayChange] = 0
    """The first seed."""
    jobs: Annotated[int | None, Range(1, MAX_RUNS), MayChange] = None
    """How many jobs, such as trainings, run at a time, each in its own process. Default: one for each GPU, or four if
    models are small; on the CPU one, or if models are small one for each core, but at most 8."""
    ray: Annotated[str | None, MayChange] = None
    """Address of a Ray cluster whose machines do the jobs, such as "auto" on its head, or "ray://HOST:10001" from
    elsewhere; "local" starts one here."""

    def name_folder(self, steps: int, seeds: int = 1) -> Path:
        """Return the folder of a longer run, next to this one's."""
        name = re.sub(r"(-quick)?(-\d+-steps)?(-\d+-seeds)?$", "", self.out.name) + f"-{steps}-steps"
        return self.out.with_name(name + f"-{seeds}-seeds" * (seeds > 1))


@dataclass(frozen=True, kw_only=True)
class Trains(Recipe):
    """Base class of recipes with options of the training. Their :meth:`run` must stop early with ``dry_run``."""

    DRY: ClassVar = "A dry run: nothing was trained or written."

    dry_run: Annotated[bool, MayChange] = False
    """Check everything, show the plan and stop. Nothing is trained or written."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the arithmetic. bfloat16 is mixed precision, for GPUs and CPUs that are fast at it; the weights stay
    float32. "auto" is bfloat16 on a GPU."""
    schedule: Schedule = "linear"
    """How the learning rate falls after the warm-up: to zero in a line or along a cosine, or with inverse_sqrt, with
    the inverse square root of the step."""

    def uses_bfloat16(self, device: str) -> bool:
        """Return whether to compute in bfloat16."""
        return self.dtype == "bfloat16" or (self.dtype == "auto" and device == "cuda")

    def recorded_options(self) -> dict[str, object]:
        from .options import find_device

        bfloat16 = self.uses_bfloat16(find_device(self.device).type)
        return {**super().recorded_options(), "dtype": "bfloat16" if bfloat16 else "float32"}

    def start(self, *, quiet: bool = False, command: str = "") -> Report:
        if not self.dry_run:
            return super().start(quiet=quiet, command=command)
        with TemporaryDirectory() as scratch:
            return Recipe.start(replace(self, out=Path(scratch)), quiet=quiet, command=command)


def as_function(kind: type[Recipe]) -> Callable[..., Report]:
    """Return a recipe as a Python function with its options as keyword arguments.

    Without ``out``, only the report is kept. ``quiet=True`` shows no progress.
    """

    def call(*, out: str | Path | None = None, quiet: bool = False, **options: Any) -> Report:
        if unknown := [name for name in options if name not in parameters]:
            raise TypeError(f"{unknown[0]}: not an option of {call.__name__}{suggest(unknown[0], parameters)}")
        if out is None and kind.MAKES_FILES:
            raise InputError("out", "expected a folder for the model, got None")
        with TemporaryDirectory() as scratch:
            options = {**kind.defaults_for(options), **options, "out": scratch if out is None else out}
            report = kind(**options).start(quiet=quiet)
        return replace(report, next_command="") if out is None else report  # it would name a folder that is gone

    parameters = dict(inspect.signature(kind).parameters)
    parameters["out"] = parameters["out"].replace(default=None)
    parameters["quiet"] = inspect.Parameter("quiet", inspect.Parameter.KEYWORD_ONLY, default=False, annotation="bool")
    call.__name__ = call.__qualname__ = kind.NAME.split()[0]
    call.__doc__ = inspect.getdoc(kind)
    call.__signature__ = inspect.Signature([*parameters.values()])  # type: ignore[attr-defined]  # a function may have one
    return call


def find_user_file(kind: type[Recipe]) -> Path | None:
    """Return the file of a user's recipe; None for this package's recipes, and for recipes in a notebook."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    is_ours = kind.__module__.partition(".")[0] == ROOT
    return None if is_ours or file is None else Path(file)


def hints(kind: type[Any]) -> dict[str, Any]:
    """Return the annotation of each option, with its markers."""
    annotations = get_type_hints(kind, include_extras=True)
    return {field.name: annotations[field.name] for field in fields(kind)}


def is_comma_separated(hint: object) -> bool:
    """Return whether an option's values are separated by commas."""
    return CommaSeparated in get_args(hint)


def flag(name: str) -> str:
    """Return the flag of a field: ``--max-length`` for ``max_length``."""
    return f"--{name.replace('_', '-')}"


def find_flags(kind: Any) -> dict[str, str]:
    """Return flags by field name. The flag of an option that is on by default turns it off.

    ``FLAGS`` has the flags that don't follow from a field's name.
    """
    is_on = {field.name: default(field, None) is True for field in fields(kind)}
    flags = {name: flag(f"no_{name}" if is_on[name] else name) for name in is_on}
    return flags | getattr(kind, "FLAGS", {})


def default(field: Field[object], without: object = MISSING) -> Any:
    """Return a field's default, or ``without`` if it has none."""
    if field.default_factory is not MISSING:
        return field.default_factory()
    return without if field.default is MISSING else field.default


def sort_fields(kind: type[Any]) -> list[Field[Any]]:
    """Return the fields: first those that the class declares itself, in its order, then the inherited ones."""
    declared = list(kind.__annotations__)
    return sorted(
        fields(kind), key=lambda field: declared.index(field.name) if field.name in declared else len(declared)
    )


def _convert(name: str, hint: object, value: object) -> Any:
    """Convert text, a list or an integer to the declared type, and check the value by its markers.

    None is allowed wherever it is declared.
    """
    kind, *markers = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    options = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    if value is None and NoneType in options:
        return None
    value = value.tolist() if hasattr(value, "tolist") else value  # numbers and arrays of numpy and torch
    if get_origin(options[0]) is tuple:
        value = _convert_several(name, get_args(options[0])[0], value, commas=CommaSeparated in markers)
    else:
        value = _convert_one(name, options[0], value)
    for marker in markers:
        if hasattr(marker, "check"):
            marker.check(name, value)
    return value


def _convert_one(name: str, kind: Any, value: Any) -> Any:
    """Convert a value to a type that is not a tuple."""
    if get_origin(kind) is Literal:
        check_choice(name, value, get_args(kind))
        return value
    sources = {int: (int, str), float: (float, int, str), str: (str, Path), Path: (str, Path)}.get(kind, (kind,))
    if isinstance(value, sources) and isinstance(value, bool) == (kind is bool):
        try:
            return kind(value)
        except (ValueError, OverflowError):
            pass
    raise kind_error(name, value, kind)


def _convert_several(name: str, kind: type, value: object, *, commas: bool) -> tuple[Any, ...]:
    """Return distinct values of a type from a sequence, from a single value, or from text with commas."""
    parts = value.split(",") if commas and isinstance(value, str) else value
    parts = parts if isinstance(parts, list | tuple) else [parts]
    words = [part.strip() if isinstance(part, str) else part for part in parts]
    if "" in words and any(words):
        raise InputError(name, f"expected something between commas, got {short_repr(value)}")
    return tuple(dict.fromkeys(_convert_one(name, kind, word) for word in words if word != ""))
