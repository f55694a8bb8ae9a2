"""The command ``whereformer pretrain``: pretrain an encoder on text."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from rich.console import Console

from ..errors import InputError
from ..experiments.pretrain.settings import ModelSettings, PretrainTraining
from ..experiments.settings import check_range
from .arguments import find_device

if TYPE_CHECKING:
    from ..experiments.pretrain.results import PretrainResults


@dataclass(frozen=True)
class Pretrain:
    """Pretrain an encoder on a folder of text, with any position method: masked LM or ELECTRA.

    The default model, a BERT with 4 layers of width 128, takes about nine minutes on one CPU core, whatever the text.
    For a larger model, raise --blocks, --hidden-size, --num-heads, --vocab-size and --steps, and lower --learning-rate.
    One page in ten is held out, and the model is scored on these pages during training.

    Writes model/ (the model and its tokenizer, for Encoder.from_pretrained and AutoTokenizer), results.json,
    checkpoints/ and, if TensorBoard is installed, tensorboard/. Ctrl-C finishes the current step and saves it; the same
    command then continues and ends with the same weights.
    """

    FLAGS: ClassVar = {"num_attention_heads": "--num-heads", "hidden_dropout_prob": "--dropout"}
    MANY: ClassVar = True

    data: tuple[str, ...] = ()
    """Text to train on: files or folders with .txt, .md, .rst, .parquet, .jsonl. Default: the documentation that
    comes with Python."""

    column: str | None = None
    """The column of Parquet and JSON Lines files that holds the text. Default: "text", or the only column of text."""

    out: Path = Path("runs/pretrain")
    """Folder for the model, checkpoints and results."""

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
        check_range(self, vocab_size=(64, float("inf")), every=(1, float("inf")), keep=(1, float("inf")))
        if self.tokenizer is not None and self.vocab_size is not None:
            raise InputError("vocab_size", f"only without `tokenizer`, which has its own size, got {self.vocab_size}")
        from ..data import corpus
        from ..experiments.pretrain.job import PretrainJob, batch_costs, settings_of
        from ..experiments.pretrain.model import build_config
        from ..experiments.pretrain.results import PretrainResults
        from ..experiments.pretrain.run import pretrain
        from ..experiments.pretrain.text import prepare_text, tokenizer_setting
        from ..runs import ranks
        from ..runs.folder import open_folder
        from ..training.folder import Folder
        from ..training.shared import check_rows
        from .tables.plans import print_plan
        from .terminal import Bar, say

        check_rows(training.batch_size)
        device = find_device(self.device)
        ranks.join(device)
        vocab_size = self.vocab_size or 4096
        # Check the settings before the text is read and encoded, which may take long.
        build_config(model, training.length)
        tokenizer = tokenizer_setting(self.tokenizer, vocab_size)
        with ExitStack() as stack:
            if not self.dry_run:
                stack.enter_context(open_folder(self.out))
            with console.status("reading the text"):
                documents = corpus.documents_of(self.data, self.column)
            if not self.dry_run:
                settings = settings_of(model, training, documents, tokenizer, device)
                folder = Folder(self.out, settings, PretrainResults)
                results = ranks.from_main(folder.finished)
                if results is not None:
                    say(console, f"{self.out} is already finished; nothing to do")
                    self._tell(console, results)
                    return
            with console.status("encoding the text" if self.tokenizer else "training a tokenizer, encoding the text"):
                source = corpus.source_of(self.data)
                with ranks.main_first():
                    text = prepare_text(documents, source, self.tokenizer, vocab_size)
                config = build_config(model, training.length, text.vocabulary)
                every = self.every or max(1, training.steps // 10)
                job = PretrainJob(model, training, text, config, device, every, self.keep)
                plan = job.plan()
            print_plan(console, text.facts, model.blocks, training.steps, plan)
            if self.dry_run:
                for part, batch in batch_costs(job).items():
                    steps = f" ({training.accumulate} batches per step)" if training.accumulate > 1 else ""
                    say(console, f"\n{part}, a batch{steps}:\n{batch}")
                return
            with Bar(console) as progress:
                results = pretrain(job, folder, progress)
            self._tell(console, results)

    def _tell(self, console: Console, results: PretrainResults) -> None:
        """Print the scores, the files that were written, and how to use the model."""
        from .terminal import tell_training

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
