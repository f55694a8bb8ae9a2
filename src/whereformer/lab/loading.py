"""Load checkpoints and tokenizers, with a clear one-line error if they can't be read, and save them.

Fine-tuning loads them with another position method and a new head.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import logging as transformers_logging

from .. import manifest
from ..data.tokenizers import read_tokenizer
from ..errors import InputError
from ..files import new_folder
from ..models import Encoder, EncoderForSequenceClassification, load_pretrained
from ..models.checkpoints.files import find_config, find_weights
from ..positions.base import position_parameters
from .methods import as_method_error, count_parameters

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


def check_exists(path: str) -> None:
    """Raise an InputError if a checkpoint lacks a configuration or weights. This is quick, so it can come first."""
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
    """Load the tokenizer that was saved with a model, or the one at ``path``; an InputError if it can't be read."""
    with quiet_transformers():
        return read_tokenizer(model, "model") if path is None else read_tokenizer(path, "tokenizer")


def load_classifier(
    model: str, position: str | None, kernels: int | None, classes: int | None
) -> EncoderForSequenceClassification:
    """Load a pretrained model with a position method and a new head.

    If ``position`` is None, the checkpoint's positions stay. ``kernels`` is the number of TISA's kernels. If
    ``classes`` is None, the head is for regression.

    Raises:
        InputError: if the model can't be read, or the method is unknown or does not fit it.
    """
    options: dict[str, Any] = {} if kernels is None else {"num_kernels": kernels}
    try:
        with quiet_transformers():
            classifier = load_pretrained(
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
        if isinstance(error, InputError) and error.field == "checkpoint":
            reason = f"{model} was trained with other options of it, which the method 'own' keeps ({error.reason})"
            raise InputError("position", reason) from None
        raise as_method_error(error) from None
    assert isinstance(classifier, EncoderForSequenceClassification)
    return classifier


def load_for_training(
    model: str, position: str | None, kernels: int | None, classes: int | None, seed: int
) -> EncoderForSequenceClassification:
    """Load a model to train, see :func:`load_classifier`. With one seed, all start from the same weights and head."""
    torch.manual_seed(seed)
    common = load_classifier(model, "none", None, classes).state_dict()
    torch.manual_seed(seed)
    classifier = load_classifier(model, position, kernels, classes)
    weights = {name: weight for name, weight in common.items() if not name.startswith("encoder.position.")}
    classifier.load_state_dict(weights, strict=False)
    return classifier


def fingerprint(model: str, *settings: object) -> str:
    """Return a hash of a checkpoint: its weights, its configuration, and settings on which reading it depends."""
    return manifest.fingerprint_of_files(find_weights(model), [json.dumps(find_config(model)), *map(str, settings)])


def count_parameters_by_origin(model: EncoderForSequenceClassification) -> tuple[int, int, int]:
    """Count a loaded model's parameters: all, the positional ones, and the positional ones not in the checkpoint."""
    assert model.loading_report is not None
    new = position_parameters(model).keys() & model.loading_report.initialized
    return (*count_parameters(model).values(), sum(model.get_parameter(name).numel() for name in new))


def save(model: Any, tokenizer: Any, folder: Path, facts: Mapping[str, object]) -> None:
    """Save a model and its tokenizer in transformers' format, with a manifest of ``facts``, in a new folder."""
    with quiet_transformers(), new_folder(folder) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        manifest.write(partial, facts)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars and messages, which would garble ours."""
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
