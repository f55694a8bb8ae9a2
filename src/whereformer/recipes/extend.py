"""The extend recipe: a pretrained sentence encoder is trained for minutes to read longer texts."""

from __future__ import annotations

import hashlib
import random
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar

from ..errors import InputError
from ..files import new_folder
from ..lab.options import MOST_COUNT, MOST_RUNS, MOST_SEED
from ..lab.recipe import Free, Range, Recipe, lazily
from ..lab.sheet import Column, Sheet

with lazily(__name__):
    import torch
    from torch import Tensor, nn
    from torch.nn import functional

    from .. import manifest
    from ..data import corpus
    from ..data.tokenizers import check_predictable
    from ..lab import loading
    from ..lab import train as training
    from ..lab.report.report import Figure, Report
    from ..lab.run import Run
    from . import score_report
    from . import sentence_encoders as encoders

FEWEST_DOCUMENTS = 32  # so that two are held out, and a step has several
HELD_OUT_EVERY, MOST_HELD_OUT = 16, 24  # one document in 16 is held out to judge by, but at most 24
JUDGED = 4  # how often a model is judged in a training, besides before it
LETTERS = 12  # the most characters of a token on average; what a document has beyond that is not read
SHORT, CHUNKS, FOUND = "like the original", "like its chunks", "passages found"
READING = (
    f"{SHORT}: the mean cosine with the original's vectors of texts that it can read. {CHUNKS}: that of whole "
    f"documents with the mean of the original's vectors of their parts. {FOUND}: the share of the original's vectors "
    "of passages that are nearest to the vector of the document that they come from. "
    "The last row is the mean of the original's vectors of chunks."
)


@dataclass(frozen=True)
class Outcome:
    """How an encoder learned to read longer texts.

    Args:
        documents, held_out: the number of documents that were read, and of those that judge the model.
        limit: the tokens that the original reads.
        curve: the model before, during and after training: the step, then what :class:`Judge` says.
        chunks_found: the share of passages that the mean of the original's vectors of chunks finds.
        losses: the training loss of each step.
    """

    documents: int
    held_out: int
    limit: int
    curve: Annotated[list[Any], list[tuple[float, float, float, float]]]
    chunks_found: float
    losses: list[float]


@dataclass(frozen=True, kw_only=True)
class Extend(Recipe):
    """Teach a pretrained sentence encoder to read longer texts, in a few minutes of training.

    The position embeddings are repeated until there are --length of them, and each token attends to those near it. Then
    the model learns from the original. On texts that are short enough for the original, its outputs should be the same.
    On longer texts, its vector should be close to the mean of the original's vectors of the parts, and closer to those
    of the text's own passages than to those of others. The position embeddings are trained first, then all weights with
    a small learning rate.

    Writes model/, which sentence-transformers loads, report.html and records.jsonl. A run that was interrupted
    continues from its last checkpoint. With --steps 0 nothing is trained.
    """

    NAME = "extend"
    FLAGS: ClassVar = {"model": "MODEL"}
    MAKES_FILES = True

    model: str
    """The folder of a sentence-transformers model, or of a transformers encoder with position embeddings (BERT,
    RoBERTa, MPNet, DistilBERT...), whose token states are averaged into one vector."""
    length: Annotated[int, Range(16, 2**16)] = 1024
    """The most tokens that the new model can read."""
    steps: Annotated[int, Range(0, MOST_COUNT)] = 80
    """Steps of training."""
    documents: Annotated[int, Range(FEWEST_DOCUMENTS, 2**20)] = 700
    """The most documents to learn from. Each has at least --length tokens; anything beyond that is ignored."""
    seed: Annotated[int, Range(0, MOST_SEED)] = 0
    """Random seed."""
    out: Annotated[Path, Free] = Path("runs/extend")
    """Folder for the model and the results."""
    data: Annotated[tuple[str, ...], Free] = ()
    """Text to read: files, patterns such as 'data/**/*.txt' (in quotes), or folders with .txt, .md, .rst, .parquet,
    .jsonl. Default: the documentation that comes with Python."""
    column: Annotated[str | None, Free] = None
    """The column of tables that holds the text. Default: text."""
    threads: Annotated[int | None, Range(1, MOST_RUNS), Free] = None
    """Threads on the CPU. Default: torch's."""

    outputs = ("model/", "checkpoints/checkpoint-1/")

    def run(self, run: Run) -> Report:
        run.threads = self.threads or run.threads
        teacher = encoders.load_encoder(self.model)
        if self.length <= teacher.limit:
            raise InputError("length", f"expected more than the model's {teacher.limit} tokens, got {self.length}")
        windows = self.windows(teacher)
        digest = hashlib.sha256(windows.numpy().tobytes()).hexdigest()
        run.identify("text", digest, "data")
        run.identify("model", loading.fingerprint_of(self.model, teacher.pooling, teacher.limit), "model")
        run.say(f"{len(windows):,} documents of {self.length:,} tokens from {corpus.describe_source(self.data)}")
        about = {**self.record(), "text": digest}
        model = run.folder / "model"

        def problem(key: Any, outcome: Outcome) -> str | None:
            whole = outcome.curve and len(outcome.losses) == self.steps
            return manifest.find_problem(model, about) if whole else "its record lacks losses or scores"

        outcome = run.each(
            [()],
            *(self.train, teacher, windows, about),
            kind=Outcome,
            steps=self.steps,
            problem=problem,
        )[()]
        shutil.rmtree(run.folder / "checkpoints", ignore_errors=True)
        report = self.report(outcome)
        usage = f'After "import whereformer.models", load the model with SentenceTransformer("{model}").'
        return replace(report, sentences=[*report.sentences, usage])

    def windows(self, teacher: encoders.SentenceEncoder) -> Tensor:
        """Return the beginnings of documents that are long enough, (documents, length - 2) token ids."""
        body, rows = self.length - 2, []
        for document in corpus.TextSource(self.data, self.column).documents():
            text = ""
            for part in document:
                text += part
                if len(text) >= body * LETTERS:
                    break
            ids = teacher.ids(text[: body * LETTERS])
            if len(ids) >= body:
                rows.append(ids[:body])
            if len(rows) == self.documents:
                break
        if len(rows) < FEWEST_DOCUMENTS:
            raise InputError(
                "data",
                f"expected at least {FEWEST_DOCUMENTS} documents of {self.length} tokens, got {len(rows)}; give more "
                "text, or a lower `length`",
            )
        windows = torch.tensor(rows)
        largest, words = int(windows.max()), teacher.model.get_input_embeddings().num_embeddings
        if largest >= words:
            raise InputError("model", f"its tokenizer belongs to another model: it has token id {largest} of {words}")
        check_predictable(teacher.tokenizer, windows.flatten().bincount(minlength=words), "the text")
        return windows

    def train(self, run: Run, teacher: encoders.SentenceEncoder, windows: Tensor, about: dict[str, Any]) -> Outcome:
        """Train the model beside the original, judge it, and save it."""
        teacher.model.to(run.device)
        held = held_out(windows)
        judge = Judge.of(teacher, windows[held], self.seed)
        if not bool(judge.chunks.isfinite().all() and judge.passages.isfinite().all()):
            raise InputError("model", f"{self.model} gives vectors that are not finite (NaN or inf)")
        student = encoders.extended(teacher, self.length)
        student.model.to(run.device)
        bank, learned_from = bank_of(teacher, windows[~held], self.seed), windows[~held]
        before = judge(student)
        try:
            trained = training.train(
                beside(teacher, student, bank),
                lambda step: lesson(learned_from, teacher.limit, self.seed, step),
                training.Training(
                    steps=self.steps,
                    rate=RATE,
                    optimizer=lambda model: optimizer_of(student.model, self.steps),
                    log_every=5,
                ),
                device=run.device,
                score=lambda step: judge(student),
                score_at=[round(self.steps * part / JUDGED) for part in range(1, JUDGED + 1)],
                checkpoints=training.Checkpoints(
                    run.folder / "checkpoints", max(1, self.steps // JUDGED), about, run.say, keeps=run.keeps
                ),
                on_log=run.step,
            )
        except training.NotFiniteError as error:
            raise InputError("model", error.problem) from None
        curve = [[step, *judged] for step, judged in ([0, before], *trained.scores)]
        counts = len(windows), int(held.sum())
        outcome = Outcome(*counts, teacher.limit, curve, judge.found(judge.chunks), trained.losses)
        with loading.quiet_transformers(), new_folder(run.folder / "model") as partial:
            encoders.save_encoder(student, Path(self.model), partial)
            manifest.write(partial, about)
        return outcome

    def report(self, outcome: Outcome) -> Report:
        """Return how good the model is, and how it became so."""
        _, short, _, found = outcome.curve[-1]
        columns: list[Column | str] = ["step", *(Column(name, "cosine") for name in (SHORT, CHUNKS)), FOUND]
        rows = [
            (f"{step:,}", f"{short:.4f}", f"{chunks:.4f}", f"{found:.1%}")
            for step, short, chunks, found in outcome.curve
        ]
        rows.append(("chunks", "", "", f"{outcome.chunks_found:.1%}"))
        documents = outcome.held_out
        said = [
            f"The model reads {self.length:,} tokens, the original {outcome.limit:,}.",
            f"One vector of a document finds {found:.1%} of its passages among {documents} documents; "
            f"the mean of the original's chunks finds {outcome.chunks_found:.1%}.",
            f"Its vectors of texts that the original can read have a cosine of {short:.4f} with the original's.",
            f"It was trained for {self.steps:,} steps on {outcome.documents - documents:,} documents of "
            f"{corpus.describe_source(self.data)}.",
        ]
        sheet = Sheet.of(f"On {documents} documents that were held out", columns, rows, notes=(READING,))

        drawn = []
        if outcome.losses:
            paint = score_report.paint_over_steps({"training": score_report.smooth(outcome.losses)})
            drawn.append(Figure("Loss over the steps of training", paint))
        return Report("A model that reads more", said, [sheet, *drawn], asdict(outcome))


def held_out(windows: Tensor) -> Tensor:
    """Return which windows are held out to judge by, (rows,)."""
    held = torch.arange(len(windows)) % HELD_OUT_EVERY == 0
    return held & (held.cumsum(0) <= MOST_HELD_OUT)


# What a step shows, and what is asked of the student.

SHORT_TOKENS = 512  # about the number of tokens in a step's windows that the original can read, all of one length
SHORTER = (8, 12, 16, 24, 32, 64, 128)  # lengths of such windows besides the longest
DOCUMENTS, PASSAGES = 4, 4  # longer windows of a step, and passages of each of them
PASSAGE_TOKENS = (24, 96)  # the tokens of a passage, at least and at most
CHUNK = 64  # tokens of the chunks whose mean a document's vector should be near; longer ones find passages less well
BANK = 1024  # passages of other documents that a document has to stay away from; the original's vectors don't change
TEMPERATURE = 0.05  # of the contrastive loss
WEIGHTS = {"states": 1.0, "vectors": 20.0, "chunks": 20.0, "passages": 5.0}  # of the parts of the loss
POSITIONS_ONLY = 0.15  # the share of steps that train nothing but the position embeddings
POSITION_RATE, RATE = 1e-3, 5e-5  # the learning rates of the position embeddings and of all other weights


def lesson(windows: Tensor, limit: int, seed: int, step: int) -> dict[str, Tensor]:
    """Draw what a student sees in a step.

    Args:
        windows: (rows, n) token ids, without special ones; a row is a document.
        limit: the tokens that the teacher reads, special ones included.
        seed: chooses what is drawn.
        step: the step.

    Returns:
        ``short``: (windows, tokens) that the teacher can read; ``rows``: (documents,), those of the longer windows;
        ``long``: (documents, tokens); ``passages``: (documents * PASSAGES, tokens), those of the first document first.
    """
    draw = random.Random(f"{seed}/{step}")
    rows = draw.sample(range(len(windows)), min(DOCUMENTS, len(windows)))
    most, chunk = windows.shape[1], limit - 2
    length = most if draw.random() < 0.5 else draw.randint(min(most, chunk + chunk // 2), most)
    long = windows[rows, :length]
    tokens = draw.choice([chunk, *(shorter for shorter in SHORTER if shorter < chunk)])
    count = max(2, SHORT_TOKENS // (tokens + 2))
    short = torch.stack([_part(draw, windows[draw.randrange(len(windows))], tokens) for _ in range(count)])
    return {"short": short, "rows": torch.tensor(rows), "long": long, "passages": passages_of(draw, long, chunk)}


def passages_of(draw: random.Random, long: Tensor, most: int) -> Tensor:
    """Return a passage of up to ``most`` tokens from each of PASSAGES equal stretches of windows, (documents, n)."""
    stretch, tokens = long.shape[1] // PASSAGES, min(most, draw.randint(*PASSAGE_TOKENS))
    return torch.stack([_part(draw, part, tokens) for row in long for part in row.split(stretch)[:PASSAGES]])


def _part(draw: random.Random, window: Tensor, tokens: int) -> Tensor:
    start = draw.randint(0, max(0, len(window) - tokens))
    return window[start : start + tokens]


def bank_of(teacher: encoders.SentenceEncoder, windows: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Draw one passage from each of up to BANK documents, (rows, n).

    Returns:
        The documents' rows, (passages,), and the teacher's vectors of the passages, (passages, hidden_size).
    """
    draw = random.Random(f"{seed}/bank")
    rows = draw.sample(range(len(windows)), min(BANK, len(windows)))
    tokens = min(teacher.limit - 2, sum(PASSAGE_TOKENS) // 2)
    vectors = _vectors(teacher, torch.stack([_part(draw, windows[row], tokens) for row in rows]))
    return torch.tensor(rows, device=vectors.device), vectors


def beside(
    teacher: encoders.SentenceEncoder, student: encoders.SentenceEncoder, bank: tuple[Tensor, Tensor]
) -> nn.Module:
    """Return a module that has the student's weights, and returns the loss of what :func:`lesson` draws."""
    bank_rows, bank_vectors = bank

    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = student.model

        def train(self, mode: bool = True) -> Any:
            return self  # without dropout, it can agree with the teacher exactly

        def forward(self, short: Tensor, rows: Tensor, long: Tensor, passages: Tensor) -> SimpleNamespace:
            ids = teacher.framed(short)
            with torch.no_grad():
                wanted, chunks = teacher.states(ids), chunk_means(teacher, long, CHUNK)
                asked = teacher.vectors(passages)
            states, documents = student.states(ids), student.vectors(long)
            taken = (bank_rows[:, None] == rows).any(1)
            parts = {
                "states": (1 - functional.cosine_similarity(states, wanted, dim=-1)).mean(),
                "vectors": (1 - (student.pool(states) * teacher.pool(wanted)).sum(-1)).mean(),
                "chunks": (1 - (documents * chunks).sum(-1)).mean(),
                "passages": contrast(documents, asked, bank_vectors, taken),
            }
            return SimpleNamespace(loss=torch.stack([WEIGHTS[name] * part for name, part in parts.items()]).sum())

    return Beside()


def contrast(documents: Tensor, passages: Tensor, others: Tensor, taken: Tensor) -> Tensor:
    """Return how badly documents and passages find each other.

    Args:
        documents: (documents, hidden_size).
        passages: (documents * PASSAGES, hidden_size), those of the first document first.
        others: (rows, hidden_size), passages of other documents,
        taken: (rows,), except for these, which are of some of these documents.
    """
    places = torch.arange(len(documents), device=documents.device)
    owner = places.repeat_interleave(PASSAGES)
    scores = passages @ documents.T / TEMPERATURE
    finding = functional.cross_entropy(scores, owner)
    # Of each passage: its document has to like it more than all passages of others.
    strange = (others @ documents.T / TEMPERATURE).masked_fill(taken[:, None], -torch.inf)
    wrong = torch.cat([scores.masked_fill(owner[:, None] == places, -torch.inf), strange]).logsumexp(0)
    right = scores.gather(1, owner[:, None]).squeeze(1)
    return finding + (torch.logaddexp(right, wrong[owner]) - right).mean()


def chunk_means(teacher: encoders.SentenceEncoder, long: Tensor, tokens: int) -> Tensor:
    """Return the mean vector, (rows, hidden_size), of the chunks of windows, (rows, n), of so many tokens each."""
    chunks = long.split(min(tokens, teacher.limit - 2), dim=1)
    with torch.no_grad():
        total = torch.stack([teacher.vectors(chunk) * chunk.shape[1] for chunk in chunks]).sum(0)
    return functional.normalize(total, dim=-1)


def optimizer_of(student: nn.Module, steps: int) -> Any:
    """Return the optimizer, with the position embeddings first, and its schedule."""
    table = encoders.learned(student).weight
    others = [weight for weight in student.parameters() if weight is not table]
    groups = [{"params": [table], "lr": POSITION_RATE}, {"params": others, "lr": RATE}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    alone, warmup = int(POSITIONS_ONLY * steps), max(1, steps // 10)

    def down(step: int) -> float:
        return max(0.02, 1 - step / max(1, steps))

    def of_positions(step: int) -> float:
        return min(1.0, (step + 1) / 5) * down(step)

    def of_others(step: int) -> float:
        return min(1.0, (step - alone + 1) / warmup) * down(step) if step >= alone else 0.0

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, [of_positions, of_others])


@dataclass(frozen=True)
class Judge:
    """Held-out documents, with what the original says of them.

    Args:
        documents: (documents, n) token ids, without special ones.
        short: (documents, most) their beginnings, as much as the original can read.
        short_vectors: (documents, hidden_size), the original's vectors of them.
        chunks: (documents, hidden_size), the mean of the original's vectors of the chunks of whole documents.
        passages: (documents * PASSAGES, hidden_size), the original's vectors of passages, document by document.
    """

    documents: Tensor
    short: Tensor
    short_vectors: Tensor
    chunks: Tensor
    passages: Tensor

    @classmethod
    def of(cls, teacher: encoders.SentenceEncoder, documents: Tensor, seed: int) -> Judge:
        """Return the judge of students of an encoder."""
        short = documents[:, : teacher.limit - 2]
        passages = passages_of(random.Random(f"{seed}/judge"), documents, teacher.limit - 2)
        chunks = chunk_means(teacher, documents, teacher.limit)
        return cls(documents, short, _vectors(teacher, short), chunks, _vectors(teacher, passages))

    def __call__(self, student: encoders.SentenceEncoder) -> list[float]:
        """Return how good a student is.

        Returns:
            The mean cosine with the original's vectors, of what the original can read; that with the mean of the
            original's vectors of chunks, of whole documents; and what :meth:`found` says.
        """
        documents = _vectors(student, self.documents)
        short = (_vectors(student, self.short) * self.short_vectors).sum(-1).mean()
        chunks = (documents * self.chunks).sum(-1).mean()
        return [float(short), float(chunks), self.found(documents)]

    def found(self, documents: Tensor) -> float:
        """Return the share of passages to which their own document's vector, (documents, hidden_size), is nearest."""
        owner = torch.arange(len(documents), device=documents.device).repeat_interleave(PASSAGES)
        return float(((self.passages @ documents.T).argmax(1) == owner).float().mean())


def _vectors(encoder: encoders.SentenceEncoder, rows: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([encoder.vectors(some) for some in rows.split(4)])
