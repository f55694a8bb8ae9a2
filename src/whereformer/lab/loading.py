"""Load checkpoints and tokenizers, with a clear one-line error if they can't be read.

Fine-tuning loads them with another position method and a new head.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers import logging as transformers_logging

from ..data.tokenizers import read_tokenizer
from ..errors import InputError
from ..manifest import fingerprint_of_files
from ..models import Encoder, EncoderForSequenceClassification, load_pretrained
from ..models.checkpoints.files import find_config, find_weights
from ..positions.base import position_parameters
from .methods import about_method, parameters

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load(path: str) -> Encoder:
    """Load a checkpoint's encoder.

    Raises:
        InputError: if the checkpoint can't be read, or has weights that are not finite.
    """
    with _naming(path), quiet_transformers():
        encoder = load_pretrained(path, model_class=Encoder)
    assert isinstance(encoder, Encoder)
    return encoder


def check_there(path: str) -> None:
    """Check that a checkpoint has a configuration and weights, which is quick, before work on others begins.

    Raises:
        InputError: if it has none.
    """
    with _naming(path), quiet_transformers():
        find_config(path)
        find_weights(path)


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Turn errors of reading a checkpoint into one about ``model``."""
    try:
        yield
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = " ".join(str(error).split()).removeprefix("path_or_id: ")
        raise InputError("model", reason if path in reason else f"{path}: {reason}") from None


def load_tokenizer(model: str, path: str | None) -> PreTrainedTokenizerBase:
    """Load the tokenizer that was saved with a model, or the one at ``path`` if that is given.

    Raises:
        InputError: if it can't be read.
    """
    with quiet_transformers():
        return read_tokenizer(model, "model") if path is None else read_tokenizer(path, "tokenizer")


def load_classifier(
    model: str, position: str | None, kernels: int | None, classes: int | None
) -> EncoderForSequenceClassification:
    """Load a pretrained model with a position method and a new head.

    A ``position`` of None keeps the checkpoint's own, ``kernels`` are those of TISA, and no ``classes`` is regression.

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
        load_classifier(model, None, None, classes)
        raise about_method(error, "position") from None
    assert isinstance(found, EncoderForSequenceClassification)
    return found


def fresh(
    model: str, position: str | None, kernels: int | None, classes: int | None, seed: int
) -> EncoderForSequenceClassification:
    """Load a model to train, see :func:`load_classifier`. With one seed, all start from the same weights and head."""
    torch.manual_seed(seed)
    common = load_classifier(model, "none", None, classes).state_dict()
    torch.manual_seed(seed)
    found = load_classifier(model, position, kernels, classes)
    found.load_state_dict({n: x for n, x in common.items() if not n.startswith("encoder.position.")}, strict=False)
    return found


def fingerprint_of(model: str, *more: object) -> str:
    """Return a hash of a checkpoint: of its weights and configuration, and of what else decides how it is read."""
    return fingerprint_of_files(find_weights(model), [json.dumps(find_config(model)), *map(str, more)])


def sizes_of(model: EncoderForSequenceClassification) -> tuple[int, int, int]:
    """Return the number of parameters, of those of position, and of those of position that the checkpoint lacks."""
    assert model.loading_report is not None
    new = position_parameters(model).keys() & model.loading_report.initialized
    return (*parameters(model).values(), sum(model.get_parameter(name).numel() for name in new))


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars and notes, which would garble ours."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
