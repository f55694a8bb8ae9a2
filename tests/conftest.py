import gc
import os
from collections.abc import Iterator

import pytest
import torch

# Triton reads this when it is imported: without a GPU, its kernels run in its interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Its tests need a process in which Triton does not interpret; `make test-card` runs them.
collect_ignore = ["kernels/card"]

# Tests run side by side, on tensors too small to gain from threads.
torch.set_num_threads(1)

if not torch.cuda.is_available():
    # The same numbers; torch would also format the stack and keep it, for each kind of device that is missing.
    torch.manual_seed = torch.default_generator.manual_seed

if os.environ.get("WHEREFORMER_TEST_WITHOUT_ONEDNN") == "1":
    torch.backends.mkldnn.set_flags(False)

if os.environ.get("WHEREFORMER_TEST_POISON") == "1":
    from .poison import poison

    poison()

from .every import EVERY  # noqa: E402

try:
    from hypothesis import settings
except ImportError:
    # A bare GPU machine runs tests that draw no examples.
    pass
else:
    settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
    settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _no_wait_for_the_disk() -> Iterator[None]:
    """Trainings write thousands of small files; tests of what is synced put a function of their own in its place."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", lambda handle: None)
        yield


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if EVERY:
        return
    left = [item for item in items if item.get_closest_marker("every")]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if not item.get_closest_marker("every")]


def pytest_collection_finish() -> None:
    if os.environ.get("WHEREFORMER_TEST_SHAPES") == "1":
        # The modules that tests use are imported now, and what they import later finds checked functions there.
        from . import shapes

        shapes.install()
    # Trainings collect garbage, and what was imported and collected is most of what is looked through.
    gc.collect()
    gc.freeze()
