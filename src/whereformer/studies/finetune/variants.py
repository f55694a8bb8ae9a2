"""The models that fine-tuning compares: a setting is a position method; its variants differ in TISA's kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import InputError
from ...positions import layer_pattern, method_names, own_name

OWN = "own"
"""The setting that keeps the model's own positions, as it was pretrained."""
BASELINE = "baseline"


@dataclass(frozen=True)
class Variant:
    """One model of a setting."""

    label: str
    """Its name in tables."""
    position: str | None
    """The method, as ``load_pretrained`` takes it; None keeps the checkpoint's own."""
    kernels: int | None = None
    """TISA's number of kernels, if it has any."""

    @property
    def name(self) -> str:
        """The model's unique name. Variants of two settings share it if they are the same model."""
        name = OWN if self.position is None else self.position
        return name if self.kernels is None else f"{name}, S={self.kernels}"

    @property
    def options(self) -> dict[str, Any]:
        """Options for ``load_pretrained`` besides the method."""
        return {} if self.kernels is None else {"num_kernels": self.kernels}


@dataclass(frozen=True)
class Setting:
    """A position method with its variants, the baseline first if there is one."""

    position: str
    variants: tuple[Variant, ...]


def method_of(name: str) -> str:
    """Return the position method of a variant's unique name."""
    return name.partition(", S=")[0]


def settings_of(positions: Sequence[str], kernels: Sequence[int]) -> list[Setting]:
    """Return the settings to compare.

    Args:
        positions: the methods. With TISA there is a variant for each number of kernels; 0 kernels is the baseline,
            the same method without TISA. Other methods have a baseline only if 0 is among ``kernels``: learned
            positions for a method that is added to them ("learned+t5"), else none. "own" is the checkpoint as it is.
        kernels: the numbers of kernels.

    Raises:
        InputError: if a method has TISA and ``kernels`` has no number above 0.
    """
    found = []
    for position in positions:
        parts = method_names(position)
        if "tisa" in parts:
            without = ("+".join(part for part in place if part != "tisa") for place in layer_pattern(position))
            rest = own_name("/".join(place or "none" for place in without))
            others = [Variant(f"S = {number}", position, number) for number in kernels if number]
        else:
            rest = "learned" if "learned" in parts and len(parts) > 1 else "none"
            others = [Variant(position, None if position == OWN else position)]
        if not others:
            raise InputError("kernels", "expected a number above 0 besides the baseline, got 0")
        compared = 0 in kernels and position not in (OWN, rest)
        found.append(Setting(position, (*([Variant(BASELINE, rest)] if compared else []), *others)))
    return found
