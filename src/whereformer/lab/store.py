"""A study's results: a file that a run adds to, a folder to save them in, and how they are shown.

A study's ``results.py`` declares dataclasses, so each field's name appears in one place. A file also has a ``format``,
which changes when older files can no longer be read, and a hash, which tells damage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from ..errors import InputError, shown
from ..files import write_atomically
from .jobs import spread
from .json_files import from_json, read_sealed, write_sealed
from .progress import Progress
from .ranks import is_main
from .shown import Shown

FILE = "results.json"
"""The file of results in a run's folder."""


@dataclass(frozen=True, kw_only=True)
class Results(Shown):
    """Base class of dataclasses that hold the whole content of a results file, provenance included.

    Printing one, or ending a notebook's cell with it, shows its tables and what they say.

    Args:
        date, commit, machine, versions: as returned by :func:`whereformer.lab.provenance.provenance`.
    """

    FORMAT: ClassVar[int | str]
    """The value of ``format`` in the file."""

    INDENT: ClassVar[int | None] = None
    """Spaces of indentation per level; None writes the file on one line."""

    date: str = ""
    commit: str | None = None
    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Write the file, completely or not at all. Fields that are None are left out, since None is their default.

        Raises:
            ValueError: if a number is not finite.
        """
        content = {"format": self.FORMAT, **{name: value for name, value in asdict(self).items() if value is not None}}
        write_sealed(path, content, self.INDENT)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file that :meth:`write` wrote, or that of a folder.

        Raises:
            InputError: if the file is not of this kind or format, or was changed.
        """
        try:
            path = path / FILE if path.is_dir() else path
            content = read_sealed(path)
            if content.get("format") != cls.FORMAT:
                raise ValueError(f"its format is not {cls.FORMAT!r}")
        except (OSError, ValueError) as error:
            raise InputError(
                "out",
                f"{path} is not a complete result of this command ({error}); move it away or choose another folder",
            ) from None
        return from_json(cls, content)

    @classmethod
    def earlier(cls, folder: Path, **same: Any) -> Self | None:
        """Return the results that an earlier run left in a folder, or None if there are none.

        Args:
            folder: the run's folder.
            same: fields that have to be what they are in this run: a dataclass of settings, or a dictionary.

        Raises:
            InputError: if the file is something else, or a field differs; it names the first difference.
        """
        path = folder / FILE
        if not path.exists():
            return None
        results = cls.load(path)
        for name, value in same.items():
            old, new = (each if isinstance(each, dict) else asdict(each) for each in (getattr(results, name), value))
            refuse_other_settings(folder, old, new)
        return results

    def report(self) -> str | None:
        """Return an HTML page about the results, or None if there is none."""
        return None

    def save(self, folder: Path | str) -> list[Path]:
        """Write the results, and the report if there is one, to a folder, and return the files' paths.

        Raises:
            OSError: if the folder can't be written.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.write(folder / FILE)
        page = self.report()
        files = {**({} if page is None else {"report.html": page}), **self.more_files()}
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / name, content)
        return [*(folder / name for name in files), folder / FILE]

    def more_files(self) -> Mapping[str, str | bytes]:
        """Return the contents of further files, by name; a name may have a folder in it."""
        return {}


Key = tuple[Any, ...]
Kind = TypeVar("Kind", bound="RunResults")


@dataclass(frozen=True, kw_only=True)
class RunResults(Results):
    """Results with the finished runs of a study.

    ``runs`` has dictionaries within dictionaries, by the parts of a run's key: a tuple such as (task, method, seed).
    """

    if TYPE_CHECKING:
        runs: Any  # which each study declares where its file has it
    KEYS: ClassVar[int]
    """The parts of a key."""

    def run(self, *key: Any) -> Any:
        """Return the finished run of a key, or None."""
        return reduce(lambda runs, part: (runs or {}).get(part), key, self.runs)

    def with_run(self, key: Key, run: Any) -> Self:
        """Return these results with a finished run added."""
        return replace(self, runs=_added(self.runs, key, run))

    def each(self) -> Iterator[tuple[Key, Any]]:
        """Yield the key of every run, with the run."""
        return _each(self.runs, self.KEYS, ())

    def ordered(self, *parts: Sequence[Any]) -> Self:
        """Return these results with their runs in the order of keys: each part's known values first, then others."""
        return replace(self, runs=_ordered(self.runs, parts))


def _added(runs: Mapping[Any, Any], key: Key, run: Any) -> dict[Any, Any]:
    first, *rest = key
    return {**runs, first: _added(runs.get(first, {}), tuple(rest), run) if rest else run}


def _each(runs: Mapping[Any, Any], depth: int, before: Key) -> Iterator[tuple[Key, Any]]:
    for part, value in runs.items():
        yield from _each(value, depth - 1, (*before, part)) if depth > 1 else [((*before, part), value)]


def _ordered(runs: Mapping[Any, Any], parts: Sequence[Sequence[Any]]) -> dict[Any, Any]:
    if not parts:
        return dict(runs)
    return {part: _ordered(runs[part], parts[1:]) for part in dict.fromkeys((*parts[0], *runs)) if part in runs}


def complete(
    results: Kind,
    folder: Path,
    keys: Sequence[Key],
    work: Callable[[Any, Progress], Any],
    progress: Progress,
    jobs: int = 1,
    *,
    done: Callable[[Key, Any], str | None] = lambda key, run: None,
) -> Kind:
    """Do the runs that results lack, ``jobs`` at a time, and write the file after each.

    Args:
        results: the runs so far.
        folder: the run's folder.
        keys: the keys of the runs to do.
        work: does the run of a key and returns it. It can be pickled. Several processes of a launcher share each run.
        progress: receives the progress of all runs.
        jobs: the number of processes.
        done: returns what to tell of a finished run, or None.
    """
    for key, run in spread(work, keys, jobs, progress):
        results = results.with_run(key, run)
        if is_main():
            results.write(folder / FILE)
        if line := done(key, run):
            progress.line(line)
    return results


def missing(results: RunResults, keys: Sequence[Key], progress: Progress) -> list[Key]:
    """Return the keys without a run, and tell how many have one."""
    without = [key for key in keys if results.run(*key) is None]
    if len(without) < len(keys):
        others = "; continuing with the others" if without else ""
        progress.line(f"{len(keys) - len(without)} of {len(keys)} runs are already done{others}")
    return without


def refuse_other_settings(out: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Check that a folder's settings are the same as those of this run.

    Raises:
        InputError: if one differs; it names the first.
    """
    for name, value in new.items():
        was = old.get(name)
        if was != value and name == "text":
            raise InputError("out", f"{out} holds results for a different text; choose another folder")
        if was != value:
            told = f"{out} holds results with {name} {shown(was)}, not {shown(value)}; choose another folder, "
            raise InputError("out", told + "or use the same settings to continue")
