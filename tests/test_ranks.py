"""The variables of a launcher, also those that an earlier one left behind."""

from datetime import timedelta

import pytest
import torch

from whereformer import ranks
from whereformer.errors import InputError


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("address", [{}, {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}])
@pytest.mark.parametrize("rank", ["0", "1"])
def test_processes_that_do_not_come_are_not_waited_for(rank, address, monkeypatch):
    monkeypatch.setattr(ranks, "ARRIVAL", timedelta(seconds=1))
    for name, value in {"RANK": rank, "WORLD_SIZE": "2", **address}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="2 processes did not meet within 1 seconds"):
        ranks.join(torch.device("cpu"))


def test_without_a_launcher_there_is_one_process():
    assert (ranks.size(), ranks.rank(), ranks.is_main()) == (1, 0, True)
