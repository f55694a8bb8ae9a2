"""The extend recipe: a pretrained sentence encoder is trained for minutes to read longer texts."""

from __future__ import annotations

import hashlib
import random
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from ..errors import InputError
from ..files import new_folder
from ..lab.options import MAX_COUNT, MAX_RUNS, MAX_SEED
from ..lab.recipe import LazyModule, MayChange, Range, Recipe, lazy_modules
from ..lab.sheet import Column, Sheet

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.nn import functional

    from .. import manifest
    from ..analysis import verdicts
    from ..data import corpus, tokenizers
    from ..lab import examples, loading
    from ..lab import sentence_encoders as encoders
    from ..lab import train as training
    from ..lab.report import report, score_report
    from ..lab.run import Run
    from ..models import Encoder
else:
    torch, nn, functional = LazyModule("torch"), LazyModule("torch.nn"), LazyModule("torch.nn.functional")
    manifest, corpus, tokenizers = lazy_modules("manifest", "data.corpus", "data.tokenizers")
    loading, encoders, training = lazy_modules("lab.loading", "lab.sentence_encoders", "lab.train")
    verdicts, examples = lazy_modules("analysis.verdicts", "lab.examples")
    score_report, report = lazy_modules("lab.report.score_report", "lab.report.report")

MIN_DOCUMENTS = 32  # so that two are held out, and a step has several
HELD_OUT_EVERY, MAX_HELD_OUT = 16, 24  # one document in 16 is held out for the evaluation, but at most 24
NUM_EVALS = 4  # how often a model is evaluated in a training, besides before it
MAX_CHARACTERS = 12  # of a token on average; the rest of a document is not read
BEGINNING = 40  # tokens of a document in an example
SHORT, CHUNKS, FOUND = "like the original", "like its chunks", "passages found"
READING = (
    f"{SHORT}: the mean cosine with the original's vectors of texts that it can read. {CHUNKS}: the mean cosine of "
    f"complete documents with the mean of the original's vectors of their parts. {FOUND}: the share of the original's "
    "vectors of passages that are nearest to the vector of the document that they come from. "
    "The last row is the mean of the original's vectors of chunks."
)


@dataclass(frozen=True)
class ExtendResult:
    """How well an encoder learned to read longer texts."""

    documents: int  # the number of documents that were read
    held_out: int  # the number of documents that were held out
    limit: int  # the tokens that the original reads
    # The model before, during and after training: the step, then the scores of `Evaluator`.
    curve: Annotated[list[Any], list[tuple[float, float, float, float]]]
    chunks_found: float  # the share of passages that the mean of the original's vectors of chunks finds
    losses: list[float]  # the training loss of each step
    # Passages with the documents that they are from and find, as in `Evaluator.examples`; earlier versions lack them.
    examples: list[list[str]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Extend(Recipe):
    """Teach a pretrained sentence encoder to read longer texts, in a few minutes of training.

    Position embeddings are repeated until there are --length of them, relative positions stay as they are, and each
    token attends to tokens near it. Then the model learns from the original. On texts that are short enough for the
    original, its outputs should be the same. On longer texts, its vector should be close to the mean of the original's
    vectors of the parts, and closer to the vectors of the text's passages than to vectors of other passages. Position
    embeddings are trained first, then all weights with a small learning rate. A prompt for documents, such as
    "passage: ", comes before every text.

    Writes model/, which sentence-transformers loads, report.html and records.jsonl. A run that was interrupted
    continues from its last checkpoint. With --steps 0 nothing is trained.
    """

    NAME = "extend"
    EXAMPLE = "whereformer extend all-MiniLM-L6-v2 --length 1024"
    FLAGS: ClassVar = {"model": "MODEL"}
    MAKES_FILES = True

    model: str
    """The folder of a sentence-transformers model, or of a transformers encoder, whose token states are averaged into
    one vector: BERT, RoBERTa, XLM-RoBERTa, MPNet, ALBERT, DistilBERT, ELECTRA, ModernBERT or DeBERTa."""
    length: Annotated[int, Range(16, 2**16)] = 1024
    """The most tokens that the new model can read."""
    steps: Annotated[int, Range(0, MAX_COUNT)] = 80
    """Steps of training."""
    documents: Annotated[int, Range(MIN_DOCUMENTS, 2**20)] = 700
    """The most documents to learn from. Each has at least --length tokens; anything beyond that is ignored."""
    seed: Annotated[int, Range(0, MAX_SEED)] = 0
    """Random seed."""
    out: Annotated[Path, MayChange] = Path("runs/extend")
    """Folder for the model and the results."""
    data: Annotated[tuple[str, ...], MayChange] = ()
    """Text to read: files, patterns such as 'data/**/*.txt' (in quotes), or folders with .txt, .md, .rst, .parquet,
    .jsonl. Default: the documentation that comes with Python."""
    column: Annotated[str | None, MayChange] = None
    """The column of tables that holds the text. Default: text."""
    threads: Annotated[int | None, Range(1, MAX_RUNS), MayChange] = None
    """Threads on the CPU. Default: torch's."""

    outputs = ("model/", "checkpoints/checkpoint-1/")

    def run(self, run: Run) -> report.Report:
        teacher = encoders.load_encoder(self.model)
        if self.length <= teacher.limit:
            raise InputError("length", f"expected more than the model's {teacher.limit} tokens, got {self.length}")
        windows = self.windows(teacher)
        digest = hashlib.sha256(windows.numpy().tobytes()).hexdigest()
        run.record_hash("text", digest, "data")
        run.record_hash("model", loading.fingerprint(self.model, teacher.settings, teacher.limit), "model")
        run.log(f"{len(windows):,} documents of {self.length:,} tokens from {corpus.describe_source(self.data)}")
        about = {**self.recorded_options(), "text": digest}
        model = run.folder / "model"

        def problem(key: Any, result: ExtendResult) -> str | None:
            is_complete = result.curve and len(result.losses) == self.steps
            return manifest.find_problem(model, about) if is_complete else "its record lacks losses or scores"

        result = run.map(
            [()],
            *(self.train, teacher, windows, about),
            task="train",
            kind=ExtendResult,
            steps=self.steps,
            problem=problem,
        )[()]
        shutil.rmtree(run.folder / "checkpoints", ignore_errors=True)
        return self.report(result)

    def windows(self, teacher: encoders.SentenceEncoder) -> Tensor:
        """Return the beginnings of documents that are long enough, (documents, length - teacher.extra) token ids."""
        body, rows = self.length - teacher.extra, []
        for document in corpus.TextSource(self.data, self.column).documents():
            text = ""
            for part in document:
                text += part
                if len(text) >= body * MAX_CHARACTERS:
                    break
            ids = teacher.ids(text[: body * MAX_CHARACTERS])
            if len(ids) >= body:
                rows.append(ids[:body])
            if len(rows) == self.documents:
                break
        if len(rows) < MIN_DOCUMENTS:
            raise InputError(
                "data",
                f"expected at least {MIN_DOCUMENTS} documents of {self.length} tokens, got {len(rows)}; use more "
                "text, or a lower `length`",
            )
        windows = torch.tensor(rows)
        largest, words = int(windows.max()), teacher.model.get_input_embeddings().num_embeddings
        if largest >= words:
            problem = f"token id {largest}, but the vocabulary has {words} tokens"
            raise InputError("model", f"its tokenizer does not match: {problem}")
        tokenizers.check_predictable(teacher.tokenizer, windows.flatten().bincount(minlength=words), "the text")
        return windows

    def train(
        self, run: Run, teacher: encoders.SentenceEncoder, windows: Tensor, about: dict[str, Any]
    ) -> ExtendResult:
        """Train the model to imitate the original, evaluate it, and save it."""
        teacher.model.to(run.device)
        is_held_out = held_out(windows)
        evaluator = Evaluator(teacher, windows[is_held_out], self.seed)
        if not bool(evaluator.chunks.isfinite().all() and evaluator.passages.isfinite().all()):
            raise InputError("model", f"{self.model} gives vectors that are not finite (NaN or inf)")
        student = encoders.lengthen(teacher, self.length)
        student.model.to(run.device)
        train_windows = windows[~is_held_out]
        negatives = build_negatives(teacher, train_windows, self.seed)
        first_scores = evaluator(student)
        try:
            progress = training.train(
                distillation_loss(teacher, student, negatives),
                lambda step: draw_batch(train_windows, teacher.room, self.seed, step),
                training.Training(
                    steps=self.steps,
                    rate=RATE,
                    optimizer=lambda model: build_optimizer(student.model, self.steps),
                    log_every=5,
                ),
                device=run.device,
                score=lambda step: evaluator(student),
                score_at=[round(self.steps * part / NUM_EVALS) for part in range(1, NUM_EVALS + 1)],
                checkpoints=training.Checkpoints(
                    run.folder / "checkpoints", max(1, self.steps // NUM_EVALS), about, run.log
                ),
                on_log=run.advance,
            )
        except training.NotFiniteError as error:
            raise InputError("model", error.problem) from None
        curve = [[step, *scores] for step, scores in ([0, first_scores], *progress.scores)]
        counts = len(windows), int(is_held_out.sum())
        chunks_found = evaluator.retrieval_accuracy(evaluator.chunks)
        with loading.quiet_transformers(), new_folder(run.folder / "model") as partial:
            encoders.save_encoder(student, Path(self.model), partial)
            manifest.write(partial, about)
        rows = evaluator.examples(student)
        return ExtendResult(*counts, teacher.limit, curve, chunks_found, progress.losses, rows)

    def report(self, result: ExtendResult) -> report.Report:
        """Return the report: how good the model is, and how it improved during training."""
        _, last_short, _, last_found = result.curve[-1]
        cosines = (Column(name, "cosine", optional=True) for name in (SHORT, CHUNKS))
        heads: list[Column | str] = ["step", *cosines, FOUND]
        rows = [
            (f"{step:,}", f"{short:.4f}", f"{chunks:.4f}", f"{passages:.1%}")
            for step, short, chunks, passages in result.curve
        ]
        rows.append(("chunks", "", "", f"{result.chunks_found:.1%}"))
        documents = result.held_out
        sentences = [
            f"The model reads {self.length:,} tokens; the original reads {result.limit:,}.",
            f"With one vector per document, {last_found:.1%} of passages find their own among {documents} documents; "
            f"with the mean of the original's chunk vectors, {result.chunks_found:.1%} do.",
            f"On texts that the original can read, its vectors have a mean cosine of {last_short:.4f} with the "
            "original's.",
            *filter(None, [verdicts.warn_of_few_documents(documents, HELD_OUT_EVERY)]),
            f"It was trained for {self.steps:,} step{'' if self.steps == 1 else 's'} on "
            f"{result.documents - documents:,} documents of {corpus.describe_source(self.data)}.",
            f'After "import whereformer.models", load the model with SentenceTransformer("{self.out / "model"}").',
        ]
        sections: list[Any] = [Sheet.of(f"Results on {documents} held-out documents", heads, rows, notes=(READING,))]
        columns = ["", "passage", "its document begins", "the document found begins"]
        sections += examples.build_sheet("What does it find?", result.examples, columns=columns)
        if result.losses:
            paint = score_report.paint_over_steps({"training": score_report.smooth(result.losses)})
            sections.append(report.Figure("Loss over the steps of training", paint))
        return report.Report("A sentence encoder for longer texts", sentences, sections, asdict(result))


def held_out(windows: Tensor) -> Tensor:
    """Return which windows are held out, (rows,)."""
    candidates = torch.arange(len(windows)) % HELD_OUT_EVERY == 0
    return candidates & (candidates.cumsum(0) <= MAX_HELD_OUT)


# The batches of the training, and its loss.

SHORT_TOKENS = 512  # about the number of tokens in a step's windows that the original can read, all of one length
SHORTER = (8, 12, 16, 24, 32, 64, 128)  # lengths of such windows besides the longest
DOCUMENTS, PASSAGES = 4, 4  # longer windows of a step, and passages of each of them
PASSAGE_TOKENS = (24, 96)  # the tokens of a passage, at least and at most
CHUNK = 64  # tokens of the chunks whose mean a document's vector should be near; longer ones find passages less well
NEGATIVES = 1024  # passages of other documents that a document must stay away from; the original's vectors don't change
TEMPERATURE = 0.05  # of the contrastive loss
WEIGHTS = {"states": 1.0, "vectors": 20.0, "chunks": 20.0, "passages": 5.0}  # of the parts of the loss
POSITIONS_ONLY = 0.15  # the share of steps that train only the position embeddings
POSITION_RATE, RATE = 1e-3, 5e-5  # the learning rates of the position embeddings and of all other weights


def draw_batch(windows: Tensor, chunk: int, seed: int, step: int) -> dict[str, Tensor]:
    """Draw the batch of a step from ``windows``, (rows, n) token ids without special ones; a row is a document.

    ``chunk`` is the number of such tokens that the teacher reads.

    Returns:
        ``short``: (windows, tokens) that the teacher can read; ``rows``: (documents,), the rows of the longer windows;
        ``long``: (documents, tokens); ``passages``: (documents * PASSAGES, tokens), in the order of the documents.
    """
    draw = random.Random(f"{seed}/{step}")
    rows = draw.sample(range(len(windows)), min(DOCUMENTS, len(windows)))
    max_length = windows.shape[1]
    length = max_length if draw.random() < 0.5 else draw.randint(min(max_length, chunk + chunk // 2), max_length)
    long = windows[rows, :length]
    tokens = draw.choice([chunk, *(shorter for shorter in SHORTER if shorter < chunk)])
    count = max(2, SHORT_TOKENS // (tokens + 2))
    short = torch.stack([_part(draw, windows[draw.randrange(len(windows))], tokens) for _ in range(count)])
    return {"short": short, "rows": torch.tensor(rows), "long": long, "passages": draw_passages(draw, long, chunk)}


def draw_passages(draw: random.Random, long: Tensor, max_tokens: int) -> Tensor:
    """Draw a passage from each of PASSAGES equal stretches of windows, (documents, n), of at most ``max_tokens``."""
    stretch, tokens = long.shape[1] // PASSAGES, min(max_tokens, draw.randint(*PASSAGE_TOKENS))
    return torch.stack([_part(draw, part, tokens) for row in long for part in row.split(stretch)[:PASSAGES]])


def _part(draw: random.Random, window: Tensor, tokens: int) -> Tensor:
    start = draw.randint(0, max(0, len(window) - tokens))
    return window[start : start + tokens]


def build_negatives(teacher: encoders.SentenceEncoder, windows: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Draw one passage from each of up to NEGATIVES documents, (rows, n).

    Returns:
        The documents' rows, (passages,), and the teacher's vectors of the passages, (passages, hidden_size).
    """
    draw = random.Random(f"{seed}/bank")
    rows = draw.sample(range(len(windows)), min(NEGATIVES, len(windows)))
    tokens = min(teacher.room, sum(PASSAGE_TOKENS) // 2)
    vectors = _vectors(teacher, torch.stack([_part(draw, windows[row], tokens) for row in rows]))
    return torch.tensor(rows, device=vectors.device), vectors


def distillation_loss(
    teacher: encoders.SentenceEncoder, student: encoders.SentenceEncoder, negatives: tuple[Tensor, Tensor]
) -> nn.Module:
    """Return a module with the student's weights that computes the loss of a batch from :func:`draw_batch`."""
    negative_rows, negative_vectors = negatives

    class DistillationLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = student.model

        def train(self, mode: bool = True) -> Any:
            return self  # without dropout, it can equal the teacher exactly

        def forward(self, short: Tensor, rows: Tensor, long: Tensor, passages: Tensor) -> SimpleNamespace:
            ids = teacher.add_special_tokens(short)
            with torch.no_grad():
                target_states, chunks = teacher.states(ids), chunk_means(teacher, long, CHUNK)
                passage_vectors = teacher.vectors(passages)
            states, documents = student.states(ids), student.vectors(long)
            is_positive = (negative_rows[:, None] == rows).any(1)
            parts = {
                "states": (1 - functional.cosine_similarity(states, target_states, dim=-1)).mean(),
                "vectors": distance(student.pool(states), teacher.pool(target_states)).mean(),
                "chunks": (1 - (documents * chunks).sum(-1)).mean(),
                "passages": contrast(documents, passage_vectors, negative_vectors, is_positive),
            }
            return SimpleNamespace(loss=torch.stack([WEIGHTS[name] * part for name, part in parts.items()]).sum())

    return DistillationLoss()


def distance(vectors: Tensor, targets: Tensor) -> Tensor:
    """Return half the squared distance of vectors, (..., hidden_size), in units of the targets' length.

    For vectors of length 1, this is 1 - their cosine. Where a model does not normalize, lengths are learned, too.
    """
    return (vectors - targets).square().sum(-1) / (2 * targets.square().sum(-1))


def contrast(documents: Tensor, passages: Tensor, negatives: Tensor, is_positive: Tensor) -> Tensor:
    """Return the contrastive loss: how badly passages find their documents, and documents their passages.

    Args:
        documents: (documents, hidden_size).
        passages: (documents * PASSAGES, hidden_size), in the order of the documents.
        negatives: (rows, hidden_size), passages of other documents.
        is_positive: (rows,), which of the negatives come from these documents after all, and are left out.
    """
    indices = torch.arange(len(documents), device=documents.device)
    owner = indices.repeat_interleave(PASSAGES)
    scores = passages @ documents.T / TEMPERATURE
    passage_loss = functional.cross_entropy(scores, owner)
    # For each passage: its score with its document must be higher than the scores of all passages of other documents.
    negative_scores = (negatives @ documents.T / TEMPERATURE).masked_fill(is_positive[:, None], -torch.inf)
    wrong = torch.cat([scores.masked_fill(owner[:, None] == indices, -torch.inf), negative_scores]).logsumexp(0)
    right = scores.gather(1, owner[:, None]).squeeze(1)
    return passage_loss + (torch.logaddexp(right, wrong[owner]) - right).mean()


def chunk_means(teacher: encoders.SentenceEncoder, long: Tensor, tokens: int) -> Tensor:
    """Return the mean vector, (rows, hidden_size), of a window's chunks with ``tokens`` tokens; windows: (rows, n)."""
    chunks = long.split(min(tokens, teacher.room), dim=1)
    with torch.no_grad():
        total = torch.stack([teacher.vectors(chunk) * chunk.shape[1] for chunk in chunks]).sum(0)
    return functional.normalize(total, dim=-1)


def build_optimizer(student: Encoder, steps: int) -> Any:
    """Return the optimizer, with position embeddings first, and its schedule."""
    table = encoders.find_position_table(student)
    positions = [] if table is None else [table.weight]
    rest = [weight for weight in student.parameters() if not any(weight is position for position in positions)]
    groups = [{"params": positions, "lr": POSITION_RATE}, {"params": rest, "lr": RATE}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    first_step, warmup = int(POSITIONS_ONLY * steps) if positions else 0, max(1, steps // 10)

    def decay(step: int) -> float:
        return max(0.02, 1 - step / max(1, steps))

    def schedule_positions(step: int) -> float:
        return min(1.0, (step + 1) / 5) * decay(step)

    def schedule_rest(step: int) -> float:
        return min(1.0, (step - first_step + 1) / warmup) * decay(step) if step >= first_step else 0.0

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, [schedule_positions, schedule_rest])


class Evaluator:
    """Evaluates models that imitate an encoder, on held-out documents: (documents, n) token ids, without special ones.

    It has the original's vectors, each (rows, hidden_size): of the beginnings of documents, as much as the original can
    read; the mean over all chunks of a document; and of passages, PASSAGES of each document, document by document.
    """

    def __init__(self, teacher: encoders.SentenceEncoder, documents: Tensor, seed: int) -> None:
        passages = draw_passages(random.Random(f"{seed}/judge"), documents, teacher.room)
        self.passage_ids, self.tokenizer = passages, teacher.tokenizer
        self.documents, self.short = documents, documents[:, : teacher.room]
        self.short_vectors, self.passages = _vectors(teacher, self.short), _vectors(teacher, passages)
        self.chunks = chunk_means(teacher, documents, teacher.limit)
        self.owners = torch.arange(len(documents), device=self.passages.device).repeat_interleave(PASSAGES)

    def __call__(self, student: encoders.SentenceEncoder) -> list[float]:
        """Return how good a student is.

        Returns:
            The mean cosine with the original's vectors, on the beginnings of documents; the mean cosine with the mean
            of the original's vectors of chunks, on complete documents; and :meth:`retrieval_accuracy`.
        """
        documents = _vectors(student, self.documents)
        short = (_vectors(student, self.short) * self.short_vectors).sum(-1).mean()
        chunks = (documents * self.chunks).sum(-1).mean()
        return [float(short), float(chunks), self.retrieval_accuracy(documents)]

    def retrieval_accuracy(self, documents: Tensor) -> float:
        """Return the share of passages to which their own document's vector, (documents, hidden_size), is nearest."""
        return float((self.find_documents(documents) == self.owners).float().mean())

    def find_documents(self, documents: Tensor) -> Tensor:
        """Return the document, (passages,), whose vector is nearest to each passage."""
        return (self.passages @ documents.T).argmax(1)

    def examples(self, student: encoders.SentenceEncoder) -> list[list[str]]:
        """Return the first passage that finds its document, and the first that does not, with both documents."""
        rows, nearest = list[list[str]](), self.find_documents(_vectors(student, self.documents))
        for word, is_shown in (("found", nearest == self.owners), ("missed", nearest != self.owners)):
            for passage in is_shown.nonzero().flatten().tolist()[:1]:
                documents = [self.documents[int(of[passage]), :BEGINNING] for of in (self.owners, nearest)]
                ids = [self.passage_ids[passage], *documents]
                rows.append([word, *(examples.decode(self.tokenizer, part) for part in ids)])
        return rows


def _vectors(encoder: encoders.SentenceEncoder, rows: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([encoder.vectors(batch) for batch in rows.split(4)])
