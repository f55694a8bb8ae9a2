"""OneDNN in tests: asked for on any processor, and left out where a run of the tests is to be without it."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch


def need_onednn() -> None:
    """Skip a test where no product can be oneDNN's."""
    if not (hasattr(torch.ops.mkldnn, "_linear_pointwise") and torch.backends.mkldnn.is_available()):
        pytest.skip("needs a PyTorch with oneDNN")
    if not torch.backends.mkldnn.enabled:
        pytest.skip("oneDNN is off in this run")


@contextmanager
def without_onednn() -> Iterator[None]:
    """As ``torch.backends.mkldnn.flags(enabled=False)``, which warns about settings that stay as they are."""
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.set_flags(False)
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(before)
