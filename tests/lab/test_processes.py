"""Training in two processes that use gloo: each step is the one that one process takes, up to rounding."""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.every import EVERY
from tests.failing import fails
from tests.processes import recorded, together
from tests.recipes.conftest import text  # noqa: F401 - a fixture
from tests.recipes.trainings import TINY_ENCODER, same, weights
from whereformer import ranks
from whereformer.cli.exit_codes import exit_on_error
from whereformer.cli.main import main
from whereformer.lab.run import read_records
from whereformer.positions import position_names

ENCODER = ["--device=cpu", *TINY_ENCODER, "--steps=4", "--every=2", "--learning-rate=0.01"]
ELECTRA = ["--objective=electra", "--num-heads=4"]

ENCODERS = {
    "encoder": ["--accumulate=2"],
    "hidden masks": ["--hide-masked", "--position=rope"],
    "funnel": ["--blocks=1-1", "--position=transformer_xl"],
    "truncating funnel": ["--blocks=1-1-1", "--accumulate=2"],
    "electra": [*ELECTRA, "--accumulate=2"],
    "electra funnel": [*ELECTRA, "--blocks=1-1"],
    "bfloat16": ["--dtype=bfloat16", "--accumulate=2"],
}
USUAL_ENCODERS = ("encoder", "electra funnel", "bfloat16")
USUAL_METHODS = ("floater", "tupe")
"""They have parameters that several layers use, and solve an equation or add factors."""


def check(alone, processes, atol):
    """Compare the losses and parameters of two processes with those of one; processes have the same to the bit."""
    (losses, weights), first, second = alone, *processes
    assert first[0] == second[0]
    assert first[1].keys() == second[1].keys() == weights.keys()
    for name, weight in first[1].items():
        assert torch.equal(weight, second[1][name]), name
    assert len(losses) == len(first[0])
    for actual, expected in zip(first[0], losses, strict=True):
        assert len(expected) > 1
        torch.testing.assert_close(actual, expected, rtol=2e-7, atol=atol)


def results(folder):
    """The values of a run's records, by their names."""
    return {name: record["value"] for name, record in read_records(folder / "records.jsonl")[1].items()}


def compared(folder, commands):
    """Run commands, by name, alone and in two processes; return the folders and what was recorded."""
    outs = {name: (folder / f"{name}-alone", folder / f"{name}-two") for name in commands}
    alone = {
        name: recorded([*command, "--out", str(outs[name][0])], folder / f"{name}.safetensors")
        for name, command in commands.items()
    }
    both = together(folder, [[*command, "--out", str(outs[name][1])] for name, command in commands.items()])
    return {
        name: (alone[name], processes, [results(out) for out in outs[name]])
        for name, processes in zip(commands, both, strict=True)
    }


# Each of these tests starts its processes once, since their imports take most of the time.


@pytest.mark.slow
def test_every_training_takes_the_steps_of_one_process(text, tmp_path, subtests):  # noqa: F811
    encoder = ["pretrain", "--data", text, *ENCODER]
    commands = {
        **{name: [*encoder, *flags] for name, flags in ENCODERS.items() if EVERY or name in USUAL_ENCODERS},
        **{
            name: [*encoder, "--steps=2", f"--position={name}"]
            for name in (position_names() if EVERY else USUAL_METHODS)
        },
    }
    for name, (alone, processes, (expected, actual)) in compared(tmp_path, commands).items():
        with subtests.test(name):
            # bfloat16 rounds each batch's gradients, and the batches are others.
            check(alone, processes, atol=5e-3 if name == "bfloat16" else 2e-6)
            scores = (result['["train"]']["scores"] for result in (actual, expected))
            for (_, score), (_, expected_score) in zip(*scores, strict=True):
                assert score == pytest.approx(expected_score, abs=5e-3 if name == "bfloat16" else 1.1e-4)


def test_a_batch_that_cannot_be_divided_is_refused(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    line = fails(capsys, "pretrain", "--batch-size=8", "--out", str(tmp_path))
    assert line == "whereformer: --batch-size: expected a multiple of 3, the number of processes, got 8"
    for command in (["finetune", "--model=none", "--task=cola"], ["positions"]):
        line = fails(capsys, *command)
        assert line.startswith("whereformer: this command runs in one process, got 3; start it without a launcher")


def test_only_one_process_of_a_machine_says_what_is_wrong(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as stop:
        main(["pretrain", "--batch-size=7"])
    assert stop.value.code == 2
    assert capsys.readouterr() == ("", "")


AT_STEP_3 = """
import os, signal
from whereformer.__main__ import main
from whereformer.errors import InputError
from whereformer.lab.train import _State

real, taken = _State.step, []

def step(self, *arguments):
    taken.append(0)
    if len(taken) >= 3 and os.environ["RANK"] == "1":
        {happens}
    return real(self, *arguments)

_State.step = step
main()
"""


TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node=2"]
# "GPU" only means that it starts as many processes as it is told to.
ACCELERATE = ["accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1"]
ACCELERATE += ["--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0"]


def launched(script, *arguments, launcher=TORCHRUN):
    """Run a command in two processes."""
    launcher = [sys.executable, "-m", *launcher]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [*launcher, *script, *arguments], capture_output=True, text=True, check=False, env=environment, timeout=300
    )


@pytest.mark.slow
def test_a_killed_process_ends_the_job_which_continues_with_any_number_of_processes(text, tmp_path):  # noqa: F811
    options = ["pretrain", "--data", text, *ENCODER, "--dropout=0.1", "--out"]
    script = tmp_path / "killed.py"
    script.write_text(AT_STEP_3.format(happens="os.kill(os.getpid(), signal.SIGKILL)"))
    command = [str(Path(sys.executable).with_name("whereformer"))]
    complete = launched(command, *options, str(tmp_path / "whole"))
    assert complete.returncode == 0, complete.stderr
    assert complete.stdout.count("wrote ") == 1
    assert launched([str(script)], *options, str(tmp_path / "two")).returncode != 0
    assert [path.name for path in (tmp_path / "two" / "checkpoints").iterdir()] == ["checkpoint-2"]
    shutil.copytree(tmp_path / "two", tmp_path / "one")
    continued = launched(command, *options, str(tmp_path / "two"), launcher=ACCELERATE)
    assert "continuing after step 2 of 4" in continued.stdout
    assert same(weights(tmp_path / "two"), weights(tmp_path / "whole"))
    main([*options, str(tmp_path / "one")])
    assert len(results(tmp_path / "one")['["train"]']["losses"]) == 4


def test_the_error_of_a_lost_connection_is_a_line(monkeypatch, capsys):
    monkeypatch.setattr(ranks, "_joined", {"group": None})
    with pytest.raises(SystemExit) as stop, exit_on_error():
        raise RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:21726: Connection reset by peer")
    assert stop.value.code == 2
    assert (
        capsys.readouterr().err == "whereformer: another process of this run exited; run the same command to continue\n"
    )


@pytest.mark.slow
def test_an_error_of_one_process_ends_all(text, tmp_path):  # noqa: F811
    script = tmp_path / "refused.py"
    script.write_text(AT_STEP_3.format(happens='raise InputError("steps", "too many for this process")'))
    ended = launched([str(script)], "pretrain", "--data", text, *ENCODER, "--out", str(tmp_path / "out"))
    assert ended.returncode != 0
    lines = [line for line in ended.stderr.splitlines() if "whereformer:" in line]
    assert "whereformer: --steps: too many for this process" in lines
    # torchrun ends with one of its own.
    assert ended.stderr.count("Traceback") == 1


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs glibc")
def test_a_process_of_several_keeps_the_memory_that_a_step_frees():
    """A step's tensors of 1 MB each, 30 MB together, take their pages from the system once."""
    code = """
import resource, torch
from whereformer.lab.run import _keep_freed_memory

_keep_freed_memory()
faults = []
for step in range(20):
    tensors = [torch.ones(2**18) for _ in range(30)]
    del tensors
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(faults[-1] - faults[1])
"""
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(printed) < 2000
