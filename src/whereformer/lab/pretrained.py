"""Load pretrained models with another position method and a new head, and their tokenizers, as fine-tuning does."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoTokenizer

from ..errors import InputError
from ..files import check_regular_in
from ..models import EncoderForSequenceClassification, load_pretrained
from ..positions import method_names
from .loading import quiet_transformers
from .methods import about_method

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load(
    model: str, position: str | None, kernels: int | None, classes: int | None
) -> EncoderForSequenceClassification:
    """Load a pretrained model with a position method and a new head.

    Args:
        model: a folder, or an id on the Hub.
        position: the method; None keeps the checkpoint's own.
        kernels: TISA's number of kernels; None if it has none.
        classes: the number of classes; None for regression.

    Raises:
        InputError: if the model can't be read, or the method is unknown or does not fit it.
    """
    options: dict[str, Any] = {} if kernels is None else {"num_kernels": kernels}
    try:
        with quiet_transformers():
            found = load_pretrained(
                model,
                position=position,
                model_class=EncoderForSequenceClassification,
                num_labels=classes or 1,
                problem_type="regression" if classes is None else "single_label_classification",
                **options,
            )
    except (OSError, ValueError, TypeError) as error:
        if isinstance(error, OSError) or position is None:
            raise InputError("model", str(error).removeprefix("path_or_id: ")) from None
        # If the model itself is at fault, loading it without the method fails too.
        own = load(model, None, None, classes)
        if kernels is not None and "tisa" in method_names(own.config.position):
            raise InputError(
                "kernels",
                "the model was pretrained with TISA, and its number of kernels can't change; use `position` own "
                "to fine-tune it as it is",
            ) from None
        raise about_method(error, "position") from None
    assert isinstance(found, EncoderForSequenceClassification)
    return found


def fresh(
    model: str, position: str | None, kernels: int | None, classes: int | None, seed: int
) -> EncoderForSequenceClassification:
    """Load a model to train, see :func:`load`. With the same seed, all start from the same weights, head included."""
    torch.manual_seed(seed)
    common = load(model, "none", None, classes).state_dict()
    torch.manual_seed(seed)
    found = load(model, position, kernels, classes)
    found.load_state_dict({n: x for n, x in common.items() if not n.startswith("encoder.position.")}, strict=False)
    return found


def load_tokenizer(model: str, path: str | None) -> PreTrainedTokenizerBase:
    """Load the tokenizer that was saved with a model, or the one at ``path`` if that is given.

    Raises:
        InputError: if it can't be read.
    """
    field, where = ("model", model) if path is None else ("tokenizer", path)
    check_regular_in(field, where)
    try:
        return AutoTokenizer.from_pretrained(where, trust_remote_code=False)
    except Exception as error:
        # For a missing or broken file the libraries raise all kinds of errors.
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(field, f"no tokenizer can be read from {where!r} ({reason})") from None


def fingerprint_of(model: EncoderForSequenceClassification) -> str:
    """Return a hash of a model's pretrained weights. Those of position may be new."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.encoder.state_dict().items()):
        if not name.startswith("position."):
            digest.update(name.encode())
            digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def sizes_of(model: EncoderForSequenceClassification) -> tuple[int, int, int]:
    """Return the number of parameters, of those of position, and of those of position that the checkpoint lacks."""
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    positional = {name: size for name, size in sizes.items() if name.startswith("encoder.position.")}
    assert model.loading_report is not None
    new = sum(positional.get(name, 0) for name in model.loading_report.initialised)
    return sum(sizes.values()), sum(positional.values()), new
