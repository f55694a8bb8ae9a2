"""Texts as one stream of token ids, which the tests of streams, masks and windows compare with."""

import torch

from whereformer.data.tokenizers import SEP


def token_stream(tokenizer, texts, sep=SEP):
    """Encode all texts as one stream of ids, (tokens,), with ``sep`` after each text and no other special tokens."""
    encoded = tokenizer.encode_batch(list(texts), add_special_tokens=False)
    return torch.tensor([token for text in encoded for token in (*text.ids, sep)])
