"""The command ``whereformer translate``: train a translation model, translate with it, and score translations."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, BinaryIO, ClassVar, Literal, TextIO

import tyro
from rich.console import Console

from ..errors import InputError, fail, printable, shown
from ..files import check_file, is_same_file, naming, new_file, write_atomically
from ..lab.options import MOST_SIZE, MOST_THREADS, check_range, find_device, listed_numbers
from ..studies.translate.settings import Decoding, ParallelData, TranslateTrain

Device = Literal["auto", "cpu", "cuda"]
Model = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
Threads = int | None


@contextmanager
def _repeatable() -> Iterator[None]:
    """Say after Ctrl-C that nothing was written. A translation that has begun reports for itself how far it got."""
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(fail("interrupted; nothing has been written yet", 130)) from None


@dataclass(frozen=True)
class TranslateRun:
    """Translate the lines of a file or of standard input.

    Each line of the input gives one line of the output, in the same order; empty lines stay empty. The command reads,
    translates and writes 1024 lines at a time. If a line is too long or not UTF-8, the error names it, and the
    translations of all lines before it are written first. Only translations go to standard output.
    """

    FLAGS: ClassVar = {"model": "MODEL"}

    model: Model
    """The folder of a training, or an id on the Hugging Face Hub."""

    input: Path | None = None  # shadows a builtin, so that the option is --input
    """Lines to translate. Default: standard input."""

    output: Path | None = None
    """File for the translations. Default: standard output."""

    device: Device = "auto"
    """Where to compute. "auto" is a GPU if there is one."""

    threads: Threads = None
    """Threads on the CPU. Default: torch's."""

    decoding: Decoding = field(default_factory=Decoding)

    @_repeatable()
    def run(self, console: Console) -> None:
        """Translate the lines."""
        decoding = self.decoding.checked()
        check_range(self, threads=(1, MOST_THREADS))
        with _opened(self.input) as stream:
            from ..data.read import lines_of
            from ..lab.terminal import Bar, Terminal
            from ..studies.translate import translating

            if self.output is not None:
                check_file("output", self.output)
                if _is_read_by(stream, self.output):
                    raise InputError("output", f"expected a different file from `input`, got {str(self.output)!r}")
            translator = translating.load(self.model, decoding, find_device(self.device))
            _use(self.threads)
            window = 1 if self.input is None and stream.isatty() else translating.WINDOW
            lines = lines_of("input", str(self.input or "the standard input"), stream)
            errors = Terminal(stderr=True)
            with ExitStack() as stack:
                progress = None
                if errors.is_terminal and window > 1:
                    progress = stack.enter_context(Bar(errors))
                    progress.begin("translating")
                    # Counting the lines of a pipe would use them up.
                    if self.input is not None and self.input.is_file():
                        progress.start(_count_lines(self.input))
                advance = (lambda count: None) if progress is None else progress.step
                out = stack.enter_context(_writable(self.output))
                _write(translator.stream(lines, window, advance), out)


@dataclass(frozen=True)
class TranslateScore:
    """How good are translations? BLEU and chrF by sacrebleu, with signatures, and BLEU by the length of the source.

    Give a model and parallel text for it to translate, or a file of translations with their --references. In the second
    case the lengths are those of --source or, without it, those of the references.
    """

    FLAGS: ClassVar = {"model": "MODEL"}

    model: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[MODEL]")] = None
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

    threads: Threads = None
    """Threads on the CPU. Default: torch's."""

    decoding: Decoding = field(default_factory=Decoding)

    @_repeatable()
    def run(self, console: Console) -> None:
        """Score the translations and print the table."""
        decoding, edges = self.decoding.checked(), self._edges()
        check_range(self, threads=(1, MOST_THREADS))
        for name in ("out", "translations"):
            file = getattr(self, name)
            if file is None:
                continue
            if not file.parent.is_dir():
                raise InputError(name, f"no such folder: {str(file.parent)!r}")
            # Checked now, because a failure after translating would lose the translations.
            check_file(name, file)
            if not os.access(file.parent, os.W_OK):
                raise InputError(name, f"cannot write {str(file)!r}")
            self._check_other(name, file)
        import json

        from ..lab.terminal import say
        from ..studies.translate import scoring

        if self.model is None:
            hypotheses, references, sources, facts = self._files()
        else:
            hypotheses, references, sources, facts = self._translated(console, decoding)
        found = scoring.score(hypotheses, references, sources, edges=edges, tokenize=self.tokenize)
        console.print(scoring.sheet(found), highlight=False)
        say(console, *scoring.sentences(found))
        written = []
        if self.translations is not None:
            write_atomically(self.translations, "".join(f"{line}\n" for line in hypotheses))
            written.append(str(self.translations))
        if self.out is not None:
            write_atomically(self.out, json.dumps({**facts, **found}, indent=1, ensure_ascii=False) + "\n")
            written.append(str(self.out))
        if written:
            say(console, f"wrote {' and '.join(written)}")

    def _check_other(self, name: str, file: Path) -> None:
        """Check that an output is none of the files that are read, nor the other output."""
        parallel = self.parallel
        others = [("source", parallel.source), ("target", parallel.target), *(("data", path) for path in parallel.data)]
        others += [("hypotheses", self.hypotheses), ("references", self.references)]
        for other, path in others:
            if path is not None and is_same_file(file, path):
                raise InputError(name, f"expected a different file from `{other}`, got {str(file)!r}")
        if name == "out" and self.translations is not None and file.resolve() == self.translations.resolve():
            raise InputError(name, f"expected a different file from `translations`, got {str(file)!r}")

    def _files(self) -> tuple[list[str], list[str], list[str], dict[str, Any]]:
        """Read hypotheses, references and sources from files, and return them with the files' names."""
        from ..data.read import read_lines
        from ..studies.translate.parallel import check_aligned

        if self.hypotheses is None:
            raise InputError("model", "expected a model, or `hypotheses` and `references`, got none")
        if self.references is None:
            raise InputError("references", "expected a file to go with `hypotheses`, got none")
        given = {"data": self.parallel.data, "target": self.parallel.target, "translations": self.translations}
        for name, value in given.items():
            if value:
                raise InputError(name, "only with a model")
        hypotheses = list(read_lines("hypotheses", self.hypotheses))
        references = list(read_lines("references", self.references))
        check_aligned("hypotheses", self.hypotheses, hypotheses, self.references, references)
        sources = references
        if self.parallel.source is not None:
            sources = list(read_lines("source", self.parallel.source))
            check_aligned("source", self.parallel.source, sources, self.references, references)
        facts = {"hypotheses": str(self.hypotheses), "references": str(self.references)}
        return hypotheses, references, sources, facts

    def _translated(
        self, console: Console, decoding: Decoding
    ) -> tuple[list[str], list[str], list[str], dict[str, Any]]:
        """Translate the sources with a model; return translations, references, sources and facts."""
        for name in ("hypotheses", "references"):
            if getattr(self, name) is not None:
                raise InputError(name, "either a model or files, got both")
        from ..lab.terminal import Bar, Terminal
        from ..studies.translate import translating
        from ..studies.translate.pairs import load_pairs

        pairs = load_pairs(self.parallel.checked_pairs())
        translator = translating.load(str(self.model), decoding, find_device(self.device))
        _use(self.threads)
        with Bar(Terminal(stderr=True)) as progress:
            progress.start(len(pairs))
            progress.begin("translating")
            hypotheses = translator.translate(pairs.source, progress.step)
        facts = {"model": str(self.model), "text": pairs.name, **asdict(decoding)}
        return hypotheses, pairs.target, pairs.source, facts

    def _edges(self) -> list[int]:
        edges = listed_numbers("words", self.words, 1, MOST_SIZE)
        if edges != sorted(edges):
            raise InputError("words", f"expected ascending numbers, such as 8,12,16, got {shown(self.words)}")
        return edges


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


def _use(threads: int | None) -> None:
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


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
            except (InputError, SystemExit) as error:
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


def _count_lines(file: Path) -> int:
    with file.open("rb") as lines:
        return sum(1 for _ in lines)


def _write(translations: Iterable[str], out: TextIO) -> None:
    """Write line by line, so that finished translations are kept whatever happens next."""
    shown = printable if out.isatty() else str
    done = 0
    try:
        for line in translations:
            print(shown(line), file=out, flush=True)
            done += 1
    except KeyboardInterrupt:
        raise SystemExit(fail(f"interrupted after {done:,} lines, which have been written", 130)) from None
