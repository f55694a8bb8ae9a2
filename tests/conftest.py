import pytest
import torch
from hypothesis import settings

# Tests run side by side, on tensors too small to gain from threads.
torch.set_num_threads(1)

settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
