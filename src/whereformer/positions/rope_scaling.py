"""RoPE's frequencies, and the ways to scale them for text longer than a model was trained on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, shown
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
"""The numbers of each way, with their defaults; those without one have to be given."""


class Scaling:
    """How RoPE's frequencies differ from ``base ** (-2 m / rotary_dim)`` for pair m of features.

    Args:
        given: ``rope_type`` and the numbers of this type, with the names of transformers' ``rope_parameters``:

            - "default": the frequencies stay as they are.
            - "linear": all are divided by ``factor``.
            - "ntk": the base grows so that the lowest is divided by ``factor`` and the highest stays.
            - "yarn": those that turn fewer than ``beta_slow`` (1) times in ``original_max_position_embeddings`` tokens
              are divided by ``factor``, those that turn more than ``beta_fast`` (32) times stay. Query and key are
              multiplied by ``attention_factor``, by default ``0.1 log(factor) + 1``.
            - "llama3": wavelengths above ``original_max_position_embeddings / low_freq_factor`` (1) are multiplied by
              ``factor``, those below ``original_max_position_embeddings / high_freq_factor`` (4) stay.
            - "longrope": each is divided by its own number in ``long_factor``, or in ``short_factor`` if ``max_length``
              is at most ``original_max_position_embeddings`` (L). Query and key are multiplied by ``attention_factor``,
              by default ``sqrt(1 + log(factor) / log(L))`` for a ``factor`` above 1, which is ``max_length / L`` by
              default. (transformers chooses the list anew for every text, by its length. Here, as in engines that serve
              models, the longest text decides for all, so that cached keys and packed documents turn alike.)
            - "proportional": only the first ``partial_rotary_factor`` (1) of the pairs turn, at the frequencies that
              they have without it, divided by ``factor`` (1).

            transformers' "dynamic" has other frequencies at every length, which cached keys and packed documents do not
            share; "ntk" with the factor of the longest text takes its place.
        rotary_dim: the features that turn.
        max_length: the length of the longest text, for "longrope".

    Raises:
        InputError: for an unknown type, an unknown or missing number, or one out of range.
    """

    def __init__(self, given: Mapping[str, Any] | None, *, rotary_dim: int, max_length: int = 512) -> None:
        if given is not None and not isinstance(given, Mapping):
            raise InputError("scaling", f"expected numbers by their names, such as rope_type, got {shown(given)}")
        numbers = dict({"rope_type": "default"} if given is None else given)
        self.type = numbers.pop("rope_type", None)
        if not isinstance(self.type, str) or self.type not in _NUMBERS:
            raise InputError("scaling", f"expected a rope_type of {', '.join(_NUMBERS)}, got {shown(self.type)}")
        self.rotary_dim, self.max_length = rotary_dim, max_length
        known = _NUMBERS[self.type]
        if unknown := [name for name in numbers if name not in known]:
            names = ", ".join(known) or "no numbers"
            raise InputError("scaling", f"{self.type!r} has no {shown(unknown[0])}; it has {names}")
        self.numbers = {name: usual if numbers.get(name) is None else numbers[name] for name, usual in known.items()}
        for name, value in self.numbers.items():
            self._check(name, value)
        if self.type == "ntk" and rotary_dim < 4:
            raise InputError("scaling", f"'ntk' needs a rotary_dim of at least 4, got {rotary_dim}")
        for low, high in (("beta_slow", "beta_fast"), ("low_freq_factor", "high_freq_factor")):
            if low in self.numbers and not self.numbers[low] < self.numbers[high]:
                got = f"{self.numbers[low]} and {self.numbers[high]}"
                raise InputError("scaling", f"expected {low} < {high}, got {got}")

    def _check(self, name: str, value: Any) -> None:
        if value is ...:
            raise InputError("scaling", f"{self.type!r} needs {name}")
        pairs, lists = self.rotary_dim // 2, name in ("short_factor", "long_factor")
        if lists and not (isinstance(value, list | tuple) and len(value) == pairs):
            raise InputError("scaling", f"expected {name} as {pairs} numbers, one per pair, got {shown(value)}")
        least = {"factor": 1, _LENGTH: 2}.get(name, 0)
        most = 1 if name == "partial_rotary_factor" else math.inf
        for number in value if lists else () if value is None else (value,):
            check_value(f"scaling: {name}", number, "float")
            if not (least <= number <= most and number > 0):
                expected = f"a positive number from {least} to {most}"
                raise InputError("scaling", f"{name}: expected {expected}, got {shown(number)}")

    def frequencies(self, base: float, device: torch.device) -> Tensor:
        """Return the angle of each pair per token, (rotary_dim / 2,) float64."""
        dim = self.rotary_dim
        if self.type == "ntk":
            base = base * self.numbers["factor"] ** (dim / (dim - 2))
        pair = torch.arange(dim // 2, dtype=torch.float64, device=device)
        plain = base ** (-2 * pair / dim)
        if self.type == "linear":
            return plain / self.numbers["factor"]
        if self.type == "yarn":
            return plain * self._kept_by_yarn(pair, base)
        if self.type == "llama3":
            return plain * self._kept_by_llama3(plain)
        if self.type == "longrope":
            longer = self.max_length > self.numbers[_LENGTH]
            factors = self.numbers["long_factor" if longer else "short_factor"]
            return plain / torch.tensor(factors, dtype=torch.float64, device=device)
        if self.type == "proportional":
            turning = int(self.numbers["partial_rotary_factor"] * dim // 2)
            return plain / self.numbers["factor"] * (pair < turning)
        return plain

    @property
    def attention_factor(self) -> float:
        """What query and key are multiplied by."""
        if self.numbers.get("attention_factor") is not None:
            return float(self.numbers["attention_factor"])
        if self.type == "yarn":
            return 0.1 * math.log(self.numbers["factor"]) + 1
        if self.type == "longrope":
            length = self.numbers[_LENGTH]
            factor = self.max_length / length if self.numbers["factor"] is None else self.numbers["factor"]
            return math.sqrt(1 + math.log(max(factor, 1)) / math.log(length))
        return 1.0

    def _kept_by_yarn(self, pair: Tensor, base: float) -> Tensor:
        """Return what remains of each frequency: 1 for the first pairs, 1 / factor for the last, a line between."""
        length, dim = self.numbers[_LENGTH], self.rotary_dim
        low, high = (
            dim * math.log(length / (2 * math.pi * self.numbers[turns])) / (2 * math.log(base))
            for turns in ("beta_fast", "beta_slow")
        )
        low, high = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
        if low == high:
            high += 0.001  # as in transformers
        scaled = ((pair - low) / (high - low)).clamp(0, 1)
        return scaled / self.numbers["factor"] + (1 - scaled)

    def _kept_by_llama3(self, frequencies: Tensor) -> Tensor:
        """Return what remains of each frequency: 1 for short waves, 1 / factor for long ones, a line between."""
        low, high = self.numbers["low_freq_factor"], self.numbers["high_freq_factor"]
        turns = self.numbers[_LENGTH] * frequencies / (2 * math.pi)
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 - kept) / self.numbers["factor"] + kept
