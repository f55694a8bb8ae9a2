"""The tasks: rows of symbols drawn from a seed, with their exact answers and the best guess without positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ...data.masks import IGNORED

PAD, CLS, MASK = 0, 1, 2
FIRST = 3
"""The id of the first symbol."""
SYMBOLS = 16
VOCABULARY = FIRST + SYMBOLS

KEYS = 8
"""Of the symbols, the last ones are keys in passkey; the others are noise."""
OPEN, CLOSE, DEPTH = FIRST, FIRST + 1, FIRST + 2
"""The ids of brackets and of depth 0."""
DEEPEST = 4
"""Greater depths have the answer of this one."""
OPENING = 0.4
"""The probability that a bracket opens where both kinds may follow. Below 0.5, so that long rows are no deeper."""

Rows = tuple[Tensor, Tensor]
"""Input ids and labels, (rows, length) each; labels are IGNORED where nothing is asked."""
Draw = Callable[[int, int, torch.Generator], Rows]
"""Draws rows, given their number, their length and the source of randomness."""


@dataclass(frozen=True)
class Task:
    """A question about rows of symbols.

    Args:
        asks: what has to be predicted, in words.
        needs: what a model has to know about positions.
        example: an input and its answers, a word each; "_" is [MASK], and "." is where nothing is asked.
        draw: draws rows.
        guess: predicts every label as well as anyone can who does not know positions, (rows, length).
        shortest: the fewest symbols in a row.
    """

    asks: str
    needs: str
    example: tuple[str, str]
    draw: Draw
    guess: Callable[[Tensor, Tensor], Tensor]
    shortest: int = 4

    def rows(self, count: int, length: int, seed: int) -> Rows:
        """Draw rows that begin with [CLS], (count, 1 + length) ids and labels. Equal seeds give equal rows."""
        inputs, labels = self.draw(count, length, torch.Generator().manual_seed(seed))
        return functional.pad(inputs, (1, 0), value=CLS), functional.pad(labels, (1, 0), value=IGNORED)


def _symbols(count: int, length: int, generator: torch.Generator, kinds: int = SYMBOLS) -> Tensor:
    return torch.randint(FIRST, FIRST + kinds, (count, length), generator=generator)


def _masked_half(answers: Callable[[Tensor], Tensor]) -> Draw:
    """Draw rows whose second half is masked, and asked for: the answers to the first."""

    def draw(count: int, length: int, generator: torch.Generator) -> Rows:
        first = _symbols(count, length // 2, generator)
        inputs = torch.cat((first, torch.full_like(first, MASK)), 1)
        return inputs, torch.cat((torch.full_like(first, IGNORED), answers(first)), 1)

    return draw


def _previous(count: int, length: int, generator: torch.Generator) -> Rows:
    inputs = _symbols(count, length, generator)
    return inputs, functional.pad(inputs[:, :-1], (1, 0), value=IGNORED)


def _reverse(count: int, length: int, generator: torch.Generator) -> Rows:
    inputs = _symbols(count, length, generator)
    return inputs, inputs.flip(1)


def _match(count: int, length: int, generator: torch.Generator) -> Rows:
    inputs = _symbols(count, length, generator)
    labels = torch.full_like(inputs, IGNORED)
    follows = torch.full((count, VOCABULARY), IGNORED)  # what came after the last occurrence of each symbol
    for at in range(2, length):
        # The token before this one is known to follow its own left neighbor only from here on, so an answer is
        # never the token that asks.
        follows.scatter_(1, inputs[:, at - 2 : at - 1], inputs[:, at - 1 : at])
        labels[:, at] = follows.gather(1, inputs[:, at : at + 1])[:, 0]
    twice = inputs[:, 1:] == inputs[:, :-1]
    labels[:, 1:].masked_fill_(twice, IGNORED)
    return inputs, labels


def _brackets(count: int, length: int, generator: torch.Generator) -> Rows:
    opens = torch.rand(count, length, generator=generator) < OPENING
    depth = torch.zeros(count, dtype=torch.long)
    depths = []
    for at in range(length):
        opens[:, at] |= depth == 0
        depth = depth + torch.where(opens[:, at], 1, -1)
        depths.append(depth)
    return torch.where(opens, OPEN, CLOSE), DEPTH + torch.stack(depths, 1).clamp(max=DEEPEST)


def _passkey(count: int, length: int, generator: torch.Generator) -> Rows:
    inputs = _symbols(count, length, generator, SYMBOLS - KEYS)
    key = _symbols(count, 1, generator, KEYS) + SYMBOLS - KEYS
    inputs.scatter_(1, torch.randint(length - 1, (count, 1), generator=generator), key)
    inputs[:, -1] = MASK
    labels = torch.full_like(inputs, IGNORED)
    labels[:, -1:] = key
    return inputs, labels


def _most_common(inputs: Tensor, labels: Tensor) -> Tensor:
    """Guess the most common symbol of a row."""
    return _counts(inputs).argmax(-1, keepdim=True).expand_as(inputs)


def _most_common_other(inputs: Tensor, labels: Tensor) -> Tensor:
    """Guess the most common symbol among the other tokens of a row."""
    others = _counts(inputs)[:, None] - functional.one_hot(inputs, VOCABULARY)
    return others.argmax(-1)


def _most_common_other_symbol(inputs: Tensor, labels: Tensor) -> Tensor:
    """Guess the most common symbol of a row that is not the token's own."""
    own = functional.one_hot(inputs, VOCABULARY).bool()
    return _counts(inputs)[:, None].masked_fill(own, -1).argmax(-1)


def _most_common_depth(inputs: Tensor, labels: Tensor) -> Tensor:
    """Guess the depth that is the most common below an equal bracket in rows with as many opening ones.

    This is counted in the labels, so the guess is, if anything, too good.
    """
    length = inputs.shape[1]
    opens = (inputs == OPEN).sum(1, keepdim=True)
    known = 2 * opens + (inputs == OPEN)
    asked = labels != IGNORED
    cells = torch.bincount((known * VOCABULARY + labels)[asked], minlength=2 * (length + 1) * VOCABULARY)
    return cells.view(-1, VOCABULARY).argmax(1)[known]


def _the_key(inputs: Tensor, labels: Tensor) -> Tensor:
    """Return the key, which shows by itself."""
    return inputs.amax(1, keepdim=True).expand_as(inputs)


def _counts(inputs: Tensor) -> Tensor:
    """Return how often each symbol occurs in each row, (rows, VOCABULARY); other tokens count as never."""
    counts = torch.zeros(len(inputs), VOCABULARY, dtype=torch.long)
    counts.scatter_add_(1, inputs, torch.ones_like(inputs))
    counts[:, :FIRST] = -1
    return counts


TASKS = {
    "copy": Task(
        asks="The second half repeats the first. It is masked.",
        needs="relative offset, half the length",
        example=("d a c b _ _ _ _", ". . . . d a c b"),
        draw=_masked_half(lambda first: first),
        guess=_most_common,
    ),
    "previous": Task(
        asks="Which symbol is to the left of this one?",
        needs="relative offset, -1",
        example=("d a c b", ". d a c"),
        draw=_previous,
        guess=_most_common_other,
    ),
    "match": Task(
        asks="Which symbol followed the last earlier occurrence of this one?",
        needs="relative offset, -1, and order",
        example=("d a c d b d", ". . . a . b"),
        draw=_match,
        guess=_most_common_other_symbol,
        shortest=8,
    ),
    "reverse": Task(
        asks="Which symbol stands here if the row is read from its end?",
        needs="absolute position",
        example=("d a c b", "b c a d"),
        draw=_reverse,
        guess=_most_common_other,
    ),
    "sort": Task(
        asks="The second half is the first half in order. It is masked.",
        needs="absolute position",
        example=("d a c b _ _ _ _", ". . . . a b c d"),
        draw=_masked_half(lambda first: first.sort(1).values),
        guess=_most_common,
    ),
    "brackets": Task(
        asks=f"How many brackets are open here, counted up to {DEEPEST}?",
        needs="order only",
        example=("( ( ) ( ) )", "1 2 1 2 1 0"),
        draw=_brackets,
        guess=_most_common_depth,
    ),
    "passkey": Task(
        asks="One symbol is a key, and the others are noise. Which key is it?",
        needs="content only",
        example=("d a K b _", ". . . . K"),
        draw=_passkey,
        guess=_the_key,
    ),
}
"""The tasks by name, in the order of the table."""
