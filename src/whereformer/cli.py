"""The command line: parse, call, print. Bad input gives one line (or the parser's own box) and exit code 2."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console

from . import __version__
from .commands.properties import Properties
from .errors import InputError
from .tasks.finetune_settings import DataSettings, TuningSettings, listed
from .tasks.pretrain_settings import ModelSettings, TrainingSettings, check_range

if TYPE_CHECKING:
    import torch

    from . import analysis
    from .tasks.bench import Settings
    from .tasks.cases import Way
    from .tasks.compare import Sizes


@dataclass(frozen=True)
class Compare:
    """Which position method suits your text? Trains the same small encoder once per method and compares.

    By default the text is the documentation inside the running Python: about 2 MB, nothing is downloaded. All methods
    start from the same weights and see the same batches and masks, so that only position differs. Writes report.html
    (open it in a browser), results.json and the trained models (models/METHOD-SEED, for
    EncoderForMaskedLM.from_pretrained). If it is interrupted, the same command continues with what is missing.
    """

    positions: Annotated[str | None, tyro.conf.arg(metavar="A,B,C+D")] = None
    """Methods to compare, split by commas; "a+b" uses both at once, "all" takes every method. Default: none,
    sinusoidal, learned, rope, t5, shaw, tisa, learned+tisa (with --quick: none, learned, rope, tisa)."""

    data: Annotated[tuple[str, ...], tyro.conf.arg(metavar="PATH [PATH ...]")] = ()
    """Text to train on: files or folders with .txt, .md, .rst, .parquet, .jsonl."""

    column: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """The text column of Parquet and JSON Lines files, if it isn't "text" or the only one."""

    out: Path = Path("runs/compare")
    """Folder for the results."""

    quick: bool = False
    """A first look in about a minute: fewer methods and steps; too few for small differences."""

    blocks: str = "4"
    """Layers: "4" are four, "1x4" is one layer used four times, "2-2" a funnel, halving the sequence between blocks."""

    decoder_layers: Annotated[str | None, tyro.conf.arg(metavar="LAYERS")] = None
    """Full-length layers after the blocks of a funnel. Default: 1 where there are several blocks."""

    length: int = 64
    """Tokens of a training window. Held-out text is judged at this length and at 2 and 4 times it."""

    steps: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Training steps of each method. Default: 2400, with --quick 400."""

    seeds: int = 1
    """Repeat everything with so many seeds; the table then shows medians and ranges."""

    seed: int = 0
    """The first seed."""

    batch_size: int = 16
    """Windows of a training step."""

    hidden_size: int = 64
    """Width of the encoder."""

    num_heads: int = 2
    """Attention heads; they must divide the width."""

    vocab_size: int = 1024
    """Size of the WordPiece vocabulary that is trained on the text."""

    mask_rate: float = 0.4
    """Share of tokens to predict in training. Held-out text always has 15%."""

    learning_rate: float = 8e-3
    """The learning rate's peak."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; "auto" takes a GPU if there is one."""

    def run(self, console: Console) -> None:
        """Do it."""
        from .positions import position_names
        from .report import write_report
        from .tasks import compare, corpus, ranking
        from .terminal import Bar, print_ranking, say

        names: Sequence[str] = compare.QUICK_POSITIONS if self.quick else compare.DEFAULT_POSITIONS
        if self.positions is not None:
            names = position_names() if self.positions == "all" else self.positions.split(",")
        sizes = self.sizes()
        names = compare.check_positions(names, sizes)
        device = _device(self.device)
        with compare.open_folder(self.out):
            with console.status("reading the text and training a tokenizer"):
                documents = corpus.load_documents(self.data, self.column) if self.data else corpus.default_documents()
                results = compare.Results(self.out, sizes, corpus.fingerprint(documents), device.type)
                text = compare.prepare_text(documents, sizes, self.data, self.column, self.out)
            console.print(
                f"{text.facts['training_tokens']:,} training and {text.facts['held_out_tokens']:,} held-out tokens "
                f"from {text.facts['source']}; guessing by frequency: loss {text.facts['unigram_entropy']:.2f}",
                highlight=False,
            )
            with Bar(console) as progress:
                compare.run(results, sizes, names, range(self.seed, self.seed + self.seeds), text, device, progress)
            rows = ranking.rank(results.data)
            report = self.out / "report.html"
            write_report(results.data, report)
            print_ranking(console, rows, self.length)
            console.print(ranking.verdict(rows, results.data), style="bold", highlight=False)
            say(console, f"wrote {report} (open it in a browser) and {results.path}")

    def sizes(self) -> Sizes:
        """All that decides a result besides text, method and seed.

        Raises:
            InputError: for an option out of range.
        """
        from .tasks import compare

        self._check()
        return compare.Sizes(
            blocks=self.blocks,
            decoder_layers=self._decoder_layers(),
            length=self.length,
            steps=self.steps or (compare.QUICK_STEPS if self.quick else compare.DEFAULT_STEPS),
            batch_size=self.batch_size,
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            vocab_size=self.vocab_size,
            mask_rate=self.mask_rate,
            learning_rate=self.learning_rate,
        )

    def _decoder_layers(self) -> str:
        if self.decoder_layers is not None:
            return self.decoder_layers
        return "1" if "-" in self.blocks else "0"

    def _check(self) -> None:
        from .models import EncoderConfig

        least = {
            "length": 8,
            "seeds": 1,
            "seed": 0,
            "batch_size": 1,
            "hidden_size": 1,
            "num_heads": 1,
            "vocab_size": 64,
            "steps": 1,
        }
        for name, smallest in least.items():
            value = getattr(self, name)
            if value is not None and value < smallest:
                raise InputError(f"--{name.replace('_', '-')}: expected at least {smallest}, got {value}")
        if self.hidden_size % self.num_heads:
            raise InputError(f"--num-heads: {self.num_heads} heads do not divide hidden_size {self.hidden_size}")
        try:
            EncoderConfig(blocks=self.blocks, decoder_layers=self._decoder_layers()).require_full_length()
        except ValueError as error:
            raise InputError(f"--{str(error).replace('_', '-', 1)}") from None
        if not 0 < self.mask_rate < 1:
            raise InputError(f"--mask-rate: expected a share between 0 and 1, got {self.mask_rate}")
        if not 0 < self.learning_rate < float("inf"):
            raise InputError(f"--learning-rate: expected a positive number, got {self.learning_rate}")


@dataclass(frozen=True)
class Bench:
    """How fast is attention with positions on this machine, compared with attention that has none?

    Every way is checked against the float64 reference first, output and gradients. Then all are timed in turns, and
    each time is divided by that of torch's own attention without positions ("sdpa") in the same round: 1.00 is as if
    positions cost nothing, 2.00 twice the time. "sdpa+bias" is what most code does today: an (n, n) bias handed to
    torch's attention. Forward is without gradients, training forward and backward with all of them.

    Writes results.json, results.csv and plot.svg. Ctrl-C keeps what is measured; a later run with other terms or
    lengths adds to the folder.
    """

    terms: Annotated[str | None, tyro.conf.arg(metavar="A,B,C")] = None
    """What positions add: bias (a number per head and offset), t5, tisa, shaw (vectors for keys and values), factors
    (a product of rank 66, as in TUPE), dense (a number per pair), and bias once more where queries are every second
    token (funnel), in a batch of different lengths (padded), and causal; "all" takes every one. Default: bias,t5,shaw
    (with --quick: bias)."""

    lengths: Annotated[str | None, tyro.conf.arg(metavar="N,N")] = None
    """Tokens of a sequence. Default: 128,512,2048 (with --quick: 128,512)."""

    dtypes: Annotated[str | None, tyro.conf.arg(metavar="A,B")] = None
    """float32, bfloat16 or float16. Default: float32, on a GPU bfloat16."""

    backends: Annotated[str, tyro.conf.arg(metavar="A,B")] = "auto"
    """Backends of whereformer.attention: "auto" chooses for the call, "reference" is the plain formula."""

    rounds: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """How often each way is timed. Default: 7 (with --quick: 3)."""

    quick: bool = False
    """A first look in less than a minute."""

    batch: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Sequences at a time. Default: 4, and 1 for more than 2048 tokens."""

    heads: int = 12
    """Attention heads."""

    head_dim: int = 64
    """Width of a head."""

    threads: int = 1
    """Threads on the CPU. With one, time is the process's CPU time, which other programs disturb least."""

    memory_limit: Annotated[float | None, tyro.conf.arg(metavar="GIB")] = None
    """What would need more GiB is not tried, and the table says so. Default: half of what is free."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; "auto" takes a GPU if there is one."""

    out: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """Folder for the results. Default: runs/bench."""

    def run(self, console: Console) -> None:
        """Do it."""
        self.measure(console)

    def measure(self, console: Console, peers: Sequence[Way] = (), out: Path = Path("runs/bench")) -> None:
        """Do it with more ways to compare with, and another default folder."""
        from .report import write_plot
        from .tasks import bench, cases, compare
        from .terminal import Bar, print_bench, say

        settings = self._settings()
        names = self._backends(settings)
        ways = [*map(cases.backend, names), cases.DENSE, *peers]
        out = self.out or out
        with compare.open_folder(out):
            results = bench.Results(out, settings.device)
            measured: list[bench.Row] = []

            def keep(rows: list[bench.Row]) -> None:
                measured.extend(rows)
                results.add(rows)

            interrupted = False
            with Bar(console) as progress:
                try:
                    bench.Bench(settings, ways, keep, progress).run()
                except KeyboardInterrupt:
                    interrupted = True
            if measured:
                print_bench(console, measured)
                written = [results.path, results.csv]
                if write_plot(list(results.rows.values()), names[0], out / "plot.svg"):
                    written.append(out / "plot.svg")
                say(console, f"wrote {', '.join(map(str, written))}")
            if interrupted:
                raise SystemExit(_fail("interrupted; what is measured is kept", 130))

    def _settings(self) -> Settings:
        from .tasks import bench, cases

        for name in ("rounds", "batch", "heads", "head_dim", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"--{name.replace('_', '-')}: expected at least 1, got {value}")
        if self.memory_limit is not None and not 0 < self.memory_limit < float("inf"):
            raise InputError(f"--memory-limit: expected a positive number, got {self.memory_limit}")
        device = _device(self.device)
        kinds = self.terms or ("bias" if self.quick else "bias,t5,shaw")
        lengths = []
        for text in _split("lengths", self.lengths or ("128,512" if self.quick else "128,512,2048")):
            if not text.isdecimal() or int(text) < 1:
                raise InputError(f"--lengths: expected numbers of at least 1, got {text!r}")
            lengths.append(int(text))
        return bench.Settings(
            kinds=list(cases.KINDS) if kinds == "all" else _split("terms", kinds, list(cases.KINDS)),
            lengths=lengths,
            dtypes=_split(
                "dtypes", self.dtypes or ("float32" if device.type == "cpu" else "bfloat16"), list(cases.DTYPES)
            ),
            device=device,
            memory_limit=int(self.memory_limit * 2**30) if self.memory_limit else bench.free_memory(device) // 2,
            batch=self.batch,
            heads=self.heads,
            head_dim=self.head_dim,
            rounds=self.rounds or (3 if self.quick else 7),
            threads=self.threads,
        )

    def _backends(self, settings: Settings) -> list[str]:
        from .attention.choose import BACKENDS
        from .tasks import bench

        names = _split("backends", self.backends, BACKENDS)
        for name in names:
            bench.check_backend(name, settings)
        return names


def _device(name: str) -> torch.device:
    """The device of a ``--device`` option.

    Raises:
        InputError: for a GPU that isn't there.
    """
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("--device: expected cpu or auto, got cuda, which torch does not find here")
    return torch.device(name)


def _split(option: str, text: str, known: Sequence[str] | None = None) -> list[str]:
    """The different parts of a list with commas, each of them known.

    Raises:
        InputError: naming the option.
    """
    parts = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not parts:
        raise InputError(f"--{option}: expected at least one, got none")
    for part in parts:
        if known is not None and part not in known:
            raise InputError(f"--{option}: expected {', '.join(known)}, got {part!r}")
    return parts


MOST = 2**20
"""What a size given to ``cost`` may be at most; numbers of bytes beyond are none that torch can hold."""
MOST_LAYERS = 1000
"""And layers, each of which is looked at: as many as the deepest Transformers have; that takes seconds."""


@dataclass(frozen=True)
class Pretrain:
    """Pretrain an encoder on a folder of text, with any position method: masked LM or ELECTRA.

    With the defaults (a BERT of 4 layers of width 128) it takes about nine minutes of one CPU core, whatever the text;
    for a real model raise --blocks, --hidden-size, --num-heads, --vocab-size and --steps, and lower --learning-rate.
    Text is cut into windows, one page in ten is held out and scored on the way. --out gets model/ (model and
    tokenizer, for Encoder.from_pretrained and AutoTokenizer), results.json, checkpoints/ and, if TensorBoard is
    installed, tensorboard/. Ctrl-C finishes the step and saves; the same command continues, to the same weights.
    """

    data: Annotated[tuple[str, ...], tyro.conf.arg(metavar="PATH [PATH ...]")] = ()
    """Text to train on: files or folders with .txt, .md, .rst, .parquet, .jsonl. Default: the documentation inside
    the running Python."""

    column: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """The text column of Parquet and JSON Lines files, if it isn't "text" or the only one."""

    out: Path = Path("runs/pretrain")
    """Folder for the model and all else."""

    tokenizer: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """A tokenizer.json, or a folder that a Hugging Face tokenizer was saved to. Default: WordPiece, trained on the
    text."""

    vocab_size: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Size of the vocabulary that is trained. Default: 4096."""

    every: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Steps between checkpoints, each with a held-out score. Default: a tenth of the steps."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; "auto" takes a GPU if there is one."""

    dry_run: bool = False
    """Only print sizes, parameters and how often the text is read; train and write nothing."""

    model: tyro.conf.OmitArgPrefixes[ModelSettings] = field(default_factory=ModelSettings)
    training: tyro.conf.OmitArgPrefixes[TrainingSettings] = field(default_factory=TrainingSettings)

    def run(self, console: Console) -> None:
        """Do it."""
        model = self.model.resolved()
        training = self.training.resolved(model.objective)
        check_range(self, vocab_size=(64, float("inf")), every=(1, float("inf")))
        if self.tokenizer is not None and self.vocab_size is not None:
            raise InputError(f"--vocab-size: only without --tokenizer, whose size it is, got {self.vocab_size}")
        from .tasks import compare, corpus, pretrain
        from .terminal import Bar, print_plan, say

        device = _device(self.device)
        vocab_size = self.vocab_size or 4096
        # Before the text is read and encoded, which may take long.
        pretrain.build_config(model, training.length)
        tokenizer = pretrain.tokenizer_setting(self.tokenizer, vocab_size)
        with ExitStack() as stack:
            if not self.dry_run:
                stack.enter_context(compare.open_folder(self.out))
            with console.status("reading the text"):
                documents = corpus.load_documents(self.data, self.column) if self.data else corpus.default_documents()
            if not self.dry_run:
                settings = pretrain.settings_of(model, training, documents, tokenizer, device)
                folder = pretrain.Folder(self.out, settings)
                results = folder.finished()
                if results is not None:
                    say(console, f"{self.out} is finished already; nothing to do")
                    self._tell(console, results)
                    return
            with console.status("encoding the text" if self.tokenizer else "training a tokenizer, encoding the text"):
                source = ", ".join(self.data) or "the documentation inside this Python"
                text = pretrain.prepare_text(documents, source, self.tokenizer, vocab_size)
                config = pretrain.build_config(model, training.length, text.vocabulary)
                every = self.every or max(1, training.steps // 10)
                job = pretrain.Job(model, training, text, config, device, every)
                plan = job.facts()
            print_plan(console, text.facts, model.blocks, training.steps, plan)
            if self.dry_run:
                for part, batch in pretrain.batch_costs(job).items():
                    steps = f" ({training.accumulate} batches a step)" if training.accumulate > 1 else ""
                    say(console, f"\n{part}, a batch{steps}:\n{batch}")
                return
            with Bar(console) as progress:
                results = pretrain.run(job, folder, progress)
            self._tell(console, results)

    def _tell(self, console: Console, results: dict[str, Any]) -> None:
        """Where everything is, how good it is, and how to use it."""
        from .tasks.pretrain import score_text
        from .terminal import say

        scores = ", ".join(score_text(name, value) for name, value in results["held_out"][-1].items() if name != "step")
        say(
            console,
            f"{results['step']:,} steps, {results['tokens_seen']:,} tokens in {results['seconds']:.0f} s; "
            f"held-out {scores}",
            f"wrote {self.out / 'model'} (model and tokenizer), {self.out / 'results.json'} and "
            f"{self.out / 'checkpoints'}",
            "\nfrom transformers import AutoTokenizer; from whereformer import Encoder\n"
            f"tokenizer = AutoTokenizer.from_pretrained({str(self.out / 'model')!r})\n"
            f"hidden = Encoder.from_pretrained({str(self.out / 'model')!r})"
            '(**tokenizer("some text", return_tensors="pt")).last_hidden_state',
        )


@dataclass(frozen=True)
class Finetune:
    """What does a position method add to a pretrained model? Fine-tunes it with and without, on GLUE or your own task.

    As in Table 3 of the TISA paper: each task is fine-tuned with several seeds, by default with 0, 1, 3 and 5 kernels
    of TISA added to the model's position embeddings, and the table has medians with their range, the largest gain over
    the baseline and what share of its errors that is. Writes results.json, results.md and report.html (with what each
    head learned). Ctrl-C keeps every finished run; the same command continues with what is missing.
    """

    model: Annotated[str, tyro.conf.arg(metavar="PATH_OR_ID")]
    """The pretrained model: a folder, or an id on the Hugging Face Hub."""

    tokenizer: Annotated[str | None, tyro.conf.arg(metavar="PATH_OR_ID")] = None
    """Its tokenizer, if it isn't where the model is."""

    position: Annotated[str, tyro.conf.arg(metavar="A,B+C")] = "learned+tisa"
    """Position methods, each with a table of its own: "learned+tisa" adds to the model's position embeddings, "tisa"
    takes their place, "own" leaves the model as it is; `whereformer positions` lists others."""

    kernels: Annotated[str, tyro.conf.arg(metavar="N,N")] = "0,1,3,5"
    """TISA's kernels a head; 0 is the baseline, the same without."""

    seeds: int = 5
    """Repeat every run with so many seeds."""

    seed: int = 0
    """The first seed."""

    out: Path = Path("runs/finetune")
    """Folder for the results."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; "auto" takes a GPU if there is one."""

    threads: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Threads on the CPU. Default: torch's."""

    dry_run: bool = False
    """Only check everything and print what would be done."""

    of: tyro.conf.OmitArgPrefixes[DataSettings] = field(default_factory=DataSettings)
    tuning: tyro.conf.OmitArgPrefixes[TuningSettings] = field(default_factory=TuningSettings)

    def run(self, console: Console) -> None:
        """Do it."""
        data, tuning = self.of.checked(), self.tuning.checked()
        check_range(self, seeds=(1, 2**20), seed=(0, 2**31), threads=(1, 2**20))
        kernels = []
        for text in listed("kernels", self.kernels):
            if not text.isdecimal():
                raise InputError(f"--kernels: expected numbers of at least 0, got {text!r}")
            kernels.append(int(text))
        import torch

        from .tasks import compare, finetune, gains, glue, variants
        from .terminal import Bar, print_finetuning, print_gains

        settings = variants.settings_of(listed("position", self.position), sorted(set(kernels)))
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        seeds = list(range(self.seed, self.seed + self.seeds))
        tokenizer = finetune.load_tokenizer(self.model, self.tokenizer)
        with ExitStack() as stack:
            if not self.dry_run:
                stack.enter_context(compare.open_folder(self.out))
            with console.status("reading rows and models"):
                tasks = glue.load(data)
                job = finetune.Job(self.model, tokenizer, tasks, settings, seeds, tuning, _device(self.device))
                encoded, facts = finetune.prepare(job)
            print_finetuning(console, job, encoded, facts)
            if self.dry_run:
                return
            results = finetune.Results(self.out, job, encoded, facts)
            with Bar(console) as progress:
                finetune.run(job, encoded, results, self.out, progress)
            print_gains(console, gains.tables(results.data))
            self._write(console, results.data)

    def _write(self, console: Console, results: dict[str, Any]) -> None:
        """The table as text and as a page."""
        from .files import write_atomically
        from .report import finetune as report
        from .terminal import say

        files = {"results.md": report.build_markdown(results), "report.html": report.build_report(results)}
        for name, text in files.items():
            write_atomically(self.out / name, text)
        written = " and ".join(str(self.out / name) for name in ("results.json", "results.md"))
        say(console, f"wrote {self.out / 'report.html'} (open it in a browser), {written}")


@dataclass(frozen=True)
class Cost:
    """What does an encoder cost? FLOPs, parameters and memory, counted without building it.

    FLOPs are two for each multiply-add of a matrix product, and compared with BERT-base at the same length. A
    Funnel-Transformer is --blocks 4-4-4 --decoder-layers 2 --position transformer_xl --segments attention
    --no-query-bias.
    """

    blocks: str = "12"
    """Layers: "12" are twelve, "1x12" is one used twelve times, "4-4-4" pools between its blocks."""

    decoder_layers: str = "0"
    """Full-length layers after pooled blocks, as "2" or "1x2"."""

    decoder: bool = True
    """Whether the decoder is there; a model that classifies sequences leaves it out."""

    hidden_size: int = 768
    """Width of the encoder."""

    num_heads: int = 12
    """Attention heads."""

    head_dim: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Width of a head. Default: the encoder's width divided by the heads."""

    intermediate_size: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Width within the feed-forward networks. Default: four times the encoder's."""

    embedding_size: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Width of the token embeddings. Default: the encoder's."""

    vocab_size: int = 30522
    """Tokens in the vocabulary."""

    position: str = "learned"
    """A position method, or several joined by "+"."""

    segments: Literal["embedding", "attention"] = "embedding"
    """Where token types act: added to the embeddings (BERT), or to the scores (Funnel)."""

    query_bias: bool = True
    """Whether the queries' projection has a bias."""

    pool_query_only: bool = True
    """Whether the layer that halves the sequence still attends to the whole of it."""

    separate_cls: bool = True
    """Whether the first token is [CLS] and stays itself in every pooling."""

    truncate_seq: bool = True
    """Whether pooling drops the last token, so that 512 become 256."""

    length: int = 512
    """Tokens of a sequence."""

    batch_size: int = 1
    """Sequences at a time."""

    predictions: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Tokens of a sequence that the masked-LM head predicts. Default: all; there is no such head where blocks pool
    without a decoder."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of parameters and activations."""

    device: Literal["cpu", "cuda"] = "cpu"
    """Where it would run; it need not be there."""

    paper: bool = False
    """Print what the Funnel-Transformer paper's models cost relative to BERT-base instead, counted as in the authors'
    code; of the other options only --out counts."""

    out: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """A file to write the numbers to, as JSON."""

    def run(self, console: Console) -> None:
        """Do it."""
        from .analysis import paper_table
        from .files import write_atomically
        from .terminal import print_paper_flops, say

        if self.out is not None and self.out.is_dir():
            raise InputError(f"--out: expected a file, got the folder {str(self.out)!r}")
        data: Any
        if self.paper:
            rows = paper_table()
            data = [{"model": row.model, **row.relative} for row in rows]
            print_paper_flops(console, rows)
        else:
            found = self._count()
            data = found.to_dict()
            say(console, str(found))
        if self.out is not None:
            write_atomically(self.out, json.dumps(data, indent=2, allow_nan=False) + "\n")
            say(console, f"wrote {self.out}")

    def _count(self) -> analysis.Cost:
        import torch

        from .analysis import cost
        from .models import EncoderConfig, parse_blocks

        sizes = ("hidden_size", "num_heads", "head_dim", "intermediate_size", "embedding_size", "vocab_size")
        for name in (*sizes, "length", "batch_size"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= MOST:
                limit = "at least 1" if value < 1 else f"at most {MOST}"
                raise InputError(f"--{name.replace('_', '-')}: expected {limit}, got {value}")
        try:
            config = EncoderConfig(
                num_attention_heads=self.num_heads,
                max_position_embeddings=max(512, self.length),
                **{
                    name: getattr(self, name)
                    for name in (each.name for each in fields(self))
                    if name in EncoderConfig.__dataclass_fields__
                },
            )
            for name in ("blocks", "decoder_layers"):
                given = getattr(config, name)
                layers = 0 if given == "0" else sum(block.layers * block.repeats for block in parse_blocks(given))
                if layers > MOST_LAYERS:
                    raise ValueError(f"{name}: expected at most {MOST_LAYERS} layers, got {layers}")
            return cost(
                config,
                self.length,
                self.batch_size,
                predictions=self.predictions,
                decoder=self.decoder,
                dtype=getattr(torch, self.dtype),
                device=self.device,
            )
        except ValueError as error:
            name, _, reason = str(error).partition(": ")
            if name == "num_attention_heads":
                name = "num_heads"
            if name not in {each.name for each in fields(self)}:
                # Of the method itself, which does not know what it was asked for by.
                name, reason = "position", str(error)
            raise InputError(f"--{name.replace('_', '-')}: {reason}") from None


@dataclass(frozen=True)
class ListPositions:
    """List the position methods, and the options that each takes, with their defaults as in JSON."""

    def run(self, console: Console) -> None:
        """Do it."""
        from rich.table import Table

        from .positions import describe, position_names

        table = Table("name", "what it is", "options", show_edge=False)
        for name in position_names():
            summary, options = describe(name)
            shown = (f"{option}={json.dumps(default)}" for option, default in options.items())
            table.add_row(name, summary, ", ".join(shown))
        console.print(table)
        console.print("Join several by '+': learned+tisa, tupe+t5.")


COMMANDS: dict[str, Callable[..., Any]] = {
    "compare": Compare,
    "bench": Bench,
    "pretrain": Pretrain,
    "finetune": Finetune,
    "cost": Cost,
    "properties": Properties,
    "positions": ListPositions,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the ``whereformer`` command."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given == ["--version"]:
        print(f"whereformer {__version__}")
        return
    command = tyro.extras.subcommand_cli_from_dict(
        COMMANDS,
        prog="whereformer",
        description="Where a token is, as a swappable, inspectable, fast part of self-attention.",
        args=given,
    )
    execute(command.run)


def execute(work: Callable[[Console], None]) -> None:
    """Do a command's work, with one line on stderr and an exit code if it can't be done."""
    try:
        # Without markup, because paths may hold brackets.
        work(Console(markup=False, width=None if sys.stdout.isatty() else 100))
    except (InputError, OSError) as error:
        raise SystemExit(_fail(str(error))) from None
    except KeyboardInterrupt:
        raise SystemExit(_fail("interrupted; what is finished is kept, the same command continues", 130)) from None


def _fail(message: str, code: int = 2) -> int:
    """Print one line to stderr and give the exit code back: 2 for bad input."""
    print(f"whereformer: {' '.join(message.split())}", file=sys.stderr)
    return code
