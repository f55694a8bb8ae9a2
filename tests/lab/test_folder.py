"""A run's folder: what it may be, and that its lock is its own."""

import os

import pytest

from whereformer.errors import InputError
from whereformer.lab.run import open_folder


def test_a_second_command_is_refused_until_the_first_ends(tmp_path):
    with open_folder(tmp_path / "out"), pytest.raises(InputError, match="another command is writing"):
        open_folder(tmp_path / "out")
    open_folder(tmp_path / "out").close()


@pytest.mark.parametrize("kind", ["a named pipe", "a file"])
def test_only_folders_are_taken(kind, tmp_path):
    path = tmp_path / "out"
    if kind == "a named pipe":
        os.mkfifo(path)
    else:
        path.write_text("")
    with pytest.raises(FileExistsError, match=str(path)):
        open_folder(path)
