"""Numbers on the command line: a strange one is refused in a line that names an option, or passes every check."""

import dataclasses
import sys
import tempfile
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import get_args, get_origin, get_type_hints

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.every import EVERY
from tests.failing import fails, refusals
from tests.recipes import finetuning, parallel_text
from whereformer.cli.flags import METAVARS, flag
from whereformer.cli.main import COMMANDS, command_class, main
from whereformer.lab.recipe import Recipe

resource = pytest.importorskip("resource", reason="this system does not tell how much memory was used")

GIGABYTE = 2**30 if sys.platform == "darwin" else 2**20
"""In the unit in which the system tells how much memory was used."""

BEGINS = {"translate run": "whereformer.recipes.translating.load"}
"""Where some commands begin their work, once all checks are done. Recipes are stopped before they open their folder."""

KINDS = {name: command_class(name) for name in COMMANDS if name not in ("positions", "run")}

LISTS = ("N,N", "LAYERS", "A,B,C", "JSON")
"""The placeholders of text that holds numbers."""
NAMES = ("task", "tasks")
"""Options with such a placeholder that hold none."""
NUMBERS = [
    *("0", "-1", "1", "7", "3.5", "1e3", "1e400", "-1e400", "5e-324", "1e308", "nan", "inf", "-inf", "", "x", "1_000"),
    *(str(number) for number in (2**20, 2**20 + 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64, 10**19)),
    *(
        "9" * 4000,
        "9" * 5000,
        "0" * 5000,
        "\N{ARABIC-INDIC DIGIT THREE}",
        "\N{SUPERSCRIPT TWO}",
        "\N{FULLWIDTH DIGIT ONE}",
    ),
]
SEPARATORS = st.sampled_from([",", ",,", "-", "x", ":", ", "])
NESTED = ["[" * 4000, "[" * 5000, '{"a":' * 700]


def options(kind):
    """Yield each option of a command that takes a number, and whether it is text that holds some."""
    for field in dataclasses.fields(kind):
        hint = get_type_hints(kind)[field.name]
        parts = {hint, *get_args(hint)} - {type(None)}
        if dataclasses.is_dataclass(hint):
            yield from options(hint)
        elif parts & {int, float}:
            yield flag(field.name), False
        elif (
            str in parts
            and get_origin(hint) is not tuple
            and METAVARS.get(field.name) in LISTS
            and field.name not in NAMES
        ):
            yield flag(field.name), True


def test_options_are_found():
    found = {name: set(options(kind)) for name, kind in KINDS.items()}
    assert {("--learning-rate", False), ("--lengths", True)} < found["pretrain"]
    assert all(found.values())


class Begun(SystemExit):
    """A command has done its checks and would begin its work."""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    refusals(f"""
        compare --hidden-size {10**19} => --hidden-size: expected at most 1048576, got 10000000000000000000
        compare --seed {2**64} => --seed: expected 0 to 4294967295, got 18446744073709551616
        probe --length 1048576 => --length: expected 4 to 512, got 1048576
        probe --seed -1 => --seed: expected 0 to 4294967295, got -1
        compare --seeds {10**9} => --seeds: expected 1 to 10000, got 1000000000
        pretrain --steps {2**63 - 1} => --steps: expected at most 2147483647, got 9223372036854775807
        pretrain --lengths {10**19}:1 => --lengths: expected lengths of 8 to 1048576 and shares above 0
        pretrain --learning-rate 1e308 => --learning-rate: expected a number above 0 and below 1e+06, got 1e+308
        finetune --model x --task rte --kernels {10**9} => --kernels: expected 0 to 1024, got 1000000000
    """),
)
def test_the_error_says_what_would_fit(arguments, expected, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert expected in fails(capsys, *arguments)
    assert not list(tmp_path.iterdir())


def begin(*others, **options):
    raise Begun(0)


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    """Each command with what it needs."""
    place = tmp_path_factory.mktemp("given")
    words = " ".join(finetuning.NOUNS)
    (place / "text.txt").write_text("\n\n".join(f"{words} {number}. {words}" for number in range(400)))
    model = finetuning.save_model(place / "model")
    finetuning.save_glue(place / "glue", "rte")
    source, target = (lines[:60] for lines in parallel_text.pairs())
    pairs = parallel_text.write(place, source, target)
    text = ["--data", str(place / "text.txt")]
    small = ["--vocab-size=64", "--hidden-size=16", "--num-heads=2", "--blocks=1", "--length=8"]
    return {
        "pretrain": [*text, *small, "--steps=10", "--cache", str(place / "cache")],
        "compare": [*text, *small, "--quick", "--positions=none,learned"],
        "finetune": ["--model", model, "--task=rte", "--data", str(place / "glue"), "--kernels=1"],
        "translate train": [*pairs, *parallel_text.TINY],
        "translate run": [model],
        "analyze": [model],
        "probe": ["--positions=learned", "--tasks=copy"],
        "extend": [model, *text],
        "cost": [],
    }


def outcome(command, given, *more):
    """Run a command up to where its work begins; return its exit code and what it said of an error."""
    out, said = StringIO(), StringIO()
    with ExitStack() as stack:
        patched = stack.enter_context(pytest.MonkeyPatch.context())
        patched.setattr(torch, "set_num_threads", lambda number: None)
        if command in BEGINS:
            patched.setattr(BEGINS[command], begin)
        patched.setattr("whereformer.lab.run.Run.__enter__", begin)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(redirect_stdout(out))
        stack.enter_context(redirect_stderr(said))
        to = ["--out", str(folder / "out")] if issubclass(KINDS[command], Recipe) else []
        try:
            main([*command.split(), *given.get(command, []), *to, *more])
        except SystemExit as stop:
            return stop.code, said.getvalue()
    return 0, ""


def values(option, holds_several):
    """What an option is given."""
    number = st.one_of(st.sampled_from(NUMBERS), st.integers().map(str), st.floats().map(str))
    if not holds_several:
        return number
    several = st.builds(lambda parts, between: between.join(parts), st.lists(number, max_size=3), SEPARATORS)
    if option != "--position-options":
        return several
    return st.one_of(several, number.map(lambda each: f'{{"num_kernels": {each}}}'), st.sampled_from(NESTED))


@settings(max_examples=400 if EVERY else 60)
@given(st.data())
def test_a_number_is_refused_in_a_line_or_passes(commands, data):
    command = data.draw(st.sampled_from(list(KINDS)))
    chosen = data.draw(st.lists(st.sampled_from(list(options(KINDS[command]))), min_size=1, max_size=2, unique=True))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    words = [f"{option}={data.draw(values(option, several))}" for option, several in chosen]
    code, said = outcome(command, commands, *words)
    assert code in (0, 2), said
    if code == 2:
        assert "--" in said, said
        assert len(said) < 5000
        assert "not enough memory" not in said, said
        assert said.startswith("whereformer: "), said
        assert said.count("\n") == 1, said
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + GIGABYTE, "it took a gigabyte"
