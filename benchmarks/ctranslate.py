"""Compare a translation model with itself in CTranslate2: equal lines, BLEU and CPU time, in float32 and int8.

Run: .venv-clients/bin/python benchmarks/ctranslate.py --model runs/translate/model --data multi30k/test.parquet

The model is one of `whereformer translate train` with `shaw` or `sinusoidal`. `specification` and `translate` are the
code of the guide "Other programs". The p-value is sacrebleu's, by paired bootstrap: how probable it is that chance
makes such a difference in BLEU from our translations. Prints a table.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from benchmark import Benchmark, main
from rich.console import Console
from rich.table import Table
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.significance import PairedTest

from whereformer._extras import require
from whereformer.data.parallel import Pairs
from whereformer.lab.translation import load, translate_lines

GUIDE = Path(__file__).parents[1] / "docs" / "guides" / "other-programs.md"


@dataclass(frozen=True, kw_only=True)
class CTranslate(Benchmark):
    """Compare a translation model with itself in CTranslate2."""

    model: Path
    """Folder of the model."""
    data: Path
    """Table with a column for each language."""
    columns: str = "en,de"
    """The language to translate from, and the other one."""
    sentences: int = 500
    """The number of sentences, from the beginning."""
    out: Path = Path("runs/ctranslate")

    def measure(self, console: Console) -> dict[str, Any]:
        require("clients", "ctranslate2")
        import ctranslate2

        pairs = islice(Pairs("data", (self.data,), self.columns), self.sentences)
        sources, references = map(list, zip(*pairs, strict=True))
        model, tokenizer = load(str(self.model), torch.device("cpu"))
        names: dict[str, Any] = {"model": model.eval(), "tokenizer": tokenizer}
        section = GUIDE.read_text(encoding="utf-8").split("\n## CTranslate2\n")[1]
        first, _, last = re.findall(r"```python\n(.*?)```", section, re.DOTALL)[:3]
        exec(first, names)
        exec(last.split("\n\n\nlines = ")[0], names)
        translators, rows = dict[str, Any](), dict[str, dict[str, Any]]()
        with tempfile.TemporaryDirectory() as folder:
            names["specification"](model, tokenizer).save(folder)
            for kind in ("float32", "int8"):
                options = {"compute_type": kind, "inter_threads": 1, "intra_threads": 1}
                translators[kind] = ctranslate2.Translator(folder, **options)
        table = Table("", "same lines", "BLEU", "p-value", "CPU, s")
        for beams in (1, 4):
            ours = _timed(partial(translate_lines, model, tokenizer, sources, beams=beams))
            rows[f"ours, beams {beams}"] = {"bleu": _bleu(ours[0], references), "cpu_seconds": ours[1]}
            for kind, translator in translators.items():
                names["translator"] = translator
                theirs, seconds = _timed(partial(names["translate"], sources, beams))
                rows[f"CTranslate2, {kind}, beams {beams}"] = {
                    "bleu": _bleu(theirs, references),
                    "p_value": _p_value(theirs, ours[0], references),
                    "same": sum(map(str.__eq__, theirs, ours[0])),
                    "cpu_seconds": seconds,
                }
        for name, row in rows.items():
            cells = (row.get(column) for column in ("same", "bleu", "p_value", "cpu_seconds"))
            table.add_row(name, *("" if cell is None else str(cell) for cell in cells))
        console.print(table)
        return {"settings": self.settings("model", "data"), "rows": rows}


def _timed(function: Callable[[], list[str]]) -> tuple[list[str], float]:
    """Return a function's result and the CPU time that it takes, in seconds."""
    began = time.process_time()
    return function(), round(time.process_time() - began, 2)


def _bleu(lines: Sequence[str], references: Sequence[str]) -> float:
    return round(BLEU().corpus_score(lines, [references]).score, 2)


def _p_value(lines: Sequence[str], baseline: Sequence[str], references: Sequence[str]) -> float | None:
    """Return how probable it is that chance makes such a difference in BLEU; None if all lines are equal."""
    if lines == baseline:
        return None
    systems: list[Any] = [("Baseline", [*baseline]), ("CTranslate2", [*lines])]
    _, scores = PairedTest(systems, {"BLEU": BLEU()}, [[*references]], "bs", 1000)()
    result: Any = scores["BLEU"][1]
    return round(result.p_value, 3)


if __name__ == "__main__":
    main(CTranslate)
