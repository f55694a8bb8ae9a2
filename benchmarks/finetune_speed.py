"""Compare the speed of our fine-tuning with transformers' own Trainer, on the same checkpoint and task.

Run: .venv/bin/python benchmarks/finetune_speed.py --model FOLDER --data GLUE_FOLDER [--task cola] [--position learned]

The peers are AutoModelForSequenceClassification with attn_implementation="sdpa" and DataCollatorWithPadding, as in
transformers' run_glue: once with rows in random order (its default), and once with rows grouped by length. All are
trained in turns, a few steps at a time, on one thread. The measure is process CPU time per token of text, without
padding. Ratios are taken within rounds, because the machine may be shared. Writes results.json.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from rich.console import Console
from rich.table import Table
from side_by_side import by_turns, ratios_by_round
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from whereformer.cli.main import execute
from whereformer.data import batches, glue
from whereformer.data import labeled as rows
from whereformer.lab.loading import load_classifier, load_tokenizer, quiet_transformers
from whereformer.lab.optimizer import build_optimizer
from whereformer.lab.train import Training, train
from whereformer.provenance import write_results

PEER = "transformers"


class Clock(TrainerCallback):
    """Measures CPU seconds from the start of the first step to the end of the last, without the Trainer's setup."""

    seconds = 0.0
    started: float | None = None

    def on_step_begin(self, *arguments: Any, **others: Any) -> None:
        if self.started is None:
            self.started = time.process_time()

    def on_step_end(self, *arguments: Any, **others: Any) -> None:
        assert self.started is not None
        self.seconds = time.process_time() - self.started


class Counting:
    """A collator that counts each batch's tokens of text. A loader may ask for one more batch than is used."""

    def __init__(self, collate: Callable[[list[Any]], Any], key: str) -> None:
        self.collate, self.key = collate, key
        self.tokens: list[int] = []

    def __call__(self, batch: list[Any]) -> Any:
        self.tokens.append(sum(len(row[self.key]) for row in batch))
        return self.collate(batch)


@dataclass(frozen=True)
class Speed:
    """Measure the time per token of our fine-tuning and of transformers'."""

    model: str
    """A BERT checkpoint of transformers."""
    task: str = "cola"
    """A GLUE task."""
    data: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Folder with GLUE as Parquet. Default: download from the Hub."""
    position: str = "learned"
    """The position method of our model. With "learned" it is the same model as theirs."""
    kernels: int = 5
    """Number of TISA kernels, if the method has TISA."""
    batch_size: int = 32
    """Rows in a step."""
    steps: int = 8
    """Steps of each way in a round."""
    rounds: int = 7
    """Number of rounds. The first one does not count."""
    out: Path = Path("runs/finetune_speed")
    """Folder for results.json."""

    def run(self, console: Console) -> None:
        torch.set_num_threads(1)
        (data,) = glue.load_glue([self.task], self.data)
        tokenizer = load_tokenizer(self.model, None)
        classes = None if data.task.classes is None else len(data.task.classes)
        kernels = self.kernels if "tisa" in self.position.split("+") else None
        with quiet_transformers():
            models: dict[str, Any] = {"ours": load_classifier(self.model, self.position, kernels, classes)}
            for name in (PEER, f"{PEER}, by length"):
                models[name] = AutoModelForSequenceClassification.from_pretrained(
                    self.model, num_labels=classes or 1, attn_implementation="sdpa"
                )
        encoded = rows.tokenize(data.train, tokenizer, 512, models["ours"].config)
        drawn = list(islice(batches.RandomBatches(encoded.lengths, self.batch_size, 0), self.steps * self.rounds))
        plain = [
            {"input_ids": list(ids), "labels": label, "length": len(ids)}
            | ({"token_type_ids": list(types)} if encoded.has_types else {})
            for (ids, types), label in zip(encoded.rows, encoded.labels, strict=True)
        ]
        optimizers = {name: build_optimizer(model, 3e-5) for name, model in models.items() if name.startswith(PEER)}
        turns = {name: count() for name in models}

        def cost(name: str) -> float:
            turn = next(turns[name])
            if name.startswith(PEER):
                return self._time_peer(name, models[name], optimizers[name], plain, tokenizer, turn)
            return self._time_ours(models[name], drawn[turn * self.steps : (turn + 1) * self.steps], encoded)

        costs = by_turns({name: partial(cost, name) for name in models}, self.rounds - 1)
        ratios = ratios_by_round(costs, PEER)
        table = Table("", "ms per 1000 tokens", f"/ {PEER}'s", "rounds", title=f"{self.task}, {self.position}")
        for name, found in ratios.items():
            middle = statistics.median(costs[name])
            table.add_row(
                name, f"{1e6 * middle:.0f}", f"{statistics.median(found):.2f}", f"{min(found):.2f}-{max(found):.2f}"
            )
        console.print(table)
        settings: dict[str, Any] = {"model": Path(self.model).name, "task": self.task, "position": self.position}
        settings |= {"batch_size": self.batch_size, "steps": self.steps, "parameters": models["ours"].num_parameters()}
        results = {"settings": settings, "seconds_by_token": costs, "ratios": ratios}
        write_results(self.out / "results.json", results)
        console.print(f"wrote {self.out / 'results.json'}", highlight=False)

    def _time_ours(self, model: Any, drawn: list[list[int]], encoded: rows.Rows) -> float:
        """Return CPU seconds of our loop per token of text, over some steps."""
        started: list[float] = []

        def batch(step: int) -> dict[str, torch.Tensor]:
            started.append(time.process_time())
            return encoded.collate(drawn[step])

        plan = Training(steps=self.steps, rate=3e-5, warmup=0)
        train(model, batch, plan)
        tokens = sum(int(encoded.lengths[numbers].sum()) for numbers in drawn)
        return (time.process_time() - started[0]) / tokens

    def _time_peer(
        self,
        name: str,
        model: Any,
        optimizer: torch.optim.Optimizer,
        plain: list[dict[str, Any]],
        tokenizer: Any,
        turn: int,
    ) -> float:
        """Return CPU seconds of transformers' Trainer per token of text, over some steps."""
        arguments = TrainingArguments(
            output_dir=str(self.out),
            max_steps=self.steps,
            per_device_train_batch_size=self.batch_size,
            train_sampling_strategy="group_by_length" if "length" in name else "random",
            length_column_name="length",
            seed=turn,
            use_cpu=True,
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            log_level="error",
        )
        clock = Clock()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        counting = Counting(DataCollatorWithPadding(tokenizer), "input_ids")
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=plain,
            data_collator=counting,
            callbacks=[clock],
            optimizers=(optimizer, schedule),
        )
        trainer.remove_callback(PrinterCallback)
        with quiet_transformers():
            trainer.train()
        return clock.seconds / sum(counting.tokens[: self.steps])


if __name__ == "__main__":
    execute(tyro.cli(Speed))
