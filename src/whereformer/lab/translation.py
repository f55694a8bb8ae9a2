"""Translate lines with a trained model, by transformers' ``generate``, and score them by sacrebleu's BLEU and chrF."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..data import batches, subwords
from ..errors import InputError, short_repr
from ..models import Seq2SeqConfig, Seq2SeqForConditionalGeneration
from ..models.checkpoints.files import find_config, find_weights, read_header
from ..models.checkpoints.loading import check_header, check_weights
from ..positions import PositionRangeError
from .loading import quiet_transformers

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerFast

BATCH_TOKENS = {"cpu": 512, "cuda": 8192}
"""Tokens of source lines that are translated at a time, for each device: the fastest number."""
MAX_EXTRA_TOKENS = 50
"""A translation may have this number of tokens more than the longest source of its batch, as in Vaswani et al."""


def load(model: str, device: torch.device) -> tuple[Seq2SeqForConditionalGeneration, PreTrainedTokenizerFast]:
    """Load a translation model and its tokenizer from a folder or an id on the Hub.

    Raises:
        InputError: for ``model``, if it does not exist, is another kind of model, or its files don't match.
    """
    from transformers import AutoTokenizer

    try:
        fields = find_config(model)
        if fields.get("model_type") != Seq2SeqConfig.model_type:
            raise InputError(None, f"expected a model of `whereformer translate train`, got {fields.get('model_type')}")
        config = Seq2SeqConfig.from_dict(fields)
        # First without memory: an untrusted configuration could ask for any amount.
        check_header(lambda: Seq2SeqForConditionalGeneration(config), read_header(find_weights(model)))
        with quiet_transformers():
            loaded, report = Seq2SeqForConditionalGeneration.from_pretrained(
                model, config=config, use_safetensors=True, output_loading_info=True
            )
        check_weights(loaded.state_dict())
        if report["missing_keys"]:
            raise InputError(None, f"it lacks {min(report['missing_keys'])}")
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    except Exception as error:
        # For a broken file the libraries raise all kinds of errors, even a plain Exception.
        raise InputError("model", f"cannot read {model}: {error}") from None
    special = [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id]
    if special != [subwords.PAD, subwords.START, subwords.END] or len(tokenizer) > config.vocab_size:
        raise InputError("model", f"the tokenizer of {model} does not match the model")
    tokenizer.model_input_names = ["input_ids", "attention_mask"]  # even if its files have other names
    return loaded.to(device).eval(), tokenizer


def generation_config(config: Seq2SeqConfig, max_length: int) -> GenerationConfig:
    """Return settings for transformers' ``generate``: the beam search of Vaswani et al."""
    from transformers import GenerationConfig

    return GenerationConfig(
        num_beams=4,
        length_penalty=0.6,
        max_length=max_length,
        do_sample=False,
        pad_token_id=config.pad_token_id,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        decoder_start_token_id=config.decoder_start_token_id,
    )


@torch.no_grad()
def translate_lines(
    model: Seq2SeqForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    lines: Sequence[str],
    *,
    beams: int = 4,
    length_penalty: float = 0.6,
) -> list[str]:
    """Translate each line, in batches of similar length; empty lines stay empty.

    With one beam, the search is greedy. A translation's log-probability is divided by its length to the power of
    ``length_penalty``.

    Raises:
        InputError: if a line is longer than the position method allows.
    """
    translations = [""] * len(lines)
    rows = [row for row, line in enumerate(lines) if line.strip()]
    encoded = list(subwords.encode(tokenizer, [lines[row] for row in rows]))
    lengths = torch.tensor([len(ids) for ids in encoded]).unsqueeze(1)
    for batch in batches.by_length(lengths, BATCH_TOKENS[model.device.type], tokens=True):
        longest = int(lengths[batch].max())
        inputs = tokenizer.pad({"input_ids": [encoded[index] for index in batch]}, return_tensors="pt")
        max_tokens = min(longest + MAX_EXTRA_TOKENS, max(longest, model.config.max_position_embeddings))
        options = {"num_beams": beams, "length_penalty": length_penalty, "max_new_tokens": max_tokens}
        try:
            with quiet_transformers():
                outputs = model.generate(**inputs.to(model.device), **options)
        except PositionRangeError as error:
            # The last line of a batch is the longest.
            raise InputError(None, f"the line {short_repr(lines[rows[batch[-1]]])} is too long: {error}") from None
        for index, text in zip(batch, tokenizer.batch_decode(outputs, skip_special_tokens=True), strict=True):
            # A translation stays on one line, even if the model writes line ends.
            translations[rows[index]] = " ".join(text.split())
    return translations


def scores(hypotheses: Sequence[str], references: Sequence[str]) -> tuple[str, str]:
    """Return BLEU and chrF of translations in plain text, each with sacrebleu's signature."""
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    bleu, chrf = BLEU(), CHRF()
    values = [metric.corpus_score(hypotheses, [references]).score for metric in (bleu, chrf)]
    return f"BLEU {values[0]:.2f} ({bleu.get_signature()})", f"chrF {values[1]:.2f} ({chrf.get_signature()})"
