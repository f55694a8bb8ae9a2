"""Independent runs in several processes: results, progress, errors and a stop."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from whereformer.errors import InputError
from whereformer.lab.jobs import number_of_jobs, spread, threads
from whereformer.lab.progress import Progress


class Listener(Progress):
    def __init__(self):
        self.steps = 0
        self.labels = set()

    def begin(self, label):
        self.labels.add(label)

    def step(self, steps=1, detail=""):
        self.steps += steps


def work(task, progress):
    progress.begin(f"task {task}")
    if task == "refused":
        raise InputError("task", "no")
    if task == "killed":
        os._exit(1)
    if task == "endless":
        while True:
            progress.step()
            time.sleep(0.01)
    progress.step(2)
    return task, os.getpid(), torch.get_num_threads()


@pytest.mark.parametrize("count", [1, 2])
def test_all_tasks_are_done_and_report_their_progress(count):
    listener = Listener()
    found = dict(spread(work, [1, 2, 3], count, listener))
    assert {task: result[0] for task, result in found.items()} == {1: 1, 2: 2, 3: 3}
    assert listener.steps == 6
    assert listener.labels == {"task 1", "task 2", "task 3"}
    assert (os.getpid() in {process for _, process, _ in found.values()}) == (count == 1)
    assert {threads for _, _, threads in found.values()} == {1}


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("refused", "task: no"),
        pytest.param("killed", "jobs: one of 2 processes ended unexpectedly", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_an_error_ends_the_other_tasks(task, message):
    with pytest.raises(InputError, match=message):
        list(spread(work, [task, "endless"], 2, Listener()))


@pytest.mark.slow
def test_finished_tasks_are_kept_when_the_caller_stops():
    tasks = spread(work, [1, "endless"], 2, Listener())
    assert next(tasks)[0] == 1
    with pytest.raises(KeyboardInterrupt):
        tasks.throw(KeyboardInterrupt)


def test_a_processor_does_one_run_at_a_time_by_default():
    assert number_of_jobs(None, torch.device("cpu")) == 1
    assert number_of_jobs(12, torch.device("cpu")) == 12


def test_threads_are_restored():
    before = torch.get_num_threads()

    def fail():
        with threads(before + 1):
            assert torch.get_num_threads() == before + 1
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert torch.get_num_threads() == before


SLEEPERS = """
import os, sys, time
from whereformer.lab.jobs import spread
from whereformer.lab.progress import Progress

def sleep(task, progress):
    print(os.getpid(), flush=True)
    time.sleep(60)

if __name__ == "__main__":
    list(spread(sleep, [1, 2], 2, Progress()))
"""


def alive(pid):
    try:
        # A process that has ended but is not yet waited for is a zombie.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")
def test_processes_end_with_the_one_that_started_them(tmp_path):
    script = tmp_path / "sleepers.py"
    script.write_text(SLEEPERS)
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as main:
        workers = [int(main.stdout.readline()) for _ in range(2)]
        main.kill()
        main.wait()
        for _ in range(200):
            if not any(map(alive, workers)):
                break
            time.sleep(0.05)
        assert not any(map(alive, workers))
