"""Writing files and folders: in one step, to the disk, and with a clear line if it is full."""

import errno
import os

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

from tests.failing import largest_file
from whereformer import files
from whereformer.errors import InputError


def make_link(path, target):
    target.write_text("target")
    path.symlink_to(target)


def test_a_file_is_replaced_whole_and_reaches_the_disk_before_its_name_changes(tmp_path, monkeypatch):
    done = []
    real = os.fsync, os.replace

    def fsync(handle):
        done.append(("fsync", os.path.basename(os.readlink(f"/proc/self/fd/{handle}"))))
        real[0](handle)

    def replace(source, target):
        done.append(("replace", os.path.basename(source)))
        real[1](source, target)

    if not os.path.exists("/proc/self/fd"):
        pytest.skip("this system does not tell the names of open files")
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    path = tmp_path / "a.json"
    files.write_atomically(path, "ä")
    assert done == [("fsync", "a.json.partial"), ("replace", "a.json.partial"), ("fsync", tmp_path.name)]
    assert path.read_bytes() == "ä".encode()
    done.clear()
    with files.new_folder(tmp_path / "model") as partial:
        (partial / "part").mkdir()
        (partial / "part" / "x").write_bytes(b"x")
    names = [("fsync", name) for name in ("model.partial", "part", "x")]
    assert sorted(done[:3]) == sorted(names)
    assert done[3:] == [("replace", "model.partial"), ("fsync", tmp_path.name)]


def test_only_folders_are_replaced_by_folders(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "kept").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").write_text("kept")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "file", "pipe"):
        with pytest.raises(OSError, match=name), files.new_folder(tmp_path / name) as partial:
            (partial / "new").write_text("")
    assert (tmp_path / "real" / "kept").exists()
    assert (tmp_path / "file").read_text() == "kept"


def test_what_lies_beside_is_not_written_through(tmp_path):
    make_link(tmp_path / "a.json.partial", tmp_path / "target")
    files.write_atomically(tmp_path / "a.json", "new")
    assert (tmp_path / "target").read_text() == "target"
    assert (tmp_path / "a.json").read_text() == "new"


def test_after_an_error_everything_is_as_it_was(tmp_path):
    files.write_atomically(tmp_path / "a.json", "old")
    with files.new_folder(tmp_path / "model") as partial:
        (partial / "x").write_text("old")
    with pytest.raises(KeyboardInterrupt), files.new_folder(tmp_path / "model") as partial:  # noqa: PT012
        (partial / "x").write_text("new")
        raise KeyboardInterrupt
    with pytest.raises(UnicodeEncodeError):
        files.write_atomically(tmp_path / "a.json", "new \ud800")
    assert (tmp_path / "a.json").read_text() == (tmp_path / "model" / "x").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "model"]


WRITERS = {
    "torch": lambda path: torch.save(torch.zeros(5000), path),
    "safetensors": lambda path: save_file({"a": torch.zeros(5000)}, path),
    "tokenizers": lambda path: Tokenizer(models.WordLevel({f"w{n}": n for n in range(5000)}, "w0")).save(str(path)),
    "python": lambda path: path.write_bytes(bytes(20_000)),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_full_disk_is_known_whichever_library_meets_it(writer, tmp_path):
    path = tmp_path / "file"
    with (
        largest_file(1000),
        pytest.raises(InputError, match=f"cannot write {path}: .*; make room, then run the same command again"),
        files.naming(path),
    ):
        WRITERS[writer](path)


@pytest.mark.parametrize("number", ["ENOSPC", "EDQUOT", "EFBIG"])
def test_the_systems_errors_of_a_full_disk(number):
    code = getattr(errno, number)
    assert files.full_disk(OSError(code, ""))
    assert files.full_disk(Exception(f"I/O error (os error {code})"))


def test_other_errors_are_not_about_the_disk(tmp_path):
    for error in (OSError(errno.EACCES, ""), ValueError("x"), RuntimeError("shape"), Exception("(os error 13)")):
        assert not files.full_disk(error)
        with pytest.raises(type(error)), files.naming(tmp_path):
            raise error
