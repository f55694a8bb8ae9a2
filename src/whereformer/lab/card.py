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
from .report.report import Report

KINDS: dict[type[PreTrainedModel], tuple[str, str]] = {
    Encoder: ("feature-extraction", "AutoModel"),
    EncoderForMaskedLM: ("fill-mask", "AutoModelForMaskedLM"),
    EncoderForPreTraining: ("feature-extraction", "AutoModelForPreTraining"),
    Seq2SeqForConditionalGeneration: ("translation", "AutoModelForSeq2SeqLM"),
}
"""The Hub's name for the task of each saved class, and the class of transformers that loads it."""

TRAINED, CHANGED = (Path(__file__).with_name(f"{name}.md") for name in ("card", "changed"))
"""The texts, with names in braces for what differs."""
SENTENCES = """from sentence_transformers import SentenceTransformer

model = SentenceTransformer("path or id of this model")
vectors = model.encode(["some text"])"""
STATES = """from transformers import AutoModel

model = AutoModel.from_pretrained("path or id of this model")"""


def write_card(
    folder: Path,
    model: PreTrainedModel,
    parameters: int,
    text: Mapping[str, Any],
    scores: Mapping[str, float],
    settings: Mapping[str, Any],
    command: str,
    provenance: Mapping[str, Any],
) -> None:
    """Write README.md, a trained model's card, to its folder.

    Args:
        folder: the model's folder.
        model: the model.
        parameters: how many parameters were trained.
        text: facts about the text.
        scores: the last held-out scores.
        settings: what was chosen.
        command: the command that trained it, or empty.
        provenance: the machine and the versions.
    """
    task, auto = KINDS[type(model)]
    config, method = model.config, model.config.position
    _write(
        folder,
        TRAINED,
        ModelCardData(
            library_name="whereformer",
            pipeline_tag=task,
            tags=["transformers", "position", *method.replace("+", " ").split()],
            metrics=sorted(scores),
        ),
        provenance,
        name=type(model).__name__,
        method=method,
        parameters=parameters,
        position=_code(json.dumps({"position": method, **(config.position_options or {})})),
        kind=_code(config.model_type),
        auto=auto,
        more=', decoder_input_ids=tokenizer("start", return_tensors="pt").input_ids' if task == "translation" else "",
        data=_table(_facts(text)),
        scores=_table({name: round(score, 4) for name, score in scores.items()}),
        command=f"```sh\n{_plain(command)}\n```" if command else "The command is not known.",
        settings=_table({name: value for name, value in settings.items() if value is not None}),
    )


def write_changed_card(
    folder: Path,
    model: PreTrainedModel,
    original: str,
    settings: Mapping[str, Any],
    report: Report,
    provenance: Mapping[str, Any],
) -> None:
    """Write README.md, the card of a model that a recipe made of a pretrained one, to its folder.

    Args:
        folder: the model's folder. Where sentence-transformers loads it, the card says so.
        model: the model.
        original: the path or id of the pretrained one.
        settings: what was chosen.
        report: what came out.
        provenance: the machine and the versions.
    """
    sentences = (folder / LIST).exists()
    _write(
        folder,
        CHANGED,
        ModelCardData(
            library_name="sentence-transformers" if sentences else "whereformer",
            pipeline_tag="sentence-similarity" if sentences else "feature-extraction",
            tags=["whereformer", "transformers", "position"],
        ),
        provenance,
        name=type(model).__name__,
        method=model.config.position,
        original=_code(original),
        sentences=" ".join(map(_plain, report.sentences)),
        usage=SENTENCES if sentences else STATES,
        scores="\n\n".join(f"{sheet.title}:\n\n{chr(10).join(sheet.markdown())}" for sheet in report.sheets),
        settings=_table(_facts(settings)),
    )


def _write(folder: Path, text: Path, metadata: ModelCardData, provenance: Mapping[str, Any], **parts: Any) -> None:
    body = text.read_text(encoding="utf-8").format(
        **parts,
        machine=_code(provenance["machine"].get("cpu", "an unknown machine")),
        versions=", ".join(f"{name} {version}" for name, version in provenance["versions"].items()),
    )
    write_atomically(folder / "README.md", str(ModelCard(f"---\n{metadata.to_yaml()}\n---\n\n{body}")))


def _facts(facts: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return facts about a text in one level."""
    found: dict[str, Any] = {}
    for name, value in facts.items():
        inner = isinstance(value, Mapping)
        found |= _facts(value, f"{prefix}{name}: ") if inner else {f"{prefix}{name}": value}
    return found


def _table(rows: Mapping[str, Any]) -> str:
    """Return rows as a table in Markdown."""
    escaped = {name.replace("_", " "): _code(value).replace("|", r"\|") for name, value in rows.items()}
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in escaped.items())])


def _code(value: Any) -> str:
    """Return a value as code, whatever characters it has."""
    return f"`{_plain(str(value)).replace('`', chr(39))}`"


def _plain(text: str) -> str:
    """Return text in one line, without characters that end a block of code."""
    return " ".join(text.replace("```", "'''").split())
