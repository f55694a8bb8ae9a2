"""Table 1 of the TISA paper, measured: what each position method of a comparison can do."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from torch import Tensor

from ...analysis import properties as measure
from ...data import corpus
from ...data.masks import HeldOut
from ...data.tokenizers import token_stream
from ...errors import InputError
from ...files import write_atomically
from ...models import EncoderForMaskedLM
from ...positions import build_position
from ...runs.progress import Progress
from ...runs.provenance import provenance
from ...runs.results import read_results, refuse_other_settings
from ...training.trainer import quiet_transformers
from ..compare import run as compare
from . import summary as ticks

FORMAT = "properties 1"
DEFAULT_STEPS = 800
QUICK_STEPS = 200
WINDOWS = 16
"""Windows of held-out text that a trained model is looked at with."""


@dataclass(frozen=True)
class Comparison:
    """A finished comparison: where it is, its ``results.json``, and the text that its models were judged on.

    Args:
        folder: holds ``models/`` as well.
        data: the content of ``results.json``.
        held_out: masked tokens of text that they were not trained on.
    """

    folder: Path
    data: dict[str, Any]
    held_out: HeldOut

    @property
    def sizes(self) -> compare.Sizes:
        """What all its runs have in common."""
        return sizes_of(self.data["settings"])

    @property
    def positions(self) -> list[str]:
        """The methods that can be judged: all but the baseline."""
        return [name for name in self.data["runs"] if name != compare.BASELINE]

    def seed(self, position: str) -> int:
        """The seed whose model is looked at: the first."""
        return min(map(int, self.data["runs"][position]))

    def model(self, position: str) -> EncoderForMaskedLM:
        """The trained model of a method.

        Raises:
            InputError: if the comparison did not keep it.
        """
        folder = compare.model_folder(self.folder, position, self.seed(position))
        if not (folder / "config.json").is_file():
            raise InputError(
                "results",
                f"{self.folder} has no trained model of {position!r} ({folder} is missing); "
                "run whereformer compare again, which keeps them",
            )
        with quiet_transformers():
            model: EncoderForMaskedLM = EncoderForMaskedLM.from_pretrained(folder)
        return model.eval()


def sizes_of(settings: dict[str, Any]) -> compare.Sizes:
    """The sizes among a comparison's settings."""
    return compare.Sizes(**{each.name: settings[each.name] for each in fields(compare.Sizes)})


def load_comparison(folder: Path, positions: Sequence[str] | None) -> tuple[Comparison, list[str]]:
    """A folder that ``whereformer compare`` wrote, and which of its methods are to be judged.

    Args:
        folder: what the command's ``--out`` was.
        positions: the methods; all but the baseline if None.
    Raises:
        InputError: if it is something else, of a funnel, lacks a method, or its text is not what it was.
    """
    path = folder / "results.json"
    try:
        data = read_results(path, compare.FORMAT)
        if data is None:
            raise InputError("results", "no results")
        sizes = sizes_of(data["settings"])
        facts = data["text"]
        given, column = facts["data"], facts["column"]
    except (InputError, KeyError, TypeError):
        raise InputError("results", f"{path} is not there, or no result of whereformer compare") from None
    check_one_block(sizes, "results")
    comparison = Comparison(folder, data, _held_out(folder, data, given, column))
    names = comparison.positions if positions is None else list(positions)
    for name in names:
        if name not in comparison.positions:
            raise InputError(
                "positions", f"{folder} has no {name!r} to judge; it has {', '.join(comparison.positions) or 'none'}"
            )
    if not names:
        raise InputError("results", f"{folder} has no method besides the baseline")
    return comparison, names


def check_one_block(sizes: compare.Sizes, field: str) -> None:
    """Raise if the encoder pools.

    Raises:
        InputError: naming the field.
    """
    if "-" in sizes.blocks:
        raise InputError(field, f"expected encoders of one block, got blocks {sizes.blocks!r}")


def _held_out(folder: Path, data: dict[str, Any], given: Sequence[str], column: str | None) -> HeldOut:
    """The held-out text of a comparison, read again."""
    try:
        documents = corpus.documents_of(given, column)
    except InputError as error:
        raise InputError("results", f"the text of {folder} can't be read again ({error})") from None
    if corpus.fingerprint(documents) != data["settings"]["text"]:
        raise InputError("results", f"the text of {folder} is not what it was; run whereformer compare again")
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise InputError("results", f"cannot read {folder / 'tokenizer.json'} ({error})") from None
    stream = token_stream(tokenizer, corpus.split_documents(documents)[1])
    return HeldOut(stream, compare.HELD_OUT_RATE, tokenizer.get_vocab_size())


class Results:
    """``results.json`` of an output folder: what is measured, kept after every method, and the table.

    Args:
        out: the folder.
        comparison: whose models are looked at.
    Raises:
        InputError: if the folder holds something else, or what was measured of another comparison.
    """

    def __init__(self, out: Path, comparison: Comparison) -> None:
        self.path = out / "results.json"
        self.comparison = comparison
        settings = comparison.data["settings"]
        self.data: dict[str, Any] = {"format": FORMAT, "settings": settings, "runs": {}}
        found = read_results(self.path, FORMAT)
        if found is not None:
            refuse_other_settings(out, found["settings"], settings)
            self.data = found
        self.data["text"] = {name: value for name, value in comparison.data["text"].items() if name != "data"}
        self.data |= provenance()
        self.data["thresholds"] = ticks.THRESHOLDS

    def get(self, position: str) -> dict[str, Any] | None:
        """What is measured of a method, if it was of the model that would be looked at now."""
        run: dict[str, Any] | None = self.data["runs"].get(position)
        return run if run is not None and run["seed"] == self.comparison.seed(position) else None

    def add(self, position: str, run: dict[str, Any]) -> None:
        """Keep what is measured of a method."""
        self.data["runs"][position] = run
        self.save()

    def finish(self, positions: Sequence[str]) -> list[ticks.Row]:
        """Put losses, ticks and reasons of these methods beside what is measured; the table's rows."""
        self.data["losses"] = {
            name: {seed: run["scores"] for seed, run in by_seed.items()}
            for name, by_seed in self.comparison.data["runs"].items()
            if name == compare.BASELINE or name in positions
        }
        rows = ticks.rows(self.data, positions)
        self.data["table"] = {row.position: {name: asdict(tick) for name, tick in row.ticks.items()} for row in rows}
        self.save()
        return rows

    def save(self) -> None:
        write_atomically(self.path, json.dumps(self.data, allow_nan=False))


def run(results: Results, positions: Sequence[str], progress: Progress) -> None:
    """Measure every method that ``results`` lacks; all goes there."""
    missing = [name for name in positions if results.get(name) is None]
    progress.start(len(missing))
    for name in missing:
        progress.begin(f"measuring {name}")
        results.add(name, measure_method(results.comparison, name))
        progress.step()


def measure_method(comparison: Comparison, position: str) -> dict[str, Any]:
    """All that is measured of one method, as JSON has it."""
    sizes, seed = comparison.sizes, comparison.seed(position)
    trained = comparison.model(position)
    fresh = compare.build_model(sizes, position, trained.config.vocab_size, seed).eval()
    inputs, labels = _windows(comparison.held_out, sizes.length)

    def build(length: int) -> Any:
        return build_position(
            position,
            hidden_size=sizes.hidden_size,
            num_heads=sizes.num_heads,
            num_layers=trained.config.num_hidden_layers,
            max_length=length,
        )

    # Half the length, so that there is room to shift also where there is a last position.
    short = inputs[:, : sizes.length // 2]
    found: dict[str, Any] = {
        "reached": measure.reached_parameters(trained, inputs, labels),
        "growth": measure.parameter_growth(position),
        "shifted_fresh": measure.shift_change(fresh.encoder, short),
        "shifted_trained": measure.shift_change(trained.encoder, short),
        "curve": measure.curve_share(trained.encoder, inputs),
        "steps": measure.sequential_steps(build),
    }
    return {"seed": seed, **{name: _plain(asdict(part)) for name, part in found.items()}}


def _windows(held_out: HeldOut, length: int) -> tuple[Tensor, Tensor]:
    """Some whole windows of held-out text: input ids and labels, (batch, length) each."""
    inputs, labels, real = next(held_out.windows(length, WINDOWS * length))
    whole = real.all(-1)
    return inputs[whole], labels[whole]


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Numbers that JSON can hold: None for an infinite one."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()
    }
