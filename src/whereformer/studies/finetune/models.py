"""Load pretrained models with a position method and a new head, and their tokenizers."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch
from transformers import AutoTokenizer

from ...errors import InputError
from ...files import check_regular_in
from ...lab.loading import named_errors, quiet_transformers
from ...lab.methods import about_method
from ...models import EncoderForSequenceClassification, load_pretrained
from ...models.checkpoints.files import find_config
from ...positions import method_names
from .variants import OWN, Variant

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(model: str, path: str | None) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer, or the one at ``path`` if that is given.

    Raises:
        InputError: if no tokenizer, or no configuration of the model can be read.
    """
    field, where = ("model", model) if path is None else ("tokenizer", path)
    with named_errors(model):
        find_config(model)  # which transformers would read whatever it holds
    check_regular_in(field, where)
    try:
        with quiet_transformers():
            return AutoTokenizer.from_pretrained(where, trust_remote_code=False)
    except Exception as error:
        # For a missing or broken file the libraries raise all kinds of errors.
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(field, f"no tokenizer can be read from {where!r} ({reason})") from None


def load(model: str, variant: Variant, classes: int | None) -> EncoderForSequenceClassification:
    """Load a pretrained model with a variant's position method and a new head; ``classes`` is None for regression.

    Raises:
        InputError: if the model can't be read, or the method is unknown or does not fit it.
    """
    try:
        found = load_pretrained(
            model,
            position=variant.position,
            model_class=EncoderForSequenceClassification,
            num_labels=classes or 1,
            problem_type="regression" if classes is None else "single_label_classification",
            **variant.options,
        )
    except (OSError, ValueError, TypeError) as error:
        if isinstance(error, OSError) or variant.position is None:
            raise InputError("model", str(error).removeprefix("path_or_id: ")) from None
        # If the model itself is at fault, loading it without the method fails too.
        own = load(model, Variant(OWN, None), classes)
        if variant.kernels is not None and "tisa" in method_names(own.config.position):
            raise InputError(
                "kernels",
                "the model was pretrained with TISA, and its number of kernels can't change; use `position` own "
                "to fine-tune it as it is",
            ) from None
        raise about_method(error, "position") from None
    assert isinstance(found, EncoderForSequenceClassification)
    return found


def fresh(model: str, variant: Variant, classes: int | None, seed: int) -> EncoderForSequenceClassification:
    """Load a model to train. With the same seed, all variants start from the same weights, new head included."""
    torch.manual_seed(seed)
    common = load(model, Variant("", "none"), classes).state_dict()
    torch.manual_seed(seed)
    found = load(model, variant, classes)
    found.load_state_dict({n: x for n, x in common.items() if not n.startswith("encoder.position.")}, strict=False)
    return found


def fingerprint_of(model: EncoderForSequenceClassification) -> str:
    """Return a hash of the pretrained weights, which tells results from different models apart."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.encoder.state_dict().items()):
        # Position weights may be new.
        if not name.startswith("position."):
            digest.update(name.encode())
            digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
