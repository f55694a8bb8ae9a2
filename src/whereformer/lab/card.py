"""The model card of a saved model: a README.md with metadata that the Hugging Face Hub reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from transformers import PreTrainedModel

from ..files import write_atomically
from ..models import Encoder, EncoderForMaskedLM, EncoderForPreTraining, Seq2SeqForConditionalGeneration
from ..models.checkpoints.sentences import LIST

KINDS: dict[type[PreTrainedModel], tuple[str, str]] = {
    Encoder: ("feature-extraction", "AutoModel"),
    EncoderForMaskedLM: ("fill-mask", "AutoModelForMaskedLM"),
    EncoderForPreTraining: ("feature-extraction", "AutoModelForPreTraining"),
    Seq2SeqForConditionalGeneration: ("translation", "AutoModelForSeq2SeqLM"),
}
"""The Hub's name for the task of each saved class, and the class of transformers that loads it."""


def write_card(
    folder: Path,
    model: PreTrainedModel,
    settings: Mapping[str, Any],
    provenance: Mapping[str, Any],
    *,
    original: str = "",
    **parts: Any,
) -> None:
    """Write README.md, a model's card, to its folder.

    Args:
        folder: the model's folder. Where sentence-transformers loads it, the card says so.
        model: the model.
        settings: what was chosen.
        provenance: the machine and the versions.
        original: the path or id of the pretrained model that was changed, if it was not trained anew.
        parts: of a changed model, the ``report`` on it; of a trained one, its ``parameters``, facts about the ``text``,
            the last held-out ``scores`` and the ``command`` that trained it.
    """
    (task, auto), config = KINDS[type(model)], model.config
    sentences = (folder / LIST).exists()
    data = ModelCardData(
        library_name="sentence-transformers" if sentences else "whereformer",
        pipeline_tag="sentence-similarity" if sentences else task,
        tags=["whereformer", "transformers", "position", *config.position.replace("+", " ").split()],
        metrics=sorted(parts.get("scores", ())) or None,
    )
    card = ModelCard.from_template(
        data,
        template_path=str(Path(__file__).with_suffix(".md.j2")),
        name=type(model).__name__,
        config=config,
        method=json.dumps({"position": config.position, **(config.position_options or {})}),
        auto=auto,
        sentences=sentences,
        settings=settings,
        machine=provenance["machine"].get("cpu", "an unknown machine"),
        versions=", ".join(f"{name} {version}" for name, version in provenance["versions"].items()),
        original=original,
        **parts,
    )
    write_atomically(folder / "README.md", str(card))
