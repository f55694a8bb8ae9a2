"""Run command lines in several processes, as torchrun does, and look at what each process trained."""

import json
import os
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import multiprocessing

from whereformer.cli.main import main
from whereformer.lab import train as training


def recorded(command, file):
    """Run a command, and save the loss of each step and the trained parameters of each training that it does."""
    real, trained, losses = training.train, [], []

    def train(model, *arguments, **options):
        done = real(model, *arguments, **options)
        trained.append({name: weight.detach().clone() for name, weight in model.named_parameters()})
        losses.append(done.losses)
        return done

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(training, "train", train)
        main(command)
    file.with_suffix(".json").write_text(json.dumps(losses))
    save_file({f"{run}.{name}": x for run, weights in enumerate(trained) for name, x in weights.items()}, file)
    return load(file)


def load(file):
    """The losses, [training][step], and the parameters by name."""
    return json.loads(file.with_suffix(".json").read_text()), load_file(file)


def together(folder, commands, count=2):
    """Run commands one after another in ``count`` processes; return what each process recorded, [command][process]."""
    folder = Path(folder)
    # A process group can't use the port of the one before it at once.
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in commands]
        for sock in sockets:
            sock.bind(("localhost", 0))
        ports = [sock.getsockname()[1] for sock in sockets]
    multiprocessing.spawn(_process, (count, folder, commands, ports), nprocs=count)
    return [[load(folder / f"{number}-{rank}.safetensors") for rank in range(count)] for number in range(len(commands))]


def _process(rank, count, folder, commands, ports):
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count))
    os.environ.update(MASTER_ADDR="localhost", OMP_NUM_THREADS="1")
    for number, (command, port) in enumerate(zip(commands, ports, strict=True)):
        os.environ["MASTER_PORT"] = str(port)
        recorded(command, folder / f"{number}-{rank}.safetensors")
