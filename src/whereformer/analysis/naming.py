"""Names a head by what it looks for by position alone ("previous token", "local window"), by stated rules.

The rules are about *weights*: the softmax of what position adds to the scores, which is where the head would look if
all words were equal. Compared with uniform attention, position moves some of that weight, and the rules ask where to.
This question does not depend on the length, while the share of all weight that one offset gets falls with it.
"""

from __future__ import annotations

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


def name_heads(scores: Tensor) -> list[str]:
    """Name heads by their position scores, (heads, n, n); constants added to rows make no difference."""
    return [_name(own) for own in scores.double()]


def _name(scores: Tensor) -> str:
    n = scores.shape[-1]
    if n < 2:
        return POSITION_BLIND
    # Remove each row's constant, which the softmax does not see.
    found = diagonals(scores - scores.mean(-1, keepdim=True))
    half = max(1, n // 2)
    seen = diagonals(scores).mean[n - 1 - half : n + half]
    count = pairs(n).double()
    spread = float((count @ found.spread.square() / n**2).sqrt())
    if float(seen.max() - seen.min()) < BLIND and spread < BLIND:
        return POSITION_BLIND
    moved = diagonal_sums((scores.softmax(-1) - 1 / n).clamp(min=0))
    moved = moved / moved.sum()
    (share, second), (place, _) = moved.topk(2)
    offset = int(place) - (n - 1)
    names = {-1: PREVIOUS, 1: NEXT, 0: SAME}
    if offset in names and share >= PEAK and share >= AHEAD * second:
        return names[offset]
    folded = torch.stack((moved, count / n**2))
    near = folded[:, n - 1 :].clone()
    near[:, 1:] += folded[:, : n - 1].flip(-1)
    within = near.cumsum(-1)
    distance = int((within[0] < LOCAL).sum())
    if within[1, distance] <= WINDOW:
        return LOCAL_WINDOW
    return GLOBAL if diagonals(scores).explained >= CURVED else MIXED
