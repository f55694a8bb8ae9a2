"""What tests of long trainings look at: weights and records."""

import pytest
import torch
from safetensors.torch import load_file

from whereformer.lab.run import read_records

TINY_ENCODER = [
    "--length=16",
    "--hidden-size=16",
    "--num-heads=2",
    "--blocks=1",
    "--vocab-size=64",
    "--batch-size=4",
    "--steps=6",
]
"""Options of an encoder that trains in a second."""


def weights(out):
    return load_file(out / "model" / "model.safetensors")


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def results_of(out):
    """What a training has recorded."""
    value = read_records(out / "records.jsonl")[1]['["train"]']["value"]
    return {**value, **value["about"]}


class StopError(Exception):
    pass


def crash():
    raise StopError


def stop_at(batch, step, what, run):
    """Run a training that does something while the method ``batch`` makes the batch of a step; the command ends."""

    def patched(self, number):
        if number + 1 == step:
            what()
        return batch(self, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{batch.__module__}.{batch.__qualname__}", patched)
        with pytest.raises((SystemExit, StopError)) as stop:
            run()
    return stop.value
