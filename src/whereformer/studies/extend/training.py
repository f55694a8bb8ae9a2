"""Train an encoder with more positions to agree with the original, and then to be better than its own target."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from .checkpoint import SentenceEncoder, learned

SHORT_TOKENS = 512
"""About this number of tokens is in a step's windows that the original can read, all of one length."""
SHORT = (8, 12, 16, 24, 32, 64, 128)
"""Lengths of such windows besides the longest."""
DOCUMENTS = 4
"""Longer windows of a step."""
PASSAGES = 4
"""Passages of each of them."""
PASSAGE_TOKENS = (24, 96)
"""The tokens of a passage, at least and at most."""
CHUNK = 64
"""Tokens of the chunks whose mean a document's vector should be near; shorter ones find passages better than those of
all tokens that the original can read."""
BANK = 1024
"""Passages of other documents that a document has to stay away from. The original doesn't change, so that one look at
them is enough for a whole training."""
TEMPERATURE = 0.05
"""The temperature of the contrastive loss."""
POSITIONS_ONLY = 0.15
"""The share of steps that train nothing but the position embeddings."""
POSITION_RATE, RATE = 1e-3, 5e-5
"""The learning rates of the position embeddings and of all other weights."""
WEIGHTS = {"states": 1.0, "vectors": 20.0, "chunks": 20.0, "passages": 5.0}
"""How much each part of the loss counts."""


@dataclass(frozen=True)
class Lesson:
    """What a student sees in a step.

    Args:
        short: token ids of windows that the teacher can read.
        rows: the documents of the longer windows.
        long: (documents, n) token ids of these windows.
        passages: parts of each long window, ``PASSAGES`` of the first, then of the second, and so on.
    """

    short: list[Tensor]
    rows: list[int]
    long: Tensor
    passages: list[Tensor]


@dataclass(frozen=True)
class Bank:
    """The teacher's vectors of passages, one from a document.

    Args:
        rows: (passages,), their documents.
        vectors: (passages, hidden_size).
    """

    rows: Tensor
    vectors: Tensor


def lesson(windows: Tensor, teacher_limit: int, seed: int, step: int) -> Lesson:
    """Return the lesson of a step, which depends on nothing but the arguments, so that a run can continue.

    Args:
        windows: (rows, n) token ids, without special ones; a row is a document.
        teacher_limit: the tokens that the teacher reads, special ones included.
        seed: chooses what is drawn.
        step: the step.
    """
    draw = random.Random(f"{seed}/{step}")
    rows = draw.sample(range(len(windows)), min(DOCUMENTS, len(windows)))
    most, chunk = windows.shape[1], teacher_limit - 2
    length = most if draw.random() < 0.5 else draw.randint(min(most, chunk + chunk // 2), most)
    long = windows[rows, :length]
    short = draw.choice([chunk, *(tokens for tokens in SHORT if tokens < chunk)])
    return Lesson(
        [_part(draw, windows[draw.randrange(len(windows))], short) for _ in range(max(2, SHORT_TOKENS // (short + 2)))],
        rows,
        long,
        passages_of(draw, long, chunk),
    )


def passages_of(draw: random.Random, long: Tensor, most: int) -> list[Tensor]:
    """Return passages of windows, (documents, n): one from each of ``PASSAGES`` equal stretches of each window.

    ``most`` is the number of tokens that a passage has at most.
    """
    stretch, tokens = long.shape[1] // PASSAGES, min(most, draw.randint(*PASSAGE_TOKENS))
    return [
        _part(draw, window[index * stretch : (index + 1) * stretch], tokens)
        for window in long
        for index in range(PASSAGES)
    ]


def _part(draw: random.Random, window: Tensor, tokens: int) -> Tensor:
    start = draw.randint(0, max(0, len(window) - tokens))
    return window[start : start + tokens]


@torch.no_grad()
def bank_of(teacher: SentenceEncoder, windows: Tensor, seed: int) -> Bank:
    """Return a bank of one passage from each of up to ``BANK`` documents, (rows, n)."""
    draw = random.Random(f"{seed}/bank")
    rows = draw.sample(range(len(windows)), min(BANK, len(windows)))
    tokens = min(teacher.limit - 2, sum(PASSAGE_TOKENS) // 2)
    parts = [_part(draw, windows[row], tokens) for row in rows]
    vectors = [teacher.vectors(parts[start : start + 32]) for start in range(0, len(parts), 32)]
    return Bank(torch.tensor(rows), torch.cat(vectors))


@torch.no_grad()
def chunk_means(teacher: SentenceEncoder, long: Tensor, tokens: int) -> Tensor:
    """Return the mean vector, (rows, hidden_size), of the chunks of windows, (rows, n), of so many tokens each."""
    total = torch.zeros(())
    for chunk in long.split(min(tokens, teacher.limit - 2), dim=1):
        total = total + teacher.vectors(list(chunk)) * chunk.shape[1]
    return functional.normalize(total, dim=-1)


def losses(teacher: SentenceEncoder, student: SentenceEncoder, given: Lesson, bank: Bank) -> dict[str, Tensor]:
    """Return the parts of the loss by name.

    Args:
        teacher: the original.
        student: the encoder that is trained.
        given: the texts of this step.
        bank: passages that documents have to stay away from, those of the same documents left out.
    """
    ids, mask = teacher.padded(given.short)
    with torch.no_grad():
        wanted = teacher.states(ids, mask)
        passages = teacher.vectors(given.passages)
    states = student.states(ids, mask)
    far = 1 - functional.cosine_similarity(states, wanted, dim=-1)
    documents = student.vectors(list(given.long))
    others = bank.vectors[~torch.isin(bank.rows, torch.tensor(given.rows))]
    return {
        "states": (far * mask).sum() / mask.sum(),
        "vectors": (1 - (student.pool(states, mask) * teacher.pool(wanted, mask)).sum(-1)).mean(),
        "chunks": (1 - (documents * chunk_means(teacher, given.long, CHUNK)).sum(-1)).mean(),
        "passages": contrast(documents, passages, others),
    }


def contrast(documents: Tensor, passages: Tensor, others: Tensor) -> Tensor:
    """Return how badly documents and passages find each other.

    Args:
        documents: (documents, hidden_size).
        passages: (documents * PASSAGES, hidden_size), those of the first document first.
        others: (rows, hidden_size), passages of none of these documents.
    """
    owner = torch.arange(len(documents)).repeat_interleave(PASSAGES)
    scores = passages @ documents.T / TEMPERATURE
    finding = functional.cross_entropy(scores, owner)
    # Of each passage: its document has to like it more than all passages of others.
    own = owner[:, None] == torch.arange(len(documents))
    wrong = torch.cat([scores.masked_fill(own, -torch.inf), others @ documents.T / TEMPERATURE]).logsumexp(0)
    right = scores[own]
    choosing = (torch.logaddexp(right, wrong[owner]) - right).mean()
    return finding + choosing


def optimizer_of(student: SentenceEncoder) -> torch.optim.AdamW:
    """Return the optimizer, with the position embeddings first."""
    table = learned(student.model).weight
    others = [weight for weight in student.model.parameters() if weight is not table]
    return torch.optim.AdamW([{"params": [table]}, {"params": others}], lr=0.0, weight_decay=0.0)


def rates(step: int, steps: int) -> tuple[float, float]:
    """Return the learning rates of a step: that of the position embeddings, and that of the rest."""
    alone = int(POSITIONS_ONLY * steps)
    down = max(0.02, 1 - step / steps)
    warm = min(1.0, (step - alone + 1) / max(1, steps // 10))
    return POSITION_RATE * min(1.0, (step + 1) / 5) * down, (RATE * warm * down if step >= alone else 0.0)


def train_step(
    teacher: SentenceEncoder,
    student: SentenceEncoder,
    optimizer: torch.optim.AdamW,
    given: Lesson,
    bank: Bank,
    learning_rates: tuple[float, float],
) -> dict[str, float]:
    """Do one step, and return the parts of its loss."""
    for group, rate in zip(optimizer.param_groups, learning_rates, strict=True):
        group["lr"] = rate
    parts = losses(teacher, student, given, bank)
    total = torch.stack([WEIGHTS[name] * part for name, part in parts.items()]).sum()
    optimizer.zero_grad()
    total.backward()
    torch.nn.utils.clip_grad_norm_(student.model.parameters(), 1.0)
    optimizer.step()
    return {name: float(part.detach()) for name, part in parts.items()}
