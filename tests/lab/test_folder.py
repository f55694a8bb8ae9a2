"""A run's folder: what it may be, and that its lock is its own."""

import os

import pytest

from whereformer.errors import InputError
from whereformer.lab.folder import open_folder


def test_a_second_command_is_refused_until_the_first_ends(tmp_path):
    with open_folder(tmp_path / "out"), pytest.raises(InputError, match="another command is writing"):
        open_folder(tmp_path / "out")
    open_folder(tmp_path / "out").close()


@pytest.mark.parametrize("kind", ["a symbolic link", "a named pipe", "a file"])
def test_only_folders_are_taken(kind, tmp_path):
    path = tmp_path / "out"
    if kind == "a symbolic link":
        path.symlink_to(tmp_path)
    elif kind == "a named pipe":
        os.mkfifo(path)
    else:
        path.write_text("")
    with pytest.raises(InputError, match=f"out: expected a folder or a new name, got {kind}: '{path}'"):
        open_folder(path)


def test_the_lock_is_no_way_to_another_file(tmp_path):
    (tmp_path / "target").write_text("kept")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".lock").symlink_to(tmp_path / "target")
    with pytest.raises(InputError, match="out: cannot write"):
        open_folder(tmp_path / "out")
    assert (tmp_path / "target").read_text() == "kept"
    (tmp_path / "out" / ".lock").unlink()
    os.mkfifo(tmp_path / "out" / ".lock")
    with pytest.raises(InputError, match="out: expected a file or a new name"):
        open_folder(tmp_path / "out")
