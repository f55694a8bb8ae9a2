"""Strange values for every argument of the public functions: they work, or an error of ours names the argument."""

import contextlib
import inspect
import math
from dataclasses import fields

import pytest
import torch
from transformers import BertConfig, BertModel, PreTrainedConfig

import whereformer
from whereformer import Positions, attention
from whereformer.errors import InputError
from whereformer.lab.run import Run
from whereformer.recipes import RECIPES, recipe_class

B, H, N, D = 1, 2, 4, 8
STRANGE = [
    *(None, "", b"x", -1, 0, 1, 2**31, 2**63, 10**30, 1.5, math.inf, -math.inf, math.nan, True, [], {}, (), [None]),
    *("x\0y", "a" * 5000, "\ud800", {"a": 1}, object(), int, len, torch.zeros(0), torch.zeros((), dtype=torch.bool)),
    *(torch.zeros(3, dtype=torch.int8), torch.full((2, 2), math.nan), torch.zeros(2, 3, 4, 5, 6)),
    torch.zeros(B, H, N, D, dtype=torch.complex64),
]


def heads(*shape):
    return torch.randn(B, H, *shape)


def in_attention(term):
    """A function that makes a term of arguments and attends with it."""

    def call(**options):
        return attention(heads(N, D), heads(N, D), heads(N, D), [term(**options)])

    return call


def bert():
    sizes = {"vocab_size": 9, "hidden_size": 16, "intermediate_size": 16, "max_position_embeddings": 32}
    return BertModel(BertConfig(**sizes, num_hidden_layers=1, num_attention_heads=2))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    sizes = {"vocab_size": 9, "hidden_size": 16, "num_attention_heads": 2, "blocks": "1"}
    whereformer.EncoderForMaskedLM(whereformer.EncoderConfig(**sizes)).save_pretrained(folder)
    return folder


CONTENT = {name: lambda: heads(N, D) for name in ("query", "key", "value")}
ROWS = {name: lambda: torch.randn(N, H, D) for name in ("query", "key", "value")}
TABLE = {"table": lambda: torch.randn(H, 5), "first": lambda: -2, "step": lambda: 1}
WIDE = {**TABLE, "table": lambda: torch.randn(1, 5, D)}
CALLS = {
    "attention": CONTENT,
    "attention_weights": CONTENT,
    "explain": CONTENT,
    "attention_varlen": {**ROWS, "cu_seqlens_q": lambda: torch.tensor([0, 2, N], dtype=torch.int32)},
    "Positions": {"start": lambda: 0, "stride": lambda: 1, "length": lambda: N},
    "Site": {"query_positions": lambda: Positions(0, 1, N), "key_positions": lambda: Positions(0, 1, N)},
    "DenseBias": {"scores": lambda: heads(N, N)},
    "DistanceDecay": {"query_levels": lambda: heads(N), "key_levels": lambda: heads(N)},
    "OffsetBias": TABLE,
    "OffsetKeys": WIDE,
    "OffsetQueries": WIDE,
    "OffsetValues": WIDE,
    "build_position": {"name": lambda: "tisa", "hidden_size": lambda: 16, "num_heads": lambda: 2},
    "position_names": {},
    "attach": {"model": bert, "position": lambda: "tisa"},
    "detach": {"model": bert},
    "load_attached": {"path_or_id": None, "model_class": lambda: BertModel},
    "load_pretrained": {"path_or_id": None},
    "unpad": {"model": bert},
    "EncoderConfig": {},
    "ElectraPretrainingConfig": {},
    "Seq2SeqConfig": {},
}


def arguments():
    """Every function with each of its arguments."""
    for name, valid in CALLS.items():
        function = getattr(whereformer, name)
        if name.endswith("Config"):
            inherited = {field.name for field in fields(PreTrainedConfig)}  # transformers checks these
            names = [field.name for field in fields(function) if field.name not in inherited]
        else:
            names = [p.name for p in inspect.signature(function).parameters.values() if p.kind != p.VAR_KEYWORD]
        yield from ((name, argument) for argument in dict.fromkeys([*valid, *names]))


@pytest.mark.parametrize(("name", "argument"), [*arguments()])
def test_a_strange_value_works_or_is_refused_by_name(name, argument, saved):
    function = getattr(whereformer, name)
    if name in ("DenseBias", "DistanceDecay") or name.startswith("Offset"):
        function = in_attention(function)
    for value in STRANGE:
        kwargs = {key: make() if make else saved for key, make in CALLS[name].items()}
        try:
            function(**{**kwargs, argument: value})
        except (TypeError, ValueError, OSError) as error:
            # Of another argument, if the two do not go together.
            names = [getattr(error, "field", None), *(key for key in kwargs.keys() | {argument} if key in str(error))]
            assert any(names), (value, error)  # noqa: PT017  # it need not fail
        except NotImplementedError:
            pass


def recipe_options():
    """Every option of recipes, with the first recipe that has it; those of others are slow."""
    options = [(name, field.name) for name in RECIPES for field in fields(recipe_class(name)) if field.name != "out"]
    first = {option: name for name, option in reversed(options)}
    return [pytest.param(*pair, marks=() if first[pair[1]] == pair[0] else pytest.mark.slow) for pair in options]


@pytest.mark.parametrize(("name", "option"), recipe_options())
def test_a_strange_option_of_a_recipe_is_refused_by_name(name, option, tmp_path, monkeypatch):
    class CheckedError(Exception):
        pass

    def begin(run):
        raise CheckedError

    monkeypatch.setattr(Run, "__enter__", begin)
    needed = {"model": "x"} if name in ("finetune", "extend") else {}
    for value in STRANGE:
        with contextlib.suppress(InputError, CheckedError):
            getattr(whereformer, name)(**{**needed, option: value}, out=tmp_path / "out", quiet=True)
