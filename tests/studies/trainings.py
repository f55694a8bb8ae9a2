"""What tests of long trainings look at: weights, results without their time, and Ctrl-C."""

import os
import signal

import pytest
import torch
from safetensors.torch import load_file

from whereformer.lab.training.long_run import LongTrainer

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


def without_time(results):
    return {name: value for name, value in results.items() if name not in ("seconds", "sha256")}


def interrupt_at(step, run, times=1):
    """Run a training, with Ctrl-C in the middle of a step; the command has to end as one that was interrupted."""
    real = LongTrainer.training_step

    def training_step(self, *arguments):
        if self.state.global_step + 1 == step:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)
        return real(self, *arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LongTrainer, "training_step", training_step)
        with pytest.raises(SystemExit) as stop:
            run()
    assert stop.value.code == 130
