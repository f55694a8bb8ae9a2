"""A run: the folder of a recipe. What its record has is not done again."""

from __future__ import annotations

import ctypes
import itertools
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, is_dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .. import ranks
from ..errors import InputError, join_words, printable, short_repr
from ..files import check_regular, try_outputs, write_atomically
from ..manifest import dump_with_hash, load_with_hash, matches_type
from ..provenance import provenance, this_version
from .methods import load_plugin
from .options import find_device
from .terminal import output

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from .sheet import Sheet

RECORDS = "records.jsonl"
"""The file of records in a run's folder."""
FILES = (RECORDS, "report.html", "report.md")
"""The files that every run has."""
HASHES = "hashes of"
"""What its first line has besides options: hashes of what was read, by what that is."""
VERSION = "version of the "
"""How those of a user's own files begin. They may change as long as nothing was done."""
MOST_JOBS = 8
"""The most runs at a time, unless somebody asks for more. Each process needs about half a GiB."""
SMALL_JOBS = 4
"""The runs of small models at a time on one GPU."""
Key = tuple[Any, ...]
Value = TypeVar("Value")


class Run:
    """The folder of a recipe, locked: its records, its progress, its device and its processes.

    Records are lines of JSON in one file. The first line has the recipe's options, hashes of what it read, and where
    the last command ran. Every other line has the value of a function at a key, the seconds that it took, the versions
    of this package that computed it ("by"), where and when, and a checksum. A line is on the disk itself before the
    next begins. A line that was cut or changed is done again, which is said, and so are results of another version.

    Args:
        folder: the folder.
        options: what decides the values, as JSON has it. A folder with other options is refused.
        device: "auto", "cpu" or "cuda".
        jobs: the number of runs at a time; None is the usual one.
        small: whether models are so small that one keeps neither a second thread nor a GPU busy.
        quiet: whether to show no progress.
        plugin: the file of position methods that its processes load.
        keep_versions: whether results of other versions of this package count.
        outputs: the paths in the folder of other files that are written at its end, and of folders (which end in "/").

    Raises:
        InputError: for ``out``, if the folder holds something else, or cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        options: Mapping[str, Any],
        *,
        device: str = "auto",
        jobs: int | None = None,
        small: bool = False,
        quiet: bool = False,
        plugin: Path | None = None,
        keep_versions: bool = False,
        outputs: Iterable[str] = (),
    ) -> None:
        self.plugin = plugin
        self.keep_versions = keep_versions
        self.outputs = tuple(outputs)
        self.folder = folder
        self.is_main = ranks.is_main()
        self.quiet = quiet or not self.is_main
        self.device = find_device(device).type
        self.options = json.loads(json.dumps({**options, "device": self.device}))
        self.jobs = jobs or usual_jobs(self.device, small=small)
        self.threads = torch.get_num_threads()  # of each run
        if self.device == "cpu":
            self.threads = 1 if small else max(1, self.threads // self.jobs)
        self.counts = self.losses = None  # of the keys at work: shared with processes
        self.slot = self.total = self.done = self.finished = 0
        self.labels: list[str] = []
        self.records: dict[str, dict[str, Any]] = {}
        self.hashes: dict[str, str] = {}
        self.other_versions: set[str] = set()  # those that have a part in the results at work
        self.by: dict[str, list[str]] = {}
        """The versions that computed each result of this run, by the result's name."""

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs: the folder and the device, but neither records nor a lock."""
        names = ("folder", "is_main", "quiet", "device", "threads", "slot", "plugin", "keep_versions", "other_versions")
        return {name: getattr(self, name) for name in names}

    def __enter__(self) -> Run:
        with ExitStack() as stack:
            stack.enter_context(ranks.open_folder(self.folder))
            ranks.join(torch.device(self.device))
            self.provenance = provenance(self.device)
            self.console = output(quiet=self.quiet)
            if self.is_main:
                self._try_outputs()
                self._read()
                self._write()
            self.records, self.hashes = ranks.from_main(lambda: (self.records, self.hashes))
            stack.enter_context(_Bar(self))
            self._exits = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._exits.__exit__(*error)

    def _try_outputs(self) -> None:
        """Try to write where results will go, before any work."""
        pictures = [path.name for path in self.folder.glob("*.svg")]
        files = [name for name in self.outputs if not name.endswith("/")]
        folders = [name for name in self.outputs if name.endswith("/")]
        try_outputs("out", self.folder, [*FILES, *files, *pictures], folders)

    def _read(self) -> None:
        """Read the records of an earlier run, or begin new ones."""
        path = self.folder / RECORDS
        if path.exists():
            try:
                earlier, self.records, damaged = read_records(path)
            except DamagedOptionsError:
                self._set_aside(path)
                return
            hashes = earlier.pop(HASHES)
            if self.records or damaged or any(not what.startswith(VERSION) for what in hashes):
                self.hashes = hashes
                self._compare(earlier)
            for number in damaged:
                self.say(f"line {number} of {path} is damaged; what it had is done again")

    def _set_aside(self, path: Path) -> None:
        """Rename a file of records whose options are lost, so that none of its lines is."""
        names = (path.with_name(f"{path.stem}.damaged-{number}{path.suffix}") for number in itertools.count(1))
        new_path = next(name for name in names if not os.path.lexists(name))
        os.rename(path, new_path)
        problem = f"the first line of {path} is damaged, which has the options of all results"
        self.say(f"{problem}; all is done again, and {new_path} keeps the file")

    def _compare(self, earlier: Mapping[str, Any]) -> None:
        for name in {**earlier, **self.options}:  # either may lack one, such as the version of a plugin
            there, value = earlier.get(name), self.options.get(name)
            if there != value:
                advice = "choose another folder, or use the same settings to continue"
                told = f"{self.folder} holds results with {name} {short_repr(there)}, not {short_repr(value)}"
                raise InputError("out", f"{told}; {advice}")

    def _write(self) -> None:
        first = {"options": {**self.options, HASHES: self.hashes}, **self.provenance}
        write_atomically(self.folder / RECORDS, "".join(map(dump_with_hash, [first, *self.records.values()])))

    def say(self, text: str | Sheet) -> None:
        """Print a line or a table, above the progress."""
        if multiprocessing.parent_process() is None:
            self.console.print(text, highlight=False, soft_wrap=isinstance(text, str))
        elif not self.quiet:
            print(printable(str(text)), flush=True)

    def expect(self, steps: int) -> None:
        """Tell the steps of all that the recipe does, done or not, for the progress."""
        self.total = steps

    def step(self, steps: int = 1, loss: float | None = None) -> None:
        """Tell that steps are done, and perhaps the loss so far."""
        if self.counts is not None and self.losses is not None:
            self.counts[self.slot] += steps
            self.losses[self.slot] = self.losses[self.slot] if loss is None else loss

    def identify(self, what: str, value: str, field: str = "out") -> None:
        """Record the hash of what results are of, such as a text, so that a folder never mixes those of two.

        Raises:
            InputError: for ``field``, if the folder holds results with another.
        """
        if self.hashes.setdefault(what, value) != value:
            raise InputError(field, f"{self.folder} holds results with another {what}; choose another folder")
        if self.is_main:
            self._write()

    def keeps(self, version: str) -> bool:
        """Return whether work of a version of this package counts, such as a checkpoint.

        If it is another version, records of whatever is computed from this work will say so.
        """
        if version == this_version():
            return True
        if self.keep_versions:
            self.other_versions.add(version)
        return self.keep_versions

    def each(
        self,
        keys: Iterable[Key],
        function: Callable[..., Value],
        *shared: Any,
        kind: type[Value],
        steps: int | Callable[..., int] = 1,
        problem: Callable[[Any, Any], str | None] = lambda key, value: None,
    ) -> dict[Any, Value]:
        """Return ``function(run, *shared, *key)`` for each key, several at a time. The record keeps the values.

        Args:
            keys: tuples of JSON.
            function: what is called, perhaps in another process. Its name is in the record.
            shared: arguments that are the same for all keys.
            kind: what it returns: a dataclass whose fields are JSON, or a type of JSON.
            steps: how many steps a key takes, for the progress, or what returns that for ``*key``.
            problem: says why a key and its recorded value do not count, such as a model that is gone, or a list of
                another length; None if they do.
        """
        keys = list(keys)
        names = {key: json.dumps([function.__name__, *key]) for key in keys}
        self._say_versions(names.values())
        missing = [key for key in keys if not self._has(names[key], kind, partial(problem, key))]
        sizes = {key: steps if isinstance(steps, int) else steps(*key) for key in keys}
        new = sum(sizes[key] for key in missing)
        if any(sizes.values()) and len(missing) < len(keys):
            others = "; continuing with the others" if missing else ""
            self.say(f"{len(keys) - len(missing)} of {len(keys)} runs are already done{others}")
        self.done += sum(sizes.values()) - new
        self.total = max(self.total, self.done + new)
        self.labels, self.finished = [" ".join(map(str, key)) for key in missing], 0
        self.counts, self.losses = _numbers(len(missing)), _numbers(len(missing))
        with closing(self._work(missing, function, shared, min(self.jobs, len(missing)))) as work:
            for key, result in work:
                self._keep(names[key], result)
                self.finished += 1
        self.done += new
        self.counts = None
        self.by |= {_label(name): self.records[name]["by"] for name in names.values()}
        return {key: _build(kind, self.records[name]["value"]) for key, name in names.items()}

    def _say_versions(self, names: Iterable[str]) -> None:
        """Say how many of some results other versions computed, and whether they count."""
        names = list(names)
        outdated = [name for name in names if self._is_of_another_version(name)]
        if outdated:
            by = join_words(sorted({version for name in outdated for version in self.records[name]["by"]}))
            problem = f"{len(outdated)} of {len(names)} results are of whereformer {by}, and this is {this_version()}"
            answer = "kept" if self.keep_versions else "done again (--keep-versions keeps them)"
            self.say(f"{problem}; they are {answer}")

    def _is_of_another_version(self, name: str) -> bool:
        return name in self.records and self.records[name]["by"] != [this_version()]

    def _has(self, name: str, kind: Any, problem: Callable[[Any], str | None]) -> bool:
        """Return whether the record has a value that counts."""
        if name not in self.records or (self._is_of_another_version(name) and not self.keep_versions):
            return False
        value = self.records[name]["value"]
        why = problem(_build(kind, value)) if matches_type(kind, value) else "its record has something else"
        if why is not None:
            self.say(f"doing {_label(name)} again: {why}")
        return why is None

    def _work(self, keys: Sequence[Key], function: Any, shared: Any, jobs: int) -> Generator[tuple[Key, _Result]]:
        """Yield each key with its result, in the order in which they are done."""
        if jobs < 2 or ranks.size() > 1:
            for self.slot, key in enumerate(keys):
                with threads(self.threads):
                    result = _result(function, self, shared, key)
                yield key, result
            return
        # A forked process would inherit locks and threads, and it could not use a GPU.
        context = multiprocessing.get_context("spawn")
        stops, begun = _numbers(1), _numbers(jobs)
        begin = (function, self, shared, self.counts, self.losses, stops, begun, context.Value("i", 0))
        unrelated = multiprocessing.active_children()  # such as those of the script that calls this
        pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin, initargs=begin)
        with handling(signal.SIG_IGN, signal.SIGINT):  # which reaches processes that begin, too
            waiting = {pool.submit(_do, slot, key): key for slot, key in enumerate(keys)}
        processes = [process for process in multiprocessing.active_children() if process not in unrelated]
        try:
            with handling(signal.default_int_handler, signal.SIGTERM):  # or the processes would not save
                while waiting:
                    done, _ = wait(waiting, return_when=FIRST_COMPLETED)
                    for future in sorted(done, key=lambda future: future.exception() is not None):
                        result = future.result()
                        yield waiting.pop(future), result
        except BrokenProcessPool:
            advice = "perhaps for lack of memory, so use fewer; a script has to call it below if __name__ == '__main__'"
            raise InputError("jobs", f"one of {jobs} processes ended unexpectedly, {advice}") from None
        except KeyboardInterrupt:
            self.say("stopping")
            raise
        finally:
            if waiting:
                stops[0] = 1
                _stop(processes, set(map(int, begun)), waiting)
            pool.shutdown(wait=True, cancel_futures=True)

    def _keep(self, name: str, result: _Result) -> None:
        """Add a result to the record."""
        value = result.value
        plain = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
        record = {"key": name, "value": plain, "seconds": round(result.seconds, 2), "by": result.by}
        record |= {"provenance": self.provenance}
        replaces = name in self.records
        try:
            self.records[name] = record = json.loads(json.dumps(record, allow_nan=False))
        except (ValueError, TypeError) as error:
            raise TypeError(f"the value of {name} is no JSON: {error}") from None
        if not self.is_main:
            return
        if replaces:  # so that the file has one value for each key
            self._write()
            return
        with (self.folder / RECORDS).open("a", encoding="utf-8") as file:
            file.write(dump_with_hash(record))
            file.flush()
            os.fsync(file.fileno())


def usual_jobs(device: str, *, small: bool) -> int:
    """Return how many runs to do at a time, unless somebody says: one for each GPU, or one on the CPU.

    Small models hardly gain from a second thread, and leave a GPU waiting. On the CPU there is one of them for each
    core, but at most MOST_JOBS, and on each GPU there are SMALL_JOBS.
    """
    if device == "cuda":
        return torch.cuda.device_count() * (SMALL_JOBS if small else 1)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_JOBS) if small else 1


def read_records(path: Path) -> tuple[dict[str, Any], dict[str, Any], list[int]]:
    """Return the options of a run with its :data:`HASHES`, its records by name, and the numbers of damaged lines.

    A record's name is the JSON of a list: the function's name, then the parts of the key.

    Each record has the versions of this package that computed it ("by"). Records without them are older; they are of
    the version in the first line.

    Raises:
        InputError: for ``out``, if the file is not the record of a run. It is a :class:`DamagedOptionsError` if the
            first line is damaged and another one is not.
    """
    check_regular("out", path)
    first, *rest = path.read_bytes().splitlines(keepends=True) or [b""]
    options, version = None, []
    with suppress(ValueError, KeyError, TypeError):
        content = load_with_hash(first)
        options = dict(content["options"])
        options[HASHES] = dict(options[HASHES])
        version = [content["versions"]["whereformer"]]
    records, damaged = {}, []
    for number, line in enumerate(rest, 2):
        try:
            record = load_with_hash(line)
            _, *_ = json.loads(record["key"])
            by = record.get("by", version)
            if not matches_type(list[str], by) or not (by or options is None):
                raise TypeError
            records[record["key"]] = {**record, "value": record["value"], "by": by}
        except (ValueError, KeyError, TypeError):
            damaged.append(number)
    if options is None:
        problem = f"the first line of {path} is damaged" if records else f"{path} is not the record of a run"
        kind = DamagedOptionsError if records else InputError
        raise kind("out", f"{problem}; move it away or choose another folder")
    return options, records, damaged


class DamagedOptionsError(InputError):
    """A file has records of a run, but the line with its options is damaged."""


@dataclass(frozen=True)
class _Result:
    """The value of a function at a key, the seconds that it took, and the versions of this package that computed it."""

    value: Any
    seconds: float
    by: list[str]


def _result(function: Callable[..., Any], run: Run, shared: Any, key: Key) -> _Result:
    """Call a function, and note what other versions have a part in its value."""
    before, started = run.other_versions, time.perf_counter()
    run.other_versions = set(before)
    try:
        value = function(run, *shared, *key)
        return _Result(value, time.perf_counter() - started, sorted({this_version(), *run.other_versions}))
    finally:
        run.other_versions = before


def _build(kind: Any, value: Any) -> Any:
    """Return a value of a type, of its JSON."""
    return kind(**value) if is_dataclass(kind) and isinstance(kind, type) else value


def _label(name: str) -> str:
    """Return the name of a record for people to read."""
    return " ".join(map(str, json.loads(name)))


def _numbers(count: int) -> Any:
    return multiprocessing.get_context("spawn").RawArray("d", max(1, count))


class _Bar(Progress):
    """A progress bar that looks at the numbers of the keys at work whenever it is drawn."""

    def __init__(self, run: Run) -> None:
        self.run = run
        super().__init__(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TextColumn("left:"),
            TimeRemainingColumn(),
            console=run.console,
            refresh_per_second=2,
            speed_estimate_period=120,
            transient=True,
        )
        self.task = self.add_task("", total=None)

    def get_renderables(self) -> Iterable[Any]:
        """Draw the bar."""
        run = self.run
        if run.counts is not None and run.losses is not None:
            last = [(label, loss) for label, loss in zip(run.labels, run.losses, strict=False) if loss][-4:]
            text = " · ".join(f"{label} {loss:.2f}" for label, loss in last)
            if not text:  # of several processes, none says which key it is at
                text = run.labels[0] if len(run.labels) == 1 else f"{run.finished} of {len(run.labels)} runs"
            done = run.done + sum(run.counts)
            self.update(self.task, description=printable(text), completed=done, total=run.total or None)
        yield from super().get_renderables()


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Set torch's number of threads, and restore it afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def handling(handler: Any, *signals: signal.Signals) -> Iterator[None]:
    """Let a handler answer signals in this block. Outside of the main thread, where Python forbids that, do nothing."""
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in signals if main}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


_this: dict[str, Any] = {}
"""What this process works with, if it is one of several."""


def _begin(function: Any, run: Run, shared: Any, counts: Any, losses: Any, stops: Any, begun: Any, number: Any) -> None:
    """Begin a process of several. At the end, add its id to ``begun``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # except while it works
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with number.get_lock():
        index = number.value
        number.value += 1
    if run.device == "cuda":
        torch.cuda.set_device(index % torch.cuda.device_count())
    torch.set_num_threads(run.threads)
    _keep_freed_memory()
    load_plugin(run.plugin)
    run.counts, run.losses = counts, losses
    _this.update(function=function, run=run, shared=shared, stops=stops)
    begun[index] = os.getpid()


def _stop(processes: Iterable[BaseProcess], begun: set[int], futures: Iterable[Future[_Result]]) -> None:
    """Stop processes. A process that works saves its training first; one that has not begun has nothing to save."""
    working = [process.pid for process in processes if process.pid is not None and process.pid in begun]
    for pid in working:
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, signal.SIGINT)
    if working:  # they take whatever is queued, and raise at once
        wait([future for future in futures if not future.cancel()])
    for process in processes:
        if process.pid not in working:
            process.kill()  # importing takes many seconds, in which it heeds no signal


def _keep_freed_memory() -> None:
    """Let this process keep the memory that it frees: each step of a training frees what the next one takes.

    By default, the C library may give it back to the system at the end of a step, and every page of it has to be found
    and cleared again in the next one. Chance decides how much that is: up to 1,300 pages and a tenth of the time of a
    small model's step. Only glibc has these options.
    """
    trim_threshold, mmap_threshold, most = -1, -3, 2**25
    with suppress(AttributeError):
        set_option = ctypes.CDLL(None).mallopt
        set_option(trim_threshold, 8 * most)
        set_option(mmap_threshold, most)


def _end_with_parent() -> None:
    """End this process when the one that started it has ended: nobody is left to take what it computes."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _do(slot: int, key: Key) -> _Result:
    run = _this["run"]
    run.slot = slot
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if _this["stops"][0]:  # the signal came before this process heeded any
            raise KeyboardInterrupt
        return _result(_this["function"], run, _this["shared"], key)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
