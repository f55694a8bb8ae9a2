"""Does a funnel pay? Give plain encoders and funnels the same time to pretrain and fine-tune, and compare accuracy.

The funnels' blocks cost the same as the plain encoder. In pretraining, funnels have an additional decoder layer.

Run: .venv/bin/python benchmarks/funnel_pays.py --text wikitext.parquet --train sst2/train.parquet
         --test sst2/validation.parquet [--column sentence]

Pretraining is masked language modelling. Every model gets the same stream of batches for the same CPU time of one
thread. Then each is fine-tuned on labeled sentences, again for the same time, and judged on the test sentences at
intervals. The result is accuracy over time. Writes results.json and plot.svg.
"""

from __future__ import annotations

import json
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import pyarrow.parquet as parquet
import torch
import tyro
from matplotlib.figure import Figure
from rich.console import Console
from torch import Tensor

from whereformer import EncoderConfig, EncoderForMaskedLM, EncoderForSequenceClassification
from whereformer.analysis import cost
from whereformer.cli.main import execute
from whereformer.data import corpus
from whereformer.data.masks import Batches, HeldOut
from whereformer.data.tokenizers import CLS, PAD, SEP, token_stream, train_tokenizer
from whereformer.runs.provenance import commit, write_results
from whereformer.training.held_out import evaluate
from whereformer.training.optimizer import build_optimizer

MODELS: dict[str, dict[str, Any]] = {
    "plain": {"blocks": "4", "position": "transformer_xl"},
    "funnel": {"blocks": "2-3-2", "decoder_layers": "1", "position": "transformer_xl"},
    "funnel + tisa": {"blocks": "2-3-2", "decoder_layers": "1", "position": "tisa"},
    "plain + tisa": {"blocks": "4", "position": "tisa"},
}
COLORS = {"plain": "#7a7a7a", "plain + tisa": "#0072b2", "funnel": "#cc79a7", "funnel + tisa": "#d55e00"}
MASK_RATE = 0.15


@dataclass(frozen=True)
class Pays:
    """Measure accuracy over time for plain encoders and funnels that are pretrained and fine-tuned the same way."""

    text: Annotated[str, tyro.conf.arg(metavar="PATH")]
    """Text to pretrain on."""
    train: Annotated[Path, tyro.conf.arg(metavar="PARQUET")]
    """Sentences to fine-tune on, with a column "label" of whole numbers."""
    test: Annotated[Path, tyro.conf.arg(metavar="PARQUET")]
    """Sentences to judge by."""
    test_rows: int = 2000
    """Number of sentences to judge by, drawn at random."""
    column: str = "sentence"
    """The column with the sentences."""
    length: int = 128
    """Tokens in a pretraining window."""
    sentence_length: int = 64
    """Most tokens in a sentence."""
    vocab_size: int = 8192
    """Vocabulary size of the tokenizer, which is trained on the text."""
    models: Annotated[str, tyro.conf.arg(metavar="A,B")] = "plain,plain + tisa,funnel,funnel + tisa"
    """The models to train."""
    hidden_size: int = 192
    """Width."""
    batch_size: int = 32
    """Windows or sentences in a step."""
    pretrain_seconds: float = 300.0
    """CPU seconds to pretrain each model."""
    finetune_seconds: float = 120.0
    """CPU seconds to fine-tune each model."""
    judgements: int = 8
    """How many times the model is judged during fine-tuning."""
    out: Path = Path("benchmarks/results/funnel_pays")
    """Folder for the results. Models that it already has are not trained again."""
    seed: int = 0
    """Seed of weights and batches."""

    def run(self, console: Console) -> None:
        torch.set_num_threads(1)
        documents = corpus.load_documents([self.text])
        training, held_out = corpus.split_documents(documents)
        tokenizer = train_tokenizer(training, self.vocab_size)
        vocabulary = tokenizer.get_vocab_size()
        stream = token_stream(tokenizer, training)
        judged = HeldOut(token_stream(tokenizer, held_out)[:65536], MASK_RATE, vocabulary)
        train, test = (self._sentences(tokenizer, file) for file in (self.train, self.test))
        test = random.Random(self.seed).sample(test, min(self.test_rows, len(test)))
        file = self.out / "results.json"
        settings = {name: str(value) for name, value in asdict(self).items() if name not in ("out", "models", "text")}
        settings = {
            name: Path(value).parent.name if name in ("train", "test") else value for name, value in settings.items()
        }
        results: dict[str, Any] = {"settings": settings, "models": {}}
        if file.exists():
            found = json.loads(file.read_text())
            results = {name: found[name] for name in results}
        models = results["models"]
        for name in self.models.split(","):
            config = self._config(name, vocabulary)
            if name in models:
                models[name] |= self._costs(config)
                continue
            batches = Batches(stream, self.batch_size, self.length, MASK_RATE, vocabulary, self.seed)
            torch.manual_seed(self.seed)
            model = EncoderForMaskedLM(config)
            steps = self._train(model, lambda step, b=batches: b[step], self.pretrain_seconds, 1e-3)
            loss = evaluate(model, judged, self.length).loss
            console.print(f"{name}: {steps} steps of pretraining, held-out loss {loss:.3f}", highlight=False)
            classifier = EncoderForSequenceClassification(config)
            own = classifier.state_dict()
            found = {key: x for key, x in model.state_dict().items() if key in own and key.startswith("encoder.")}
            classifier.load_state_dict(found, strict=False)
            curve: list[tuple[float, float]] = []
            tuned = self._fine_tune(classifier, train, test, curve)
            console.print(f"{name}: {tuned} steps of fine-tuning, accuracy {curve[-1][1]:.1%}", highlight=False)
            models[name] = {
                "commit": commit(),
                **MODELS[name],
                **self._costs(config),
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
                "pretraining_steps": steps,
                "held_out_loss": loss,
                "fine_tuning_steps": tuned,
                "accuracy": curve,
            }
            write_results(file, results)
        write_results(file, results)
        self._plot(results)
        console.print(f"wrote {file} and {self.out / 'plot.svg'}", highlight=False)

    def _costs(self, config: EncoderConfig) -> dict[str, float]:
        """Return the cost of a pretraining window, with the decoder, and of the longest sentence, without it."""
        predictions = round(MASK_RATE * self.length)
        blocks = EncoderConfig.from_dict({**config.to_dict(), "decoder_layers": "0"})
        return {
            "gflops_pretraining": cost(config, self.length, predictions=predictions).flops.training / 1e9,
            "gflops_fine_tuning": cost(blocks, self.sentence_length, predictions=0).flops.training / 1e9,
        }

    def _config(self, name: str, vocabulary: int) -> EncoderConfig:
        return EncoderConfig(
            vocab_size=vocabulary,
            hidden_size=self.hidden_size,
            num_attention_heads=self.hidden_size // 32,
            norm="pre",
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            type_vocab_size=0,
            max_position_embeddings=self.length,
            sparse_prediction=True,
            **MODELS[name],
        )

    def _sentences(self, tokenizer: Any, file: Path) -> list[tuple[list[int], int]]:
        table = parquet.read_table(file)
        encoded = tokenizer.encode_batch(table[self.column].to_pylist(), add_special_tokens=False)
        ids = ([CLS, *one.ids[: self.sentence_length - 2], SEP] for one in encoded)
        return list(zip(ids, table["label"].to_pylist(), strict=True))

    def _padded(self, rows: list[tuple[list[int], int]]) -> tuple[Tensor, Tensor, Tensor]:
        longest = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([row + [PAD] * (longest - len(row)) for row, _ in rows])
        return ids, ids != PAD, torch.tensor([label for _, label in rows])

    def _train(self, model: Any, batch: Any, seconds: float, learning_rate: float) -> int:
        """Train until the CPU time is used up, and return the number of steps. The learning rate follows the time."""
        optimizer = build_optimizer(model, learning_rate)
        model.train()
        started, step = time.process_time(), 0
        while (spent := (time.process_time() - started) / seconds) < 1:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * min(spent / 0.1, (1 - spent) / 0.9)
            inputs, labels = batch(step)
            model(inputs, labels=labels).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
        return step

    def _fine_tune(self, model: Any, train: list[Any], test: list[Any], curve: list[tuple[float, float]]) -> int:
        optimizer = build_optimizer(model, 3e-4)
        order = torch.Generator().manual_seed(self.seed)
        spent, step, judged = 0.0, 0, 0
        while spent < self.finetune_seconds:
            started, share = time.process_time(), spent / self.finetune_seconds
            for group in optimizer.param_groups:
                group["lr"] = 3e-4 * min((share + 0.01) / 0.1, (1 - share) / 0.9)
            rows = [train[i] for i in torch.randint(len(train), (self.batch_size,), generator=order).tolist()]
            ids, mask, labels = self._padded(rows)
            model.train()
            model(ids, mask, labels=labels).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            spent += time.process_time() - started
            step += 1
            if spent >= self.finetune_seconds * (judged + 1) / self.judgements:
                judged += 1
                curve.append((spent, self._accuracy(model, test)))
        return step

    @torch.no_grad()
    def _accuracy(self, model: Any, test: list[Any]) -> float:
        model.eval()
        right = 0
        for start in range(0, len(test), 128):
            ids, mask, labels = self._padded(test[start : start + 128])
            right += int((model(ids, mask).logits.argmax(-1) == labels).sum())
        return right / len(test)

    def _plot(self, results: dict[str, Any]) -> None:
        figure = Figure(figsize=(6.4, 3.6), layout="constrained")
        axes = figure.add_subplot()
        for name, found in results["models"].items():
            seconds, accuracy = zip(*found["accuracy"], strict=True)
            label = f"{name} (pretraining loss {found['held_out_loss']:.2f})"
            axes.plot(seconds, [100 * x for x in accuracy], color=COLORS[name], marker="o", markersize=3, label=label)
        axes.set_xlabel("seconds of fine-tuning (CPU time, one thread)")
        axes.set_ylabel("accuracy, %")
        axes.legend(frameon=False, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(self.out / "plot.svg", metadata={"Date": None})


if __name__ == "__main__":
    execute(tyro.cli(Pays, args=sys.argv[1:]))
