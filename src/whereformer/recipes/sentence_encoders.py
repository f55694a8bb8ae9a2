"""Sentence encoders: read one, give it more positions, and write it so that sentence-transformers loads it."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import InputError
from ..lab.loading import load, load_tokenizer
from ..models import Encoder
from ..models.checkpoints.files import check_has_config
from ..models.checkpoints.sentences import LIST, SentenceSettings, keep_sentence_settings, read_sentence_settings
from ..positions.learned import Learned


@dataclass(frozen=True)
class SentenceEncoder:
    """An encoder, with the way from its states to the vector of a text.

    Args:
        model: the encoder.
        tokenizer: its tokenizer.
        pooling: whether a text's vector is the mean of its tokens' states, or the first token's ("cls").
        limit: how many tokens it reads, special ones included.
    """

    model: Encoder
    tokenizer: Any
    pooling: str
    limit: int

    def ids(self, text: str) -> list[int]:
        """Return the token ids of a text, without special ones."""
        found: list[int] = self.tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
        return found

    def framed(self, rows: Tensor) -> Tensor:
        """Return the ids of texts between special tokens, (rows, n + 2), of their ids without, (rows, n)."""
        first, last = self.tokenizer.cls_token_id, self.tokenizer.sep_token_id
        return functional.pad(functional.pad(rows, (1, 0), value=first), (0, 1), value=last).to(self.model.device)

    def states(self, ids: Tensor) -> Tensor:
        """Return the last hidden states, (rows, n, hidden_size), of token ids, (rows, n)."""
        found: Tensor = self.model(ids).last_hidden_state
        return found

    def pool(self, states: Tensor) -> Tensor:
        """Return the vectors of texts, (rows, hidden_size), each of length 1."""
        return functional.normalize(states[:, 0] if self.pooling == "cls" else states.mean(1), dim=-1)

    def vectors(self, rows: Tensor) -> Tensor:
        """Return the vectors of texts, (rows, hidden_size), of their token ids without special ones, (rows, n)."""
        return self.pool(self.states(self.framed(rows)))


def load_encoder(path: str) -> SentenceEncoder:
    """Load the folder of a sentence-transformers model, or of an encoder, whose states are averaged.

    Raises:
        InputError: if it can't be read, has no position embeddings, or works in a way that can't be kept.
    """
    folder = Path(path)
    if not folder.is_dir():
        download = "`hf download NAME --local-dir FOLDER` gets one from the Hugging Face Hub"
        raise InputError("model", f"expected a folder with a model, got {path!r}; {download}")
    check_has_config("model", folder)
    settings = read_sentence_settings(folder)
    if settings is None and (folder / LIST).exists():
        raise InputError("model", f"expected a model that makes vectors, got a CrossEncoder: {path}")
    settings = settings or SentenceSettings()
    model = load(path)
    most = len(learned(model).weight)
    if "-" in model.config.blocks:
        raise InputError("model", "expected a model that doesn't pool, got a funnel")
    tokenizer = load_tokenizer(path, None)
    lacking = [name for name in ("cls", "sep") if getattr(tokenizer, f"{name}_token_id") is None]
    if lacking:
        raise InputError("model", f"{path}: its tokenizer has no {lacking[0]} token")
    return SentenceEncoder(model, tokenizer, settings.pooling, min(settings.limit or tokenizer.model_max_length, most))


def learned(model: Any) -> Learned:
    """Return the position embeddings of a model.

    Raises:
        InputError: if it has none.
    """
    found = [module for module in model.modules() if isinstance(module, Learned)]
    if len(found) != 1:
        raise InputError("model", f"expected a model with position embeddings, got one with {model.config.position!r}")
    return found[0]


def extended(encoder: SentenceEncoder, length: int) -> SentenceEncoder:
    """Return a copy of an encoder that reads ``length`` tokens, special ones included.

    The position embeddings that the encoder reads are repeated until there are enough, as in Longformer (Beltagy et al.
    2020, section 5), and each token attends to so many tokens on both sides that it never sees two with the same
    embedding. Texts of up to half the encoder's limit then have the same vectors. If the first token's state is the
    vector, the last layer has no such window.
    """
    model, weights = encoder.model, encoder.model.state_dict()
    name = next(name for name, weight in model.named_parameters() if weight is learned(model).weight)
    config = deepcopy(model.config)
    config.max_position_embeddings = length
    windows = [max(1, encoder.limit // 2 - 1)] * len(model.passes)
    if encoder.pooling == "cls":
        windows[-1] = 0
    config.windows = ",".join(map(str, windows))
    student = Encoder(config).eval()
    student.load_state_dict({**weights, name: weights[name][torch.arange(length) % encoder.limit]})
    return SentenceEncoder(student, encoder.tokenizer, encoder.pooling, length)


def save_encoder(encoder: SentenceEncoder, original: Path, folder: Path) -> None:
    """Write an encoder to an empty folder, with the modules and prompts of the original's folder."""
    encoder.model.save_pretrained(folder)
    tokenizer = deepcopy(encoder.tokenizer)
    tokenizer.model_max_length = encoder.limit
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:  # its file may say at which length it truncates, whatever the model
        backend.no_truncation()
        backend.no_padding()
    tokenizer.save_pretrained(folder)
    keep_sentence_settings(original, folder, limit=encoder.limit)
