"""The error that a person is meant to read: what it holds, and that only the command line speaks of flags."""

import ast
import pickle
import re
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

import whereformer
from whereformer.cli.flags import format_error
from whereformer.errors import InputError
from whereformer.models import EncoderConfig

SOURCE = Path(whereformer.__file__).parent


@pytest.mark.parametrize("again", [lambda error: error, copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_an_error_has_a_field_and_a_reason(again):
    error = again(InputError("decoder_layers", "expected at least 1, got 0"))
    assert (error.field, error.reason) == ("decoder_layers", "expected at least 1, got 0")
    assert str(error) == "decoder_layers: expected at least 1, got 0"
    assert str(again(InputError(None, "line 3 is too long"))) == "line 3 is too long"


def test_configurations_raise_it():
    with pytest.raises(InputError) as caught:
        EncoderConfig(hidden_size=0)
    assert caught.value.field == "hidden_size"


@dataclass(frozen=True)
class Command:
    FLAGS: ClassVar = {"num_attention_heads": "--num-heads", "model": "MODEL", "text": "--no-text"}

    model: str = ""
    text: bool = True
    max_length: int = 1
    num_heads: int = 1


@pytest.mark.parametrize(
    ("name", "reason", "line"),
    [
        ("max_length", "expected 1", "--max-length: expected 1"),
        ("num_attention_heads", "expected 1", "--num-heads: expected 1"),
        (
            "model",
            "expected one that `whereformer pretrain` made",
            "MODEL: expected one that `whereformer pretrain` made",
        ),
        ("text", "goes without `max_length`", "--no-text: goes without --max-length"),
        (None, "set `num_heads` to 2, not `this`", "set --num-heads to 2, not `this`"),
        ("hidden_size", "is no field of the command", "--hidden-size: is no field of the command"),
    ],
)
def test_the_command_line_says_it_in_flags(name, reason, line):
    assert format_error(InputError(name, reason), Command()) == line


def test_no_module_but_the_command_lines_names_a_flag_in_an_error():
    lines = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path in SOURCE.rglob("*.py")
        if not path.is_relative_to(SOURCE / "cli")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Raise) and re.search(r"--[a-z]", ast.unparse(node))
    ]
    assert not lines
