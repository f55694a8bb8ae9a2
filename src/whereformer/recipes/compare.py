"""The compare recipe: train the same small encoder with each position method on one text, and rank the methods."""

from __future__ import annotations

import json
import math
import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from ..errors import InputError, join_words
from ..lab.options import MOST_COUNT, MOST_RATE, MOST_RUNS, MOST_SIZE, find_device
from ..lab.recipe import RECIPE, Between, Counts, Free, ManyRuns, Names, Numbers, Range, lazily
from ..lab.sheet import Column, Sheet

with lazily(__name__):
    from .. import analysis, manifest, models
    from ..analysis import held_out as scoring
    from ..analysis import ranking as rankings
    from ..data import corpus, encode, tokenizers, windows
    from ..data.streams import Stream
    from ..lab import methods
    from ..lab import run as running
    from ..lab import train as training
    from ..lab.report import report
    from ..lab.run import Run
    from . import comparison_report
    from . import small_encoders as encoders
    from .comparison_report import ComparisonResult

LENGTH_FACTORS, MOST_LENGTHS = (1, 2, 4), 5
TOKENS = 8192  # held-out tokens that are read at a time
SAVE_EVERY = 500  # steps between the checkpoints of a training, which are there until it is done

SIZES: dict[str, dict[str, Any]] = {
    "medium": {
        "hidden_size": 512,
        "num_heads": 8,
        "blocks": "10",
        "vocab_size": 8192,
        "length": 256,
        "batch_size": 64,
        "learning_rate": 1e-3,
    },
    "large": {
        "hidden_size": 768,
        "num_heads": 12,
        "blocks": "12",
        "vocab_size": 16384,
        "length": 512,
        "batch_size": 64,
        "learning_rate": 5e-4,
    },
}
"""The defaults of each size of models; those of "small" are the options' own."""

TIMED_STEPS, LEAST_STEPS = 10, 100
"""The steps of each method that are timed for a budget, and the fewest that are worth a comparison."""
JUDGING, USED = 0.1, 0.9
"""How long judging a model takes, as a share of training it, and the share of a budget that is planned for."""

LOOK_SHARE, LEAST_LOOK = 1 / 40, 40
"""Steps of a look, a very short training with a learning rate, as a share of all; and the fewest."""
AHEAD = 0.05
"""How much lower the loss of a look has to be than with the usual rate, so that short trainings are worth their time.
The rate of a look rises for two thirds of its steps, so low rates seem better in it than they are. High rates are ahead
where the usual one is so low that a method has hardly begun to learn."""
SEARCH_SHARE = 0.15
"""Steps of a short training, which tries a learning rate, as a share of all. Its windows grow as in a whole one."""
JUDGED_SHARE = 0.1
"""The mean training loss of this share of a short training, at its end, decides."""
CLEARLY_LOWER, CLEARLY_HIGHER = 0.1, 0.5
"""How much lower the loss of a short training has to be with a lower, or with a higher rate than with the usual one.
Short runs tolerate higher rates: with the default sizes, twice the usual rate was up to 0.09 better in them, but 0.07
to 0.31 worse in whole trainings. With twice the steps it was even 0.39 better, because with one rate the loss had just
left the plateau at the beginning, and with the other not yet."""


@dataclass(frozen=True)
class Trials:
    """The loss at the end of a short training with each rate; None if it was not finite.

    Args:
        losses: the losses, by rate.
        steps: the steps of each training.
    """

    losses: list[float | None]
    steps: int

    def is_settled(self, rates: Sequence[float], usual: float, guessing: float) -> bool:
        """Return whether looks show that the rate nearest to the usual one is kept.

        With it, a method already predicts better than ``guessing``, and no other rate is ahead of it.
        """
        losses = [math.nan if loss is None else loss for loss in self.losses]
        _, kept = min(zip(rates, losses, strict=True), key=lambda pair: abs(math.log(pair[0] / usual)))
        return kept < guessing and all(loss >= kept - AHEAD for loss in losses)

    def best(self, rates: Sequence[float], usual: float) -> float | None:
        """Return the rate that is nearest to the usual one, or the best of those that are clearly better.

        None if no loss was finite.
        """
        finished = [(loss, rate) for loss, rate in zip(self.losses, rates, strict=True) if loss is not None]
        if not finished:
            return None
        kept, nearest = min(finished, key=lambda each: abs(math.log(each[1] / usual)))
        needed = {rate: CLEARLY_HIGHER if rate > nearest else CLEARLY_LOWER for _, rate in finished}
        return min(((loss, rate) for loss, rate in finished if loss < kept - needed[rate]), default=(kept, nearest))[1]


@dataclass(frozen=True)
class Material:
    """What all models are trained and judged on: an encoded text. ``held_out`` is masked unless models are causal."""

    source: str
    training: Stream
    held_out: scoring.HeldOut
    vocabulary: tokenizers.Vocabulary
    tokenizer: Any
    guessing: float
    """The held-out loss of guessing by token frequency."""


@dataclass(frozen=True, kw_only=True)
class Compare(ManyRuns):
    """Which position method suits your text? Trains the same small encoder once per method and compares them.

    Without --data, the text is the documentation that comes with Python: about 2 MB, and nothing is downloaded. All
    methods start from the same weights and see the same batches and masks, so the models differ only in their position
    method.

    Writes report.html (open it in a browser), records.jsonl and the trained models with their tokenizer
    (models/METHOD-SEED, for EncoderForMaskedLM.from_pretrained, or with --causal for EncoderForCausalLM). After an
    interruption, the same command continues with the missing runs.
    """

    NAME = "compare"
    FLAGS: ClassVar = {"num_attention_heads": "--num-heads"}
    QUICK: ClassVar = {
        "positions": ("none", "learned", "rope", "tisa"),
        "steps": 400,
        "characters": 3_000_000,
    }

    data: tuple[str, ...] = ()
    """Text to read: files, patterns such as 'data/**/*.txt' (in quotes), or folders with .txt, .md, .rst, .parquet,
    .jsonl. Default: the documentation that comes with Python."""
    column: str | None = None
    """The column of tables that holds the text. Default: text."""
    positions: Annotated[Names, Free] = ("none", "sinusoidal", "learned", "rope", "t5", "shaw", "tisa", "learned+tisa")
    """Methods to compare, separated by commas. "a+b" uses both at once, "rope+sinks" has a trained sink per head, too,
    and "hybrid" has the positions and windows of this preset; "all" means every method."""
    out: Annotated[Path, Free] = Path("runs/compare")
    """Folder for the results."""
    quick: Annotated[bool, Free] = False
    """Take a first look in a minute or two: fewer methods and steps, and the first 3 million characters of the text.
    Too short to reveal small differences."""
    characters: Annotated[int | None, Range(1, MOST_COUNT)] = None
    """Characters of the text to read, from its beginning. Default: all."""
    minutes: Annotated[float | None, Between(0, MOST_RATE)] = None
    """Time for the whole comparison; --steps then does not count. A short measurement decides how many steps fit into
    it, as many for every method. Reading a large text may take longer than planned, and so may methods for which short
    trainings search a learning rate."""
    preset: Literal["bert", "albert", "electra", "funnel", "modernbert", "hybrid"] | None = None
    """Build the encoder like a published model: its norms, activation, biases, windows, and shared or pooled layers,
    but in a small size. Default: BERT with pre-layer normalization."""
    blocks: str | None = None
    """Layers: "4" is four layers, "1x4" one layer used four times, and "2-2" a funnel that halves the sequence between
    its two blocks, with a layer at full length behind them. Default: the preset's, or 4."""
    length: Annotated[int, Range(8, MOST_SIZE)] = 64
    """Tokens in a training window; the first 40% of the steps use windows of 8 tokens. Methods are ranked at this
    length."""
    lengths: Annotated[Counts, Range(8, MOST_SIZE)] = ()
    """More lengths at which to evaluate every method on held-out text. Default: two and four times `length`."""
    steps: Annotated[int, Range(1, MOST_COUNT)] = 1800
    """Training steps of each method."""
    seeds: Annotated[int, Range(1, MOST_RUNS), Free] = 1
    """How many seeds to repeat everything with. With several, the table shows medians and ranges."""
    batch_size: Annotated[int, Range(1, MOST_SIZE)] = 16
    """Training windows in a step. While windows are shorter, a step has more of them."""
    hidden_size: Annotated[int, Range(1, MOST_SIZE)] = 64
    """Width of the encoder."""
    num_heads: Annotated[int, Range(1, MOST_SIZE)] = 2
    """Number of attention heads. It must divide the width."""
    vocab_size: Annotated[int, Range(64, MOST_SIZE)] = 1024
    """Size of the WordPiece vocabulary, which is learned from the text."""
    causal: bool = False
    """Train causal models, which predict every token from those before it, instead of masked ones."""
    mask_rate: Annotated[float, Between(0, 1)] = 0.4
    """Share of tokens that are masked in training. In held-out text, 15% always are. Causal models mask none."""
    learning_rate: Annotated[float, Between(0, MOST_RATE)] = 8e-3
    """Peak learning rate."""
    rate_factors: Annotated[Numbers, Between(0, MOST_RATE)] = (0.5, 1.0, 2.0)
    """Multiples of the learning rate to try for each method, in short runs. A method keeps the usual rate unless
    another is clearly better. "1" skips this search."""

    size: Annotated[Literal["auto", "small", "medium", "large"], Free] = "auto"
    """Defaults for width, layers, vocabulary, windows, batches and learning rate. small is for a CPU, medium has 25
    million parameters and windows of 256 tokens, and large has 70 million and windows of 512. "auto" is medium for
    your own text on a GPU, otherwise small. A preset's layers win over these, and `quick` wins over both."""

    @classmethod
    def usual(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the defaults of the size, over which those of a preset win, over which those of ``quick`` win."""
        size, data, quick = str(options.get("size", "auto")), options.get("data", ()), super().usual(options)
        chosen = {}
        if size == "auto":
            on_gpu = str(options.get("device")) != "cpu" and find_device("auto").type == "cuda"
            chosen["size"] = size = "medium" if on_gpu and data not in ((), None) else "small"
        preset = {"blocks": None} if options.get("preset") is not None else {}  # its own layers
        folder = "runs/compare" + f"-{size}" * (size in SIZES) + "-quick" * bool(quick)
        return {**chosen, **SIZES.get(size, {}), **preset, **quick, "out": Path(folder)}

    @property
    def small(self) -> bool:
        return self.hidden_size < SIZES["medium"]["hidden_size"]

    @property
    def outputs(self) -> tuple[str, ...]:
        names = [
            self.model_folder(*key).name for key in product(self.positions, range(self.seed, self.seed + self.seeds))
        ]
        models = [f"models/{name}/" for name in names]
        return ("cache/text/", *models, *(f"checkpoints/{name}/checkpoint-{SAVE_EVERY}/" for name in names))

    def check(self) -> None:
        if self.causal and self.mask_rate != Compare.mask_rate:
            raise InputError("mask_rate", "causal models mask nothing; leave it out")
        for length in self.lengths:
            if length < self.length:
                raise InputError("lengths", f"expected at least the training length {self.length}, got {length}")
        if len(self.lengths) > MOST_LENGTHS:
            raise InputError("lengths", f"expected at most {MOST_LENGTHS}, got {len(self.lengths)}")
        if self.learning_rate * max(self.rate_factors) > MOST_RATE:
            raise InputError("rate_factors", f"expected learning rates of at most {MOST_RATE:g}, got higher ones")

    def resolved(self) -> Compare:
        names = methods.known_methods(self.positions)
        corpus.TextSource(self.data, self.column)  # to look whether its files are there
        sizes = {"hidden_size": self.hidden_size, "num_heads": self.num_heads, "max_length": self.length}
        layers = self.config(encoders.BASELINE, self.vocab_size).num_hidden_layers
        methods.check_methods(names, num_layers=layers, **sizes)
        return replace(self, positions=names)

    def run(self, run: Run) -> report.Report:
        text = corpus.TextSource(self.data, self.column, characters=self.characters)
        material = self.read(run, text)
        if self.minutes is not None:
            steps = run.each([()], self.fitting_steps, material, kind=int, steps=0)[()]
            run.say(f"{self.minutes:g} minutes: {steps:,} steps for each method")
            self = replace(self, minutes=None, steps=steps)
        run.identify("text", text.fingerprint)
        names = self.positions
        seeds = range(self.seed, self.seed + self.seeds)
        tried = min(look(self.steps), short(self.steps)) * len(self.rates) if len(self.rates) > 1 else 0
        run.expect(len(names) * (tried + len(seeds) * self.steps))
        trials: dict[tuple[str], Trials] = {}
        if tried:
            rows = [(name,) for name in names]
            trials = run.each(rows, self.search, material, kind=Trials, steps=tried, problem=self.problem_of_trials)
        best: dict[str, float | None] = dict.fromkeys(names, self.rates[0])
        for (name,), found in trials.items():
            best[name] = found.best(self.rates, self.learning_rate)
            run.say(f"{name}, losses of short trainings by learning rate: {self.told(found)}")
        keys = [(seed, name) for seed, name in product(seeds, names) if best[name] is not None]
        outcomes = run.each(
            *(keys, self.train, material, best),
            kind=comparison_report.ComparisonResult,
            steps=self.steps,
            problem=partial(self.problem, labels=material.held_out.count_labels()),
        )
        return self.report(material, outcomes, best, seeds, trials)

    # What every run does.

    def read(self, run: Run, text: corpus.TextSource) -> Material:
        """Read the text, learn its vocabulary, and encode it, unless that was done."""
        if text.paths:
            run.say(text.about_files)
        encoded = encode.open_or_encode(
            run.folder / "cache", text, encode.TokenizerChoice(None, self.vocab_size), run.say, run.keeps
        )
        training, held_out = len(encoded.training), len(encoded.held_out)
        if min(training, held_out) < (longest := max(*self.judged, scoring.HeldOut.GROUP)):
            raise InputError(
                "data",
                f"too little text: {training} training and {held_out} held-out tokens, expected at least {longest} of "
                f"each to judge {longest} tokens at a time; give more text or a smaller `length`",
            )
        source, rate = text.source, None if self.causal else windows.HELD_OUT_RATE
        if self.characters is not None:
            source = f"up to {self.characters:,} characters of {source}"
        guessing = encoded.guessing
        tokens = f"{training:,} training and {held_out:,} held-out tokens"
        run.say(f"{tokens} from {source}; guessing by frequency: loss {guessing:.2f}")
        held_out_text = scoring.HeldOut(encoded.held_out, rate, encoded.vocabulary)
        return Material(source, encoded.training, held_out_text, encoded.vocabulary, encoded.tokenizer, guessing)

    def config(self, position: str, vocab_size: int) -> models.EncoderConfig:
        """Return one method's encoder configuration. Every method has its own default options, also in a preset.

        Raises:
            InputError: if options do not fit the preset.
        """
        own = models.config.PRESETS[self.preset] if self.preset else {}
        blocks = own.get("blocks", "4") if self.blocks is None else self.blocks
        gated = own.get("feed_forward") == "gated"
        return encoders.small_config(
            self.preset,
            vocab_size=vocab_size,
            hidden_size=self.hidden_size,
            num_attention_heads=self.num_heads,
            blocks=blocks,
            decoder_layers=own.get("decoder_layers", "1") if "-" in blocks else "0",
            position=position,
            position_options={},
            max_position_embeddings=self.length,
            causal=self.causal,
            segments="embedding",
            # A gated layer has three matrices instead of two.
            intermediate_size=8 * math.ceil(self.hidden_size / 6) if gated else 2 * self.hidden_size,
        )

    @property
    def rates(self) -> list[float]:
        """The learning rates to try."""
        return [factor * self.learning_rate for factor in self.rate_factors]

    @property
    def judged(self) -> list[int]:
        """The lengths to judge at, that of training first."""
        more = self.lengths or [factor * self.length for factor in LENGTH_FACTORS]
        return sorted({self.length, *map(int, more)})

    def fit(
        self, run: Run, material: Material, model: Any, seed: int, plan: training.Training, on_log: Any, **more: Any
    ) -> Any:
        """Train a model by a plan. Its batches are the same for every method."""
        rate = None if self.causal else self.mask_rate
        stages = windows.growing_stages(self.length, self.batch_size, plan.steps)
        drawn = windows.Windows(material.training, material.vocabulary, stages, rate, seed)
        return training.train(model, drawn.batch, plan, device=run.device, on_log=on_log, **more)

    def search(self, run: Run, material: Material, position: str) -> Trials:
        """Look at every rate and, unless that is enough to keep the usual one, train a method shortly with each.

        In a short training, the rate rises for as many steps as in a whole one, two thirds of all, and then falls to
        zero. With fewer steps, high rates do harm that they do not do in a whole training.
        """
        steps = look(self.steps)
        if steps < short(self.steps):
            trials = self.try_rates(run, material, position, steps, warmup=round(2 / 3 * steps))
            if trials.is_settled(self.rates, self.learning_rate, material.guessing):
                return trials
        return self.try_rates(run, material, position, short(self.steps), warmup=max(1, self.steps // 10))

    def try_rates(self, run: Run, material: Material, position: str, steps: int, warmup: int) -> Trials:
        """Train a method for some steps with every rate, on the same batches."""
        end_losses: list[float | None] = []
        for rate in self.rates:
            model = encoders.build(self.config(position, material.vocabulary.size), self.seed)
            plan = training.Training(steps=steps, rate=rate, warmup=warmup)
            try:
                losses = self.fit(run, material, model, self.seed, plan, run.step).losses
                end_losses.append(round(statistics.fmean(losses[-max(1, round(JUDGED_SHARE * steps)) :]), 4))
            except training.NotFiniteError:
                end_losses.append(None)
        return Trials(end_losses, steps)

    def train(
        self, run: Run, material: Material, rates: Mapping[str, float], seed: int, position: str
    ) -> ComparisonResult:
        """Train a method with a seed, save the model, and judge it."""
        rate, held_out = rates[position], material.held_out
        config = self.config(position, material.vocabulary.size)
        model: Any = encoders.build(config, seed)
        facts = self.facts(seed, position)
        checkpoints = run.folder / "checkpoints" / self.model_folder(position, seed).name
        kept = training.Checkpoints(checkpoints, SAVE_EVERY, [facts, rate], run.say, keeps=run.keeps)
        plan = training.Training(steps=self.steps, rate=rate)
        about = f"{position}, seed {seed}"
        self.try_lengths(model.to(run.device), held_out)
        try:
            trained = self.fit(run, material, model, seed, plan, run.step, checkpoints=kept)
        except training.NotFiniteError as error:
            run.say(f"{about}: {error.reason}")
            return ComparisonResult(rate, [], [], [], 0, None, error.reason)
        model.eval()
        everything: list[Any] = []

        def score(length: int) -> Any:
            found = scoring.lm_score(model, held_out.windows(length, TOKENS))
            everything.append(found.losses)
            finite = math.isfinite(found.loss)
            return [found.loss, found.accuracy] if finite else "the loss is not finite (NaN or inf) at this length"

        scores = encoders.at_lengths(self.judged, score)
        if isinstance(scores[0], str):
            return ComparisonResult(rate, [], [], [], 0, None, scores[0])
        encoders.keep(model, material.tokenizer, self.model_folder(position, seed), facts)
        shutil.rmtree(checkpoints, ignore_errors=True)
        run.say(f"{about}: held-out loss {scores[0][0]:.3f}, accuracy of tokens {scores[0][1]:.1%}")
        return ComparisonResult(
            rate=rate,
            losses=[round(loss, 4) for loss in trained.losses],
            scores=scores,
            # Losses by window, to tell a real difference between two methods from chance in the held-out text.
            windows=[round(float(part.mean()), 4) for part in everything[0].split(comparison_report.WINDOW)],
            parameters=methods.parameters(model)["positional_parameters"],
            flops=self.flops(config),
        )

    def try_lengths(self, model: Any, held_out: scoring.HeldOut) -> None:
        """Let an untrained model read a batch of each length, so that whatever goes wrong there costs no training."""
        encoders.at_lengths(
            self.judged, lambda length: scoring.lm_score(model, islice(held_out.windows(length, TOKENS), 1))
        )

    def flops(self, config: models.EncoderConfig) -> int | None:
        """Return the operations of a training step; None for a method that torch can't run without memory."""
        predicted = self.length if self.causal else max(1, round(self.mask_rate * (self.length - 1)))
        try:
            return analysis.count_flops(config, self.length, self.batch_size, predictions=predicted).training
        except (RuntimeError, NotImplementedError, ValueError, TypeError):
            return None

    def facts(self, seed: int, position: str) -> dict[str, Any]:
        """Return what a trained model is of, for its manifest."""
        return json.loads(json.dumps({"options": self.record(), "position": position, "seed": seed}))

    def model_folder(self, position: str, seed: int) -> Path:
        """Return the folder for the trained model of a method and seed."""
        return self.out / "models" / f"{position.replace('/', ',')}-{seed}"  # no name of a method has a comma

    def problem(self, key: tuple[int, str], outcome: ComparisonResult, *, labels: int | None = None) -> str | None:
        """Return why the model of a key does not count, or None if it does.

        Args:
            key: its seed and method.
            outcome: its record.
            labels: how many held-out tokens models are judged by, if that is known.
        """
        seed, position = key
        folder = self.model_folder(position, seed)
        windows = len(outcome.windows) if labels is None else math.ceil(labels / comparison_report.WINDOW)
        sizes = len(outcome.losses), len(outcome.scores), len(outcome.windows)
        if not outcome.failed and (
            sizes != (self.steps, len(self.judged), windows) or isinstance(outcome.scores[0], str)
        ):
            return "its record lacks losses or scores"
        found = manifest.find_problem(folder, self.facts(seed, position))
        return None if found is None else f"{folder}: {found}"

    def problem_of_trials(self, key: tuple[str], trials: Trials) -> str | None:
        """Return why the short trainings of a method do not count, or None if they do."""
        return None if len(trials.losses) == len(self.rates) else "its record lacks losses"

    def fitting_steps(self, run: Run, material: Material) -> int:
        """Return the steps that fit the minutes, by the time of a few steps of each method."""
        assert self.minutes is not None
        with running.threads(run.threads):
            seconds = sum(self.seconds_per_step(run, material, name) for name in self.positions)
        # The last round of runs may be incomplete.
        seconds *= math.ceil(len(self.positions) / min(run.jobs, len(self.positions))) / len(self.positions)
        # Few methods need more than looks.
        tried = LOOK_SHARE * len(self.rates) if len(self.rates) > 1 else 0.0
        seconds *= (self.seeds * (1 + JUDGING) + tried) / USED
        steps = int(60 * self.minutes / seconds)
        if steps < LEAST_STEPS:
            least = math.ceil(100 * LEAST_STEPS * seconds / 60) / 100
            told = f"expected at least {least:g} here, for {LEAST_STEPS} steps with each method and seed"
            raise InputError("minutes", f"{told}, got {self.minutes:g}")
        return steps

    def seconds_per_step(self, run: Run, material: Material, position: str) -> float:
        """Train a method for a few steps, and return the mean time of those after the first."""
        times: list[float] = []
        model = encoders.build(self.config(position, material.vocabulary.size), 0)
        plan = training.Training(steps=TIMED_STEPS, rate=1e-6, log_every=1)  # each step waits for the device
        self.fit(run, material, model, 0, plan, lambda *_: times.append(time.perf_counter()))
        return (times[-1] - times[0]) / (TIMED_STEPS - 1)

    # What is told.

    def told(self, trials: Trials) -> str:
        """Return what came out of short trainings, in a line."""
        parts = zip(self.rates, trials.losses, strict=True)
        return ", ".join(f"{rate:g}: {'not finite' if loss is None else f'{loss:.3f}'}" for rate, loss in parts)

    def report(
        self,
        material: Material,
        outcomes: Mapping[tuple[int, str], ComparisonResult],
        rates: Mapping[str, float | None],
        seeds: range,
        trials: Mapping[tuple[str], Trials],
    ) -> report.Report:
        """Return the ranking, and what it is made of."""
        title, tried = "Which position method suits this text?", ", ".join(f"{rate:g}" for rate in self.rates)
        failed = {
            name: f"the loss of {name!r} is not finite (NaN or inf) at any of {tried}; try {min(self.rates) / 4:g}"
            for name, rate in rates.items()
            if rate is None
        }
        failed |= {
            name: f"{name}, seed {seed}: {each.failed}" for (seed, name), each in outcomes.items() if each.failed
        }
        runs: dict[str, dict[int, ComparisonResult]] = {name: {} for name in self.positions if name not in failed}
        for (seed, name), outcome in outcomes.items():
            if name in runs:
                runs[name][seed] = outcome
        problem = "; ".join(failed.values())
        if not runs:
            return report.Report(title, ["No method has a result."], values=outcomes, problem=problem)
        ranking = rankings.rank(runs, None if self.causal else encoders.BASELINE, self.steps)
        told = rankings.sentences(ranking, encoders.BASELINE, material.guessing, self.steps)
        if failed:
            told.append(f"No result, because the loss was not finite (NaN or inf): {join_words(failed)}.")
        goal = "predict the next token" if self.causal else "fill in masked tokens"
        told.append(
            f"Each method was trained for {self.steps:,} steps of {self.batch_size} x {self.length} tokens, "
            f"seed{'s' if len(seeds) > 1 else ''} {join_words(seeds)}, to {goal} of {material.source}."
        )
        parts: list[Any] = [
            comparison_report.build_table(
                ranking, runs, lengths=self.judged, causal=self.causal, guessing=material.guessing
            ),
            *comparison_report.build_figures(ranking, runs, lengths=self.judged, guessing=material.guessing),
        ]
        if trials:
            rows = [(name, f"{found.steps:,}", self.told(found)) for (name,), found in trials.items()]
            columns = [Column("position"), Column("steps"), Column("losses by learning rate", left=True)]
            parts.append(Sheet.of("Short trainings", columns, rows, folded=True))
        return report.Report(title, told, parts, outcomes, problem=problem)


def look(steps: int) -> int:
    """Return the steps of a look at a learning rate."""
    return max(LEAST_LOOK, round(LOOK_SHARE * steps))


def short(steps: int) -> int:
    """Return the steps of a short training."""
    return max(1, round(SEARCH_SHARE * steps))


def load(folder: Path) -> tuple[Compare, dict[str, dict[int, ComparisonResult]]]:
    """Return a finished comparison: its options, and its models by method and seed.

    Raises:
        InputError: for ``out``, if the folder holds something else; for another option, if its record has a bad value.
    """
    path = folder / running.RECORDS
    options, records, _ = running.read_records(path) if path.exists() else ({}, {}, [])
    if options.get(RECIPE) != Compare.NAME:
        raise InputError("out", f"{folder} has no results of whereformer compare")
    known = {field.name for field in fields(Compare)} - {"out"}
    recipe = Compare(out=folder, **{name: value for name, value in options.items() if name in known})
    if recipe.minutes is not None and (planned := records.get('["fitting_steps"]')) is not None:
        recipe = replace(recipe, minutes=None, steps=planned["value"])
    runs: dict[str, dict[int, ComparisonResult]] = {}
    for name, record in records.items():
        what, *key = json.loads(name)
        if what != "train":
            continue
        if not (
            manifest.matches_type(tuple[int, str], key)
            and manifest.matches_type(comparison_report.ComparisonResult, record["value"])
        ):
            raise InputError("out", f"{path} has something else as {name}; run the same whereformer compare again")
        outcome = comparison_report.ComparisonResult(**record["value"])
        if not outcome.failed:
            runs.setdefault(key[1], {})[key[0]] = outcome
    return recipe, runs
