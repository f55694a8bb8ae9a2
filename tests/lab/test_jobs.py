"""Independent runs in several processes: results, progress, errors and a stop."""

import os
import time

import pytest
import torch

from whereformer.errors import InputError
from whereformer.lab.jobs import number_of_jobs, spread, threads, undisturbed
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


@pytest.mark.parametrize("jobs", [1, 2])
def test_all_tasks_are_done_and_report_their_progress(jobs):
    listener = Listener()
    found = dict(spread(work, [1, 2, 3], jobs, listener))
    assert {task: result[0] for task, result in found.items()} == {1: 1, 2: 2, 3: 3}
    assert listener.steps == 6
    assert listener.labels == {"task 1", "task 2", "task 3"}
    assert (os.getpid() in {process for _, process, _ in found.values()}) == (jobs == 1)
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


def test_a_processor_does_one_run_at_a_time_by_default_or_a_small_one_for_each_thread():
    processor = torch.device("cpu")
    for available, small in ((1, 1), (3, 3), (40, 8)):
        with threads(available):
            assert number_of_jobs(None, processor) == 1
            assert number_of_jobs(None, processor, small=True) == small
            assert number_of_jobs(12, processor) == number_of_jobs(12, processor, small=True) == 12
            assert undisturbed(12, processor) == min(12, available)


def test_threads_are_restored():
    before = torch.get_num_threads()

    def fail():
        with threads(before + 1):
            assert torch.get_num_threads() == before + 1
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert torch.get_num_threads() == before
