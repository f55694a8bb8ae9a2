"""``LoadingReport``: which tensors of a checkpoint a model loaded."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import printable


@dataclass(frozen=True)
class LoadingReport:
    """The tensors that a model took from a checkpoint, and the others; :func:`str` has a line for each field.

    Args:
        loaded: the model's tensors that come from the checkpoint, by the model's names.
        dropped: the checkpoint's tensors without a place in the model, by the checkpoint's names without the encoder's
            prefix; if several of them would be one tensor here, by this library's name.
        initialized: the model's tensors that are freshly drawn, by the model's names.
    """

    loaded: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    initialized: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"loaded: {len(self.loaded)} tensors"]
        for part, names in (("dropped", self.dropped), ("initialized", self.initialized)):
            # A module's weight and bias, and the same module in several layers, are named once.
            modules = (re.sub(r"\.(weight|bias)$", "", name) for name in names)
            groups = dict.fromkeys(re.sub(r"\b(layers?)\.\d+\.", r"\1.*.", name) for name in modules)
            lines += [f"{part}: {printable(', '.join(groups))}"] if names else []
        return "\n".join(lines)
