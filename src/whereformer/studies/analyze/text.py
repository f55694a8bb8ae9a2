"""Cut text into windows of tokens, and measure attention over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from ...analysis.curves import OFFSETS_SHOWN
from ...analysis.findings import AttentionFindings
from ...analysis.measured import OffsetStatistics
from ...data import corpus
from ...errors import InputError
from ...models import Encoder
from .settings import Analyze

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENS_OF_A_BATCH = 512
"""Tokens that are read at a time; few, because the attention weights of all layers are in memory together."""


def measure_attention(
    encoder: Encoder,
    tokenizer: PreTrainedTokenizerBase,
    path: str,
    options: Analyze,
    pages: Sequence[str],
    length: int,
    on_part: Callable[[float], None],
) -> AttentionFindings:
    """Measure attention over windows ``[CLS] text [SEP]`` of ``length`` tokens, without the first and last token.

    Args:
        encoder, tokenizer, path: the model, and where it is.
        options: the options of the analysis.
        pages: pages of the text.
        length: the number of tokens in a window.
        on_part: called with the share that is done.
    """
    windows, ends = text_windows(pages, tokenizer, encoder, length, options.tokens, path)
    body = windows.shape[1] - 2 * ends
    statistics = OffsetStatistics(encoder.config.num_hidden_layers, encoder.config.num_attention_heads, body)
    part = slice(ends, ends + body)
    batches = windows.split(max(1, TOKENS_OF_A_BATCH // body))
    for index, rows in enumerate(batches):
        attentions = encoder(rows.to(encoder.device), output_attentions=True).attentions
        for layer, weights in enumerate(attentions):
            if weights.shape[-2:] == (rows.shape[1], rows.shape[1]):
                statistics.add(layer, weights[..., part, part])
        on_part((index + 1) / len(batches))
    reach = min(OFFSETS_SHOWN, body - 1)
    return AttentionFindings(
        source=corpus.source_of(options.data),
        tokens=len(windows) * body,
        offsets=torch.arange(-reach, reach + 1),
        shares=statistics.shares(reach).float(),
        explained=statistics.explained().float(),
    )


def pages_of(documents: Sequence[str]) -> list[str]:
    """Split the documents into pages."""
    return [page for document in documents for page in corpus.pages_of([document])]


def text_windows(
    pages: Sequence[str], tokenizer: PreTrainedTokenizerBase, encoder: Encoder, length: int, tokens: int, path: str
) -> tuple[Tensor, int]:
    """Return about ``tokens`` tokens of text in windows ``[CLS] text [SEP]`` of ``length``, shorter for less text.

    Returns:
        (count, n) token ids without padding, and the number of special tokens at each end, 0 or 1.

    Raises:
        InputError: if there are no tokens, or some that the model at ``path`` does not know.
    """
    special = tokenizer.cls_token_id, tokenizer.sep_token_id
    ends = 1 if None not in special else 0
    body = length - 2 * ends
    if body < 1:
        ends, body = 0, length
    ids = _text_ids(pages, tokenizer, max(body, tokens))
    if not len(ids):
        raise InputError("data", f"the tokenizer of {path} finds no tokens in the text")
    words = len(encoder.embeddings.word.weight)
    if int(ids.max()) >= words:
        raise InputError(
            "model",
            f"the tokenizer of {path} belongs to another model: it has token id {int(ids.max())}, but the model has "
            f"{words} tokens",
        )
    body = min(body, len(ids))
    rows = functional.pad(ids[: len(ids) // body * body].view(-1, body), (ends, ends))
    if ends:
        rows[:, 0], rows[:, -1] = special
    return rows, ends


def _text_ids(pages: Sequence[str], tokenizer: PreTrainedTokenizerBase, count: int) -> Tensor:
    """Return up to ``count`` tokens, from pages spread evenly over the text."""
    # A page has about a thousand tokens. If pages have fewer, those in between follow.
    every = max(1, len(pages) * 500 // max(count, 1))
    ids: list[int] = []
    for page in (page for start in range(every) for page in pages[start::every]):
        if len(ids) >= count:
            break
        ids += tokenizer(page, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor(ids[:count], dtype=torch.int64)
