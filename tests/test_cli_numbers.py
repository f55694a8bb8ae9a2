"""Numbers on the command line: a strange one is refused in a line that names its option."""

import dataclasses
from typing import get_args, get_type_hints

import pytest

from tests.failing import fails, refusals
from whereformer.cli.main import COMMANDS, command_class
from whereformer.lab.recipe import find_flags

KINDS = {name: command_class(name) for name in COMMANDS if name not in ("positions", "run", "demo", "merge")}
NEEDED = {
    "finetune": ["--model=x", "--task=rte"],
    "translate train": ["--data", "x", "y"],
    "check": ["x.py:f"],
    **{name: ["x"] for name in ("translate run", "analyze", "extend")},
}
"""What some commands can't do without."""


def numbers(kind):
    """The options of a command that take a number."""
    hints, flags = get_type_hints(kind), find_flags(kind)
    return [
        flags[field.name]
        for field in dataclasses.fields(kind)
        if {int, float} & {hints[field.name], *get_args(hints[field.name])}
    ]


@pytest.mark.parametrize("value", ["-1", "nan", "1e400", "9" * 5000, str(10**30), "1_000.x"])
@pytest.mark.parametrize("name", KINDS)
def test_a_strange_number_is_refused_in_a_line_that_names_its_option(name, value, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = numbers(KINDS[name])
    assert options
    for option in options:
        if (option, value) == ("--length-penalty", "-1"):
            continue
        line = fails(capsys, *name.split(), *NEEDED.get(name, ()), f"{option}={value}")
        assert option in line
        assert len(line) < 300
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    refusals(f"""
        compare --hidden-size {10**19} => --hidden-size: expected at most 1048576, got 10000000000000000000
        probe --seed -1 => --seed: expected at least 0, got -1
        pretrain --learning-rate 1e308 => --learning-rate: expected a number above 0 and below 1e+06, got 1e+308
        finetune --model x --task rte --kernels {10**9} => --kernels: expected 0 to 1024, got 1000000000
        pretrain --position-options {"[" * 5000} => --position-options: expected a JSON object
    """),
)
def test_the_error_says_what_would_fit(arguments, expected, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert expected in fails(capsys, *arguments)
    assert not list(tmp_path.iterdir())
