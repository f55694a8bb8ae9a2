"""Time whole models on the CPU: the effect of ``whereformer.attach(model, "none")``, and our encoders next to others.

Run: python benchmarks/models.py [--models bert,t5,modernbert,deberta] [--lengths 128,512,2048] [--out FILE]
     python benchmarks/models.py --models chronos --layers 6 --dtypes bfloat16 --lengths 512,1024,2048 --rounds 3
     python benchmarks/models.py --models funnel,funnel+decoder --layers 6 --tokens 1024 --lengths 128,512 --rounds 3

Models of transformers ("sdpa") are timed against the same model after ``attach(model, "none")``, which keeps the
model's own positions and only has its attention computed by this library. Our encoders are timed against transformers'
BERT of the same sizes, and our funnel against transformers' Funnel with the same weights. Outputs that have to be the
same are compared first. All have few layers of base width (768, with 12 heads) and no dropout; "chronos", the T5
encoder of a small Chronos, is 512 wide with 8 heads. A training step is a forward and a backward pass without an
optimizer. In each round every model runs once, in random order; a ratio is a model's CPU time divided by the time of
transformers' model in the same round, with one thread. Results have the median, the lowest and the highest ratio.
Memory is the peak of a step's allocations, besides parameters and their gradients. FLOPs are by
``whereformer.analysis.count_flops``, relative to our first model. With WHEREFORMER_NATIVE=0 in the environment, this
library has no compiled kernel.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
from benchmark import Among, Benchmark, main
from peak import peak_of_first_call
from rich.console import Console
from side_by_side import time_by_turns
from torch import Tensor, nn
from transformers.utils.logging import disable_progress_bar

import whereformer
from whereformer import Encoder, EncoderConfig, load_pretrained
from whereformer.analysis import count_flops
from whereformer.lab.recipe import Counts, Names, Range

MAX_LENGTH = 2048
VOCABULARY = 1000
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _bert(layers: int) -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "num_hidden_layers": layers, "max_position_embeddings": MAX_LENGTH}
    return transformers.BertModel(transformers.BertConfig(**sizes, **NO_DROPOUT), add_pooling_layer=False)


def _t5(layers: int) -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "d_model": 768, "d_ff": 3072, "num_heads": 12, "num_layers": layers}
    return transformers.T5EncoderModel(transformers.T5Config(**sizes, dropout_rate=0.0))


def _chronos(layers: int) -> nn.Module:
    sizes = {"vocab_size": 4096, "d_model": 512, "d_ff": 2048, "num_heads": 8, "num_layers": layers}
    return transformers.T5EncoderModel(transformers.T5Config(**sizes, dropout_rate=0.0))


def _modernbert(layers: int) -> nn.Module:
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)
    config = transformers.ModernBertConfig(vocab_size=VOCABULARY, num_hidden_layers=layers, **tokens)
    return transformers.ModernBertModel(config)


def _deberta(layers: int) -> nn.Module:
    # As in DeBERTa-v3-base
    positions = {"relative_attention": True, "position_buckets": 256, "norm_rel_ebd": "layer_norm"}
    positions |= {"share_att_key": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False}
    sizes = {"vocab_size": VOCABULARY, "num_hidden_layers": layers, "type_vocab_size": 0}
    return transformers.DebertaV2Model(transformers.DebertaV2Config(**sizes, **positions, **NO_DROPOUT))


def _pair(make: Callable[[int], Any], layers: int) -> dict[str, nn.Module]:
    theirs = make(layers)
    if not isinstance(theirs, transformers.DebertaV2Model):  # which only has its own attention
        theirs.set_attn_implementation("sdpa")
    return {"transformers": theirs, "attached": whereformer.attach(copy.deepcopy(theirs), "none")}


def _ours(position: str, blocks: str) -> nn.Module:
    options = {"vocab_size": VOCABULARY, "blocks": blocks, "max_position_embeddings": MAX_LENGTH}
    return Encoder(EncoderConfig(position=position, **options, **NO_DROPOUT))


def _encoders(layers: int) -> dict[str, nn.Module]:
    funnel = "-".join("1" * layers)
    return {
        "transformers": _bert(layers),
        **{
            position: _ours(position, str(layers))
            for position in ("learned", "tisa", "shaw", "deberta", "transformer_xl")
        },
        f"tisa {funnel}": _ours("tisa", funnel),
    }


def _funnels(decoder: bool, layers: int) -> dict[str, nn.Module]:
    """Build Funnel with three blocks, our encoder with its weights, others like it, and plain encoders."""
    dropouts = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    sizes = {"vocab_size": VOCABULARY, "block_sizes": [layers // 3] * 3, "num_decoder_layers": 2}
    config = transformers.FunnelConfig(**sizes, **dropouts)
    theirs = (transformers.FunnelModel if decoder else transformers.FunnelBaseModel)(config)
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = load_pretrained(folder)
        tisa = load_pretrained(folder, "tisa", segments="embedding", type_vocab_size=0)
    plain = {**ours.config.to_dict(), "blocks": str(layers // 3 * 3), "decoder_layers": "0", "type_vocab_size": 0}
    plain["segments"] = "embedding"
    return {
        "transformers": theirs,
        "whereformer": ours,
        "whereformer, tisa": tisa,
        "plain, transformer_xl": Encoder(EncoderConfig.from_dict(plain)),
        "plain, tisa": Encoder(EncoderConfig.from_dict({**plain, "position": "tisa", "position_options": {}})),
    }


MODELS: dict[str, Callable[[int], dict[str, nn.Module]]] = {
    "bert": partial(_pair, _bert),
    "t5": partial(_pair, _t5),
    "chronos": partial(_pair, _chronos),
    "modernbert": partial(_pair, _modernbert),
    "deberta": partial(_pair, _deberta),
    "encoders": _encoders,
    "funnel": partial(_funnels, False),
    "funnel+decoder": partial(_funnels, True),
}


@dataclass(frozen=True, kw_only=True)
class Models(Benchmark):
    """Measure time and memory of whole models relative to transformers'."""

    models: Annotated[Names, Among(MODELS)] = ("bert", "t5", "modernbert", "encoders")
    """Some of bert, t5, chronos, modernbert, deberta (each before and after attach), encoders (ours next to BERT),
    funnel and funnel+decoder (ours next to Funnel)."""
    lengths: Annotated[Counts, Range(1, MAX_LENGTH)] = (128, 512, 2048)
    """Tokens in a sequence, at most 2048."""
    dtypes: Annotated[Names, Among(("float32", "bfloat16"))] = ("float32", "bfloat16")
    """float32, or bfloat16 by autocast."""
    tokens: int = 2048
    """Tokens in a batch."""
    layers: int = 3
    """Layers; a funnel has them in three blocks."""
    rounds: int = 5
    """How many times each model is timed."""
    out: Path = Path("benchmarks/results/models.json")

    def measure(self, console: Console) -> dict[str, Any]:
        rows = []
        for name in self.models:
            torch.manual_seed(0)
            models = MODELS[name](self.layers)
            for dtype in self.dtypes:
                for length in self.lengths:
                    ids = torch.randint(1, VOCABULARY, (max(1, self.tokens // length), length))
                    calls = {key: partial(_call, key, model, ids, dtype) for key, model in models.items()}
                    if name != "encoders":
                        _check(calls, dtype)
                    flops = _count_flops(models, ids)
                    for direction, run in (("forward", torch.no_grad()), ("training", _train)):
                        steps = {key: run(call) for key, call in calls.items()}
                        case = {"models": name, "n": length, "batch": len(ids), "layers": self.layers, "dtype": dtype}
                        for key, times in time_by_turns(steps, self.rounds, "transformers", models).items():
                            mib = _peak(steps[key], models[key]) // 2**20
                            rows.append({**case, "direction": direction, "model": key, **asdict(times), "mib": mib})
                            rows[-1] |= {"flops_ratio": flops[key]} if key in flops else {}
                            label = f"{name:15}{dtype:9} n={length:<5}{direction:9}{key:22}"
                            count = f"  FLOPs {flops[key]:.2f}" if key in flops else ""
                            print(f"{label}{times}  {times.seconds:.2f} s  {mib} MiB{count}", flush=True)
        return {"method": " ".join(str(__doc__).split()), "rows": rows}


def _call(name: str, model: nn.Module, ids: Tensor, dtype: str) -> Tensor:
    # Without token types, transformers assumes zeros. Our Funnel gets them, so that the same weights do the same.
    types = {"token_type_ids": torch.zeros_like(ids)} if name == "whereformer" else {}
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
        return model(ids, **types).last_hidden_state


def _train(call: Callable[[], Tensor]) -> Callable[[], None]:
    return lambda: call().float().sum().backward()


def _count_flops(models: Mapping[str, nn.Module], ids: Tensor) -> dict[str, float]:
    """Return the FLOPs of our encoders, relative to the first of them."""
    configs = {name: model.config for name, model in models.items() if isinstance(model, Encoder)}
    flops = {
        name: count_flops(config, ids.shape[1], len(ids), predictions=0).layers for name, config in configs.items()
    }
    return {name: count / next(iter(flops.values())) for name, count in flops.items()}


def _peak(step: Callable[[], object], model: nn.Module) -> int:
    """Return a step's peak memory in bytes."""
    step()  # leaves gradients, so that the measured step only adds to them
    peak = peak_of_first_call(step)
    model.zero_grad()
    return peak


def _check(calls: Mapping[str, Callable[[], Tensor]], dtype: str) -> None:
    """Compare the first two models."""
    with torch.no_grad():
        expected, actual, *_ = (call().float() for call in calls.values())
    tolerance = 1e-4 if dtype == "float32" else 5e-2
    if not (actual - expected).norm() <= tolerance * expected.norm():
        raise SystemExit("attach changed the output, or our Funnel differs from transformers'")


if __name__ == "__main__":
    main(Models)
