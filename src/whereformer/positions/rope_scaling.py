"""RoPE's frequencies, and the ways to scale them for text longer than a model was trained on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, shown
from .base import check_value

_NUMBERS: dict[str, tuple[tuple[str, ...], dict[str, float | None]]] = {
    "default": ((), {}),
    "linear": (("factor",), {}),
    "ntk": (("factor",), {}),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        {"attention_factor": None, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": None, "mscale_all_dim": None},
    ),
    "llama3": (
        ("factor", "original_max_position_embeddings"),
        {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ),
    "longrope": (
        ("short_factor", "long_factor", "original_max_position_embeddings"),
        {"factor": None, "attention_factor": None},
    ),
    "proportional": ((), {"factor": 1.0, "partial_rotary_factor": 1.0}),
}
"""The numbers that each way needs, and those that it may have, with their defaults."""


_LISTS = ("short_factor", "long_factor")
"""Numbers that come as lists, with one for each pair of features."""

_OPTIONS = {"rope_theta": "base", "partial_rotary_factor": "rotary_dim"}
"""What transformers says among these numbers, and RoPE's own options that say it here."""


class Scaling:
    """How RoPE's frequencies differ from ``base ** (-2 m / rotary_dim)`` for pair m of features.

    Args:
        given: ``rope_type`` and the numbers of this type, with the names of transformers' ``rope_parameters``:

            - "default": the frequencies stay as they are.
            - "linear": all are divided by ``factor``.
            - "ntk": the base grows so that the lowest is divided by ``factor`` and the highest stays.
            - "yarn": those that turn fewer than ``beta_slow`` (1) times in ``original_max_position_embeddings`` tokens
              are divided by ``factor``, those that turn more than ``beta_fast`` (32) times stay. Query and key are
              multiplied by ``attention_factor``, by default ``0.1 log(factor) + 1``, or that number with ``mscale``
              over that with ``mscale_all_dim``. ``truncate`` (True) rounds the bounds to whole pairs.
            - "llama3": wavelengths above ``original_max_position_embeddings / low_freq_factor`` (1) are multiplied by
              ``factor``, those below ``original_max_position_embeddings / high_freq_factor`` (4) stay.
            - "longrope": each is divided by its own number in ``long_factor``, or in ``short_factor`` if ``max_length``
              is at most ``original_max_position_embeddings`` (L). Query and key are multiplied by ``attention_factor``,
              by default ``sqrt(1 + log(factor) / log(L))`` for a ``factor`` above 1, which is ``max_length / L`` by
              default. (transformers chooses the list anew for every text, by its length. Here, as in engines that serve
              models, the longest text decides for all, so that cached keys and packed documents turn alike.)
            - "proportional": only the first ``partial_rotary_factor`` (1) of the pairs turn, at the frequencies that
              they have without it, divided by ``factor`` (1).
        rotary_dim: the features that turn.
        bases: the bases that ``frequencies`` will get.
        max_length: the length of the longest text, for "longrope".

    Raises:
        InputError: for an unknown type, an unknown or missing number, or one out of range.
    """

    def __init__(
        self, given: Mapping[str, Any] | None, *, rotary_dim: int, bases: Sequence[float], max_length: int = 512
    ) -> None:
        if given is not None and not isinstance(given, Mapping):
            raise InputError("scaling", f"expected numbers by their names, such as rope_type, got {shown(given)}")
        numbers = dict({"rope_type": "default"} if given is None else given)
        if "rope_type" not in numbers and "type" in numbers:
            raise InputError("scaling", f"expected rope_type, got its old name type ({shown(numbers['type'])})")
        self.type = self._type(numbers.pop("rope_type", None))
        self.rotary_dim, self.max_length = rotary_dim, max_length
        self.truncate = numbers.pop("truncate", True) if self.type == "yarn" else True
        check_value("scaling: truncate", self.truncate, "bool")
        self.numbers = self._numbers(numbers)
        if self.type == "ntk" and rotary_dim < 4:
            raise InputError("scaling", f"'ntk' needs a rotary_dim of at least 4, got {rotary_dim}")
        if self.type == "yarn" and min(bases) <= 1:
            raise InputError("scaling", f"'yarn' needs a base above 1, got {min(bases)}")
        if self.type == "longrope" and self.numbers["original_max_position_embeddings"] <= 1:
            got = shown(self.numbers["original_max_position_embeddings"])
            raise InputError("scaling", f"expected an original_max_position_embeddings above 1, got {got}")
        if self.type == "yarn" and not self.numbers["beta_slow"] < self.numbers["beta_fast"]:
            slow, fast = self.numbers["beta_slow"], self.numbers["beta_fast"]
            raise InputError("scaling", f"expected beta_slow < beta_fast, got {slow} and {fast}")
        if self.type == "llama3" and not self.numbers["low_freq_factor"] < self.numbers["high_freq_factor"]:
            low, high = self.numbers["low_freq_factor"], self.numbers["high_freq_factor"]
            raise InputError("scaling", f"expected low_freq_factor < high_freq_factor, got {low} and {high}")

    @staticmethod
    def _type(name: Any) -> str:
        if name == "dynamic":
            raise InputError(
                "scaling",
                "'dynamic' has other frequencies at every length, which cached keys and packed documents do not share; "
                "use 'ntk' with the factor of the longest text",
            )
        if not isinstance(name, str) or name not in _NUMBERS:
            raise InputError("scaling", f"expected a rope_type of {', '.join(_NUMBERS)}, got {shown(name)}")
        return name

    def _numbers(self, given: dict[str, Any]) -> dict[str, Any]:
        needed, optional = _NUMBERS[self.type]
        for name in needed:
            if given.get(name) is None:
                raise InputError("scaling", f"{self.type!r} needs {name}")
        for name, value in given.items():
            if name not in needed and name not in optional:
                truncate = ["truncate"] if self.type == "yarn" else []
                known = ", ".join((*needed, *optional, *truncate)) or "no numbers"
                known += f"; for {name} use the option {_OPTIONS[name]}" if name in _OPTIONS else ""
                raise InputError("scaling", f"{self.type!r} has no {shown(name)}; it has {known}")
            pairs = self.rotary_dim // 2
            if name in _LISTS and not (isinstance(value, list | tuple) and len(value) == pairs):
                raise InputError("scaling", f"expected {name} as {pairs} numbers, one per pair, got {shown(value)}")
            for number in value if name in _LISTS else (value,):
                check_value(f"scaling: {name}", number, "float" if name in _LISTS else "float | None")
                if number is not None and number <= 0:
                    raise InputError("scaling", f"expected a positive {name}, got {shown(number)}")
        if (given.get("factor") or 1) < 1:
            raise InputError("scaling", f"expected a factor of at least 1, got {shown(given['factor'])}")
        if (given.get("partial_rotary_factor") or 0) > 1:
            got = shown(given["partial_rotary_factor"])
            raise InputError("scaling", f"expected a partial_rotary_factor of at most 1, got {got}")
        return {**optional, **{name: value for name, value in given.items() if value is not None}}

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
            longer = self.max_length > self.numbers["original_max_position_embeddings"]
            factors = self.numbers["long_factor" if longer else "short_factor"]
            return plain / torch.tensor(factors, dtype=torch.float64, device=device)
        if self.type == "proportional":
            turning = int(self.numbers["partial_rotary_factor"] * dim // 2)
            return plain / self.numbers["factor"] * (pair < turning)
        return plain

    @property
    def attention_factor(self) -> float:
        """What query and key are multiplied by."""
        if self.type == "longrope":
            length = self.numbers["original_max_position_embeddings"]
            factor = self.max_length / length if self.numbers["factor"] is None else self.numbers["factor"]
            grown = math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 else 1.0
            return grown if self.numbers["attention_factor"] is None else float(self.numbers["attention_factor"])
        if self.type != "yarn":
            return 1.0
        given, mscale, over = (self.numbers[name] for name in ("attention_factor", "mscale", "mscale_all_dim"))
        if given is not None:
            return float(given)
        growth = 0.1 * math.log(self.numbers["factor"])
        return (growth * mscale + 1) / (growth * over + 1) if mscale and over else growth + 1

    def _kept_by_yarn(self, pair: Tensor, base: float) -> Tensor:
        """Return what remains of each frequency: 1 for the first pairs, 1 / factor for the last, a line between."""
        length, dim = self.numbers["original_max_position_embeddings"], self.rotary_dim
        low, high = (
            dim * math.log(length / (2 * math.pi * self.numbers[turns])) / (2 * math.log(base))
            for turns in ("beta_fast", "beta_slow")
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        if low == high:
            high += 0.001  # as in transformers
        scaled = ((pair - low) / (high - low)).clamp(0, 1)
        return scaled / self.numbers["factor"] + (1 - scaled)

    def _kept_by_llama3(self, frequencies: Tensor) -> Tensor:
        """Return what remains of each frequency: 1 for short waves, 1 / factor for long ones, a line between."""
        low, high = self.numbers["low_freq_factor"], self.numbers["high_freq_factor"]
        turns = self.numbers["original_max_position_embeddings"] * frequencies / (2 * math.pi)
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 - kept) / self.numbers["factor"] + kept
