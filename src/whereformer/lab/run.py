"""A run: a recipe's folder. Recorded results are not computed again."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, is_dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .. import ranks
from ..errors import InputError, join_words, printable, short_repr
from ..files import check_outputs, check_regular, write_atomically
from ..manifest import dump_with_hash, load_with_hash, matches_type
from ..provenance import provenance, this_version
from .methods import load_plugin
from .options import find_device
from .ray_jobs import connect, map_on_cluster
from .terminal import output

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from .sheet import Sheet

RECORDS = "records.jsonl"
"""The file of records in a run's folder."""
HASHES = "hashes of"
"""The key in the first line's options of the hashes of everything that was read, by name."""
VERSION = "version of the "
"""How the names of a user's files begin among the hashes, so that a message reads "results for a different version of
the plugin". These files may change until the first result."""
MAX_JOBS = 8
"""The most jobs at a time by default, of small models on the CPU. Each process needs about half a GiB."""
SMALL_JOBS = 4
"""The jobs of small models at a time on one GPU, by default."""
Key = tuple[object, ...]
JobResult = tuple[Any, float]
"""The value of a function at a key, and the seconds that it took."""
Value = TypeVar("Value")


class Run:
    """The folder of a recipe, locked: its records, its progress, its device and its processes.

    A job computes one result: a function at a key, such as the training of a method with a seed. Several jobs may run
    at a time.

    Records are lines of JSON in one file. The first line has the recipe's options, hashes of its inputs, and where the
    last command ran. Every other line is a result: its name as "key" (the JSON of its task and the parts of its
    key), its value, the seconds that its job took (since the last interruption, if there was one), the version of this
    package that computed it ("by"), where and when, and a checksum. A line is on the disk itself before the next
    begins. A line that was cut or changed is removed, and its result is computed again. A result of another version is
    computed again too; its line stays until the new result replaces it. Messages say so. Results that
    arrive while the run is being stopped are not recorded.

    Args:
        recipe: the recipe, which names the folder, the device and the outputs.
        options: the options on which values depend, as JSON. A folder with other options is refused.
        quiet: whether to show no progress.

    Raises:
        InputError: for ``out``, if the folder has other files or results, or cannot be written.
    """

    console: Any = None  # set where the command runs

    def __init__(self, recipe: Any, options: Mapping[str, object], *, quiet: bool = False) -> None:
        self.plugin, self.outputs = recipe.plugin, recipe.outputs
        self.folder = recipe.out
        self.is_new = not self.folder.exists()
        self.is_main = ranks.is_main()
        self.quiet = quiet or not self.is_main
        self.device = find_device(recipe.device).type
        self.options = json.loads(json.dumps({**options, "device": self.device}))
        self.ray = getattr(recipe, "ray", None)
        self.jobs = getattr(recipe, "jobs", None) or default_jobs(self.device, has_small_models=recipe.has_small_models)
        self.has_small_models = recipe.has_small_models
        default = torch.get_num_threads()
        if self.device == "cpu":
            default = 1 if recipe.has_small_models else max(1, default // self.jobs)
        self.threads = getattr(recipe, "threads", None) or default  # of each job
        self.counts = self.losses = None  # steps and last loss of each job in progress, shared with processes
        # This process's place in these; the steps of all jobs, and those done in earlier maps; the map's finished jobs.
        self.slot = self.total = self.done = self.finished = 0
        self.labels: list[str] = []
        self.records: dict[str, dict[str, Any]] = {}
        self.hashes: dict[str, str] = {}

    def __getstate__(self) -> dict[str, object]:
        """Return the state for another process, which can log and advance, but has no records."""
        names = ("folder", "is_main", "quiet", "device", "threads", "slot", "plugin")
        return {name: getattr(self, name) for name in names}

    def __enter__(self) -> Run:
        with ExitStack() as stack:
            if self.ray is not None:
                stack.enter_context(connect(self.ray, quiet=self.quiet))
            stack.enter_context(ranks.open_folder(self.folder))
            ranks.join(torch.device(self.device))
            with threads(self.threads):
                self.provenance = provenance(self.device)
            self.console = output(quiet=self.quiet)
            if self.is_main:
                self._check_outputs()
                self._read()
                self._write()
            self.records, self.hashes = ranks.from_main(lambda: (self.records, self.hashes))
            stack.enter_context(_Bar(self))
            self._exits = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._exits.__exit__(*error)
        is_refused = self.is_new and isinstance(error[1], InputError) and not self.records and ranks.size() == 1
        # A refused folder without any result goes, with text that was encoded before the refusal. Whatever else is in
        # it, such as a checkpoint, is worth keeping.
        if is_refused and {path.name for path in self.folder.iterdir()} <= {RECORDS, ".lock", "cache"}:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _check_outputs(self) -> None:
        """Check where results will go, before any work."""
        parts = [path.name for path in self.folder.glob("*.[sc][vs][gv]")]  # figures and tables
        files = [name for name in self.outputs if not name.endswith("/")]
        folders = [name for name in self.outputs if name.endswith("/")]
        check_outputs("out", self.folder, [RECORDS, "report.html", "report.md", *files, *parts], folders)

    def _read(self) -> None:
        """Read the records of an earlier run, or begin new ones."""
        path = self.folder / RECORDS
        if path.exists():
            earlier, self.records, damaged = read_records(path)
            hashes = earlier.pop(HASHES)
            if self.records or damaged or any(not what.startswith(VERSION) for what in hashes):
                self.hashes = hashes
                self._compare(earlier)
            for number in damaged:
                self.log(f"line {number} of {path} is damaged and removed; its result will be computed again")

    def _compare(self, earlier: Mapping[str, object]) -> None:
        for name in {**earlier, **self.options}:  # either may lack one that another version of the recipe has
            old, new = earlier.get(name), self.options.get(name)
            if old != new:
                advice = "choose another folder, or use the same settings to continue"
                problem = f"{self.folder} has results with {name} {short_repr(old)}, not {short_repr(new)}"
                raise InputError("out", f"{problem}; {advice}")

    def _write(self) -> None:
        first = {"options": {**self.options, HASHES: self.hashes}, **self.provenance}
        write_atomically(self.folder / RECORDS, "".join(map(dump_with_hash, [first, *self.records.values()])))

    def log(self, text: str | Sheet) -> None:
        """Print a line or a table, above the progress."""
        if self.console is not None:
            self.console.print(text, highlight=False, soft_wrap=isinstance(text, str))
        elif not self.quiet:
            print(printable(str(text)), flush=True)

    def advance(self, steps: int = 1, loss: float | None = None) -> None:
        """Advance the progress bar by some steps, and show the last loss."""
        if self.counts is not None and self.losses is not None:
            self.counts[self.slot] += steps
            self.losses[self.slot] = self.losses[self.slot] if loss is None else loss

    def record_hash(self, name: str, value: str, field: str = "out") -> None:
        """Record the hash of an input, such as the text, so that a folder never mixes results from two of them.

        If the folder has results for another hash, raise an InputError for ``field``.
        """
        if self.hashes.setdefault(name, value) != value:
            raise InputError(field, f"{self.folder} has results for a different {name}; choose another folder")
        if self.is_main:
            self._write()

    def map(
        self,
        keys: Iterable[Key],
        function: Callable[..., Value],
        *shared: object,
        task: str,
        kind: type[Value],
        steps: int | Callable[..., int] = 1,
        problem: Callable[[Any, Any], str | None] = lambda key, value: None,
        on_result: Callable[[Mapping[Any, Value]], None] = lambda values: None,
    ) -> dict[Any, Value]:
        """Return ``function(run, *shared, *key)`` for each key, several at a time. The record keeps the values.

        Args:
            keys: tuples of JSON.
            function: called with each key, perhaps in another process.
            shared: arguments that are the same for all keys.
            task: the name of the work in the record, such as "train". Values with another name are computed again.
            kind: the type of the value: a dataclass whose fields are JSON, or a type of JSON.
            steps: the number of steps for a key, for the progress bar, or a function that returns it for ``*key``.
            problem: returns why a key's recorded value is not valid, such as a missing model, or a list of the wrong
                length; None if it is valid.
            on_result: is called after each result but the last, with the values of all keys that are done.
        """
        keys = list(keys)
        names = {key: json.dumps([task, *key]) for key in keys}
        self._log_versions(names.values())
        missing = [key for key in keys if not self._has_valid_record(names[key], kind, partial(problem, key))]
        sizes = {key: steps if isinstance(steps, int) else steps(*key) for key in keys}
        new = sum(sizes[key] for key in missing)
        if any(sizes.values()) and len(missing) < len(keys):
            remaining = "; continuing with the others" if missing else ""
            self.log(f"{len(keys) - len(missing)} of {len(keys)} runs are already done{remaining}")
        self.done += sum(sizes.values()) - new
        self.total = max(self.total, self.done + new)
        self.labels, self.finished = [name_key(key, keys) or task.replace("_", " ") for key in missing], 0
        self.counts = counts = _shared_array(len(missing))
        self.losses = _shared_array(len(missing))
        values = {key: _build(kind, self.records[names[key]]["value"]) for key in keys if key not in missing}
        with closing(self._run_jobs(missing, function, shared, min(self.jobs, len(missing)))) as work:
            for key, result in work:
                self._append_record(names[key], result)
                self.finished += 1
                if self.ray is not None:  # other machines do not count their steps here
                    counts[missing.index(key)] = sizes[key]
                values[key] = _build(kind, self.records[names[key]]["value"])
                if len(values) < len(keys):
                    on_result(values)
        self.done += new
        self.counts = None
        return {key: values[key] for key in keys}

    def sum_seconds(self, task: str, keys: Iterable[Key]) -> float:
        """Return the seconds that a task took for some keys together, as if they had run one after another."""
        return sum(self.records[json.dumps([task, *key])]["seconds"] for key in keys)

    def _log_versions(self, names: Collection[str]) -> None:
        """Log how many of some results other versions computed."""
        outdated = [name for name in names if self._is_of_another_version(name)]
        if outdated:
            by = join_words(sorted({version for name in outdated for version in self.records[name]["by"]}))
            problem = f"{len(outdated)} of {len(names)} results are of whereformer {by}, and this is {this_version()}"
            self.log(f"{problem}; they are computed again (to keep them, install that version)")

    def _is_of_another_version(self, name: str) -> bool:
        return name in self.records and self.records[name]["by"] != [this_version()]

    def _has_valid_record(self, name: str, kind: Any, problem: Callable[[Any], str | None]) -> bool:
        """Return whether the record has a valid value."""
        if name not in self.records or self._is_of_another_version(name):
            return False
        value = self.records[name]["value"]
        reason = problem(_build(kind, value)) if matches_type(kind, value) else "its record has a value of another type"
        if reason is not None:
            self.log(f"repeating {' '.join(map(str, json.loads(name)))}: {reason}")
        return reason is None

    def _run_jobs(self, keys: Sequence[Key], function: Any, shared: Any, jobs: int) -> Generator[tuple[Key, JobResult]]:
        """Yield each key with its result, in the order of completion."""
        if self.ray is not None and keys:
            gpus = (1 / SMALL_JOBS if self.has_small_models else 1) if self.device == "cuda" else 0
            compute = partial(_run_elsewhere, function, self, shared)
            yield from map_on_cluster(self.folder, compute, keys, threads=self.threads, gpus=gpus)
            return
        if jobs < 2 or ranks.size() > 1:
            for self.slot, key in enumerate(keys):
                with threads(self.threads):
                    result = compute_job(function, self, shared, key)
                yield key, result
            return
        # A forked process would inherit locks and threads, and it could not use a GPU.
        context = multiprocessing.get_context("spawn")
        stops, begun = _shared_array(1), _shared_array(jobs)
        begin = (self, self.counts, self.losses, stops, begun, context.Value("i", 0))
        # Large data comes with each job: a process that begins would read it from a pipe only after its imports, and
        # this process would wait for that, and not react to signals.
        work = pickle.dumps((function, shared))
        unrelated = multiprocessing.active_children()  # such as processes of the script that calls this
        pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin, initargs=begin)
        waiting: dict[Future[JobResult], Key] = {}
        _mask_interrupts("SIG_BLOCK")  # in processes that begin, too
        try:
            try:
                waiting |= {pool.submit(_run_job, slot, key, work): key for slot, key in enumerate(keys)}
            finally:
                processes = [process for process in multiprocessing.active_children() if process not in unrelated]
                _mask_interrupts("SIG_UNBLOCK")
            with handle_signals(signal.default_int_handler, signal.SIGTERM):  # raises, so that jobs save below
                while waiting:
                    done, _ = wait(waiting, return_when=FIRST_COMPLETED)
                    for future in sorted(done, key=lambda future: future.exception() is not None):
                        result = future.result()
                        yield waiting.pop(future), result
        except BrokenProcessPool:
            advice = "perhaps for lack of memory, so use fewer; a script has to call it below if __name__ == '__main__'"
            raise InputError("jobs", f"one of {jobs} processes ended unexpectedly, {advice}") from None
        except KeyboardInterrupt:
            self.log("stopping")
            raise
        finally:
            if waiting:
                stops[0] = 1
                _stop(processes, set(map(int, begun)), waiting)
            pool.shutdown(wait=True, cancel_futures=True)

    def _append_record(self, name: str, result: JobResult) -> None:
        """Add a result to the record."""
        value, seconds = result
        plain = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
        record = {"key": name, "value": plain, "seconds": round(seconds, 2), "by": [this_version()]}
        record |= {"provenance": self.provenance}
        replaces = name in self.records
        try:
            self.records[name] = record = json.loads(json.dumps(record, allow_nan=False))
        except (ValueError, TypeError) as error:
            raise TypeError(f"the value of {name} is not JSON: {error}") from None
        if not self.is_main:
            return
        if replaces:  # so that the file has one value for each key
            self._write()
            return
        with (self.folder / RECORDS).open("a", encoding="utf-8") as file:
            file.write(dump_with_hash(record))
            file.flush()
            os.fsync(file.fileno())


def default_jobs(device: str, *, has_small_models: bool) -> int:
    """Return the default number of jobs at a time: one for each GPU, or one on the CPU.

    Small models hardly gain from a second thread, and leave a GPU waiting. So on the CPU the number is one for each
    core, but at most MAX_JOBS, and on each GPU it is SMALL_JOBS.
    """
    if device == "cuda":
        return torch.cuda.device_count() * (SMALL_JOBS if has_small_models else 1)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MAX_JOBS) if has_small_models else 1


def read_records(path: Path) -> tuple[dict[str, Any], dict[str, Any], list[int]]:
    """Return the options of a run with its :data:`HASHES`, its records by name, and the numbers of damaged lines.

    A record's name is the JSON of a list: the task, then the parts of the key.

    Each record has the version of this package that computed it ("by"), in a list. Older records lack it; their version
    is that in the first line.

    Raises:
        InputError: for ``out``, if the file is not the record of a run, or its first line is damaged.
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
        raise InputError("out", f"{problem}; move it away or choose another folder")
    return options, records, damaged


def compute_job(function: Callable[..., Any], run: Run, shared: Any, key: Key) -> JobResult:
    """Call a function, and measure its time."""
    started = time.perf_counter()
    return function(run, *shared, *key), time.perf_counter() - started


def _build(kind: Any, value: Any) -> Any:
    """Build a value of a type from its JSON."""
    return kind(**value) if is_dataclass(kind) and isinstance(kind, type) else value


def name_key(key: Key, keys: Sequence[Key]) -> str:
    """Return a key for people to read, without the parts that all keys have in common; numbers are seeds."""
    varying = [part for part, *rest in zip(key, *keys, strict=True) if len(set(rest)) > 1]
    names = [part for part in varying or key if isinstance(part, str)]
    return " ".join([*names, *(f"seed {part}" for part in varying if not isinstance(part, str))])


def _shared_array(count: int) -> Any:
    return multiprocessing.get_context("spawn").RawArray("d", max(1, count))


class _Bar(Progress):
    """A progress bar that reads the counts of the jobs in progress whenever it is drawn."""

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
        self.task = self.add_task("preparing", total=None)

    def get_renderables(self) -> Iterable[Any]:
        """Draw the bar."""
        run = self.run
        if run.counts is not None and run.losses is not None:
            last = [(label, loss) for label, loss in zip(run.labels, run.losses, strict=False) if loss]
            last = last[-max(1, (self.console.width - 45) // 14) :]
            text = " · ".join(f"{label} {loss:.2f}" for label, loss in last)
            text = text and f"training loss: {text}"
            if not text:  # several processes do not report which jobs they run
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
def handle_signals(handler: Any, *signals: signal.Signals) -> Iterator[None]:
    """Let a handler answer signals in this block. Outside of the main thread, where Python forbids that, do nothing."""
    is_main = threading.current_thread() is threading.main_thread()
    earlier_handlers = {number: signal.signal(number, handler) for number in signals if is_main}
    try:
        yield
    finally:
        for number, earlier in earlier_handlers.items():
            signal.signal(number, earlier)


def _mask_interrupts(how: str) -> None:
    """Block SIGINT, which then waits, or unblock it, except on Windows, which cannot."""
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(getattr(signal, how), {signal.SIGINT})


_this: dict[str, Any] = {}
"""The run, number and shared numbers of this process, if it is one of several."""


def _begin(run: Run, counts: Any, losses: Any, stops: Any, begun: Any, number: Any) -> None:
    """Prepare a process of several."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # except while it runs a job
    _mask_interrupts("SIG_UNBLOCK")
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
    _this.update(run=run, stops=stops, begun=begun, index=index)


def _stop(processes: Iterable[BaseProcess], begun: set[int], futures: Iterable[Future[JobResult]]) -> None:
    """Stop processes. A process with a job saves its training first; one that has not begun has nothing to save."""
    working = [process.pid for process in processes if process.pid is not None and process.pid in begun]
    for pid in working:
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, signal.SIGINT)
    if working:  # jobs that are queued may still begin, and raise at once: see ``stops``
        wait([future for future in futures if not future.cancel()])
    for process in processes:
        if process.pid not in working:
            process.kill()  # it is still importing, which takes many seconds, and does not react to signals


def _keep_freed_memory() -> None:
    """Let this process keep the memory that it frees: each step of a training frees memory that the next one needs.

    By default, the C library may return it to the system at the end of a step, and the system has to find and clear
    every page again in the next one. Chance decides how much that is: up to 1,300 pages and a tenth of the time of a
    small model's step. Only glibc has these options.
    """
    trim_threshold, mmap_threshold, max_block = -1, -3, 2**25
    with suppress(AttributeError):
        set_option = ctypes.CDLL(None).mallopt
        set_option(trim_threshold, 8 * max_block)
        set_option(mmap_threshold, max_block)


def _end_with_parent() -> None:
    """End this process when the one that started it has ended, because no process is left to read its results."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run_elsewhere(function: Callable[..., Any], run: Run, shared: Any, key: Key) -> JobResult:
    """Compute one job on a machine of a cluster, which has no progress bar."""
    run.counts = run.losses = None
    load_plugin(run.plugin)
    with threads(run.threads):
        return compute_job(function, run, shared, key)


def _run_job(slot: int, key: Key, work: bytes) -> JobResult:
    """Run a job. A process whose first job has begun is in ``begun``: before, it has nothing to save."""
    run = _this["run"]
    run.slot = slot
    if _this.get("work") != work:
        _this.update(work=work, parts=pickle.loads(work))  # which may import for seconds
    function, shared = _this["parts"]
    _this["begun"][_this["index"]] = os.getpid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if _this["stops"][0]:  # the signal came before this process reacted to any
            raise KeyboardInterrupt
        return compute_job(function, run, shared, key)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
