"""Judge an encoder on documents that it was not trained on."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from .checkpoint import SentenceEncoder
from .results import Judged
from .training import PASSAGES, chunk_means, passages_of


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
    @torch.no_grad()
    def of(cls, teacher: SentenceEncoder, documents: Tensor, seed: int) -> Judge:
        """Return the judge of students of an encoder."""
        short = documents[:, : teacher.limit - 2]
        passages = passages_of(random.Random(f"{seed}/judge"), documents, teacher.limit - 2)
        return cls(
            documents,
            short,
            _vectors(teacher, short),
            chunk_means(teacher, documents, teacher.limit),
            teacher.vectors(passages),
        )

    @torch.no_grad()
    def __call__(self, student: SentenceEncoder, step: int) -> Judged:
        """Return how good an encoder is after some steps."""
        documents = _vectors(student, self.documents)
        short = (_vectors(student, self.short) * self.short_vectors).sum(-1).mean()
        chunks = (documents * self.chunks).sum(-1).mean()
        return Judged(step, float(short), float(chunks), *self.found(documents))

    def found(self, documents: Tensor) -> tuple[float, float]:
        """Return how well the vectors of documents, (documents, hidden_size), find passages.

        Returns:
            The share of passages that are nearest to the vector of their own document, and by how much that is nearer
            than the nearest other one: the mean difference of the cosines.
        """
        owner = torch.arange(len(documents)).repeat_interleave(PASSAGES)[:, None]
        cosines = self.passages @ documents.T
        own = cosines.gather(1, owner).squeeze(1)
        lead = own - cosines.scatter(1, owner, -torch.inf).amax(1)
        return float((lead > 0).float().mean()), float(lead.mean())


def _vectors(encoder: SentenceEncoder, rows: Tensor) -> Tensor:
    return torch.cat([encoder.vectors(list(some)) for some in rows.split(4)])
