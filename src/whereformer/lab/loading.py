"""Load a checkpoint's encoder and tokenizer, with a clear one-line error if they can't be read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from transformers import AutoTokenizer
from transformers import logging as transformers_logging

from ..errors import InputError
from ..files import check_regular_in
from ..models import Encoder, load_pretrained
from ..models.checkpoints.files import find_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load(path: str) -> tuple[Encoder, str]:
    """Load a checkpoint's encoder, and return it with transformers' name for its kind.

    Raises:
        InputError: if the checkpoint can't be read, or has weights that are not finite.
    """
    with named_errors(path), quiet_transformers():
        encoder = load_pretrained(path, model_class=Encoder)
    assert isinstance(encoder, Encoder)
    return encoder, find_config(path)["model_type"]


@contextmanager
def named_errors(path: str) -> Iterator[None]:
    """Turn errors about a checkpoint into an InputError of one line that names it."""
    try:
        yield
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        reason = " ".join(str(error).split()).removeprefix("path_or_id: ")
        where = "" if path in reason else f"{path}: "
        raise InputError("model", f"{where}{reason}") from None


def tokenizer_of(path: str) -> tuple[PreTrainedTokenizerBase | None, str]:
    """Load the model's tokenizer or, for a checkpoint of ``whereformer pretrain``, its run's.

    Returns:
        the tokenizer and "", or None and the reason why there is none.
    """
    folder = Path(path)
    places = [path]
    if folder.is_dir():
        places += [str(near) for near in (folder.parent, folder.parent.parent / "model") if near.is_dir()]
    reason = ""
    for place in places:
        if Path(place).is_dir() and not any(Path(place).glob("*token*")) and not (Path(place) / "vocab.txt").exists():
            reason = reason or "there is none next to it"
            continue
        try:
            check_regular_in(None, place)
            with quiet_transformers():
                return AutoTokenizer.from_pretrained(place, trust_remote_code=False), ""
        except Exception as error:
            # For a missing or broken file the libraries raise all kinds of errors.
            reason = (str(error).splitlines() or [type(error).__name__])[0]
    return None, f"no tokenizer can be read for {path} ({reason})"


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
