"""Give an encoder more positions, train it beside the original, judge it, and write it."""

from __future__ import annotations

import hashlib
import math
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...data.corpus import Text
from ...errors import InputError
from ...files import new_folder
from ...lab import manifest
from ...lab.jobs import threads
from ...lab.loading import quiet_transformers
from ...lab.progress import Progress
from ...lab.provenance import provenance
from ...lab.store import FILE
from ...lab.training.card import write_changed_card
from .checkpoint import SentenceEncoder, extended, load_encoder, save_encoder
from .judge import Judge
from .results import ExtendResults, ExtendText
from .settings import FEWEST_DOCUMENTS, ExtendSettings, Rows
from .state import TrainingState
from .training import bank_of, lesson, optimizer_of, rates, train_step

HELD_OUT_EVERY = 16
"""One document in this number is held out for judging."""
MOST_HELD_OUT = 24
"""The most documents to judge by."""
JUDGED = 4
"""How often a model is judged in a training, besides before it. Each time, a checkpoint is written."""
LETTERS = 12
"""The most characters of a token on average; what a document has beyond that is not read."""


@dataclass(frozen=True, kw_only=True)
class ExtendJob:
    """Everything that an extension needs; the arguments are the options of :class:`Extend`."""

    path: str
    length: int
    rows: Rows
    steps: int
    documents: int
    seed: int
    data: tuple[str, ...]
    column: str | None
    threads: int | None

    def run(self, folder: Path, progress: Progress) -> ExtendResults:
        """Train and judge the model, and save it in ``model``.

        Raises:
            InputError: if the model or the text is not suitable, or the folder holds another extension.
        """
        with threads(self.threads):
            return self._extend(folder, progress)

    def _extend(self, folder: Path, progress: Progress) -> ExtendResults:
        teacher, kind = load_encoder(self.path)
        if self.length <= teacher.limit:
            raise InputError("length", f"expected more than the model's {teacher.limit} tokens, got {self.length}")
        progress.begin("reading the text")
        windows = self._windows(teacher)
        held = torch.arange(len(windows)) % HELD_OUT_EVERY == 0
        held &= held.cumsum(0) <= MOST_HELD_OUT
        settings = ExtendSettings(
            model=self.path,
            length=self.length,
            rows=self.rows,
            steps=self.steps,
            documents=self.documents,
            seed=self.seed,
            text=hashlib.sha256(windows.numpy().tobytes()).hexdigest(),
        )
        facts = asdict(settings)
        earlier = ExtendResults.earlier(folder, settings=settings)
        if earlier is not None and manifest.problem(folder / "model", facts) is None:
            progress.line(f"{folder / 'model'} is already finished")
            return earlier
        judge = Judge.of(teacher, windows[held], self.seed)
        if not bool(judge.chunks.isfinite().all() and judge.passages.isfinite().all()):
            raise InputError("model", f"{self.path} gives vectors that are not finite (NaN or inf)")
        student = extended(teacher, self.length, repeat=self.rows == "repeat")
        state = self._train(teacher, student, windows[~held], judge, folder / "checkpoint", facts, progress)
        chunks_found, chunks_lead = judge.found(judge.chunks)
        results = ExtendResults(
            kind=kind,
            limit=teacher.limit,
            settings=settings,
            text=ExtendText(Text(self.data).source, len(windows), int(held.sum())),
            chunks_found=chunks_found,
            chunks_lead=chunks_lead,
            curve=state.curve,
            losses=state.losses,
            cpu_seconds=round(state.seconds, 1),
            **provenance(),
        )
        with quiet_transformers(), new_folder(folder / "model") as partial:
            save_encoder(student, Path(self.path), partial)
            write_changed_card(partial, student.model, self.path, facts, results)
            manifest.write(partial, facts)
        results.write(folder / FILE)
        shutil.rmtree(folder / "checkpoint", ignore_errors=True)
        return results

    def _windows(self, teacher: SentenceEncoder) -> Tensor:
        """Return the beginnings of documents that are long enough, (documents, length - 2) token ids."""
        body, rows = self.length - 2, []
        for document in Text(self.data, self.column).documents():
            text = ""
            for part in document:
                text += part
                if len(text) >= body * LETTERS:
                    break
            ids = teacher.tokenizer(text[: body * LETTERS], add_special_tokens=False, truncation=False, verbose=False)[
                "input_ids"
            ]
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
        words = teacher.model.get_input_embeddings().num_embeddings
        if int(windows.max()) >= words:
            raise InputError(
                "model",
                f"the tokenizer of {self.path} belongs to another model: it has token id {int(windows.max())}, but the "
                f"model has {words} tokens",
            )
        return windows

    def _train(
        self,
        teacher: SentenceEncoder,
        student: SentenceEncoder,
        windows: Tensor,
        judge: Judge,
        checkpoint: Path,
        facts: dict[str, str | int],
        progress: Progress,
    ) -> TrainingState:
        """Train the student from the checkpoint, if there is one, and return what its training was like."""
        optimizer = optimizer_of(student)
        state, problem = TrainingState.load(checkpoint, student, optimizer, facts)
        if problem is not None:
            progress.line(f"passing over {checkpoint.name}: {problem}. Starting again from the first step")
        if state.step:
            progress.line(f"continuing after step {state.step}")
        bank = bank_of(teacher, windows, self.seed)
        looks = {round(self.steps * part / JUDGED) for part in range(JUDGED + 1)}
        progress.start(self.steps - state.step)
        progress.begin("training")
        began = time.process_time() - state.seconds
        while True:
            if state.step in looks and (not state.curve or state.curve[-1].step < state.step):
                judged = judge(student, state.step)
                state.curve.append(judged)
                progress.line(f"step {state.step}: {judged.found:.1%} of held-out passages found")
                if state.step:
                    state.seconds = time.process_time() - began
                    state.save(checkpoint, student, optimizer, facts)
            if state.step == self.steps:
                return state
            given = lesson(windows, teacher.limit, self.seed, state.step)
            parts = train_step(teacher, student, optimizer, given, bank, rates(state.step, self.steps))
            if not all(map(math.isfinite, parts.values())):
                raise InputError("model", f"the loss is not finite (NaN or inf) after {state.step} steps")
            for name, value in parts.items():
                state.losses.setdefault(name, []).append(round(value, 6))
            state.step += 1
            progress.step(detail=f"loss {sum(parts.values()):.3f}")
