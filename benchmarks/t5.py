"""Measure what a T5 gains in training when its biases are a table over offsets, against transformers' own attention.

Run: .venv/bin/python benchmarks/t5.py [--lengths 128,512,1024] [--out FILE]

The same weights run with transformers' "eager" and "sdpa" attention, which add a matrix of biases to the scores, and
with ``whereformer.attach(model, "none")``. Outputs are compared first. Then every round runs each once, in random
order. A ratio is a model's time divided by the time of "sdpa" in the same round. Time is the CPU time of one thread;
the median, lowest and highest are given. Memory is what a step allocates at its peak, besides parameters and their
gradients. In padded batches, the lengths of rows fall evenly from n to half of n. The decoder reads the same number of
tokens as the encoder.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import tyro
from rich.console import Console
from side_by_side import SideBySide, show, write_rows
from torch import Tensor, nn
from transformers import T5Config, T5EncoderModel, T5Model

import whereformer
from whereformer.cli.main import execute


def _models(encoder_only: bool, layers: int) -> dict[str, nn.Module]:
    """Build the models to compare, with the sizes of T5-small."""
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=1000, d_model=512, d_kv=64, d_ff=2048, num_heads=8, num_layers=layers, dropout_rate=0.0
    )
    sdpa = (T5EncoderModel if encoder_only else T5Model)(config)
    sdpa.set_attn_implementation("sdpa")
    eager = copy.deepcopy(sdpa)
    eager.set_attn_implementation("eager")
    return {"sdpa": sdpa, "eager": eager, "whereformer": whereformer.attach(copy.deepcopy(sdpa), "none")}


def _inputs(length: int, batch: int, encoder_only: bool, padded: bool) -> dict[str, Tensor]:
    inputs = {"input_ids": torch.randint(1000, (batch, length))}
    if padded:
        lengths = torch.linspace(length, length // 2, batch).long()
        inputs["attention_mask"] = (torch.arange(length) < lengths[:, None]).long()
    if not encoder_only:
        inputs["decoder_input_ids"] = torch.randint(1000, (batch, length))
        if padded:
            inputs["decoder_attention_mask"] = inputs["attention_mask"]
    return inputs


@dataclass(frozen=True)
class Biases(SideBySide):
    """Measure time and memory of a T5 training step with its biases as a table, relative to transformers'."""

    lengths: Annotated[str, tyro.conf.arg(metavar="N,N")] = "128,512,1024"
    """Tokens in a sequence."""
    tokens: int = 2048
    """Tokens in a batch."""
    layers: int = 6
    """Layers of the encoder, and of the decoder."""
    out: Path = Path("benchmarks/results/t5.json")
    """File for the results."""

    def run(self, console: Console) -> None:
        torch.set_num_threads(1)
        rows = []
        for encoder_only in (True, False):
            models = _models(encoder_only, self.layers)
            for length in map(int, self.lengths.split(",")):
                batch = max(1, self.tokens // length)
                for padded in (False, True)[: 1 + (batch > 1)]:  # a single row has no padding
                    inputs = _inputs(length, batch, encoder_only, padded)
                    _check(models, inputs)
                    steps = {name: partial(_step, model, inputs) for name, model in models.items()}
                    part = "encoder" if encoder_only else "whole"
                    shape = {"part": part, "n": length, "batch": batch, "layers": self.layers, "padded": padded}
                    for name, measured in self.measure(steps, models, "sdpa").items():
                        rows.append({**shape, "model": name, **measured})
                        show(console, f"{part} n={length} {'padded' if padded else 'full':7}{name:12}", rows[-1])
        write_rows(console, self.out, __doc__, rows)


def _step(model: nn.Module, inputs: dict[str, Tensor]) -> None:
    model(**inputs).last_hidden_state.sum().backward()


def _check(models: dict[str, nn.Module], inputs: dict[str, Tensor]) -> None:
    with torch.no_grad():
        outputs = {name: model(**inputs).last_hidden_state for name, model in models.items()}
    mask = inputs.get("decoder_attention_mask", inputs.get("attention_mask"))
    for name, output in outputs.items():
        found, expected = (x if mask is None else x[mask.bool()] for x in (output, outputs["eager"]))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, msg=partial("{}: {}".format, name))


if __name__ == "__main__":
    execute(tyro.cli(Biases, args=sys.argv[1:]))
