"""Time batches of texts as they are, sorted by length, and packed into one row without padding.

The model is all-MiniLM-L6-v2 or any folder that ``whereformer.load_pretrained`` reads, with its own positions and with
others. Texts are those of three data sets, cut to the model's length. Tokens a second are real ones, by the CPU time of
one thread, for inference and for training (forward and all gradients). The ways take turns, and each keeps its best
time. Memory is the peak of the largest batch.

Run: python benchmarks/packed.py MODEL DATA [--texts 512] [--batch 32] [--positions learned,learned+tisa] [--rounds 3]
    [--out FILE], where DATA has glue/stsb, 20newsgroups and wikitext2, each with train.parquet.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from peak import peak_memory
from side_by_side import by_turns, cpu_seconds

import whereformer
from whereformer.provenance import write_results

SETS = {
    "STS-B": ("glue/stsb", "sentence1"),
    "20 Newsgroups": ("20newsgroups", "text"),
    "WikiText": ("wikitext2", "text"),
}
WAYS = ("padded", "sorted", "packed")
LONGEST = 256
"""The most tokens of a text that all-MiniLM-L6-v2 reads."""
MIB = 2**20


def tokenized(data: Path, folder: str, column: str, tokenizer: Any, count: int) -> list[list[int]]:
    """Return the token ids of texts that are not empty, drawn at random, always the same ones."""
    rows = datasets.Dataset.from_parquet(str(data / folder / "train.parquet"))[column]
    texts = random.Random(0).sample([text for text in rows if text.strip()], count)
    found: list[list[int]] = tokenizer(texts, truncation=True, max_length=LONGEST)["input_ids"]
    return found


def batches(texts: list[list[int]], way: str, size: int, pad: int) -> list[dict[str, Any]]:
    """Return the batches of one way, each the inputs of the model."""
    texts = sorted(texts, key=len) if way == "sorted" else texts
    parts = [texts[at : at + size] for at in range(0, len(texts), size)]
    if way == "packed":
        collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
        packed = [collate([{"input_ids": text} for text in part]) for part in parts]
        return [{name: value for name, value in batch.items() if name != "labels"} for batch in packed]
    rows = [
        torch.nn.utils.rnn.pad_sequence([torch.tensor(text) for text in part], True, padding_value=pad)
        for part in parts
    ]
    return [{"input_ids": ids, "attention_mask": (ids != pad).long()} for ids in rows]


def passes(model: torch.nn.Module, given: list[dict[str, Any]], step: str) -> Callable[[], None]:
    """Return a pass over batches: inference or, with gradients, training."""

    def run() -> None:
        for batch in given:
            if step == "inference":
                with torch.inference_mode():
                    model(**batch)
            else:
                model(**batch).last_hidden_state.square().mean().backward()
                model.zero_grad()

    return run


def main() -> None:
    """Measure every data set, method and step, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("data", type=Path)
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--positions", default="learned,learned+tisa")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the numbers there, as JSON")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(asked.model)
    results = []
    print("| texts | tokens: median, longest | position | pass | " + " | ".join(WAYS) + " |")
    for name, (folder, column) in SETS.items():
        texts = tokenized(asked.data, folder, column, tokenizer, asked.texts)
        lengths = sorted(map(len, texts))
        ways = {way: batches(texts, way, asked.batch, tokenizer.pad_token_id) for way in WAYS}
        for position in asked.positions.split(","):
            model = whereformer.load_pretrained(asked.model, position=position).eval()
            for step in ("inference", "training"):
                work = {way: passes(model, given, step) for way, given in ways.items()}
                seconds = by_turns({way: partial(cpu_seconds, run) for way, run in work.items()}, asked.rounds)
                speed = {way: sum(lengths) / min(times) for way, times in seconds.items()}
                largest = {way: max(given, key=lambda batch: batch["input_ids"].numel()) for way, given in ways.items()}
                memory = {
                    way: peak_memory(passes(model, [batch], step), torch.device("cpu")) / MIB
                    for way, batch in largest.items()
                }
                cells = [f"{speed[way]:,.0f}, {memory[way]:.0f} MiB" for way in WAYS]
                shape = f"{lengths[len(lengths) // 2]}, {lengths[-1]}"
                print(f"| {name} | {shape} | {position} | {step} | " + " | ".join(cells) + " |", flush=True)
                case = {"texts": name, "tokens": sum(lengths), "position": position, "pass": step}
                results.append({**case, "tokens_a_second": speed, "mib": memory})
    if asked.out:
        write_results(asked.out, {"texts": asked.texts, "batch": asked.batch, "longest": LONGEST, "results": results})


if __name__ == "__main__":
    main()
