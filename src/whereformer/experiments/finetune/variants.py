"""Which models an experiment compares: a setting is a position method, its variants are how many kernels TISA has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import InputError

OWN = "own"
"""The setting of a model as it was pretrained."""


@dataclass(frozen=True)
class Variant:
    """One model of a setting.

    Args:
        label: what a table calls it.
        position: as ``load_pretrained`` takes it; None keeps the checkpoint's own.
        kernels: TISA's, where it has any.
    """

    label: str
    position: str | None
    kernels: int | None = None

    @property
    def name(self) -> str:
        """Unique: variants of two settings that are the same model have the same name."""
        name = OWN if self.position is None else self.position
        return name if self.kernels is None else f"{name}, S={self.kernels}"

    @property
    def options(self) -> dict[str, Any]:
        """Options of the method, for ``load_pretrained``."""
        return {} if self.kernels is None else {"num_kernels": self.kernels}


@dataclass(frozen=True)
class Setting:
    """A position method, the baseline first where there is one."""

    position: str
    variants: tuple[Variant, ...]


BASELINE = "baseline"


def settings_of(positions: Sequence[str], kernels: Sequence[int]) -> list[Setting]:
    """What to compare.

    Args:
        positions: methods. With TISA there is a variant for each number of kernels, 0 of which is the baseline: the
            same without TISA. Any other method is compared with learned positions where it is added to them
            ("learned+t5"), else with none, if 0 is among ``kernels``. "own" is the checkpoint as it is.
        kernels: numbers of kernels.

    Raises:
        InputError: for TISA where it is 0 kernels only.
    """
    found = []
    for position in positions:
        parts = position.split("+")
        if "tisa" in parts:
            rest = "+".join(part for part in parts if part != "tisa") or "none"
            others = [Variant(f"S = {number}", position, number) for number in kernels if number]
        else:
            rest = "learned" if "learned" in parts and len(parts) > 1 else "none"
            others = [Variant(position, None if position == OWN else position)]
        compared = 0 in kernels and position not in (OWN, rest)
        variants = ([Variant(BASELINE, rest)] if compared else []) + others
        if not others:
            raise InputError("kernels", "expected a number above 0 besides the baseline, got 0")
        found.append(Setting(position, tuple(variants)))
    return found


def distinct(settings: Sequence[Setting]) -> list[Variant]:
    """Every model once."""
    return list({variant.name: variant for setting in settings for variant in setting.variants}.values())
