"""Names a head by what it looks for by position alone ("previous token", "local window"), by stated rules.

The rules are about *weights*: the softmax of what position adds to the scores, which is where the head would look if
all words were equal. Compared with uniform attention, position moves some of that weight, and the rules ask where to.
This question does not depend on the length, while the share of all weight that one offset gets falls with it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .toeplitz import diagonal_sums, diagonals, pairs

BLIND = 0.25
"""Scores that differ by no more than this change a weight by less than a third (e ** 0.25 = 1.28)."""
PEAK = 0.3
"""The share of the moved weight from which a single offset gives the head its name."""
AHEAD = 1.25
"""That share must also be this many times that of every other offset."""
LOCAL = 0.5
"""The share of the moved weight that must lie within a local window."""
WINDOW = 0.125
"""The largest share of all pairs that such a window may hold."""
CURVED = 0.5
"""The Toeplitzness from which a curve over offsets describes a head."""

PREVIOUS, NEXT, SAME = "previous token", "next token", "same token"
LOCAL_WINDOW, GLOBAL, POSITION_BLIND, MIXED = "local window", "global", "position-blind", "mixed"

_MOST = f"of the weight that position moves goes to offset {{}}, at least {PEAK:.0%}, and far less to any other"
RULES = {
    POSITION_BLIND: f"scores by position alone hardly differ: the curve by less than {BLIND} over half the length, and "
    f"the scores from the curve by less than {BLIND} (root mean square)",
    PREVIOUS: "most " + _MOST.format("-1"),
    NEXT: "most " + _MOST.format("+1"),
    SAME: "most " + _MOST.format("0"),
    LOCAL_WINDOW: f"{LOCAL:.0%} of the weight that position moves goes to a distance within which at most "
    f"{WINDOW:.1%} of all pairs are",
    GLOBAL: f"none of these, and the curve over offsets explains at least {CURVED:.0%} of the scores",
    MIXED: "none of these: places in the text matter more than distances",
}
"""The names in the order in which their rules are tried."""


class Name(NamedTuple):
    """A head's name, and the numbers that decided it."""

    name: str
    reason: str


def name_heads(scores: Tensor) -> list[Name]:
    """Name heads by their position scores, (heads, n, n); constants added to rows make no difference."""
    return [_name(own) for own in scores.double()]


def _name(scores: Tensor) -> Name:
    n = scores.shape[-1]
    if n < 2:
        return Name(POSITION_BLIND, "there is only one position")
    # Remove each row's constant, which the softmax does not see.
    found = diagonals(scores - scores.mean(-1, keepdim=True))
    half = max(1, n // 2)
    seen = diagonals(scores).mean[n - 1 - half : n + half]
    count = pairs(n).double()
    differ = float(seen.max() - seen.min())
    spread = float((count @ found.spread.square() / n**2).sqrt())
    sizes = f"the curve spans {differ:.2f}, and scores differ from it by {spread:.2f}"
    if differ < BLIND and spread < BLIND:
        return Name(POSITION_BLIND, sizes)
    weights = scores.softmax(-1)
    moved = diagonal_sums((weights - 1 / n).clamp(min=0))
    total = float(moved.sum()) / n
    moved = moved / moved.sum()
    (share, second), (place, _) = moved.topk(2)
    offset = int(place) - (n - 1)
    peak = f"position moves {total:.0%} of the weight, and {float(share):.0%} of that to offset {offset:+d}"
    names = {-1: PREVIOUS, 1: NEXT, 0: SAME}
    if offset in names and share >= PEAK and share >= AHEAD * second:
        return Name(names[offset], peak)
    folded = torch.stack((moved, count / n**2))
    near = folded[:, n - 1 :].clone()
    near[:, 1:] += folded[:, : n - 1].flip(-1)
    within = near.cumsum(-1)
    distance = int((within[0] < LOCAL).sum())
    held = float(within[1, distance])
    window = f"half of that to at most {distance} tokens away, where {held:.0%} of all pairs are"
    if held <= WINDOW:
        return Name(LOCAL_WINDOW, f"{peak}, {window}")
    curved = f"the curve explains {float(diagonals(scores).explained):.0%} of the scores"
    name = GLOBAL if diagonals(scores).explained >= CURVED else MIXED
    return Name(name, f"{curved}; position moves {total:.0%} of the weight, {window}; {sizes}")
