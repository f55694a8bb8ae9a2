"""The main job: train the same small encoder once per position method on the same text, and judge what differs."""

from __future__ import annotations

import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...analysis.toeplitz import diagonal_means
from ...data import corpus
from ...data.masks import IGNORED, Batches, HeldOut
from ...data.tokenizers import token_stream, train_tokenizer
from ...errors import InputError
from ...files import write_atomically
from ...models import EncoderConfig, EncoderForMaskedLM
from ...positions import PositionRangeError, build_position
from ...runs.memory import peak_memory
from ...runs.progress import Progress
from ...runs.provenance import provenance
from ...runs.results import read_results, refuse_other_settings
from ...training.held_out import evaluate, unigram_entropy
from ...training.model_options import about_method
from ...training.optimizer import build_optimizer, linear_schedule

BASELINE = "none"
DEFAULT_POSITIONS = ("none", "sinusoidal", "learned", "rope", "t5", "shaw", "tisa", "learned+tisa")
QUICK_POSITIONS = ("none", "learned", "rope", "tisa")
LENGTH_FACTORS = (1, 2, 4)
HELD_OUT_RATE = 0.15
SPEED_ROUNDS = 9
DEFAULT_STEPS = 2400
QUICK_STEPS = 400
OFFSETS_SHOWN = 16
FORMAT = 1
INITIALIZER_RANGE = 0.06
"""Wider than BERT's 0.02, which is made for a width of 768: narrow layers start learning sooner."""


@dataclass(frozen=True)
class Sizes:
    """All that decides a result besides text, method and seed; results of different sizes are never mixed.

    Args:
        blocks: layers, as ``EncoderConfig.blocks``.
        decoder_layers: full-length layers after pooled blocks, as ``EncoderConfig.decoder_layers``.
        length: tokens of a training window.
        steps: training steps.
        batch_size: windows of a step.
        hidden_size, num_heads: width and heads of the encoder.
        vocab_size: WordPiece vocabulary.
        mask_rate: share of tokens to predict in training (held-out text always has 15%).
        learning_rate: its peak; a linear warm-up over a tenth of the steps, then a linear decay to zero.
    """

    blocks: str
    decoder_layers: str
    length: int
    steps: int
    batch_size: int
    hidden_size: int
    num_heads: int
    vocab_size: int
    mask_rate: float
    learning_rate: float

    def config(self, position: str, vocab_size: int) -> EncoderConfig:
        """The encoder of one method; without dropout, since no token is seen often enough to be learned by heart."""
        return EncoderConfig(
            vocab_size=vocab_size,
            hidden_size=self.hidden_size,
            num_attention_heads=self.num_heads,
            blocks=self.blocks,
            decoder_layers=self.decoder_layers,
            position=position,
            max_position_embeddings=self.length,
            norm="pre",
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            type_vocab_size=0,
            layer_norm_eps=1e-6,
            initializer_range=INITIALIZER_RANGE,
            intermediate_size=2 * self.hidden_size,
            sparse_prediction=True,
        )


@dataclass(frozen=True)
class Text:
    """The prepared text: a tokenizer and its two streams."""

    training: Tensor
    held_out: Tensor
    vocab_size: int
    facts: dict[str, Any]


def prepare_text(documents: Sequence[str], sizes: Sizes, data: Sequence[str], column: str | None, out: Path) -> Text:
    """Split, train the tokenizer on the training part and encode; the tokenizer is kept in ``out``.

    Args:
        documents: the text.
        sizes: decide the vocabulary, and how much text there must be.
        data: where the text came from, as the user gave it; empty for Python's documentation.
        column: the tables' column that holds it, if the user named one.
        out: the folder of results.

    Raises:
        InputError: if there is too little text for the lengths to be tried.
    """
    training, held_out = corpus.split_documents(documents)
    tokenizer = train_tokenizer(training, sizes.vocab_size)
    streams = token_stream(tokenizer, training), token_stream(tokenizer, held_out)
    longest = max(max(LENGTH_FACTORS) * sizes.length, HeldOut.GROUP)
    if len(streams[1]) < longest or len(streams[0]) < longest:
        raise InputError(
            "data",
            f"too little text: {len(streams[0])} training and {len(streams[1])} held-out tokens, "
            f"expected at least {longest} of each to judge {longest} tokens at a time; give more text or "
            "a smaller `length`",
        )
    write_atomically(out / "tokenizer.json", tokenizer.to_str())
    size = tokenizer.get_vocab_size()
    facts = {
        "source": corpus.source_of(data),
        "data": list(data),
        "column": column,
        "documents": len(documents),
        "characters": sum(len(piece) for piece in training) + sum(len(piece) for piece in held_out),
        "training_tokens": len(streams[0]),
        "held_out_tokens": len(streams[1]),
        "vocabulary": size,
        "unigram_entropy": unigram_entropy(*streams, size),
    }
    return Text(*streams, size, facts)


class Results:
    """``results.json`` of an output folder: written after every finished run, and taken up again.

    Args:
        out: the folder.
        sizes: what all its results have in common.
        text: the text's fingerprint, likewise.
        device: the kind of device, likewise.
    Raises:
        InputError: if the folder holds results of other settings, or something else under that name.
    """

    def __init__(self, out: Path, sizes: Sizes, text: str, device: str) -> None:
        self.path = out / "results.json"
        settings = {**asdict(sizes), "text": text, "device": device}
        self.data: dict[str, Any] = {"format": FORMAT, "settings": settings, "runs": {}}
        found = read_results(self.path, FORMAT)
        if found is not None:
            refuse_other_settings(out, found["settings"], self.data["settings"])
            self.data = found

    def get(self, position: str, seed: int) -> dict[str, Any] | None:
        """The finished run of a method and seed, if there is one."""
        run: dict[str, Any] | None = self.data["runs"].get(position, {}).get(str(seed))
        return run

    def model_folder(self, position: str, seed: int) -> Path:
        """Where the trained model of a run is kept."""
        return model_folder(self.path.parent, position, seed)

    def add(self, position: str, seed: int, run: dict[str, Any]) -> None:
        """Keep a finished run."""
        self.data["runs"].setdefault(position, {})[str(seed)] = run
        self.save()

    def save(self) -> None:
        write_atomically(self.path, json.dumps(self.data, allow_nan=False))


def model_folder(out: Path, position: str, seed: int) -> Path:
    """Where a comparison in ``out`` keeps the trained model of a method and seed."""
    return out / "models" / f"{position}-{seed}"


def build_model(sizes: Sizes, position: str, vocab_size: int, seed: int) -> EncoderForMaskedLM:
    """A fresh model of one method; all methods of a seed start from the same backbone, weight for weight."""
    torch.manual_seed(seed)
    backbone = EncoderForMaskedLM(sizes.config(BASELINE, vocab_size)).state_dict()
    torch.manual_seed(seed)
    model = EncoderForMaskedLM(sizes.config(position, vocab_size))
    missing = model.load_state_dict(backbone, strict=False).missing_keys
    assert all(name.startswith("encoder.position.") for name in missing), missing
    return model


def train_step(model: EncoderForMaskedLM, optimizer: torch.optim.Optimizer, inputs: Tensor, labels: Tensor) -> Tensor:
    """One step with the gradient's norm clipped to 1; the loss, still on the device."""
    loss: Tensor = model(inputs.to(model.device), labels=labels.to(model.device)).loss
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def train_and_judge(
    sizes: Sizes,
    position: str,
    seed: int,
    text: Text,
    held_out: HeldOut,
    device: torch.device,
    on_step: Callable[[float], None],
    folder: Path,
) -> dict[str, Any]:
    """One run: train, keep the model in ``folder``, score held-out text at every length, see what the heads learned.

    Raises:
        InputError: if the loss stops being a number.
    """
    model = build_model(sizes, position, text.vocab_size, seed).to(device)
    optimizer = build_optimizer(model, sizes.learning_rate)
    batches = Batches(text.training, sizes.batch_size, sizes.length, sizes.mask_rate, text.vocab_size, seed)
    schedule = linear_schedule(optimizer, max(1, sizes.steps // 10), sizes.steps)
    started = time.perf_counter()
    losses = []
    for step in range(sizes.steps):
        loss = float(train_step(model, optimizer, *batches[step]))
        check_finite(loss, sizes, position, step)
        schedule.step()
        losses.append(loss)
        on_step(loss)
    seconds = time.perf_counter() - started
    model.eval()
    scores: dict[str, Any] = {}
    for factor in LENGTH_FACTORS:
        length = factor * sizes.length
        try:
            score = evaluate(model, held_out, length)
        except PositionRangeError as error:
            scores[str(length)] = {"cannot": str(error)}
        else:
            check_finite(score.loss, sizes, position, sizes.steps)
            scores[str(length)] = {"loss": score.loss, "accuracy": score.accuracy}
            if factor == 1:
                token_losses = score.losses
    keep_model(model, folder)
    return {
        "seconds": seconds,
        "train_loss": _rounded(losses),
        "scores": scores,
        # Windows' mean losses: what tells a real difference between two methods from the luck of the text.
        "window_losses": _rounded([float(part.mean()) for part in token_losses.split(64)]),
        "positional_parameters": sum(parameter.numel() for parameter in model.encoder.position.parameters()),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "curves": head_curves(model, sizes.length - 1),
        "attention": attention_by_offset(model, held_out, sizes.length),
    }


def keep_model(model: EncoderForMaskedLM, folder: Path) -> None:
    """Write a trained model for ``from_pretrained``; for use, logits are wanted at every token."""
    # Here, because it brings transformers' Trainer, which takes a second to import.
    from ...training.trainer import quiet_transformers

    model.config.sparse_prediction = False
    with quiet_transformers():
        model.save_pretrained(folder)


def check_finite(loss: float, sizes: Sizes, position: str, step: int) -> None:
    """Raise unless the loss after so many steps is a finite number.

    Raises:
        InputError: with advice.
    """
    if not math.isfinite(loss):
        raise InputError(
            "learning_rate",
            f"the loss of {position!r} is not a number after {step} steps; "
            f"{sizes.learning_rate} is too high, try {sizes.learning_rate / 4}",
        )


def _rounded(numbers: Iterable[float]) -> list[float]:
    return [round(number, 4) for number in numbers]


@torch.no_grad()
def head_curves(model: EncoderForMaskedLM, reach: int) -> list[list[list[float]]] | None:
    """What each head adds to scores at offsets -reach .. reach, [layer][head][offset]; None without such a curve."""
    offsets = torch.arange(-reach, reach + 1, device=model.device)
    curves = []
    for layer in range(model.config.num_hidden_layers):
        curve = model.encoder.position.curve(offsets, layer=layer)
        if curve is None:
            return None
        curves.append([_rounded(head) for head in curve.tolist()])
    return curves


@torch.no_grad()
def attention_by_offset(model: EncoderForMaskedLM, held_out: HeldOut, length: int) -> list[list[list[float]] | None]:
    """The mean attention weight of each head at offsets -16 .. 16, [layer][head][offset], on some held-out text.

    None for layers between pooled sequences, whose offsets are not those of tokens.
    """
    inputs, _, real = next(held_out.windows(length, 2048))
    whole = real.all(-1)
    inputs = inputs[whole] if whole.any() else inputs
    attentions = model.encoder(inputs.to(model.device), output_attentions=True).attentions
    reach = min(OFFSETS_SHOWN, length - 1)
    return [
        diagonal_means(weights).mean(0)[:, length - 1 - reach : length + reach].tolist()
        if weights.shape[-2:] == (length, length)
        else None
        for weights in attentions
    ]


def measure_speed(
    sizes: Sizes,
    positions: Sequence[str],
    text: Text,
    device: torch.device,
    on_step: Callable[[], None],
) -> dict[str, Any]:
    """Training speed relative to no positions at all, and the memory of a step.

    In every round each method runs one step, in an order that changes, and its time is compared with the baseline's
    of the same round: what else the machine is doing meets all methods alike. Medians of the rounds' ratios.
    """
    names = list(dict.fromkeys((BASELINE, *positions)))
    batches = Batches(text.training, sizes.batch_size, sizes.length, sizes.mask_rate, text.vocab_size, 0)
    steppers: dict[str, Callable[[int], None]] = {}
    memory = {}
    for name in names:
        model = build_model(sizes, name, text.vocab_size, 0).to(device)
        optimizer = build_optimizer(model, sizes.learning_rate)

        def step(index: int, model: EncoderForMaskedLM = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            train_step(model, optimizer, *batches[index])

        step(0)  # the optimizer's state and torch's own buffers come with the first step
        memory[name] = peak_memory(lambda step=step: step(1), device)  # type: ignore[misc]
        steppers[name] = step
        on_step()
    ratios: dict[str, list[float]] = {name: [] for name in names}
    order = random.Random(0)
    for index in range(SPEED_ROUNDS):
        seconds = {}
        for name in order.sample(names, len(names)):
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            started = time.perf_counter()
            steppers[name](index + 2)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds[name] = time.perf_counter() - started
        for name in names:
            ratios[name].append(seconds[BASELINE] / seconds[name])
        on_step()
    return {
        name: {
            "relative_speed": statistics.median(ratios[name]),
            "lowest": min(ratios[name]),
            "highest": max(ratios[name]),
            "peak_memory": memory[name],
        }
        for name in positions
    }


def check_positions(names: Sequence[str], sizes: Sizes) -> list[str]:
    """The methods to compare, each built once so that a wrong name is found before any training.

    Raises:
        InputError: for an unknown method, or one that these sizes don't fit.
    """
    chosen = list(dict.fromkeys("".join(name.split()) for name in names if name.strip()))
    if not chosen:
        raise InputError("positions", "expected at least one method, got none")
    for name in chosen:
        try:
            build_position(
                name,
                hidden_size=sizes.hidden_size,
                num_heads=sizes.num_heads,
                max_length=sizes.length,
            )
        except (ValueError, TypeError) as error:
            raise about_method(error, "positions") from None
    return chosen


def run(
    results: Results,
    sizes: Sizes,
    positions: Sequence[str],
    seeds: Sequence[int],
    text: Text,
    device: torch.device,
    progress: Progress,
    *,
    speed: bool = True,
) -> None:
    """Train and judge every method with every seed that ``results`` lacks, then measure speed; all goes there."""
    held_out = HeldOut(text.held_out, HELD_OUT_RATE, text.vocab_size)
    missing = [(name, seed) for seed in seeds for name in positions if results.get(name, seed) is None]
    results.data["text"] = text.facts
    results.data |= provenance(device)
    results.data["predicted_tokens"] = int((held_out.labels != IGNORED).sum())
    # A run's judging takes about as long as a tenth of its training, the speed rounds a step each.
    judging = max(1, sizes.steps // 10)
    timed = not speed or {*results.data.get("speed", {})} >= set(positions)
    rounds = 0 if timed else SPEED_ROUNDS + len({BASELINE, *positions})
    progress.start(len(missing) * (sizes.steps + judging) + rounds * len(positions))
    done = len(positions) * len(seeds) - len(missing)
    if done:
        progress.line(f"{done} of {len(positions) * len(seeds)} runs are there already, continuing with the others")
    for number, (name, seed) in enumerate(missing, 1):
        progress.begin(f"{name} ({number}/{len(missing)})")
        finished = train_and_judge(
            sizes,
            name,
            seed,
            text,
            held_out,
            device,
            lambda loss: progress.step(1, f"loss {loss:.2f}"),
            results.model_folder(name, seed),
        )
        results.add(name, seed, finished)
        progress.step(judging)
        score = finished["scores"][str(sizes.length)]
        progress.line(
            f"{name}, seed {seed}: held-out loss {score['loss']:.3f}, accuracy {score['accuracy']:.1%}, "
            f"{finished['seconds']:.0f} s"
        )
    if not timed:
        progress.begin("speed and memory")
        measured = measure_speed(sizes, positions, text, device, lambda: progress.step(len(positions)))
        results.data["speed"] = {**results.data.get("speed", {}), **measured}
    results.save()
