"""Sentences of reports say what numbers support, at the limits of every rule."""

from types import SimpleNamespace

import pytest

from whereformer.analysis.verdicts import (
    MIN_DOCUMENTS,
    PROBE_STEPS,
    choose_method,
    compare_solved,
    describe_layers,
    find_counting_tasks,
    warn_of_few_documents,
)


def solved(**methods):
    """Which of the tasks a, b, c and d each method solves."""
    return {name: {task: task in tasks for task in "abcd"} for name, tasks in methods.items()}


def test_a_task_that_needs_no_positions_counts_for_no_method():
    results = solved(none="d", rope="abcd", tisa="ad", alibi="d")
    assert find_counting_tasks(results) == ["a", "b", "c"]
    sentence = compare_solved(results, 16, PROBE_STEPS, trained=True)
    assert sentence == "rope solves 3 of 3 tasks that need positions at 16 symbols."
    assert find_counting_tasks(solved(rope="d")) == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("results", "steps", "trained", "sentence"),
    [
        (solved(rope="ab", tisa="a"), PROBE_STEPS, True, "rope solves 2 of 4 {}, the most."),
        (solved(rope="ab", tisa="ab"), PROBE_STEPS, True, "rope and tisa solve 2 of 4 {}."),
        (solved(rope="", tisa=""), PROBE_STEPS, False, "No method solves a task that needs positions at 16 symbols."),
        # Fewer steps show which tasks are learned, and not which cannot be.
        (
            solved(rope="ab", tisa="a"),
            PROBE_STEPS - 1,
            True,
            f"{PROBE_STEPS - 1} steps are too few to compare methods; so far, rope solves 2 of 4 {{}}. Train for "
            f"{PROBE_STEPS} steps or more.",
        ),
        (
            solved(rope="", tisa=""),
            100,
            True,
            f"100 steps are too few to compare methods. Train for {PROBE_STEPS} steps or more.",
        ),
        (solved(rope="abcd", tisa="abcd"), 100, True, "rope and tisa solve 4 of 4 {}."),
        (solved(rope="ab", tisa="a"), 100, False, None),
        (solved(none="bcd", rope="abcd", tisa="bcd"), PROBE_STEPS, True, "rope solves the task a at 16 symbols."),
        # Nothing is left to compare.
        (solved(none="abcd", rope="abcd"), PROBE_STEPS, True, None),
        (solved(none="a"), PROBE_STEPS, True, None),
    ],
)
def test_the_most_tasks(results, steps, trained, sentence):
    expected = sentence and sentence.format("tasks that need positions at 16 symbols")
    assert compare_solved(results, 16, steps, trained=trained) == expected


def test_layers_that_are_left_out_have_a_reason():
    embedded = describe_layers([0], 6, embedded=True)
    assert embedded.startswith("Only layer 0 of 0 to 5 can be read: positions are in the embeddings, which")
    sentence = "Only layers 0 and 2 of 0 to 3 can be read: in the others, position does not act by itself."
    assert describe_layers([0, 2], 4, embedded=True) == sentence
    assert describe_layers(range(4), 4, embedded=False) == describe_layers([], 4, embedded=False) == ""


def test_few_documents_show_little():
    few = "3 documents are too few to conclude from: a random choice finds 33% of passages. With 160 documents"
    assert warn_of_few_documents(3, 16).startswith(few)
    assert warn_of_few_documents(MIN_DOCUMENTS - 1, 16)
    assert warn_of_few_documents(MIN_DOCUMENTS, 16) == ""


def gain(points, is_clear=False, position="rope", task="rte"):
    return SimpleNamespace(points=points, is_clear=is_clear), position, task, "accuracy"


@pytest.mark.parametrize(
    ("gains", "seeds", "sentence"),
    [
        ([], 1, "Fine-tuned; no method has a baseline. Name several methods, or add 0 to --kernels."),
        ([gain(0.0), gain(-1.0)], 3, "Keep the baseline: no position method gained over it."),
        (
            [gain(2.0)],
            1,
            "rope gained 2.0 points on the task rte (accuracy) with one seed, which may be chance. Use several seeds "
            "(--seeds 5).",
        ),
        (
            [gain(2.0)],
            3,
            "Keep the baseline: rope gained 2.0 points on the task rte (accuracy), but not with every seed.",
        ),
        (
            [gain(9.0), gain(2.0, True, "tisa"), gain(-1.0, False, "tisa", "cola")],
            3,
            "Take tisa: with every seed, it is better than the baseline, by 2.0 points on the task rte (accuracy); it "
            "is worse on cola (accuracy).",
        ),
    ],
)
def test_fine_tuning_says_what_to_take(gains, seeds, sentence):
    assert choose_method(gains, seeds) == sentence
