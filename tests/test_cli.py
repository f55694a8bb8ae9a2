"""The command line's own help; what commands do is tested with their tasks."""

import os
import re
from pathlib import Path

import pytest

from tests.failing import fails
from whereformer import position_names
from whereformer.cli.cost import Cost
from whereformer.cli.main import COMMANDS, command_class, execute, main
from whereformer.files import write_atomically
from whereformer.lab.folder import open_folder


def help_of(capsys, *arguments):
    with pytest.raises(SystemExit) as stopped:
        main([*arguments, "--help"])
    assert stopped.value.code == 0
    # As one line, without the frames.
    return " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_the_list_of_commands_has_a_paragraph_of_each(capsys):
    text = help_of(capsys)
    for name in COMMANDS:
        assert f"• {name} " in text
    assert "What does an encoder cost? FLOPs, parameters and memory, measured without data. • positions" in text


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_says_all_of_itself(name, capsys):
    whole = " ".join((command_class(name).__doc__ or "").split())
    assert whole.partition(" --")[0] in help_of(capsys, name)


def test_positions_lists_methods_by_name_and_property(capsys):
    main(["positions"])
    out = capsys.readouterr().out
    assert all(name in out for name in (*position_names(), "none or nope", "num_kernels=5"))
    main(["positions", "t*", "--extrapolates", "--acts-on", "scores"])
    listed = re.findall(r"^ (\w+) +│", capsys.readouterr().out, re.MULTILINE)
    assert listed == position_names("t*", acts_on="scores", extrapolates=True) == ["t5", "tisa", "transformer_xl"]
    assert "no method has this name" in fails(capsys, "positions", "zzz")


@pytest.mark.parametrize("name", COMMANDS)
def test_none_is_no_choice(name, capsys):
    """An option is left out instead."""
    assert "None" not in help_of(capsys, name)


@pytest.mark.parametrize("words", ["pretrain --preset", "pretrain --norm", "cost --preset", "pretrain --length"])
def test_none_is_not_accepted(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([*words.split(), "None"])
    assert stopped.value.code == 2
    error = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert f"argument '{words.split()[1]}'. Expected one of ('" in error or "int() with base 10: 'None'" in error
    assert "no type matching" not in error


@pytest.mark.parametrize("name", ["compare", "probe", "pretrain", "cost"])
@pytest.mark.parametrize("kind", ["a device", "a named pipe", "a symbolic link"])
def test_outputs_replace_no_devices_pipes_and_links(name, kind, tmp_path, capsys):
    out = tmp_path / "out"
    if kind == "a symbolic link":
        out.symlink_to(tmp_path / "nothing")
    elif kind == "a named pipe":
        os.mkfifo(out)
    else:
        out = Path(os.devnull)
    expected = "a file" if name == "cost" else "a folder"
    message = fails(capsys, name, "--out", str(out))
    assert f"--out: expected {expected} or a new name, got {kind}: '{out}'" in message
    assert sorted(tmp_path.iterdir()) == ([] if kind == "a device" else [out])


@pytest.fixture
def link(tmp_path):
    """A link to a folder, as to one on another disk."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    return tmp_path / "out"


@pytest.mark.parametrize("name", ["compare", "probe", "pretrain"])
def test_a_link_to_a_folder_is_the_folder(name, link, tmp_path, capsys):
    real = tmp_path / "disk"
    with open_folder(real):
        assert f"another command is writing to {real};" in fails(capsys, name, "--out", str(link))
    assert [path.name for path in real.iterdir()] == [".lock"]


def test_a_run_stays_where_its_link_led_at_the_start(link, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()

    class Moved(Cost):
        def run(self, console):
            link.unlink()
            link.symlink_to(tmp_path / "elsewhere")
            with open_folder(self.out):
                write_atomically(self.out / "results.json", "{}")

    execute(Moved(out=link))
    assert (tmp_path / "disk" / "results.json").read_text() == "{}"
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="this system's files have no owners")
def test_links_of_others_are_not_followed(link, monkeypatch, capsys):
    owner = link.lstat()

    class Strange:
        st_uid, st_mode = owner.st_uid + 1, owner.st_mode

    real = Path.lstat
    monkeypatch.setattr(Path, "lstat", lambda path: Strange if path == link else real(path))
    message = fails(capsys, "compare", "--out", str(link))
    assert f"--out: expected a folder or a new name, got a symbolic link: '{link}'" in message


def test_an_output_file_is_no_link(link, tmp_path, capsys):
    assert "--out: expected a file or a new name, got a folder" in fails(capsys, "cost", "--out", str(link))
    (tmp_path / "cost.json").symlink_to(tmp_path / "target")
    for there in (False, True):
        if there:
            (tmp_path / "target").write_text("kept")
        message = fails(capsys, "cost", "--out", str(tmp_path / "cost.json"))
        assert "--out: expected a file or a new name, got a symbolic link" in message
    assert (tmp_path / "target").read_text() == "kept"


@pytest.mark.parametrize("given", [[], ["nope"]])
def test_no_command_or_an_unknown_one_is_an_error_that_lists_them(given, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(given)
    assert stopped.value.code == 2
    assert "compare, probe, pretrain" in capsys.readouterr().err
