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
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from ..errors import InputError, join_words
from ..lab.options import MAX_COUNT, MAX_RATE, MAX_RUNS, MAX_SIZE, find_device
from ..lab.recipe import RECIPE, Between, Counts, ManyRuns, MayChange, Names, Numbers, Range, lazy_modules
from ..lab.sheet import Column, Sheet

if TYPE_CHECKING:
    from .. import analysis, manifest, models
    from ..analysis import held_out as scoring
    from ..analysis import ranking as rankings
    from ..data import corpus, encode, tokenizers, windows
    from ..data.streams import Stream
    from ..lab import loading, methods
    from ..lab import run as running
    from ..lab import small_encoders as encoders
    from ..lab import train as training
    from ..lab.report import report
    from ..lab.report.report import Report
    from ..lab.run import Run
    from . import comparison_report
    from .comparison_report import ComparisonResult
else:
    analysis, manifest, models = lazy_modules("analysis", "manifest", "models")
    comparison_report, scoring, rankings = lazy_modules(
        "recipes.comparison_report", "analysis.held_out", "analysis.ranking"
    )
    corpus, encode, windows = lazy_modules("data.corpus", "data.encode", "data.windows")
    methods, running, encoders = lazy_modules("lab.methods", "lab.run", "lab.small_encoders")
    training, report, loading = lazy_modules("lab.train", "lab.report.report", "lab.loading")

METHODS = ("none", "sinusoidal", "learned", "rope", "t5", "shaw", "tisa", "learned+tisa")  # the default ones
LENGTH_FACTORS, MAX_LENGTHS = (1, 2, 4), 5
TOKENS = 8192  # held-out tokens that are read at a time
SAVE_INTERVAL = 500  # steps between the checkpoints of a training, which are removed when it is done

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
"""The defaults of each size of models. "small" has the options' defaults."""

TIMED_STEPS, MIN_STEPS = 10, 100
"""The steps of each method that are timed for a budget, and the fewest that are worth a comparison."""
EVAL_SHARE, PLANNED_SHARE = 0.1, 0.9
"""The time to evaluate a model, as a share of training it, and the share of a budget that is planned for."""

FIRST_SHARE, MIN_FIRST_STEPS = 1 / 40, 40
"""Steps of the first trial of a learning rate, which is very short, as a share of all; and the fewest."""
FIRST_MARGIN = 0.05
"""If the loss of a first trial is lower by this much than with the usual rate, longer trials are worth their time. The
rate rises for two thirds of a first trial, so low rates seem better in it than they are."""
SEARCH_SHARE = 0.15
"""Steps of a longer trial of a learning rate, as a share of all. Its windows grow as in a complete training."""
LAST_SHARE = 0.1
"""A trial's loss is the mean training loss of this share of its steps, the last ones."""
MARGIN_LOWER, MARGIN_HIGHER = 0.1, 0.5
"""How much lower the loss of a longer trial has to be with a lower, or with a higher rate than with the usual one.
Short runs tolerate higher rates: with the default sizes, twice the usual rate was up to 0.09 better in them, but 0.07
to 0.31 worse in complete trainings."""


@dataclass(frozen=True)
class RateSearch:
    """The loss at the end of a short training with each rate, None if it was not finite; and the training's steps."""

    losses: list[float | None]
    steps: int

    def is_settled(self, rates: Sequence[float], usual: float, guessing: float) -> bool:
        """Return whether first trials show that the rate nearest to the usual one is good enough.

        With it, a method already predicts better than ``guessing``, and no other rate is better by FIRST_MARGIN.
        """
        losses = [math.nan if loss is None else loss for loss in self.losses]
        _, usual_loss = min(zip(rates, losses, strict=True), key=lambda pair: abs(math.log(pair[0] / usual)))
        return usual_loss < guessing and all(loss >= usual_loss - FIRST_MARGIN for loss in losses)

    def find_best(self, rates: Sequence[float], usual: float) -> float | None:
        """Return the rate nearest to the usual one, or, if some rates are clearly better, the best of them.

        None if no loss was finite.
        """
        finished = [(loss, rate) for loss, rate in zip(self.losses, rates, strict=True) if loss is not None]
        if not finished:
            return None
        usual_loss, nearest = min(finished, key=lambda pair: abs(math.log(pair[1] / usual)))
        margins = {rate: MARGIN_HIGHER if rate > nearest else MARGIN_LOWER for _, rate in finished}
        better = [(loss, rate) for loss, rate in finished if loss < usual_loss - margins[rate]]
        return min(better, default=(usual_loss, nearest))[1]


@dataclass(frozen=True)
class EncodedData:
    """The encoded text that all models are trained and evaluated on. ``held_out`` has masks unless they are causal."""

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
    EXAMPLE = "whereformer compare --data my_texts/ --quick"
    FLAGS: ClassVar = {"num_attention_heads": "--num-heads"}
    QUICK: ClassVar = {"positions": ("none", "learned", "rope", "tisa"), "steps": 400, "characters": 3_000_000}

    data: tuple[str, ...] = ()
    """Text to read: files, patterns such as 'data/**/*.txt' (in quotes), or folders with .txt, .md, .rst, .parquet,
    .jsonl. Default: the documentation that comes with Python."""
    column: str | None = None
    """The column of tables that holds the text. Default: text."""
    positions: Annotated[Names, MayChange] = METHODS
    """Methods to compare, separated by commas. "a+b" uses both at once, "rope+sinks" has a trained sink per head, too,
    and "hybrid" has the positions and windows of this preset; "all" means every method."""
    out: Annotated[Path, MayChange] = Path("runs/compare")
    """Folder for the results."""
    quick: Annotated[bool, MayChange] = False
    """Take a first look in a minute or two: fewer methods and steps, and the first 3 million characters of the text.
    Too short to reveal small differences."""
    characters: Annotated[int | None, Range(1, MAX_COUNT)] = None
    """Characters of the text to read, from its beginning. Default: all."""
    minutes: Annotated[float | None, Between(0, MAX_RATE)] = None
    """Time for the whole comparison, in place of --steps. A short measurement decides how many steps fit into it, the
    same number for every method. Reading a large text may take longer than planned, and so may methods whose learning
    rate has to be searched for in short runs."""
    preset: Literal["bert", "albert", "electra", "funnel", "modernbert", "hybrid"] | None = None
    """Build the encoder like a published model: its norms, activation, biases, windows, and shared or pooled layers,
    but in a small size. Default: BERT with pre-layer normalization."""
    blocks: str | None = None
    """Layers: "4" is four layers, "1x4" one layer used four times, and "2-2" a funnel that halves the sequence between
    its two blocks, with a layer at full length behind them. Default: the preset's, or 4."""
    length: Annotated[int, Range(8, MAX_SIZE)] = 64
    """Tokens in a training window; the first 40% of the steps use windows of 8 tokens. Methods are ranked at this
    length."""
    lengths: Annotated[Counts, Range(8, MAX_SIZE)] = ()
    """More lengths at which to evaluate every method on held-out text. Default: two and four times `length`."""
    steps: Annotated[int, Range(1, MAX_COUNT)] = 1800
    """Training steps of each method."""
    seeds: Annotated[int, Range(1, MAX_RUNS), MayChange] = 1
    """How many seeds to repeat everything with. With several, the table shows medians and ranges."""
    batch_size: Annotated[int, Range(1, MAX_SIZE)] = 16
    """Training windows in a step. While windows are shorter, a step has more of them."""
    hidden_size: Annotated[int, Range(1, MAX_SIZE)] = 64
    """Width of the encoder."""
    num_heads: Annotated[int, Range(1, MAX_SIZE)] = 2
    """Number of attention heads. It must divide the width."""
    vocab_size: Annotated[int, Range(64, MAX_SIZE)] = 1024
    """Size of the WordPiece vocabulary, which is learned from the text."""
    causal: bool = False
    """Train causal models, which predict every token from those before it, instead of masked ones."""
    mask_rate: Annotated[float, Between(0, 1)] = 0.4
    """Share of tokens that are masked in training. In held-out text, 15% always are. Causal models mask none."""
    learning_rate: Annotated[float, Between(0, MAX_RATE)] = 8e-3
    """Peak learning rate."""
    rate_factors: Annotated[Numbers, Between(0, MAX_RATE)] = (0.5, 1.0, 2.0)
    """Multiples of the learning rate to try for each method, in short runs. A method keeps the usual rate unless
    another is clearly better. "1" skips this search."""

    size: Annotated[Literal["auto", "small", "medium", "large"], MayChange] = "auto"
    """Defaults for width, layers, vocabulary, windows, batches and learning rate. small is for a CPU, medium has 25
    million parameters and windows of 256 tokens, and large has 70 million and windows of 512. "auto" is medium for
    your own text on a GPU, otherwise small. A preset's layers win over these, and `quick` wins over both."""

    @classmethod
    def defaults_for(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the defaults of the size. A preset's defaults win over them, those with ``quick`` win over both."""
        size, data, quick = str(options.get("size", "auto")), options.get("data", ()), super().defaults_for(options)
        chosen = {}
        if size == "auto":
            on_gpu = str(options.get("device")) != "cpu" and find_device("auto").type == "cuda"
            chosen["size"] = size = "medium" if on_gpu and data not in ((), None) else "small"
        preset = {"blocks": None} if options.get("preset") is not None else {}  # its own layers
        folder = "runs/compare" + f"-{size}" * (size in SIZES) + "-quick" * bool(quick)
        return {**chosen, **SIZES.get(size, {}), **preset, **quick, "out": Path(folder)}

    @property
    def has_small_models(self) -> bool:
        return self.hidden_size < SIZES["medium"]["hidden_size"]

    @property
    def outputs(self) -> tuple[str, ...]:
        names = [
            self.model_folder(*key).name for key in product(self.positions, range(self.seed, self.seed + self.seeds))
        ]
        models = [f"models/{name}/" for name in names]
        return ("cache/text/", *models, *(f"checkpoints/{name}/checkpoint-{SAVE_INTERVAL}/" for name in names))

    def check(self) -> None:
        if self.causal and self.mask_rate != Compare.mask_rate:
            raise InputError("mask_rate", "causal models mask nothing; leave it out")
        for length in self.lengths:
            if length < self.length:
                raise InputError("lengths", f"expected at least the training length {self.length}, got {length}")
        if len(self.lengths) > MAX_LENGTHS:
            raise InputError("lengths", f"expected at most {MAX_LENGTHS}, got {len(self.lengths)}")
        if self.learning_rate * max(self.rate_factors) > MAX_RATE:
            raise InputError("rate_factors", f"expected learning rates of at most {MAX_RATE:g}, got higher ones")

    def resolve(self) -> Compare:
        names = methods.resolve_methods(self.positions)
        corpus.TextSource(self.data, self.column)  # to check that its files exist
        sizes = {"hidden_size": self.hidden_size, "num_heads": self.num_heads, "max_length": self.length}
        layers = self.config(encoders.BASELINE, self.vocab_size).num_hidden_layers
        methods.check_methods(names, num_layers=layers, **sizes)
        return replace(self, positions=names)

    def run(self, run: Run) -> report.Report:
        text = corpus.TextSource(self.data, self.column, characters=self.characters)
        data = self.read(run, text)
        recipe = self
        if self.minutes is not None:
            steps = run.map([()], self.fitting_steps, data, task="fitting_steps", kind=int, steps=0)[()]
            run.log(f"{self.minutes:g} minutes: {steps:,} steps for each method")
            recipe = replace(self, minutes=None, steps=steps)
        run.record_hash("text", text.fingerprint)
        return recipe.compare(run, data)

    def compare(self, run: Run, data: EncodedData) -> report.Report:
        """Search the learning rate of each method, train it with every seed, and return the report."""
        seeds = range(self.seed, self.seed + self.seeds)
        search_steps = 0
        if len(self.rates) > 1:
            search_steps = min(first_trial_steps(self.steps), trial_steps(self.steps)) * len(self.rates)
        run.total = len(self.positions) * (search_steps + len(seeds) * self.steps)
        searches: dict[tuple[str], RateSearch] = {}
        if search_steps:
            searches = run.map(
                *([(name,) for name in self.positions], self.search_rate, data),
                task="search",
                kind=RateSearch,
                steps=search_steps,
                problem=lambda _, search: None if len(search.losses) == len(self.rates) else "its record lacks losses",
            )
        rates: dict[str, float | None] = dict.fromkeys(self.positions, self.rates[0])
        for (name,), search in searches.items():
            rates[name] = search.find_best(self.rates, self.learning_rate)
            run.log(f"{name}: losses of short runs by learning rate: {self.format_losses(search)}")
        keys = [(seed, name) for seed, name in product(seeds, self.positions) if rates[name] is not None]
        outcomes = run.map(
            *(keys, self.train, data, rates),
            task="train",
            kind=comparison_report.ComparisonResult,
            steps=self.steps,
            problem=partial(self.find_problem, num_labels=data.held_out.count_labels()),
            on_result=partial(self.log_advice, run, data),
        )
        seconds = run.sum_seconds("search", searches) + run.sum_seconds("train", outcomes)
        return self.report(data, outcomes, rates, seeds, searches, seconds, run.jobs)

    def log_advice(self, run: Run, data: EncodedData, outcomes: Mapping[tuple[int, str], ComparisonResult]) -> None:
        """Log the advice that the models trained so far support."""
        runs = group_runs(outcomes)
        if len(runs) > 1:
            ranking = rankings.rank(runs, None if self.causal else encoders.BASELINE, self.steps)
            advice = rankings.headline(ranking, encoders.BASELINE, data.guessing, self.steps)
            run.log(f"If you stopped now ({join_words([*runs])} are done): {advice}")

    def read(self, run: Run, text: corpus.TextSource) -> EncodedData:
        """Read the text, learn its vocabulary, and encode it, unless that was done."""
        if text.paths:
            run.log(text.about_files)
        choice = encode.TokenizerChoice(None, self.vocab_size)
        encoded = encode.open_or_encode(run.folder / "cache", text, choice, run.log)
        training, held_out = len(encoded.training), len(encoded.held_out)
        if min(training, held_out) < (longest := max(*self.eval_lengths, scoring.HeldOut.GROUP)):
            raise InputError(
                "data",
                f"too little text: {training} training and {held_out} held-out tokens, expected at least {longest} of "
                f"each to evaluate {longest} tokens at a time; use more text or a smaller `length`",
            )
        source, rate = text.source, None if self.causal else windows.HELD_OUT_RATE
        if self.characters is not None:
            source = f"up to {self.characters:,} characters of {source}"
        guessing = encoded.guessing
        tokens = f"{training:,} training and {held_out:,} held-out tokens"
        run.log(f"{tokens} from {source}; guessing by frequency: loss {guessing:.2f}")
        held_out_text = scoring.HeldOut(encoded.held_out, rate, encoded.vocabulary)
        return EncodedData(source, encoded.training, held_out_text, encoded.vocabulary, encoded.tokenizer, guessing)

    def config(self, position: str, vocab_size: int) -> models.EncoderConfig:
        """Return one method's encoder configuration; an InputError if options do not fit the preset.

        Every method has its own default options, also in a preset.
        """
        preset = models.config.PRESETS[self.preset] if self.preset else {}
        blocks = preset.get("blocks", "4") if self.blocks is None else self.blocks
        is_gated = preset.get("feed_forward") == "gated"
        return encoders.small_config(
            self.preset,
            vocab_size=vocab_size,
            hidden_size=self.hidden_size,
            num_attention_heads=self.num_heads,
            blocks=blocks,
            decoder_layers=preset.get("decoder_layers", "1") if "-" in blocks else "0",
            position=position,
            position_options={},
            max_position_embeddings=self.length,
            causal=self.causal,
            segments="embedding",
            # A gated layer has three matrices instead of two.
            intermediate_size=8 * math.ceil(self.hidden_size / 6) if is_gated else 2 * self.hidden_size,
        )

    @property
    def rates(self) -> list[float]:
        """The learning rates to try."""
        return [factor * self.learning_rate for factor in self.rate_factors]

    @property
    def eval_lengths(self) -> list[int]:
        """The lengths to evaluate at; the training length is the first."""
        longer = self.lengths or [factor * self.length for factor in LENGTH_FACTORS]
        return sorted({self.length, *map(int, longer)})

    def fit(
        self, run: Run, data: EncodedData, model: Any, seed: int, plan: training.Training, on_log: Any, **options: Any
    ) -> Any:
        """Train a model by a plan. Its batches are the same for every method."""
        rate = None if self.causal else self.mask_rate
        stages = windows.growing_stages(self.length, self.batch_size, plan.steps)
        batches = windows.Windows(data.training, data.vocabulary, stages, rate, seed)
        return training.train(model, batches.batch, plan, device=run.device, on_log=on_log, **options)

    def search_rate(self, run: Run, data: EncodedData, position: str) -> RateSearch:
        """Make a first trial of every rate. Unless that is enough to keep the usual rate, make a longer one.

        In a longer trial, the rate rises for as long as in a complete training, which is two thirds of the trial's
        steps, and then falls to zero: with a shorter rise, high rates would do harm.
        """
        steps = first_trial_steps(self.steps)
        if steps < trial_steps(self.steps):
            search = self.try_rates(run, data, position, steps, warmup=round(2 / 3 * steps))
            if search.is_settled(self.rates, self.learning_rate, data.guessing):
                return search
        return self.try_rates(run, data, position, trial_steps(self.steps), warmup=max(1, self.steps // 10))

    def try_rates(self, run: Run, data: EncodedData, position: str, steps: int, warmup: int) -> RateSearch:
        """Train a method for some steps with every rate, on the same batches."""
        end_losses: list[float | None] = []
        for rate in self.rates:
            model = encoders.build(self.config(position, data.vocabulary.size), self.seed)
            plan = training.Training(steps=steps, rate=rate, warmup=warmup)
            try:
                losses = self.fit(run, data, model, self.seed, plan, run.advance).losses
                end_losses.append(round(statistics.fmean(losses[-max(1, round(LAST_SHARE * steps)) :]), 4))
            except training.NotFiniteError:
                end_losses.append(None)
        return RateSearch(end_losses, steps)

    def train(
        self, run: Run, data: EncodedData, rates: Mapping[str, float], seed: int, position: str
    ) -> ComparisonResult:
        """Train a method with a seed, save the model, and evaluate it."""
        rate, held_out = rates[position], data.held_out
        config = self.config(position, data.vocabulary.size)
        model: Any = encoders.build(config, seed)
        facts = self.facts(seed, position)
        checkpoint_folder = run.folder / "checkpoints" / self.model_folder(position, seed).name
        checkpoints = training.Checkpoints(checkpoint_folder, SAVE_INTERVAL, [facts, rate], run.log)
        plan = training.Training(steps=self.steps, rate=rate)
        label = f"{position}, seed {seed}"
        model.to(run.device)
        # The untrained model reads a batch of each length, so that an error there appears before the training.
        encoders.at_lengths(
            self.eval_lengths, lambda length: scoring.lm_score(model, islice(held_out.windows(length, TOKENS), 1))
        )
        try:
            progress = self.fit(run, data, model, seed, plan, run.advance, checkpoints=checkpoints)
        except training.NotFiniteError as error:
            run.log(f"{label}: {error.reason}")
            return comparison_report.ComparisonResult(rate, [], [], [], 0, None, error.reason)
        model.eval()
        at_tokens: list[Any] = []

        def evaluate(length: int) -> Any:
            score = scoring.lm_score(model, held_out.windows(length, TOKENS))
            at_tokens.append(score)
            is_finite = math.isfinite(score.loss)
            return [score.loss, score.accuracy] if is_finite else "the loss is not finite (NaN or inf) at this length"

        scores = encoders.at_lengths(self.eval_lengths, evaluate)
        if isinstance(scores[0], str):
            return comparison_report.ComparisonResult(rate, [], [], [], 0, None, scores[0])
        model.config.sparse_prediction = False  # logits at every token
        data.tokenizer.model_max_length = model.config.max_position_embeddings
        loading.save(model, data.tokenizer, self.model_folder(position, seed), facts)
        shutil.rmtree(checkpoint_folder, ignore_errors=True)
        run.log(f"{label}: held-out loss {scores[0][0]:.3f}, accuracy of tokens {scores[0][1]:.1%}")
        return comparison_report.ComparisonResult(
            rate=rate,
            losses=[round(loss, 4) for loss in progress.losses],
            scores=scores,
            # Losses by window, to distinguish a real difference between two methods from chance in the held-out text.
            windows=[round(float(part.mean()), 4) for part in at_tokens[0].losses.split(comparison_report.WINDOW)],
            parameters=methods.count_parameters(model)["positional_parameters"],
            flops=self.flops(config),
            answers=at_tokens[0].answers[: comparison_report.MAX_ANSWERS].tolist(),
        )

    def flops(self, config: models.EncoderConfig) -> int | None:
        """Return the operations of a training step; None for a method that torch can't run without memory."""
        num_predictions = self.length if self.causal else max(1, round(self.mask_rate * (self.length - 1)))
        try:
            return analysis.count_flops(config, self.length, self.batch_size, predictions=num_predictions).training
        except (RuntimeError, NotImplementedError, ValueError, TypeError):
            return None

    def facts(self, seed: int, position: str) -> dict[str, Any]:
        """Return the facts that identify a trained model, for its manifest."""
        return {"options": self.recorded_options(), "position": position, "seed": seed}

    def model_folder(self, position: str, seed: int) -> Path:
        """Return the folder for the trained model of a method and seed."""
        return self.out / "models" / f"{position.replace('/', ',')}-{seed}"  # no method's name has a comma

    def find_problem(
        self, key: tuple[int, str], outcome: ComparisonResult, *, num_labels: int | None = None
    ) -> str | None:
        """Return why the recorded model of a seed and method is not valid, or None if it is.

        ``num_labels`` is the number of held-out tokens that models are evaluated on, if it is known.
        """
        seed, position = key
        folder = self.model_folder(position, seed)
        windows = len(outcome.windows) if num_labels is None else math.ceil(num_labels / comparison_report.WINDOW)
        sizes = len(outcome.losses), len(outcome.scores), len(outcome.windows)
        if not outcome.failed and (
            sizes != (self.steps, len(self.eval_lengths), windows) or isinstance(outcome.scores[0], str)
        ):
            return "its record lacks losses or scores"
        problem = manifest.find_problem(folder, self.facts(seed, position))
        return None if problem is None else f"{folder}: {problem}"

    def fitting_steps(self, run: Run, data: EncodedData) -> int:
        """Return the steps that fit the minutes, by the time of a few steps of each method."""
        assert self.minutes is not None
        with running.threads(run.threads):
            seconds = sum(self.seconds_per_step(run, data, name) for name in self.positions)
        # The last round of runs may be incomplete.
        seconds *= math.ceil(len(self.positions) / min(run.jobs, len(self.positions))) / len(self.positions)
        # Few methods need more than first trials.
        search_share = FIRST_SHARE * len(self.rates) if len(self.rates) > 1 else 0.0
        seconds *= (self.seeds * (1 + EVAL_SHARE) + search_share) / PLANNED_SHARE
        steps = int(60 * self.minutes / seconds)
        if steps < MIN_STEPS:
            min_minutes = math.ceil(100 * MIN_STEPS * seconds / 60) / 100
            expected = f"expected at least {min_minutes:g} here, for {MIN_STEPS} steps with each method and seed"
            raise InputError("minutes", f"{expected}, got {self.minutes:g}")
        return steps

    def seconds_per_step(self, run: Run, data: EncodedData, position: str) -> float:
        """Train a method for a few steps, and return the mean time of a step without the first."""
        times: list[float] = []
        model = encoders.build(self.config(position, data.vocabulary.size), 0)
        plan = training.Training(steps=TIMED_STEPS, rate=1e-6, log_every=1)  # each step waits for the device
        self.fit(run, data, model, 0, plan, lambda *_: times.append(time.perf_counter()))
        return (times[-1] - times[0]) / (TIMED_STEPS - 1)

    def format_losses(self, search: RateSearch) -> str:
        """Return the losses of short trainings in a line."""
        parts = zip(self.rates, search.losses, strict=True)
        return ", ".join(f"{rate:g}: {'not finite' if loss is None else f'{loss:.3f}'}" for rate, loss in parts)

    def report(
        self,
        data: EncodedData,
        outcomes: Mapping[tuple[int, str], ComparisonResult],
        rates: Mapping[str, float | None],
        seeds: range,
        searches: Mapping[tuple[str], RateSearch],
        seconds: float,
        jobs: int,
    ) -> Report:
        """Return the report: the ranking, the results that it is based on, and the next command.

        ``seconds`` is the time of all trainings together. Up to ``jobs`` of them run at a time.
        """
        title, all_rates = "Which position method suits this text?", ", ".join(f"{rate:g}" for rate in self.rates)
        failed = {
            name: f"the loss of {name!r} is not finite (NaN or inf) at any of {all_rates}; try {min(self.rates) / 4:g}"
            for name, rate in rates.items()
            if rate is None
        }
        failed |= {
            name: f"{name}, seed {seed}: {outcome.failed}"
            for (seed, name), outcome in outcomes.items()
            if outcome.failed
        }
        runs = {name: models for name, models in group_runs(outcomes).items() if name not in failed}
        problem = "; ".join(failed.values())
        if not runs:
            return report.Report(title, ["No method has a result."], values=outcomes, problem=problem)
        ranking = rankings.rank(runs, None if self.causal else encoders.BASELINE, self.steps)
        sentences = rankings.sentences(ranking, encoders.BASELINE, data.guessing, self.steps)
        sentences[1:1] = comparison_report.describe_longer(ranking, runs, self.eval_lengths)
        if self.quick:
            sentences[0] = f"First look. {sentences[0]}"
        if failed:
            sentences.append(f"No result, because the loss was not finite (NaN or inf): {join_words(failed)}.")
        goal = "predict the next token" if self.causal else "fill in masked tokens"
        sentences.append(
            f"Each method was trained for {self.steps:,} steps of {self.batch_size} x {self.length} tokens, "
            f"seed{'s' if len(seeds) > 1 else ''} {join_words(seeds)}, to {goal} of {data.source}."
        )
        lengths, guessing, causal = self.eval_lengths, data.guessing, self.causal
        table = comparison_report.build_table(ranking, runs, lengths=lengths, causal=causal, guessing=guessing)
        figures = comparison_report.build_figures(ranking, runs, lengths=lengths, guessing=guessing)
        words = comparison_report.build_examples(runs, ranking.best, data.held_out, data.tokenizer, causal=causal)
        sections: list[Any] = [table, *figures, *words]
        if searches:
            rows = [(name, f"{search.steps:,}", self.format_losses(search)) for (name,), search in searches.items()]
            columns = [Column("position"), Column("steps"), Column("losses by learning rate", left=True)]
            sections.append(Sheet.of("Short trainings", columns, rows, folded=True))
        result = report.Report(title, sentences, sections, outcomes, problem=problem)
        advised = rankings.advise(ranking, encoders.BASELINE, data.guessing, self.steps, self.seeds)
        return result if advised is None else self.with_next_command(result, advised, seconds, jobs)

    def with_next_command(self, result: Report, advised: rankings.NextComparison, seconds: float, jobs: int) -> Report:
        """Return a report with the command of the advised comparison, in a new folder, and its estimated time."""
        counts = advised.steps, advised.seeds, len(advised.positions)
        minutes = seconds / 60 * math.prod(counts) / (self.steps * self.seeds * len(self.positions))
        if self.ray is None:  # a cluster decides itself how many jobs run at a time
            minutes /= min(jobs, advised.seeds * len(advised.positions))
        amount, unit = (round(minutes), "minute") if minutes < 100 else (round(minutes / 60), "hour")
        duration = f"{max(1, amount)} more {unit}{'s' * (amount > 1)}{' with one job at a time' * bool(self.ray)}"
        command = self.format_command(
            positions=tuple(name for name in self.positions if name in advised.positions),
            steps=advised.steps,
            seeds=advised.seeds,
            quick=False,
            out=self.name_folder(advised.steps, advised.seeds),
        )
        return replace(result, advice=f"{advised.purpose} (about {duration})", next_command=command)


def group_runs(outcomes: Mapping[tuple[int, str], ComparisonResult]) -> dict[str, dict[int, ComparisonResult]]:
    """Return the outcomes that did not fail, by method and seed."""
    runs: dict[str, dict[int, ComparisonResult]] = {}
    for (seed, name), outcome in outcomes.items():
        if not outcome.failed:
            runs.setdefault(name, {})[seed] = outcome
    return runs


def first_trial_steps(steps: int) -> int:
    """Return the steps of the first trial of a learning rate."""
    return max(MIN_FIRST_STEPS, round(FIRST_SHARE * steps))


def trial_steps(steps: int) -> int:
    """Return the steps of a longer trial of a learning rate."""
    return max(1, round(SEARCH_SHARE * steps))


def load(folder: Path) -> tuple[Compare, dict[str, dict[int, ComparisonResult]]]:
    """Return a finished comparison: its options, and its models by method and seed.

    Raises:
        InputError: for ``out``, if the folder does not hold a comparison; for another option, if its recorded value is
            not valid.
    """
    path = folder / running.RECORDS
    options, records, _ = running.read_records(path) if path.exists() else ({}, {}, [])
    if options.get(RECIPE) != Compare.NAME:
        raise InputError("out", f"{folder} has no results of whereformer compare")
    known = {field.name for field in fields(Compare)} - {"out"}
    recipe = Compare(out=folder, **{name: value for name, value in options.items() if name in known})
    if recipe.minutes is not None and (planned := records.get('["fitting_steps"]')) is not None:
        recipe = replace(recipe, minutes=None, steps=planned["value"])
    outcomes: dict[tuple[int, str], ComparisonResult] = {}
    for name, record in records.items():
        task, *key = json.loads(name)
        if task != "train":
            continue
        if not (
            manifest.matches_type(tuple[int, str], key)
            and manifest.matches_type(comparison_report.ComparisonResult, record["value"])
        ):
            reason = f"{path} has a value of another type for {name}"
            raise InputError("out", f"{reason}; run the same whereformer compare again")
        outcomes[key[0], key[1]] = comparison_report.ComparisonResult(**record["value"])
    return recipe, group_runs(outcomes)
