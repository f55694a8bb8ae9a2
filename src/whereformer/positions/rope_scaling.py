"""RoPE's frequencies, and the ways to scale them for texts longer than the training texts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, short_repr
from .base import check_value

_LENGTH = "original_max_position_embeddings"

_NUMBERS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": ...},
    "ntk": {"factor": ...},
    "yarn": {"factor": ..., _LENGTH: ..., "beta_slow": 1.0, "beta_fast": 32.0, "attention_factor": None},
    "llama3": {"factor": ..., _LENGTH: ..., "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {"short_factor": ..., "long_factor": ..., _LENGTH: ..., "factor": None, "attention_factor": None},
    "proportional": {"factor": 1.0, "partial_rotary_factor": 1.0},
}
"""The numbers of each type, with their defaults; `...` marks a number that is required."""


class Scaling:
    """How RoPE's frequencies differ from ``base ** (-2 m / rotary_dim)`` for pair m of features.

    Args:
        parameters: ``rope_type`` and the numbers of this type, with the names of transformers' ``rope_parameters``. If
            None, the type is "default". The types are:

            - "default": the frequencies are not scaled.
            - "linear": all are divided by ``factor``.
            - "ntk": the base grows so that the lowest frequency is divided by ``factor`` and the highest stays.
            - "yarn": frequencies with fewer than ``beta_slow`` (1) rotations in ``original_max_position_embeddings``
              tokens are divided by ``factor``; frequencies with more than ``beta_fast`` (32) rotations stay. Query and
              key are multiplied by ``attention_factor``, by default ``0.1 log(factor) + 1``.
            - "llama3": wavelengths above ``original_max_position_embeddings / low_freq_factor`` (1) are multiplied by
              ``factor``; wavelengths below ``original_max_position_embeddings / high_freq_factor`` (4) stay.
            - "longrope": the frequency of each pair is divided by the pair's number in ``long_factor``, or in
              ``short_factor`` if ``max_length`` is at most ``original_max_position_embeddings`` (L). Query and key are
              multiplied by ``attention_factor``, by default ``sqrt(1 + log(factor) / log(L))`` for a ``factor`` above
              1, which is ``max_length / L`` by default. (transformers chooses the list by the length of every text.
              This class, like engines that serve models, chooses it by the longest text, so that cached keys and
              packed documents are rotated alike.)
            - "proportional": only the first ``partial_rotary_factor`` (1) of the pairs are rotated, with their usual
              frequencies divided by ``factor`` (1).

            transformers' "dynamic" has different frequencies at every length, which cached keys and packed documents do
            not share. Use "ntk" with the factor of the longest text instead.
        rotary_dim: the number of rotated features.
        max_length: the length of the longest text, for "longrope".

    Raises:
        InputError: for an unknown type, an unknown or missing number, or a number out of range.
    """

    def __init__(self, parameters: Mapping[str, Any] | None, *, rotary_dim: int, max_length: int = 512) -> None:
        if parameters is not None and not isinstance(parameters, Mapping):
            expected = "a dictionary with rope_type and its numbers"
            raise InputError("scaling", f"expected {expected}, got {short_repr(parameters)}")
        numbers = dict({"rope_type": "default"} if parameters is None else parameters)
        self.type = numbers.pop("rope_type", None)
        if not isinstance(self.type, str) or self.type not in _NUMBERS:
            raise InputError("scaling", f"expected a rope_type of {', '.join(_NUMBERS)}, got {short_repr(self.type)}")
        self.rotary_dim, self.max_length = rotary_dim, max_length
        known = _NUMBERS[self.type]
        if unknown := [name for name in numbers if name not in known]:
            names = ", ".join(known) or "no numbers"
            raise InputError("scaling", f"{self.type!r} has no {short_repr(unknown[0])}; it has {names}")
        self.numbers = {
            name: default if numbers.get(name) is None else numbers[name] for name, default in known.items()
        }
        for name, value in self.numbers.items():
            self._check(name, value)
        if self.type == "ntk" and rotary_dim < 4:
            raise InputError("scaling", f"'ntk' needs a rotary_dim of at least 4, got {rotary_dim}")
        for low, high in (("beta_slow", "beta_fast"), ("low_freq_factor", "high_freq_factor")):
            if low in self.numbers and not self.numbers[low] < self.numbers[high]:
                values = f"{self.numbers[low]} and {self.numbers[high]}"
                raise InputError("scaling", f"expected {low} < {high}, got {values}")

    def _check(self, name: str, value: object) -> None:
        if value is ...:
            raise InputError("scaling", f"{self.type!r} needs {name}")
        if name in ("short_factor", "long_factor"):
            num_pairs = self.rotary_dim // 2
            if not (isinstance(value, list | tuple) and len(value) == num_pairs):
                expected = f"{name} as {num_pairs} numbers, one per pair"
                raise InputError("scaling", f"expected {expected}, got {short_repr(value)}")
            numbers = value
        else:
            numbers = [] if value is None else [value]
        minimum = {"factor": 1, _LENGTH: 2}.get(name, 0)
        maximum = 1 if name == "partial_rotary_factor" else math.inf
        for number in numbers:
            check_value(f"scaling: {name}", number, "float")
            if not (minimum <= number <= maximum and number > 0):
                expected = f"a positive number from {minimum} to {maximum}"
                raise InputError("scaling", f"{name}: expected {expected}, got {short_repr(number)}")

    def frequencies(self, base: float, device: torch.device) -> Tensor:
        """Return the angle of each pair per token, (rotary_dim / 2,) float64."""
        dim = self.rotary_dim
        if self.type == "ntk":
            base = base * self.numbers["factor"] ** (dim / (dim - 2))
        pair = torch.arange(dim // 2, dtype=torch.float64, device=device)
        frequencies = base ** (-2 * pair / dim)
        if self.type == "linear":
            return frequencies / self.numbers["factor"]
        if self.type == "yarn":
            return frequencies * self._yarn_multipliers(pair, base)
        if self.type == "llama3":
            return frequencies * self._llama3_multipliers(frequencies)
        if self.type == "longrope":
            is_longer = self.max_length > self.numbers[_LENGTH]
            divisors = self.numbers["long_factor" if is_longer else "short_factor"]
            return frequencies / torch.tensor(divisors, dtype=torch.float64, device=device)
        if self.type == "proportional":
            num_rotated = int(self.numbers["partial_rotary_factor"] * dim // 2)
            return frequencies / self.numbers["factor"] * (pair < num_rotated)
        return frequencies

    @property
    def attention_factor(self) -> float:
        """The factor on query and key."""
        if self.numbers.get("attention_factor") is not None:
            return float(self.numbers["attention_factor"])
        if self.type == "yarn":
            return 0.1 * math.log(self.numbers["factor"]) + 1
        if self.type == "longrope":
            length = self.numbers[_LENGTH]
            factor = self.max_length / length if self.numbers["factor"] is None else self.numbers["factor"]
            return math.sqrt(1 + math.log(max(factor, 1)) / math.log(length))
        return 1.0

    def _yarn_multipliers(self, pair: Tensor, base: float) -> Tensor:
        """Return the factor on each frequency: 1 for the first pairs, 1 / factor for the last, a line between them."""
        length, dim = self.numbers[_LENGTH], self.rotary_dim
        low, high = (
            dim * math.log(length / (2 * math.pi * self.numbers[rotations])) / (2 * math.log(base))
            for rotations in ("beta_fast", "beta_slow")
        )
        low, high = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
        if low == high:
            high += 0.001  # as in transformers
        ramp = ((pair - low) / (high - low)).clamp(0, 1)
        return ramp / self.numbers["factor"] + (1 - ramp)

    def _llama3_multipliers(self, frequencies: Tensor) -> Tensor:
        """Return the factor on each frequency: 1 for short waves, 1 / factor for long ones, a line between them."""
        low, high = self.numbers["low_freq_factor"], self.numbers["high_freq_factor"]
        rotations = self.numbers[_LENGTH] * frequencies / (2 * math.pi)
        ramp = ((rotations - low) / (high - low)).clamp(0, 1)
        return (1 - ramp) / self.numbers["factor"] + ramp
