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


REFUSED = {
    "file": "expected a folder or nothing, got a file",
    "pipe": "expected a folder or nothing, got a pipe, socket or device",
    "broken": "is a link that leads nowhere; remove or mend it",
    "mounted": "a disk is mounted at '.*/mounted', so it cannot be replaced",
    "read-only": "cannot replace '.*/read-only': '.*/inside' is read-only",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder that has whatever cannot be replaced by a folder."""
    (tmp_path / "file").write_text("kept")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    (tmp_path / "mounted").mkdir()
    (tmp_path / "read-only" / "inside").mkdir(parents=True)
    # The super-user may write everywhere, and only that one may mount disks.
    monkeypatch.setattr(os.path, "ismount", lambda path: str(path).endswith("mounted"))
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).endswith("inside"))
    return tmp_path


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_replaced_is_refused_before_a_folder_is_filled(name, folder):
    before = sorted(folder.rglob("*"))
    with pytest.raises(InputError, match=REFUSED[name]), files.new_folder(folder / name):
        pytest.fail("it was filled")
    with pytest.raises(InputError, match=f"^out: .*{REFUSED[name]}"):
        files.check_outputs("out", folder, [], [f"{name}/"])
    if name in ("file", "pipe", "broken"):  # which no folder can be in, either
        with pytest.raises(InputError, match=f"^out: .*{REFUSED[name]}"):
            files.check_outputs("out", folder, [], [f"{name}/model/"])
    assert sorted(folder.rglob("*")) == before
    assert (folder / "file").read_text() == "kept"


@pytest.mark.parametrize(
    ("name", "expected"),
    [("read-only", "expected a file, got a folder"), ("pipe", "got a pipe"), ("broken", "a link that leads nowhere")],
)
def test_what_is_no_file_is_refused_before_it_is_written(name, expected, folder):
    with pytest.raises(InputError, match=f"^out: .*{expected}"):
        files.check_outputs("out", folder, [name], [])


def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path):
    (tmp_path / "disk" / "model").mkdir(parents=True)
    (tmp_path / "disk" / "model" / "old").write_text("")
    (tmp_path / "model").symlink_to(tmp_path / "disk" / "model")
    make_link(tmp_path / "link.json", tmp_path / "target.json")
    with files.new_folder(tmp_path / "model") as partial:
        (partial / "new").write_text("")
        assert partial.parent == tmp_path / "disk"  # renamed within a disk, so that it is done in one step
    files.write_atomically(tmp_path / "link.json", "new")
    assert (tmp_path / "model").is_symlink()
    assert (tmp_path / "link.json").is_symlink()
    assert [path.name for path in (tmp_path / "disk" / "model").iterdir()] == ["new"]
    assert (tmp_path / "target.json").read_text() == "new"
    files.remove(tmp_path / "model")
    assert (tmp_path / "disk" / "model" / "new").exists()


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
        files.name_full_disk(path),
    ):
        WRITERS[writer](path)


@pytest.mark.parametrize("number", ["ENOSPC", "EDQUOT", "EFBIG"])
def test_the_systems_errors_of_a_full_disk(number):
    code = getattr(errno, number)
    assert files.is_disk_full(OSError(code, ""))
    assert files.is_disk_full(Exception(f"I/O error (os error {code})"))


def test_other_errors_are_not_about_the_disk(tmp_path):
    for error in (OSError(errno.EACCES, ""), ValueError("x"), RuntimeError("shape"), Exception("(os error 13)")):
        assert not files.is_disk_full(error)
        with pytest.raises(type(error)), files.name_full_disk(tmp_path):
            raise error
