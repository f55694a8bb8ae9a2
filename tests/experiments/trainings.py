"""What tests of long trainings look at: weights, results without their time, and Ctrl-C."""

import os
import signal

import torch
from safetensors.torch import load_file

from whereformer.training.judged import JudgedTrainer


def weights(out):
    return load_file(out / "model" / "model.safetensors")


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def without_time(results):
    return {name: value for name, value in results.items() if name != "seconds"}


def interrupt_at(monkeypatch, step, times=1):
    """Ctrl-C in the middle of a step."""
    real = JudgedTrainer.training_step

    def training_step(self, *arguments):
        if self.state.global_step + 1 == step:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)
        return real(self, *arguments)

    monkeypatch.setattr(JudgedTrainer, "training_step", training_step)
