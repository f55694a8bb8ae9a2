"""Time batches of texts as they are, sorted by length, and packed into one row without padding.

The model is all-MiniLM-L6-v2 or any folder that ``whereformer.load_pretrained`` reads, with its own positions and with
others. Texts come from three data sets and are cut to the model's length. Tokens a second do not count padding. They
are by the CPU time of one thread, for inference and for training (forward and all gradients). The ways take turns, and
each keeps its best time. Memory is the peak of the largest batch.

Run: python benchmarks/packed.py MODEL DATA [--texts 512] [--batch 32] [--positions learned,learned+tisa] [--rounds 3]
    [--out FILE], where DATA has glue/stsb, 20newsgroups and wikitext2, each with train.parquet.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import datasets
import torch
import transformers
from benchmark import Benchmark, main
from peak import peak_memory
from rich.console import Console
from side_by_side import by_turns, cpu_seconds

import whereformer
from whereformer.lab.recipe import Names

SETS = {
    "STS-B": ("glue/stsb", "sentence1"),
    "20 Newsgroups": ("20newsgroups", "text"),
    "WikiText": ("wikitext2", "text"),
}
WAYS = ("padded", "sorted", "packed")
MAX_LENGTH = 256
"""The maximum number of tokens of a text that all-MiniLM-L6-v2 reads."""


def tokenized(data: Path, folder: str, column: str, tokenizer: Any, count: int) -> list[list[int]]:
    """Return the token ids of texts that are not empty, drawn at random, always the same ones."""
    rows = datasets.Dataset.from_parquet(str(data / folder / "train.parquet"))[column]
    texts = random.Random(0).sample([text for text in rows if text.strip()], count)
    return tokenizer(texts, truncation=True, max_length=MAX_LENGTH)["input_ids"]


def batches(texts: list[list[int]], way: str, size: int, pad: int) -> list[dict[str, Any]]:
    """Return the batches of one way, each the inputs of the model."""
    texts = sorted(texts, key=len) if way == "sorted" else texts
    parts = [texts[start : start + size] for start in range(0, len(texts), size)]
    if way == "packed":
        collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
        packed = [collate([{"input_ids": text} for text in part]) for part in parts]
        return [{name: value for name, value in batch.items() if name != "labels"} for batch in packed]
    rows = [
        torch.nn.utils.rnn.pad_sequence([torch.tensor(text) for text in part], True, padding_value=pad)
        for part in parts
    ]
    return [{"input_ids": ids, "attention_mask": (ids != pad).long()} for ids in rows]


def passes(model: torch.nn.Module, inputs: list[dict[str, Any]], step: str) -> Callable[[], None]:
    """Return a pass over batches: inference or, with gradients, training."""

    def run() -> None:
        for batch in inputs:
            if step == "inference":
                with torch.inference_mode():
                    model(**batch)
            else:
                model(**batch).last_hidden_state.square().mean().backward()
                model.zero_grad()

    return run


@dataclass(frozen=True, kw_only=True)
class PackedTexts(Benchmark):
    """Measure the tokens a second of padded, sorted and packed batches."""

    FLAGS: ClassVar = {"model": "MODEL", "data": "DATA"}

    model: str
    """A model's folder or name."""
    data: Path
    """Folder with the data sets."""
    texts: int = 512
    """Texts of each data set."""
    batch: int = 32
    """Texts in a batch."""
    positions: Names = ("learned", "learned+tisa")
    """Position methods."""
    rounds: int = 3
    """How many times each way is timed."""
    out: Path = Path("runs/packed.json")

    def measure(self, console: Console) -> dict[str, Any]:
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.model)
        rows = []
        print("| texts | tokens: median, longest | position | pass | " + " | ".join(WAYS) + " |")
        for name, (folder, column) in SETS.items():
            texts = tokenized(self.data, folder, column, tokenizer, self.texts)
            lengths = sorted(map(len, texts))
            ways = {way: batches(texts, way, self.batch, tokenizer.pad_token_id) for way in WAYS}
            largest = {way: max(inputs, key=lambda batch: batch["input_ids"].numel()) for way, inputs in ways.items()}
            for position in self.positions:
                model = whereformer.load_pretrained(self.model, position=position).eval()
                for step in ("inference", "training"):
                    work = {way: partial(cpu_seconds, passes(model, inputs, step)) for way, inputs in ways.items()}
                    speed = {way: sum(lengths) / min(times) for way, times in by_turns(work, self.rounds).items()}
                    memory = {way: peak_memory(passes(model, [batch], step)) / 2**20 for way, batch in largest.items()}
                    cells = [f"{speed[way]:,.0f}, {memory[way]:.0f} MiB" for way in WAYS]
                    shape = f"{lengths[len(lengths) // 2]}, {lengths[-1]}"
                    print(f"| {name} | {shape} | {position} | {step} | " + " | ".join(cells) + " |", flush=True)
                    case = {"texts": name, "tokens": sum(lengths), "position": position, "pass": step}
                    rows.append({**case, "tokens_a_second": speed, "mib": memory})
        return {"texts": self.texts, "batch": self.batch, "longest": MAX_LENGTH, "results": rows}


if __name__ == "__main__":
    main(PackedTexts)
