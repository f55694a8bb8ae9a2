"""The command ``whereformer translate``: train a translation model, translate with it, and score translations."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, ClassVar, Literal, TextIO

import tyro
from rich.console import Console

from ..errors import InputError, printable, shown
from ..files import check_file, is_same_file, naming, new_file, write_atomically
from ..lab.options import MOST_SIZE, MOST_THREADS, check_range, find_device, listed_numbers
from ..studies.translate.settings import Decoding, ParallelData, TranslateTrain

if TYPE_CHECKING:
    from ..studies.translate.parallel import Pairs

Device = Literal["auto", "cpu", "cuda"]

NOTHING_YET = "nothing has been written yet"
"""What to say after Ctrl-C, unless lines have been written."""


@dataclass(frozen=True)
class TranslateRun:
    """Translate the lines of a file or of standard input.

    Each line of the input gives one line of the output, in the same order; empty lines stay empty. The command reads,
    translates and writes 1024 lines at a time. If a line is too long or not UTF-8, the error names it, and the
    translations of all lines before it are written first. Only translations go to standard output.
    """

    FLAGS: ClassVar = {"model": "MODEL"}
    INTERRUPTED: ClassVar = NOTHING_YET

    model: str
    """The folder of a training, or an id on the Hugging Face Hub."""

    input: Path | None = None  # shadows a builtin, so that the option is --input
    """Lines to translate. Default: standard input."""

    output: Path | None = None
    """File for the translations. Default: standard output."""

    device: Device = "auto"
    """Where to compute. "auto" is a GPU if there is one."""

    threads: int | None = None
    """Threads on the CPU. Default: torch's."""

    decoding: Decoding = field(default_factory=Decoding)

    def run(self, console: Console) -> None:
        """Translate the lines."""
        decoding = self.decoding.checked()
        check_range(self, threads=(1, MOST_THREADS))
        with ExitStack() as stack:
            stream = stack.enter_context(_opened(self.input))
            from ..data.read import lines_of
            from ..lab.jobs import threads
            from ..lab.progress import Progress
            from ..lab.terminal import Bar, Terminal
            from ..studies.translate import translating

            if self.output is not None:
                check_file("output", self.output)
                if _is_read_by(stream, self.output):
                    raise InputError("output", f"expected a different file from `input`, got {str(self.output)!r}")
            translator = translating.load(self.model, decoding, find_device(self.device))
            stack.enter_context(threads(self.threads))
            window = 1 if self.input is None and stream.isatty() else translating.WINDOW
            errors = Terminal(stderr=True)
            progress = stack.enter_context(Bar(errors)) if errors.is_terminal and window > 1 else Progress()
            progress.begin("translating")
            # Counting the lines of a pipe would use them up.
            if errors.is_terminal and self.input is not None and self.input.is_file():
                with self.input.open("rb") as counted:
                    progress.start(sum(1 for _ in counted))
            lines = lines_of("input", str(self.input or "the standard input"), stream)
            out = stack.enter_context(_writable(self.output))
            _write(translator.stream(lines, window, progress.step), out)


@dataclass(frozen=True)
class TranslateScore:
    """How good are translations? BLEU and chrF by sacrebleu, with signatures, and BLEU by the length of the source.

    Give a model and parallel text for it to translate, or a file of translations with their --references. In the second
    case the lengths are those of --source or, without it, those of the references.
    """

    FLAGS: ClassVar = {"model": "MODEL"}
    INTERRUPTED: ClassVar = NOTHING_YET

    model: str | None = None
    """The folder of a training, or an id on the Hugging Face Hub."""

    parallel: ParallelData = field(default_factory=ParallelData)

    hypotheses: Path | None = None
    """Translations, instead of a model."""

    references: Path | None = None
    """The correct translations, line by line."""

    words: str = "8,12,16,24"
    """For BLEU by length: the largest number of words of a source in each group. The last group has the rest."""

    tokenize: Literal["13a", "intl", "zh", "char", "none"] = "13a"
    """sacrebleu's tokenization for BLEU: zh for Chinese, char for scripts without spaces between words."""

    out: Path | None = None
    """File for the scores and the settings, as JSON."""

    translations: Path | None = None
    """File for the model's translations."""

    device: Device = "auto"
    """Where to compute. "auto" is a GPU if there is one."""

    threads: int | None = None
    """Threads on the CPU. Default: torch's."""

    decoding: Decoding = field(default_factory=Decoding)

    def run(self, console: Console) -> None:
        """Score the translations and print the table."""
        decoding = self.decoding.checked()
        edges = listed_numbers("words", self.words, 1, MOST_SIZE)
        if edges != sorted(edges):
            raise InputError("words", f"expected ascending numbers, such as 8,12,16, got {shown(self.words)}")
        check_range(self, threads=(1, MOST_THREADS))
        # Checked now, because a failure after translating would lose the translations.
        self._check_output("out", self.out, translations=self.translations)
        self._check_output("translations", self.translations)
        import json

        from ..lab.terminal import say
        from ..studies.translate import scoring

        pairs, hypotheses, facts = self._files() if self.model is None else self._translated(self.model, decoding)
        found = scoring.score(hypotheses, pairs.target, pairs.source, edges=edges, tokenize=self.tokenize)
        console.print(scoring.sheet(found), highlight=False)
        say(console, *scoring.sentences(found))
        written = {
            self.translations: "".join(f"{line}\n" for line in hypotheses),
            self.out: json.dumps({**facts, **found}, indent=1, ensure_ascii=False) + "\n",
        }
        for file, content in written.items():
            if file is not None:
                write_atomically(file, content)
        if files := [str(file) for file in written if file is not None]:
            say(console, f"wrote {' and '.join(files)}")

    def _check_output(self, name: str, file: Path | None, **others: Path | None) -> None:
        """Check that an output can be written, and is none of the files that are read, nor one of ``others``."""
        if file is None:
            return
        if not file.parent.is_dir():
            raise InputError(name, f"no such folder: {str(file.parent)!r}")
        check_file(name, file)
        if not os.access(file.parent, os.W_OK):
            raise InputError(name, f"cannot write {str(file)!r}")
        read = {"source": self.parallel.source, "target": self.parallel.target}
        read |= {"hypotheses": self.hypotheses, "references": self.references, **others}
        for other, path in (*read.items(), *(("data", path) for path in self.parallel.data)):
            if path is not None and (is_same_file(file, path) or file.resolve() == path.resolve()):
                raise InputError(name, f"expected a different file from `{other}`, got {str(file)!r}")

    def _files(self) -> tuple[Pairs, list[str], dict[str, Any]]:
        """Read the translations and what they are of; return the pairs, the translations and the files' names."""
        from ..data.read import read_lines
        from ..studies.translate.parallel import Pairs, check_aligned

        if self.hypotheses is None:
            raise InputError("model", "expected a model, or `hypotheses` and `references`, got none")
        if self.references is None:
            raise InputError("references", "expected a file to go with `hypotheses`, got none")
        given = {"data": self.parallel.data, "target": self.parallel.target, "translations": self.translations}
        for name, value in given.items():
            if value:
                raise InputError(name, "only with a model")
        files = {"hypotheses": self.hypotheses, "references": self.references}
        if self.parallel.source is not None:
            files["source"] = self.parallel.source
        found = {name: list(read_lines(name, file)) for name, file in files.items()}
        for name, file in files.items():
            check_aligned(name, file, found[name], self.references, found["references"])
        pairs = Pairs(found.get("source", found["references"]), found["references"], str(self.references))
        facts = {name: str(files[name]) for name in ("hypotheses", "references")}
        return pairs, found["hypotheses"], facts

    def _translated(self, model: str, decoding: Decoding) -> tuple[Pairs, list[str], dict[str, Any]]:
        """Translate the sources with a model; return the pairs, their translations and facts."""
        for name in ("hypotheses", "references"):
            if getattr(self, name) is not None:
                raise InputError(name, "either a model or files, got both")
        from ..lab.jobs import threads
        from ..lab.terminal import Bar, Terminal
        from ..studies.translate import translating
        from ..studies.translate.pairs import load_pairs

        pairs = load_pairs(self.parallel.checked_pairs())
        translator = translating.load(model, decoding, find_device(self.device))
        with threads(self.threads), Bar(Terminal(stderr=True)) as progress:
            progress.start(len(pairs))
            progress.begin("translating")
            hypotheses = translator.translate(pairs.source, progress.step)
        return pairs, hypotheses, {"model": model, "text": pairs.name, **asdict(decoding)}


@dataclass(frozen=True)
class Translate:
    """Train a translation model on parallel text, translate with it and score it, with any position method."""

    command: Annotated[
        Annotated[TranslateTrain, tyro.conf.subcommand("train")]
        | Annotated[TranslateRun, tyro.conf.subcommand("run")]
        | Annotated[TranslateScore, tyro.conf.subcommand("score")],
        # No prefix before the names of the options.
        tyro.conf.arg(name=""),
    ]
    """What to do."""


@contextmanager
def _opened(file: Path | None) -> Iterator[BinaryIO]:
    """Open a file for reading, or use standard input."""
    if file is None:
        yield sys.stdin.buffer
        return
    try:
        stream = file.open("rb")
    except OSError as error:
        raise InputError("input", f"cannot read {str(file)!r}: {error.strerror or error}") from None
    with stream:
        yield stream


@contextmanager
def _writable(file: Path | None) -> Iterator[TextIO]:
    """Open a file for writing, or use standard output; both in UTF-8, like the input."""
    if file is None:
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8")
        yield sys.stdout
        return
    failure: BaseException | None = None
    with new_file(file) as partial:
        try:
            out = partial.open("x", encoding="utf-8")
        except OSError as error:
            raise InputError("output", f"cannot write {str(file)!r}: {error.strerror or error}") from None
        with naming(file), out:
            try:
                yield out
            except (InputError, KeyboardInterrupt) as error:
                if not out.tell():
                    raise
                failure = error  # about a later line: the lines before it are kept
    if failure is not None:
        raise failure


def _is_read_by(stream: BinaryIO, file: Path) -> bool:
    """Return whether a stream reads a file, by whatever name."""
    try:
        return os.path.samestat(os.fstat(stream.fileno()), file.stat())
    except (OSError, ValueError):
        return False  # there is no such file, or the stream is not a file's


def _write(translations: Iterable[str], out: TextIO) -> None:
    """Write line by line, so that finished translations are kept whatever happens next."""
    shown = printable if out.isatty() else str
    done = 0
    try:
        for line in translations:
            print(shown(line), file=out, flush=True)
            done += 1
    except KeyboardInterrupt:
        written = "1 line has been written" if done == 1 else f"{done:,} lines have been written"
        raise KeyboardInterrupt(written if done else NOTHING_YET) from None
