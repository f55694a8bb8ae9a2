"""The command line's own help; what commands do is tested with their tasks."""

import re
import shlex
import subprocess
import sys

import pytest

from tests.failing import fails, refusals
from whereformer import position_names
from whereformer.cli.flags import GROUPS, parse
from whereformer.cli.main import COMMANDS, command_class, main
from whereformer.lab.recipe import Recipe, find_flags, hints
from whereformer.ranks import open_folder


def help_lines(capsys, *arguments):
    with pytest.raises(SystemExit) as stopped:
        main([*arguments, "--help"])
    assert stopped.value.code == 0
    return capsys.readouterr().out.splitlines()


def help_of(capsys, *arguments):
    return " ".join(" ".join(help_lines(capsys, *arguments)).split())


def test_the_list_of_commands_has_a_paragraph_of_each(capsys):
    text = help_of(capsys)
    for name in COMMANDS:
        assert f" {name} " in text


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_says_all_of_itself(name, capsys):
    description = " ".join((command_class(name).__doc__ or "").split())
    assert description.partition(" --")[0] in help_of(capsys, *name.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_a_help_begins_with_an_example_that_the_command_accepts(name, capsys):
    example = help_lines(capsys, *name.split())[0].removeprefix("Example: whereformer ")
    words = shlex.split(example.removeprefix(name).partition("<")[0])
    assert example.startswith(f"{name} ")
    if name != "run":  # the recipe's file has the options
        command_class(name)(**parse(command_class(name), words, name))


@pytest.mark.parametrize("name", COMMANDS)
def test_all_options_are_in_groups_and_in_a_named_one_in_a_recipe(name, capsys):
    kind = command_class(name)
    parts = re.split(r"^([a-z ]+):$", "\n".join(help_lines(capsys, *name.split())), flags=re.MULTILINE)
    assert parts[1::2] == [title for title in ("options", *GROUPS) if title in parts[1::2]]
    assert "options" not in parts[1::2] or not issubclass(kind, Recipe)
    shown = re.findall(r"^  (\S+)", "".join(parts[2::2]), re.MULTILINE)
    assert sorted(shown) == sorted(flag for field, flag in find_flags(kind).items() if field in hints(kind))


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_a_help_fits_the_terminal(name, columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert [line for line in help_lines(capsys, *name.split()) if len(line) > columns] == []


def test_positions_lists_methods_by_name(capsys):
    main(["positions"])
    out = capsys.readouterr().out
    assert all(name in out for name in (*position_names(), "none or nope", "num_kernels=5"))
    main(["positions", "t5*"])
    listed = re.findall(r"^ (\w+) +│", capsys.readouterr().out, re.MULTILINE)
    assert listed == position_names("t5*") == ["t5"]
    assert "no method has a name such as 'zzz'" in fails(capsys, "positions", "zzz")


def test_a_misspelled_command_is_one_line_with_what_was_meant(capsys):
    assert fails(capsys, "Positons").startswith("whereformer: unknown command 'Positons'; did you mean 'positions'?")


@pytest.mark.parametrize("name", COMMANDS)
def test_none_is_no_choice(name, capsys):
    """An option is left out instead."""
    assert "None" not in help_of(capsys, *name.split())


@pytest.mark.parametrize("words", ["pretrain --preset", "pretrain --norm", "pretrain --length"])
def test_none_is_not_accepted(words, capsys):
    assert re.search(rf": {words.split()[1]}: expected .*, got 'None'$", fails(capsys, *words.split(), "None"))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    refusals("""
        compare --prset bert => unexpected word '--prset'; did you mean --preset?
        compare bert => unexpected word 'bert'; whereformer compare --help lists them
        compare --steps => --steps: expected one argument
        finetune --task rte => --model: this option is required
        translate run a --length-penalty -20 => --length-penalty: expected -10 to 10, got -20.0
        compare --steps x => --steps: expected an integer, got 'x'
        extend --steps 3 => MODEL: this option is required
        translat => unknown command 'translat'; did you mean 'translate run'?
        translate trian => unknown command 'translate trian'; did you mean 'translate train'?
        Translate Train => unknown command 'Translate Train'; did you mean 'translate train'?
        run no.py => FILE: no such file: 'no.py'
        compare --POSITIONS rope => unexpected word '--POSITIONS'; did you mean --positions?
        compare --positions RoPE => unknown position method 'RoPE'; did you mean 'rope'?
        compare --preset BERT => got 'BERT'; did you mean 'bert'?
        compare --seed '' => empty argument after --seed
        compare --seed= => empty argument after --seed=
        positions RoPE => no method has a name such as 'RoPE'; did you mean 'rope'?
        probe --tasks Copy => got 'Copy'; did you mean 'copy'?
        finetune --model a --task COLA => got 'COLA'; did you mean 'cola'?
    """),
)
def test_bad_words_are_one_line(arguments, expected, capsys):
    assert expected in fails(capsys, *arguments)


def test_a_link_to_a_folder_is_the_folder(tmp_path, capsys):
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    with open_folder(tmp_path / "disk"):
        assert f"another command is writing to {tmp_path}/out;" in fails(capsys, "probe", "--out", f"{tmp_path}/out")


REFUSED = """
import sys
from whereformer.cli.main import main
for words in sys.argv[1:]:
    try:
        main(words.split())
    except SystemExit as stop:
        assert stop.code == 2
slow = "transformers", "scipy", "matplotlib", "typeguard", "whereformer.models", "whereformer.analysis"
print(*(name for name in sys.modules if name.startswith(slow)))
"""


def test_a_misspelled_word_is_refused_without_the_imports_that_take_seconds(tmp_path):
    """One process refuses all of them, since its own imports take the time."""
    lines = {
        "compare --positions tsia": "--positions: unknown position method 'tsia'",
        "compare --data nothing.txt": "--data: no such file or folder",
        "compare --plugin nothing.py": "--plugin: no such file",
        "probe --positions tsia": "--positions: unknown position method 'tsia'",
    }
    command = [sys.executable, "-c", REFUSED, *lines]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    for printed, line in zip(done.stderr.splitlines(), lines.values(), strict=True):
        assert printed.startswith(f"whereformer: {line}")
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("words", [[], ["nope"]])
def test_no_command_or_an_unknown_one_is_an_error_that_lists_them(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    assert "compare, probe, pretrain" in capsys.readouterr().err
