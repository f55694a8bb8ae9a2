"""Measure how the peak memory of a training grows with its text, and how fast it starts from the cache.

Run: .venv/bin/python benchmarks/text_memory.py --text FILE [--target FILE] [--times 1,4,16] [--out runs/text_memory]

The training is ``whereformer pretrain`` or, if there is a file of translations, ``whereformer translate train``. The
files are repeated to make larger texts. For each text, one process encodes it and trains a tiny model, and another
trains the same model again from the cache. Memory is what the operating system counts as the most resident bytes of
the process, pages of mapped files included. Writes results.json.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from whereformer.cli.main import execute
from whereformer.errors import InputError
from whereformer.provenance import write_results


@dataclass(frozen=True)
class TextMemory:
    """Measure peak memory and time of a training on a text that is repeated."""

    text: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    """A file of plain text."""
    target: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Translations of its lines, to measure `translate train` instead of `pretrain`."""
    times: Annotated[str, tyro.conf.arg(metavar="N,N")] = "1,4,16"
    """How often the file is repeated."""
    steps: int = 4
    """Training steps."""
    hidden_size: int = 64
    """Width of the model, which has one layer."""
    vocab_size: int = 4096
    """Size of the vocabulary, which is learned from the text."""
    out: Path = Path("runs/text_memory")
    """Folder for results.json, and meanwhile for the texts and the runs."""

    def run(self, console: Console) -> None:
        for name, file in (("text", self.text), ("target", self.target)):
            if file is not None and not file.is_file():
                raise InputError(name, f"no such file: {str(file)!r}")
        rows: list[dict[str, Any]] = []
        table = Table(
            "text, MB", "encoded: peak, MB", "growth", "seconds", "from the cache: peak, MB", "growth", "seconds"
        )
        for count in self.times.split(","):
            row = self._measured(int(count))
            rows.append(row)
            more = row["bytes"] - rows[0]["bytes"]
            shown = [f"{row['bytes'] / 1e6:,.0f}"]
            for part in ("encoded", "cached"):
                growth = row[part]["peak"] - rows[0][part]["peak"]
                row[part]["growth"] = growth / more if more else 0.0
                shown += [
                    f"{row[part]['peak'] / 1e6:,.0f}",
                    f"{row[part]['growth']:.1%}",
                    f"{row[part]['seconds']:.1f}",
                ]
            table.add_row(*shown)
            write_results(self.out / "results.json", {"rows": rows})
        console.print(table)
        console.print(f"wrote {self.out / 'results.json'}; growth is the share of the text's growth")

    def _measured(self, count: int) -> dict[str, Any]:
        """Return the peak memory and the time with and without a cache, for the text ``count`` times."""
        folder = self.out / f"times_{count}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        given = {"text.txt": self.text, "target.txt": self.target}
        texts = [_repeated(file, folder / name, count) for name, file in given.items() if file is not None]
        found: dict[str, Any] = {"times": count, "bytes": sum(text.stat().st_size for text in texts)}
        for part in ("encoded", "cached"):
            found[part] = self._trained(texts, folder / "cache", folder / part)
        shutil.rmtree(folder)
        return found

    def _trained(self, texts: list[Path], cache: Path, out: Path) -> dict[str, float]:
        """Train in a process of its own; return its peak memory in bytes and its seconds."""
        command = [sys.executable, "-m", "whereformer"]
        if len(texts) == 1:
            command += ["pretrain", f"--data={texts[0]}", "--blocks=1"]
        else:
            command += ["translate", "train", "--data", *map(str, texts), "--average=1"]
            command += ["--encoder-layers=1", "--decoder-layers=1", f"--intermediate-size={2 * self.hidden_size}"]
        command += [f"--cache={cache}", f"--out={out}", "--device=cpu", f"--vocab-size={self.vocab_size}"]
        command += [f"--steps={self.steps}", f"--every={self.steps}"]
        command += ["--num-heads=2", f"--hidden-size={self.hidden_size}"]
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise InputError("text", f"training on {texts[0]} failed with exit code {process.returncode}")
        # In kibibytes, but on macOS in bytes.
        unit = 1 if sys.platform == "darwin" else 1024
        return {"peak": usage.ru_maxrss * unit, "seconds": round(time.perf_counter() - started, 1)}


def _repeated(file: Path, copy: Path, count: int) -> Path:
    """Write a file ``count`` times into another."""
    with copy.open("wb") as written:
        for _ in range(count):
            with file.open("rb") as read:
                shutil.copyfileobj(read, written)
    return copy


if __name__ == "__main__":
    execute(tyro.cli(TextMemory))
