"""``LogSums``: the logs of sums of exponentials, in two numbers a row, so that nothing is lost beside large scores."""

from __future__ import annotations

from typing import TypeAlias

from torch import Tensor

LogSums: TypeAlias = Tensor
"""(2, ...): the largest score of each row, and the log of its sum of exponentials after that is subtracted.

Beside a bias of 1e9, one float32 could not tell how many keys share a row's attention. A row that may not attend to
anything has -inf and 0. Only the second number has a gradient, which is that of both together.
"""
