"""The variables of a launcher, also those that an earlier one left behind."""

from datetime import timedelta

import pytest
import torch

from tests.failing import fails
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
    with pytest.raises(InputError, match="not all 2 processes connected within 1 seconds"):
        ranks.join(torch.device("cpu"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("WORLD_SIZE", value) for value in ("", "x", "0", "-1", "1.5", "9" * 5000)),
        *(("RANK", value) for value in ("", "x", "-1", "2", "9" * 5000)),
    ],
)
def test_variables_that_no_launcher_sets_are_named(name, value, monkeypatch, capsys):
    for variable, usual in {"RANK": "0", "WORLD_SIZE": "2", name: value}.items():
        monkeypatch.setenv(variable, usual)
    minimum, maximum = (1, ranks.MAX_PROCESSES) if name == "WORLD_SIZE" else (0, 1)
    line = fails(capsys, "pretrain", "--data", __file__)
    assert line.startswith(f"whereformer: expected {name} from {minimum} to {maximum}, got '{value[:50]}")
    assert line.endswith(ranks.LAUNCHER)


def test_without_a_launcher_there_is_one_process():
    assert (ranks.size(), ranks.rank(), ranks.is_main()) == (1, 0, True)


@pytest.mark.parametrize("name", ["file", "link", "broken", "x" * 300, "a\0b", "\udcff", "file/below"])
def test_what_can_be_no_folder_is_named(name, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"^cache: cannot write to '"):
        ranks.open_folder(tmp_path / name, "cache")
