"""Kill, damage and starve trainings, and look whether the same command still ends with the same bits.

Run: .venv/bin/python benchmarks/kill.py [--commands pretrain,compare] [--kills 40] [--damages 30] [--disks 10]

For each of pretrain, finetune, translate train and compare, with models that train in seconds:

- A kill is a SIGKILL at a random moment of a run, between half of the time to its first results and its end. The same
  command then continues to the end. Nothing is lost if it begins no earlier than after the newest results that the
  killed run had written.
- A damage deletes, empties, truncates, edits, swaps or flips one bit of one file of a run that has ended, or of one
  that has not saved its model yet. If the same command refuses to go on in one line, the file is moved away, as the
  line says. Nothing is lost if the command then ends well.
- A full disk is a small file system in memory or, without the right to mount one, a limit on the size of files. The
  command must end with one line that names what it could not write. Then there is room, and the same command runs
  again.
- For ranks, two processes do one run together, as under torchrun, and one of them is killed at a random moment: the
  main one as often as the other. The one that is left must end by itself in one line, or when its launcher ends it. Two
  processes then continue as after a kill. compare trains each model in one process, and is not tried.

Equal means that every file of the trained models and every number of the results, but for the times, are those of a run
that nothing happened to, in as many processes. Each process is a fork of this one, which has imported everything: kills
while Python imports libraries are not tried, since nothing is written then.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import pkgutil
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from lists import listed
from rich.console import Console
from rich.table import Table

import whereformer
from whereformer.cli.main import execute, main
from whereformer.errors import InputError
from whereformer.lab.run import read_records
from whereformer.provenance import write_results

TIMES = {"seconds", "cpu_seconds", "speed", "date", "commit", "sha256"}
"""Entries of results that differ between two runs of the same command."""
ALONE = 10.0
"""Seconds that the other process gets to end by itself."""
TERMINATION = 30.0
"""Seconds between the signals by which torchrun ends a process."""
DAMAGES = ("delete", "empty", "truncate", "flip", "edit", "swap")
NOUNS = ["cat", "dog", "bird", "fish", "child", "baker", "king", "queen", "farmer", "horse"]
PATTERNS = ["the {a} saw the {b} near the old house.", "a {b} and a {a} went to the market.", "where is the {a}?"]
SIZES = ["--hidden-size=16", "--num-heads=2"]


@dataclass(frozen=True)
class Kill:
    """Kill, damage and starve trainings, and count which of them end with the same bits."""

    commands: Annotated[str, tyro.conf.arg(metavar="A,B")] = "pretrain,finetune,translate,compare"
    """The commands to try."""
    kills: int = 40
    """Kills of each command."""
    damages: int = 30
    """Damaged files of each command."""
    disks: int = 10
    """Full disks of each command."""
    ranks: int = 20
    """Runs of each command in two processes, of which one is killed."""
    seed: int = 0
    """Seed of the moments, files and sizes."""
    out: Path | None = None
    """File for the results, as JSON."""

    def run(self, console: Console) -> None:
        """Try everything and print the counts."""
        names = listed("commands", self.commands, ("pretrain", "finetune", "translate", "compare"))
        import_everything()
        found: dict[str, Any] = {}
        with tempfile.TemporaryDirectory() as folder:
            for name in names:
                command = prepare(name, Path(folder))
                chance = random.Random(f"{self.seed} {name}")
                whole, moments = reference(command)
                shutil.copytree(command.out, command.folder / "whole")
                found[name] = {
                    "kills": counted(kill(command, whole, moments, chance) for _ in range(self.kills)),
                    "damages": counted(damage(command, whole, chance) for _ in range(self.damages)),
                    "disks": counted(fill(command, whole, chance) for _ in range(self.disks)),
                }
                if name in ("pretrain", "translate") and self.ranks:
                    whole, moments = reference(command, 2)
                    ranks = [bereave(command, whole, moments, number % 2, chance) for number in range(self.ranks)]
                    found[name]["ranks"] = counted(iter(ranks))
                show(console, name, found[name])
                if self.out is not None:
                    write_results(self.out, {"seed": self.seed, "commands": found})


@dataclass(frozen=True)
class Command:
    """A command to try: its arguments without ``--out``, a folder for its runs, and where its processes meet."""

    name: str
    arguments: list[str]
    folder: Path
    stores: list[torch.distributed.TCPStore] = field(default_factory=list)

    @property
    def out(self) -> Path:
        return self.folder / "disk" / "run"

    def start(self, limit: int | None = None, ranks: int = 1) -> list[int]:
        """Start the command in forks of this process.

        Args:
            limit: the largest file in bytes that it may write.
            ranks: how many processes do the run together.
        """
        if ranks == 1:
            return [self._fork(limit, 0)]
        # As torchrun does, this process has the store where the others meet.
        self.stores[:] = [torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)]
        shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost"}
        shared |= {"MASTER_PORT": str(self.stores[0].port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        return [self._fork(limit, rank, **shared, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(ranks)]

    def _fork(self, limit: int | None, rank: int, **environment: str) -> int:
        child = os.fork()
        if child:
            return child
        code = 1
        try:
            # Processes that this one starts warn of what it leaves behind when it ends below without cleaning up.
            os.environ.update(environment, PYTHONWARNINGS="ignore")
            log = os.open(self.log(rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            if limit is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  # what the parent set may not be the terminal
            sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
            warnings.simplefilter("ignore")
            main([*self.arguments, "--out", str(self.out)])
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def finish(self, limit: int | None = None, ranks: int = 1) -> tuple[int, str]:
        """Run the command to its end; return the largest exit code of its processes and what they printed."""
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in self.start(limit, ranks)]
        return max(codes, key=abs), "".join(self.output(rank) for rank in range(ranks))

    def log(self, rank: int) -> Path:
        """Return the file for what a process prints."""
        return self.folder / f"log-{rank}"

    def output(self, rank: int = 0) -> str:
        """Return what a process has printed."""
        return self.log(rank).read_text(errors="replace")

    def fresh(self) -> None:
        """Remove the run."""
        shutil.rmtree(self.out.parent, ignore_errors=True)
        self.out.parent.mkdir()

    def take(self, folder: Path) -> None:
        """Put a copy of another run in place."""
        self.fresh()
        shutil.copytree(folder, self.out)


@dataclass(frozen=True)
class Outcome:
    """What became of one trial.

    Args:
        what: what was done.
        equal: whether the run ended with the same bits.
        kept: whether no work was lost, and every error was one clear line.
        how: a word for what happened on the way, to be counted.
        output: the output of a trial that failed.
    """

    what: str
    equal: bool
    kept: bool
    how: str
    output: str = ""


def counted(outcomes: Iterator[Outcome]) -> dict[str, Any]:
    """Count outcomes, and describe those that failed."""
    every = list(outcomes)
    failed = [each for each in every if not (each.equal and each.kept)]
    return {
        "tried": len(every),
        "equal": sum(each.equal for each in every),
        "nothing_lost": sum(each.kept for each in every),
        "how": dict(sorted(Counter(each.how for each in every).items())),
        "what": dict(sorted(Counter(each.what.split()[0] for each in every).items())),
        "failed": [{"what": each.what, "how": each.how, "output": each.output[-2000:]} for each in failed],
    }


def show(console: Console, name: str, found: dict[str, Any]) -> None:
    """Print the counts of one command."""
    table = Table(title=name)
    for column in ("", "tried", "bits equal", "nothing lost", "on the way"):
        table.add_column(column)
    for kind, counts in found.items():
        how = ", ".join(f"{word} {count}" for word, count in counts["how"].items())
        table.add_row(kind, *(str(counts[key]) for key in ("tried", "equal", "nothing_lost")), how)
    console.print(table)
    for kind, counts in found.items():
        for each in counts["failed"]:
            console.print(f"{kind}: {each['what']} ({each['how']})\n{each['output']}", highlight=False)


def import_everything() -> None:
    """Import all of the package and what it imports late, so that forks start at once."""
    torch.set_num_threads(1)
    for module in pkgutil.walk_packages(whereformer.__path__, "whereformer."):
        # The compiled kernel is a library, not a module.
        if not any(part in module.name for part in ("triton", "__main__", "_native")):
            importlib.import_module(module.name)
    for name in ("torch.utils.tensorboard", "transformers.integrations", "transformers.trainer_seq2seq"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def prepare(name: str, folder: Path) -> Command:
    """Write what a command reads, and return the command."""
    own = folder / name
    own.mkdir()
    command = Command(name, [], own)
    lines = [pattern.format(a=a, b=b) for a in NOUNS for b in NOUNS for pattern in PATTERNS]
    text = own / "text.txt"
    text.write_text("\n".join(lines * 3), encoding="utf-8")
    small = [*SIZES, "--length=16", "--blocks=1", "--vocab-size=64", "--batch-size=4"]
    if name == "pretrain":
        options = [*small, "--steps=24", "--every=4", "--dropout=0.1", "--learning-rate=0.01", "--report-to=none"]
        return Command(name, ["pretrain", "--data", str(text), *options], own)
    if name == "compare":
        options = [*small, "--steps=20", "--positions=none,learned,tisa,rope"]
        return Command(name, ["compare", "--data", str(text), *options], own)
    if name == "translate":
        other = own / "other.txt"
        text.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        other.write_text("".join(f"{' '.join(reversed(line.split()))}\n" for line in lines), encoding="utf-8")
        options = ["--vocab-size=320", *SIZES, "--intermediate-size=32", "--encoder-layers=1", "--decoder-layers=1"]
        options += ["--batch-tokens=256", "--max-length=60", "--steps=24", "--every=4", "--warmup=2", "--average=3"]
        options += ["--report-to=none"]
        return Command(name, ["translate", "train", "--data", str(text), str(other), *options], own)
    rows = [json.dumps({"text": line, "label": number % 2}) for number, line in enumerate(lines[:40])]
    (own / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    command = Command(
        name, ["pretrain", "--data", str(text), *small, "--steps=1", "--position=learned", "--length=32"], own
    )
    command.fresh()
    code, output = command.finish()
    assert code == 0, output
    shutil.move(command.out / "model", own / "model")
    options = ["--kernels=0,2", "--seeds=2", "--epochs=2", "--batch-size=8", "--text=text", "--label=label"]
    files = [f"--{part}={own / 'rows.jsonl'}" for part in ("train", "validation")]
    return Command(name, ["finetune", "--model", str(own / "model"), *files, *options], own)


def reference(command: Command, ranks: int = 1) -> tuple[dict[str, Any], tuple[float, float]]:
    """Run a command undisturbed.

    Returns:
        its bits, and the seconds until half of the time to its first results and until its end.
    """
    command.fresh()
    started = time.perf_counter()
    children, first = command.start(ranks=ranks), 0.0
    while children:
        time.sleep(0.01)
        now = time.perf_counter() - started
        first = first or (now if work(command.out) else 0.0)
        done, status = os.waitpid(children[-1], os.WNOHANG)
        if done:
            assert status == 0, command.output(len(children) - 1)
            children.pop()
    return bits(command.out), (first / 2, time.perf_counter() - started)


def bits(out: Path) -> dict[str, Any]:
    """Return the hashes of the files of trained models, and the results without times; what is missing is None."""
    files = [*(out / "model").rglob("*"), *(out / "models").rglob("*")]
    found: dict[str, Any] = {
        str(file.relative_to(out)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.is_file()
    }
    return {**found, "records.jsonl": without_times(results_of(out))}


def without_times(value: Any) -> Any:
    """Return results without what differs between two runs of the same command."""
    if isinstance(value, dict):
        return {name: without_times(each) for name, each in value.items() if name not in TIMES}
    return [without_times(each) for each in value] if isinstance(value, list) else value


def results_of(out: Path) -> Any:
    """Return the values of a run's records by their names; None if there are none, or they are broken."""
    try:
        return {name: record["value"] for name, record in read_records(out / "records.jsonl")[1].items()}
    except (OSError, InputError):
        return None


def work(out: Path) -> int:
    """Return how much of the work has been written: steps of a training, or runs."""
    results = results_of(out)
    if results is None:
        return 0
    # One that is being written has another ending.
    steps = [int(path.name[11:]) for path in (out / "checkpoints").glob("checkpoint-*") if path.name[11:].isdecimal()]
    return max(steps, default=sum(len(json.loads(name)) > 1 for name in results))


def taken_up(output: str, command: Command) -> int:
    """Return how much of the work a run took up again, as it says."""
    if match := re.search(r"continuing after step ([\d,]+)", output):
        return int(match[1].replace(",", ""))
    if match := re.search(r"(\d+) of (\d+) runs are already done", output):
        return work(command.out) if match[1] == match[2] else int(match[1])
    return 0


def kill(command: Command, whole: dict[str, Any], moments: tuple[float, float], chance: random.Random) -> Outcome:
    """Kill a run at a random moment, and continue it."""
    moment, _ = interrupted(command, moments, chance)
    return continued(command, whole, f"SIGKILL after {moment:.2f} s")


def bereave(
    command: Command, whole: dict[str, Any], moments: tuple[float, float], rank: int, chance: random.Random
) -> Outcome:
    """Kill one of two processes at a random moment, let the other one end, and continue with two."""
    moment, (other,) = interrupted(command, moments, chance, rank, 2)
    what, how = f"rank {rank} killed after {moment:.2f} s", "ended in one line"
    code = exit_code(other, ALONE)
    if code is None:
        # So do launchers at once.
        os.kill(other, signal.SIGTERM)
        code, how = exit_code(other, TERMINATION), "ended by its launcher"
    if code is None:
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
        return Outcome(what, False, False, "hung", command.output(1 - rank))
    if code == 0:
        how = "had ended"
    elif len(error_lines(command.output(1 - rank))) != (code != -signal.SIGTERM):
        return Outcome(what, False, False, "not clear", command.output(1 - rank))
    outcome = continued(command, whole, what, 2)
    return replace(outcome, how=f"{outcome.how}, {how}")


def interrupted(
    command: Command, moments: tuple[float, float], chance: random.Random, rank: int = 0, ranks: int = 1
) -> tuple[float, list[int]]:
    """Start a fresh run and kill one of its processes; return when, in seconds, and the other processes."""
    while True:
        command.fresh()
        moment = chance.uniform(*moments)
        children = command.start(ranks=ranks)
        time.sleep(moment)
        killed = children.pop(rank)
        os.kill(killed, signal.SIGKILL)
        _, status = os.waitpid(killed, 0)
        if os.waitstatus_to_exitcode(status) == -signal.SIGKILL:
            return moment, children
        for child in children:  # the run had ended before
            os.waitpid(child, 0)


def exit_code(child: int, seconds: float) -> int | None:
    """Wait for a process so long at most; return its exit code, or None if it goes on."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return None


def continued(command: Command, whole: dict[str, Any], what: str, ranks: int = 1) -> Outcome:
    """Continue what a kill has left, and compare it with an undisturbed run."""
    before = work(command.out)
    code, output = command.finish(ranks=ranks)
    equal = code == 0 and bits(command.out) == whole
    kept = code == 0 and taken_up(output, command) >= before
    how = "with work done" if before else "before any"
    return Outcome(f"{what} with {before} done", equal, kept, how, "" if equal and kept else output)


def damage(command: Command, whole: dict[str, Any], chance: random.Random) -> Outcome:
    """Damage one file of a run, and run the command again."""
    command.take(command.folder / "whole")
    unfinished = chance.random() < 0.5 and (command.out / "model").exists()
    if unfinished:
        shutil.rmtree(command.out / "model")
    places = [path for path in sorted(command.out.rglob("*")) if path.is_file() and worth(path, command.out)]
    while True:
        file, kind = chance.choice(places), chance.choice(DAMAGES)
        if damaged(file, kind, places, chance):
            break
    code, output = command.finish()
    how = "exit 0"
    if code == 2 and len(error_lines(output)) == 1:
        # As the line says: what it names is moved away.
        how = "refused, then moved away"
        (command.out / "records.jsonl").unlink(missing_ok=True)
        code, output = command.finish()
    equal = code == 0 and bits(command.out) == whole
    what = f"{kind} {file.relative_to(command.out)}{' of a run without its model' if unfinished else ''}"
    return Outcome(what, equal, code == 0, how, "" if equal else output)


def worth(path: Path, out: Path) -> bool:
    """Return whether a file is one that a command reads again; reports and curves are only for people."""
    return (
        path.name != ".lock"
        and path.suffix not in (".html", ".md", ".svg")
        and "tensorboard" not in path.relative_to(out).parts
    )


def damaged(file: Path, kind: str, places: list[Path], chance: random.Random) -> bool:
    """Damage a file; return whether this changed it."""
    content = file.read_bytes()
    if kind == "swap":
        others = [path for path in places if path.name == file.name and path.read_bytes() != content]
        if not others:
            return False
        other = chance.choice(others)
        file.write_bytes(other.read_bytes())
        other.write_bytes(content)
        return True
    if kind == "delete":
        file.unlink()
        return True
    if not content:
        return False
    changed = {"empty": lambda: b"", "truncate": lambda: content[: chance.randrange(len(content))]}
    if kind in changed:
        new = changed[kind]()
    elif kind == "flip":
        place = chance.randrange(len(content))
        new = content[:place] + bytes([content[place] ^ 1 << chance.randrange(8)]) + content[place + 1 :]
    else:
        # Another digit, as a person would write it.
        digits = [place for place, byte in enumerate(content) if byte in b"0123456789"]
        if file.suffix not in (".json", ".jsonl") or not digits:
            return False
        place = chance.choice(digits)
        new = content[:place] + str((int(chr(content[place])) + 1) % 10).encode() + content[place + 1 :]
    file.write_bytes(new)
    return new != content


def error_lines(output: str) -> list[str]:
    """Return the lines of an output from the first that is an error on."""
    lines = [line for line in output.splitlines() if line.strip()]
    first = next(
        (n for n, line in enumerate(lines) if line.startswith(("whereformer: ", "Traceback", "Exception"))), None
    )
    return [] if first is None else lines[first:]


def fill(command: Command, whole: dict[str, Any], chance: random.Random) -> Outcome:
    """Run a command on a disk that gets full, make room, and run it again."""
    command.fresh()
    files = [path for path in (command.folder / "whole").rglob("*") if path.is_file()]
    with mounted(command.out.parent) as resize:
        if resize is None:
            limit = chance.randrange(1, max(path.stat().st_size for path in files))
            code, output = command.finish(limit)
            what = f"limit of {limit:,} bytes per file"
        else:
            size = 4096 * chance.randrange(1, sum(-(-path.stat().st_size // 4096) for path in files))
            resize(size)
            code, output = command.finish()
            what = f"disk of {size:,} bytes"
            resize(2**28)
        how = "fitted" if code == 0 else "one line"
        lines = error_lines(output)
        clear = code == 0 or (code == 2 and len(lines) == 1 and "make room" in lines[0])
        first = output
        code, output = command.finish()
        equal = code == 0 and bits(command.out) == whole
    return Outcome(
        what, equal, clear, how if clear else "not clear", "" if equal and clear else f"{first}\n---\n{output}"
    )


@contextlib.contextmanager
def mounted(folder: Path) -> Iterator[Callable[[int], None] | None]:
    """Mount a file system in memory, and give a function that sets its size in bytes; None if that is not permitted."""

    def mount(*options: str) -> bool:
        return (
            subprocess.run(["mount", "-t", "tmpfs", *options, "tmpfs", str(folder)], capture_output=True).returncode
            == 0
        )

    if shutil.which("mount") is None or not mount("-o", "size=64m"):
        yield None
        return
    try:
        yield lambda size: None if mount("-o", f"remount,size={size}") else sys.exit("cannot resize the disk in memory")
    finally:
        subprocess.run(["umount", str(folder)], check=True)


if __name__ == "__main__":
    execute(tyro.cli(Kill, description=__doc__, config=(tyro.conf.OmitArgPrefixes,)))
