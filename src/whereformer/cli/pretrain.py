"""The command ``whereformer pretrain``: pretrain an encoder on text."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from rich.console import Console

from ..errors import InputError
from ..lab.options import MOST_COUNT, MOST_SIZE, check_range, find_device
from ..lab.study import command_line
from ..studies.pretrain.settings import ModelSettings, PretrainTraining

if TYPE_CHECKING:
    from ..studies.pretrain.job import PretrainJob
    from ..studies.pretrain.results import PretrainResults


@dataclass(frozen=True)
class Pretrain:
    """Pretrain an encoder on a folder of text, with any position method: masked LM or ELECTRA.

    The default model, a BERT with 4 layers of width 128, takes about nine minutes on one CPU core, whatever the text.
    For a larger model, raise --blocks, --hidden-size, --num-heads, --vocab-size and --steps, and lower --learning-rate.
    One page in ten is held out, and the model is scored on these pages during training.

    The text may be larger than memory: it is encoded once, into cache/, and read from there a window at a time. Also
    writes model/ (the model and its tokenizer, for Encoder.from_pretrained and AutoTokenizer), results.json,
    checkpoints/ and, if TensorBoard is installed, tensorboard/. Ctrl-C finishes the current step and saves it; the same
    command then continues and ends with the same weights.
    """

    FLAGS: ClassVar = {"num_attention_heads": "--num-heads", "hidden_dropout_prob": "--dropout"}
    MANY: ClassVar = True

    data: tuple[str, ...] = ()
    """Text to train on: files, patterns such as 'data/**/*.txt' (in quotes), or folders with .txt, .md, .rst, .parquet,
    .jsonl; or a data set on the Hugging Face Hub, as hub:NAME, hub:NAME:CONFIG or hf://datasets/NAME/*.parquet.
    Default: the documentation that comes with Python."""

    column: str | None = None
    """The column of Parquet and JSON Lines files that holds the text. Default: "text", or the only column of text."""

    out: Path = Path("runs/pretrain")
    """Folder for the model, checkpoints and results."""

    cache: Path | None = None
    """Folder for the encoded text, which is made once and then read a window at a time. Runs on the same text can share
    it. Default: cache/ in --out."""

    tokenizer: Path | None = None
    """A tokenizer.json, or the folder of a saved Hugging Face tokenizer. Default: WordPiece, learned from the text."""

    vocab_size: int | None = None
    """Size of the vocabulary that is learned from the text. Default: 4096."""

    every: int | None = None
    """Number of steps between checkpoints, each with a held-out score. Default: a tenth of the steps."""

    keep: int = 2
    """Number of newest checkpoints to keep. From several checkpoints, `whereformer analyze` shows how the model learned
    about position."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train. "auto" is a GPU if there is one."""

    dry_run: bool = False
    """Print the sizes, the parameters and how many times the text is read, without training or writing anything."""

    model: ModelSettings = field(default_factory=ModelSettings)
    training: PretrainTraining = field(default_factory=PretrainTraining)

    def run(self, console: Console) -> None:
        """Train the model, or with --dry-run only print the plan."""
        model = self.model.resolved()
        training = self.training.resolved(model.objective)
        check_range(self, vocab_size=(64, MOST_SIZE), every=(1, MOST_COUNT), keep=(1, MOST_COUNT))
        if self.tokenizer is not None and self.vocab_size is not None:
            raise InputError("vocab_size", f"only without `tokenizer`, which has its own size, got {self.vocab_size}")
        from ..data.corpus import Text, source_of
        from ..data.encode import TokenizerChoice
        from ..data.fingerprint import look_at
        from ..data.hub import fetched
        from ..lab import ranks
        from ..lab.folder import open_or_scratch
        from ..lab.terminal import Bar
        from ..lab.training.folder import Folder
        from ..lab.training.shared import check_rows
        from ..lab.training.telling import tell_finished, tell_slow_dtype
        from ..studies.pretrain.job import PretrainJob, settings_of
        from ..studies.pretrain.model import build_config
        from ..studies.pretrain.results import PretrainResults
        from ..studies.pretrain.run import pretrain
        from ..studies.pretrain.text import prepare_text
        from .tables.plans import print_plan

        check_rows(training.batch_size)
        device = find_device(self.device)
        ranks.join(device)
        # Check the settings before the text is read and encoded, which may take long.
        build_config(model, training.longest)
        choice = TokenizerChoice(self.tokenizer, self.vocab_size or 4096)
        tokenizer = choice.setting
        cache = self.cache or self.out / "cache"
        with open_or_scratch(self.out, dry_run=self.dry_run) as scratch:
            with Bar(console) as progress:
                with ranks.main_first():
                    paths = fetched(self.data, self.column, scratch or cache, progress)
                text = Text(paths, self.column, progress, source_of(self.data))
                seen = look_at(text, cache)
                if not self.dry_run:
                    settings = settings_of(model, training, seen.summary.fingerprint, tokenizer, device)
                    folder = Folder(self.out, settings, PretrainResults, command_line(self, "pretrain"))
                    if tell_finished(console, folder, self._tell):
                        return
                with ranks.main_first():
                    prepared = prepare_text(text, seen, choice, cache, scratch)
            config = build_config(model, training.longest, prepared.vocabulary)
            every = self.every or max(1, training.steps // 10)
            job = PretrainJob(model, training, prepared, config, device, every, self.keep)
            print_plan(console, prepared.facts, job.config.blocks, job.stages, job.plan())
            tell_slow_dtype(console, training.dtype, device)
            if self.dry_run:
                self._tell_costs(console, job)
                return
            with Bar(console) as progress:
                results = pretrain(job, folder, progress)
            self._tell(console, results)

    def _tell_costs(self, console: Console, job: PretrainJob) -> None:
        """Print what a batch of each length costs."""
        from ..lab.terminal import say
        from ..studies.pretrain.job import batch_costs

        for stage in job.stages:
            for part, batch in batch_costs(job, stage).items():
                steps = f" ({stage.batches} batches per step)" if stage.batches > 1 else ""
                length = f" of {stage.length}-token windows" if len(job.stages) > 1 else ""
                say(console, f"\n{part}, a batch{length}{steps}:\n{batch}")

    def _tell(self, console: Console, results: PretrainResults) -> None:
        """Print the scores, the files that were written, and how to use the model."""
        from ..lab.training.telling import tell_training

        model = str(self.out / "model")
        tell_training(
            console,
            self.out,
            results,
            "",
            "from transformers import AutoTokenizer; from whereformer import Encoder",
            f"tokenizer = AutoTokenizer.from_pretrained({model!r})",
            f"hidden = Encoder.from_pretrained({model!r})"
            '(**tokenizer("some text", return_tensors="pt")).last_hidden_state',
        )
