"""The answers of probes, against rules written with plain lists, and what can be guessed without positions."""

from collections import Counter, defaultdict
from itertools import permutations, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from whereformer.data.windows import IGNORED
from whereformer.recipes import probe
from whereformer.recipes.probe import CLS, DEEPEST, DEPTH, FIRST, MASK, OPEN, TASKS, VOCABULARY, Rows

HALVES = ("copy", "sort")


def match(row):
    """What followed the last earlier occurrence of each symbol, unless it is the symbol that asks."""
    answers = []
    for index, symbol in enumerate(row):
        matches = [earlier for earlier in range(index) if row[earlier] == symbol]
        answers.append(row[matches[-1] + 1] if matches and matches[-1] + 1 < index else None)
    return answers


def depths(row):
    return [DEPTH + min(DEEPEST, 2 * row[: index + 1].count(OPEN) - index - 1) for index in range(len(row))]


RULES = {
    "copy": lambda row: [None] * (len(row) // 2) + row[: len(row) // 2],
    "sort": lambda row: [None] * (len(row) // 2) + sorted(row[: len(row) // 2]),
    "previous": lambda row: [None, *row[:-1]],
    "reverse": lambda row: row[::-1],
    "match": match,
    "brackets": depths,
    "passkey": lambda row: [None] * (len(row) - 1) + [next(symbol for symbol in row if symbol >= FIRST + 8)],
}


def draw_rows(name, count, length, seed):
    """Rows without [CLS], as lists."""
    inputs, labels = TASKS[name].rows(count, length, seed)
    assert inputs.shape == labels.shape == (count, 1 + length)
    assert (inputs[:, 0] == CLS).all()
    assert (labels[:, 0] == IGNORED).all()
    return inputs[:, 1:].tolist(), labels[:, 1:].tolist()


def test_every_task_has_a_rule():
    assert RULES.keys() == TASKS.keys()


@pytest.mark.parametrize("name", TASKS)
@settings(max_examples=40)
@given(half=st.integers(4, 20), seed=st.integers(0, 2**62))
def test_answers_follow_the_rule(name, half, seed):
    inputs, labels = draw_rows(name, 5, 2 * half, seed)
    for row, answers in zip(inputs, labels, strict=True):
        expected = [IGNORED if answer is None else answer for answer in RULES[name](row)]
        assert answers == expected
        assert all(FIRST <= answer < VOCABULARY for answer in answers if answer != IGNORED)


@pytest.mark.parametrize("name", TASKS)
def test_the_shortest_rows_have_questions(name):
    _, labels = draw_rows(name, 32, TASKS[name].min_length, 0)
    assert any(answer != IGNORED for answers in labels for answer in answers)


@pytest.mark.parametrize("name", TASKS)
def test_the_seed_alone_decides_the_rows(name):
    assert draw_rows(name, 4, 16, 3) == draw_rows(name, 4, 16, 3)
    assert draw_rows(name, 4, 16, 3) != draw_rows(name, 4, 16, 4)


@pytest.mark.parametrize("name", TASKS)
def test_no_answer_is_in_the_token_that_asks(name):
    inputs, labels = draw_rows(name, 200, 16, 1)
    questions = [
        (row, i, answers[i])
        for row, answers in zip(inputs, labels, strict=True)
        for i in range(16)
        if answers[i] != IGNORED
    ]
    if name in (*HALVES, "passkey"):
        assert {row[i] for row, i, _ in questions} == {MASK}
    elif name == "match":
        assert all(row[i] != answer for row, i, answer in questions)
    elif name == "brackets":
        assert max(row[i] for row, i, _ in questions) < DEPTH
    else:  # another token there would have the same answer
        for row, i, answer in questions:
            assert RULES[name]([*row[:i], FIRST + (row[i] - FIRST + 1) % 16, *row[i + 1 :]])[i] == answer


def test_keys_are_no_noise():
    inputs, _ = draw_rows("passkey", 100, 16, 0)
    assert {sum(symbol >= FIRST + 8 for symbol in row) for row in inputs} == {1}


def test_brackets_never_close_what_is_not_open_and_stay_as_deep_in_longer_rows():
    shares = []
    for length in (16, 256):
        inputs, labels = draw_rows("brackets", 400, length, 0)
        assert min(2 * row[:index].count(OPEN) - index for row in inputs for index in range(length + 1)) == 0
        shares.append(sum(answers[-1] == DEPTH + DEEPEST for answers in labels) / 400)
    assert abs(shares[0] - shares[1]) < 0.1


EXAMPLES = {"_": MASK, ".": IGNORED, "(": OPEN, ")": OPEN + 1, "K": FIRST + 9}


@pytest.mark.parametrize("name", TASKS)
def test_the_examples_are_true(name):
    def ids(words, depth):
        if depth:
            return [DEPTH + int(word) for word in words.split()]
        return [EXAMPLES.get(word, FIRST + ord(word) - ord("a")) for word in words.split()]

    row, answers = (ids(words, name == "brackets" and words[0] != "(") for words in TASKS[name].example)
    assert [IGNORED if answer is None else answer for answer in RULES[name](row)] == answers


@pytest.mark.parametrize("name", [name for name in TASKS if name not in ("brackets", "passkey")])
@settings(max_examples=5)
@given(symbols=st.lists(st.integers(FIRST, FIRST + 3), min_size=6, max_size=6))
def test_nobody_who_does_not_know_positions_guesses_better(name, symbols):
    """All orders of the symbols are equally likely, so for each token that asks the most frequent answer is best."""
    orders = sorted(set(permutations(symbols)))
    rows = [[*order, *[MASK] * 6] if name in HALVES else [*order] for order in orders]
    answers = [RULES[name](row) for row in rows]
    by_token = defaultdict(Counter)
    for row, known in zip(rows, answers, strict=True):
        for token, answer in zip(row, known, strict=True):
            if answer is not None:
                by_token[token][answer] += 1
    best = sum(max(counts.values()) for counts in by_token.values())
    labels = torch.tensor([[IGNORED if answer is None else answer for answer in known] for known in answers])
    guess = TASKS[name].guess(torch.tensor(rows), labels)
    assert int((guess == labels).sum()) == best


def test_the_depth_that_is_guessed_without_positions_is_the_most_likely():
    chances = defaultdict(Counter)  # by what is known without positions
    for row in product((True, False), repeat=8):
        chance, depth, answers = 1.0, 0, []
        for opens in row:
            chance *= (1.0 if opens else 0.0) if depth == 0 else probe.OPENING if opens else 1 - probe.OPENING
            depth += 1 if opens else -1
            answers.append(min(depth, DEEPEST))
        for opens, answer in zip(row, answers, strict=True):
            chances[opens, sum(row)][answer] += chance
    best = sum(max(counts.values()) for counts in chances.values()) / 8
    inputs, labels = TASKS["brackets"].draw(20_000, 8, torch.Generator().manual_seed(0))
    right = (TASKS["brackets"].guess(inputs, labels) == labels).double().mean(1)
    assert float(right.mean()) == pytest.approx(best, abs=float(4 * right.std() / 20_000**0.5))


def test_the_key_needs_no_guess():
    assert Rows.of("passkey", 16).guess == 1.0


def test_guesses_by_numbers():
    # The most common of 8 symbols out of 16 has 2.06 of them on average (counted over many rows).
    assert Rows.of("copy", 16).guess == pytest.approx(2.06 / 8, abs=0.015)
    assert Rows.of("copy", 16).guess == Rows.of("sort", 16).guess
    assert Rows.of("previous", 16).guess < Rows.of("copy", 16).guess
    assert 0.4 < Rows.of("brackets", 16).guess < 0.6
