"""Time whole models on the CPU: what ``whereformer.attach(model, "none")`` changes, and our encoders beside BERT.

Run: python benchmarks/models.py [--models bert,t5,modernbert,deberta,encoders] [--lengths 128,512,2048] [--out FILE]

Models of transformers ("sdpa", DeBERTa "eager") are timed against the same model after ``attach(model, "none")``, which
keeps the model's own positions and only has its attention computed by this library; outputs are compared first. Our
encoders are timed against transformers' BERT of the same sizes. All have few layers of base width (768, with 12 heads)
and no dropout. A training step is a forward and a backward pass without an optimizer. In each round every model runs
once, in random order; a ratio is a model's CPU time divided by that of transformers' model in the same round, with one
thread. The median, lowest and highest are given. With WHEREFORMER_NATIVE=0 in the environment, this library has no
compiled kernel.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from lists import listed
from rich.console import Console
from side_by_side import SideBySide, show, write_rows
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertModel,
    DebertaV2Config,
    DebertaV2Model,
    ModernBertConfig,
    ModernBertModel,
    T5Config,
    T5EncoderModel,
)

import whereformer
from whereformer import Encoder, EncoderConfig
from whereformer.cli.main import execute

LONGEST = 2048
VOCABULARY = 1000


def _bert(layers: int) -> nn.Module:
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes = {"vocab_size": VOCABULARY, "num_hidden_layers": layers, "max_position_embeddings": LONGEST}
    return BertModel(BertConfig(**sizes, **dropouts), add_pooling_layer=False)


def _t5(layers: int) -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "d_model": 768, "d_ff": 3072, "num_heads": 12, "num_layers": layers}
    return T5EncoderModel(T5Config(**sizes, dropout_rate=0.0))


def _modernbert(layers: int) -> nn.Module:
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)
    return ModernBertModel(ModernBertConfig(vocab_size=VOCABULARY, num_hidden_layers=layers, **tokens))


def _deberta(layers: int) -> nn.Module:
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    # As in DeBERTa-v3-base
    positions = {"relative_attention": True, "position_buckets": 256, "norm_rel_ebd": "layer_norm"}
    positions |= {"share_att_key": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False}
    sizes = {"vocab_size": VOCABULARY, "num_hidden_layers": layers, "type_vocab_size": 0}
    return DebertaV2Model(DebertaV2Config(**sizes, **positions, **dropouts))


def _pair(make: Callable[[int], Any], layers: int) -> dict[str, nn.Module]:
    theirs = make(layers)
    if not isinstance(theirs, DebertaV2Model):  # which only has its own attention
        theirs.set_attn_implementation("sdpa")
    return {"transformers": theirs, "attached": whereformer.attach(copy.deepcopy(theirs), "none")}


def _ours(position: str, blocks: str) -> nn.Module:
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    of_all = {"vocab_size": VOCABULARY, "blocks": blocks, "max_position_embeddings": LONGEST}
    return Encoder(EncoderConfig(position=position, **of_all, **dropouts))


def _encoders(layers: int) -> dict[str, nn.Module]:
    funnel = "-".join("1" * layers)
    return {
        "transformers": _bert(layers),
        **{position: _ours(position, str(layers)) for position in ("learned", "tisa", "shaw")},
        f"tisa {funnel}": _ours("tisa", funnel),
    }


MODELS: dict[str, Callable[[int], dict[str, nn.Module]]] = {
    "bert": partial(_pair, _bert),
    "t5": partial(_pair, _t5),
    "modernbert": partial(_pair, _modernbert),
    "deberta": partial(_pair, _deberta),
    "encoders": _encoders,
}


@dataclass(frozen=True)
class Models(SideBySide):
    """Measure time and memory of whole models relative to transformers'."""

    models: Annotated[str, tyro.conf.arg(metavar="A,B")] = ",".join(MODELS)
    """Some of bert, t5, modernbert, deberta (each before and after attach) and encoders (ours beside BERT)."""
    lengths: Annotated[str, tyro.conf.arg(metavar="N,N")] = "128,512,2048"
    """Tokens in a sequence, at most 2048."""
    dtypes: Annotated[str, tyro.conf.arg(metavar="A,B")] = "float32,bfloat16"
    """float32, or bfloat16 by autocast."""
    tokens: int = 2048
    """Tokens in a batch."""
    layers: int = 3
    """Layers."""
    out: Path = Path("benchmarks/results/models.json")
    """File for the results."""

    def run(self, console: Console) -> None:
        torch.set_num_threads(1)
        rows = []
        for name in listed("models", self.models, list(MODELS)):
            torch.manual_seed(0)
            models = MODELS[name](self.layers)
            for dtype in listed("dtypes", self.dtypes, ["float32", "bfloat16"]):
                for length in map(int, self.lengths.split(",")):
                    ids = torch.randint(1, VOCABULARY, (max(1, self.tokens // length), length))
                    calls = {key: partial(_call, model, ids, dtype) for key, model in models.items()}
                    if name != "encoders":
                        _check(calls, dtype)
                    for direction, step in (("forward", torch.no_grad()(_call)), ("training", _train)):
                        steps = {key: partial(step, model, ids, dtype) for key, model in models.items()}
                        case = {"models": name, "n": length, "batch": len(ids), "layers": self.layers, "dtype": dtype}
                        for key, measured in self.measure(steps, models, "transformers").items():
                            rows.append({**case, "direction": direction, "model": key, **measured})
                            show(console, f"{name:11}{dtype:9} n={length:<5}{direction:9}{key:14}", rows[-1])
        write_rows(console, self.out, __doc__, rows)


def _call(model: nn.Module, ids: Tensor, dtype: str) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
        return model(ids).last_hidden_state


def _train(model: nn.Module, ids: Tensor, dtype: str) -> None:
    _call(model, ids, dtype).float().sum().backward()


def _check(calls: Mapping[str, Callable[[], Tensor]], dtype: str) -> None:
    with torch.no_grad():
        found, expected = calls["attached"]().float(), calls["transformers"]().float()
    most = 1e-4 if dtype == "float32" else 5e-2
    if not (found - expected).norm() <= most * expected.norm():
        raise SystemExit("attach changed the output")


if __name__ == "__main__":
    execute(tyro.cli(Models, args=sys.argv[1:]))
