"""Does a funnel pay? Give a plain encoder and a funnel the same time to pretrain and fine-tune, and compare accuracy.

Run: .venv/bin/python benchmarks/funnel_pays.py --text imdb/train.parquet --data FOLDER [--inputs imdb:512,imdb:1024]

Pretraining is masked language modeling, with short windows first. Then each model is fine-tuned on every input, and
evaluated on the test rows at intervals. Both models get the same CPU time of one thread. Before a training, a step of
both is timed in turns. From then on a step counts as much as it took there, so that a machine with other work to do
takes steps from neither model.

Every finished part, a pretraining or a fine-tuning, is a file in --out and is not repeated.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import torch
from benchmark import Benchmark, main
from parts import keep, spread
from rich.console import Console
from rich.table import Table
from side_by_side import time_by_turns
from torch import Tensor, nn

from whereformer import EncoderConfig, EncoderForMaskedLM, EncoderForSequenceClassification, load_pretrained
from whereformer.analysis import count_flops
from whereformer.analysis.held_out import HeldOut, lm_score
from whereformer.data.batches import RandomBatches, by_length
from whereformer.data.corpus import TextSource
from whereformer.data.encode import EncodedText, TokenizerChoice, open_or_encode
from whereformer.data.labeled import Rows
from whereformer.data.tokenizers import CLS, PAD, SEP
from whereformer.data.windows import HELD_OUT_RATE, Stage, Windows
from whereformer.files import new_folder
from whereformer.lab.loading import quiet_transformers
from whereformer.lab.optimizer import build_optimizer
from whereformer.lab.recipe import Names

# The funnel's blocks cost as much as the plain encoder's. In pretraining, it has one more layer, the decoder.
MODELS: dict[str, dict[str, Any]] = {
    "plain+tisa": {"blocks": "4", "position": "tisa"},
    "funnel+tisa": {"blocks": "2-3-2", "decoder_layers": "1", "position": "tisa"},
}
STAGES = ((8, 0.5), (16, 0.7), (32, 0.85), (64, 1.0))
"""Tokens in a window of pretraining, and the share of the time at which windows of this length end."""
WARMUP = 0.1
"""Share of the time while the learning rate rises."""
LEARNING_RATE, FINETUNING_RATE = 5e-3, 1e-3
"""Peaks of the learning rate of pretraining and of fine-tuning."""
MASK_RATE = 0.3
"""Share of tokens that are masked in pretraining."""
ROUNDS = 12
"""How many times a step of each model is timed."""
HELD_OUT_TOKENS = 65536
TEST_ROWS = 2000
"""Number of test rows, drawn at random but the same for both models."""

Batch = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Pays(Benchmark):
    """Measure accuracy over time for a plain encoder and a funnel that are pretrained and fine-tuned the same way."""

    text: tuple[str, ...]
    """Text to pretrain on."""
    data: Path
    """Folder with a folder for each task, which has train.parquet and test.parquet with columns text and label."""
    inputs: Names = ("imdb:512",)
    """Tasks to fine-tune on, each with the maximum number of tokens in a row (task:tokens)."""
    seeds: int = 1
    """Number of seeds. Both models are trained with one seed before the next."""
    vocab_size: int = 4096
    """Size of the vocabulary."""
    hidden_size: int = 128
    """Width; heads have 32 channels."""
    batch_tokens: int = 2048
    """Tokens in a step of pretraining, and the maximum in a step of fine-tuning."""
    pretrain_seconds: float = 480.0
    """CPU seconds to pretrain each model, as steps took when they were timed."""
    finetune_seconds: float = 300.0
    """CPU seconds to fine-tune each model on each input."""
    evaluations: int = 4
    """How many times the model is evaluated during fine-tuning, which does not count as time."""
    out: Path = Path("runs/funnel_pays")

    def measure(self, console: Console) -> dict[str, Any]:
        """Make the missing parts, then print all."""
        inputs = [(task, int(n)) for task, n in (part.split(":") for part in self.inputs)]
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in MODELS}
        for seed in range(self.seeds):
            for name in MODELS:
                parts = {"pretraining": self._part(name, seed, "pretraining", partial(self._pretrain, name, seed))}
                for task, length in inputs:
                    part = f"{task}-{length}"
                    parts[part] = self._part(name, seed, part, partial(self._finetune, name, seed, task, length))
                    console.print(f"{name} {seed}: {part} {parts[part]['accuracy'][-1][1]:.1%}", highlight=False)
                runs[name].append({"seed": seed, **parts})
        table = Table("", "held-out loss", *(f"{task}, {length} tokens, %" for task, length in inputs))
        for name, of_seeds in runs.items():
            losses = [run["pretraining"]["held_out_loss"] for run in of_seeds]
            scores = [[100 * run[f"{task}-{length}"]["accuracy"][-1][1] for run in of_seeds] for task, length in inputs]
            table.add_row(name, spread(losses, 2), *(spread(column, 1) for column in scores))
        console.print(table)
        return {"settings": self._settings, "models": runs}

    @cached_property
    def _settings(self) -> dict[str, Any]:
        # The text is named without its folder, which differs between machines.
        text = ["/".join(Path(path).parts[-2:]) for path in self.text]
        return self.settings("seeds", "data", "inputs") | {"text": text}

    @cached_property
    def _encoded(self) -> EncodedText:
        return open_or_encode(self.out / "cache", TextSource(self.text), TokenizerChoice(None, self.vocab_size))

    def _part(self, name: str, seed: int, part: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the results of a part, which is made first if need be."""
        settings = {**self._settings, "seed": seed, **MODELS[name]}
        return keep(self.out / name / str(seed) / f"{part}.json", settings, make)

    def _config(self, name: str, **options: Any) -> EncoderConfig:
        return EncoderConfig(
            vocab_size=self._encoded.vocabulary.size,
            hidden_size=self.hidden_size,
            num_attention_heads=self.hidden_size // 32,
            norm="pre",
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            type_vocab_size=0,
            max_position_embeddings=STAGES[-1][0],
            sparse_prediction=True,
            **MODELS[name],
            **options,
        )

    def _windows(self, length: int, seed: int, step: int) -> Batch:
        """Return the batch of a step of pretraining."""
        text, stages = self._encoded, [Stage(length, step + 1, max(1, self.batch_tokens // length))]
        return Windows(text.training, text.vocabulary, stages, MASK_RATE, seed).batch(step)

    def _pretrain(self, name: str, seed: int) -> dict[str, Any]:
        """Pretrain and save a model; return its steps and its held-out loss."""
        text, longest = self._encoded, STAGES[-1][0]

        def build(name: str) -> EncoderForMaskedLM:
            return EncoderForMaskedLM(self._config(name))

        def batches(length: int) -> Iterator[Batch]:
            return (self._windows(length, 0, step) for step in count())

        seconds = {length: self._seconds(str(length), build, partial(batches, length))[name] for length, _ in STAGES}
        torch.manual_seed(seed)
        model = build(name)
        steps = self._train(
            model,
            lambda step, spent: self._windows(_length_at(spent), seed, step),
            lambda spent: seconds[_length_at(spent)] / self.pretrain_seconds,
            LEARNING_RATE,
        )
        held_out = HeldOut(text.held_out[:HELD_OUT_TOKENS], HELD_OUT_RATE, text.vocabulary)
        loss = lm_score(model, held_out.windows(longest, 8192)).loss
        with quiet_transformers(), new_folder(self.out / name / str(seed) / "model") as folder:
            model.save_pretrained(folder)
        return {"steps": steps, "seconds_of_a_step": seconds, "held_out_loss": loss}

    def _finetune(self, name: str, seed: int, task: str, length: int) -> dict[str, Any]:
        """Fine-tune a pretrained model on a task, and return its accuracy over time."""
        train, test = self._rows(task, "train", length), self._rows(task, "test", length)
        classes = 1 + max(map(int, train.labels))

        def batches(seed: int) -> Iterator[Batch]:
            return map(train.collate, RandomBatches(train.lengths, self.batch_tokens, seed, tokens=True))

        seconds = self._seconds(
            f"{task}-{length}",
            lambda name: EncoderForSequenceClassification(self._config(name, num_labels=classes)),
            lambda: batches(0),
        )[name]
        torch.manual_seed(seed)
        with quiet_transformers():
            folder = self.out / name / str(seed) / "model"
            model = load_pretrained(folder, model_class=EncoderForSequenceClassification, num_labels=classes)
        order = batches(seed)
        curve: list[tuple[float, float]] = []

        def evaluate(spent: float) -> None:
            if spent >= (len(curve) + 1) / self.evaluations:
                curve.append((self.finetune_seconds * spent, self._accuracy(model, test)))

        steps = self._train(
            model,
            lambda step, spent: next(order),
            lambda spent: seconds / self.finetune_seconds,
            FINETUNING_RATE,
            evaluate,
        )
        gflops = count_flops(model.config, length, predictions=0).training / 1e9
        return {"steps": steps, "seconds_of_a_step": seconds, "gflops_of_a_row": gflops, "accuracy": curve}

    def _rows(self, task: str, name: str, length: int) -> Rows:
        """Return the rows of a table of a task; at most TEST_ROWS of the test's."""
        table = parquet.read_table(self.data / task / f"{name}.parquet")
        rows = list(zip(table["text"].to_pylist(), table["label"].to_pylist(), strict=True))
        if name == "test":
            rows = random.Random(0).sample(rows, min(TEST_ROWS, len(rows)))
        tokenizer = self._encoded.tokenizer.backend_tokenizer
        encoded = tokenizer.encode_batch([text for text, _ in rows], add_special_tokens=False)
        ids = [array("i", [CLS, *one.ids[: length - 2], SEP]) for one in encoded]
        return Rows([(row, array("i")) for row in ids], False, [label for _, label in rows], 0, PAD)

    def _train(
        self,
        model: nn.Module,
        batch: Callable[[int, float], Batch],
        share: Callable[[float], float],
        learning_rate: float,
        after: Callable[[float], None] = lambda spent: None,
    ) -> int:
        """Train until the time is used up, and return the number of steps. The learning rate follows the time.

        Args:
            model: the model.
            batch: returns the batch of a step, from its number and the share of the time that is spent.
            share: returns the share of the time that the next step takes, from the share that is spent.
            learning_rate: its peak.
            after: is called after every step with the share of the time that is spent.
        """
        optimizer = build_optimizer(model, learning_rate)
        spent, step = 0.0, 0
        while spent < 1:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * min((spent + 0.01) / WARMUP, (1 - spent) / (1 - WARMUP))
            self._step(model, optimizer, batch(step, spent))
            spent += share(spent)
            step += 1
            after(spent)
        return step

    def _step(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
        model.train()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def _seconds(
        self, part: str, build: Callable[[str], nn.Module], batches: Callable[[], Iterator[Batch]]
    ) -> dict[str, float]:
        """Return the CPU seconds of a training step of each model, timed in turns unless a file has them."""

        def measure() -> dict[str, Any]:
            models = {name: build(name) for name in MODELS}

            def step(name: str) -> Callable[[], None]:
                optimizer, rows = build_optimizer(models[name], LEARNING_RATE), batches()
                return lambda: self._step(models[name], optimizer, next(rows))

            baseline = next(iter(MODELS))
            times = time_by_turns({name: step(name) for name in models}, ROUNDS, baseline, models)
            # Ratios within a round are steadier than times.
            return {"seconds": {name: times[baseline].seconds * measured.ratio for name, measured in times.items()}}

        return keep(self.out / "seconds" / f"{part}.json", self._settings, measure)["seconds"]

    @torch.no_grad()
    def _accuracy(self, model: Any, test: Rows) -> float:
        model.eval()
        correct = 0
        for batch in map(test.collate, by_length(test.lengths, self.batch_tokens, tokens=True)):
            with torch.autocast("cpu", torch.bfloat16):
                correct += int((model(**batch).logits.argmax(-1) == batch["labels"]).sum())
        return correct / len(test.labels)


def _length_at(spent: float) -> int:
    """Return the tokens in a window when a share of the time is spent."""
    return next((length for length, end in STAGES if spent < end), STAGES[-1][0])


if __name__ == "__main__":
    main(Pays)
