"""Memory that nobody has written yet holds NaN, so that a number that is read too early, or never written, shows.

Otherwise such memory often holds zeros, or what the last call computed there, and tests pass by luck.
"""

import torch

from whereformer.kernels import native


def poison() -> None:
    """From now on, in this process.

    Fresh tensors (``torch.empty`` and its kind) are torch's own business: it fills them where algorithms have to be
    deterministic, floats with NaN and integers with their largest number.
    """
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    # The compiled kernel's scratch memory is its own.
    native.poisons = True
