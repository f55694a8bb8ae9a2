"""Time our funnel against transformers' Funnel with the same weights, and against our plain encoder.

Run: .venv/bin/python benchmarks/funnel.py [--lengths 128,512] [--out FILE]

Outputs are compared first. Then every round runs each model once, in random order. A ratio is a model's time divided by
the time of transformers' in the same round. Time is the CPU time of one thread; the median, lowest and highest are
given. Memory is what a forward or a training step allocates at its peak, besides parameters and their gradients, which
are the same in both. FLOPs are those of ``whereformer.analysis.count_flops``.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from rich.console import Console
from side_by_side import SideBySide, show, write_rows
from torch import Tensor, nn
from transformers import FunnelBaseModel, FunnelConfig, FunnelModel
from transformers.utils.logging import disable_progress_bar

from whereformer import Encoder, EncoderConfig, load_pretrained
from whereformer.analysis import count_flops
from whereformer.cli.main import execute


def _call(model: nn.Module, name: str, ids: Tensor) -> Callable[[], Tensor]:
    # Without token types, transformers assumes zeros. They are passed so that the same weights do the same here.
    own = {"token_type_ids": torch.zeros_like(ids)} if name in ("transformers", "whereformer") else {}
    return lambda: model(ids, **own).last_hidden_state


@dataclass(frozen=True)
class Funnel(SideBySide):
    """Measure time and memory of funnels relative to transformers' FunnelModel with the same weights."""

    lengths: Annotated[str, tyro.conf.arg(metavar="N,N")] = "128,512"
    """Tokens in a sequence."""
    tokens: int = 1024
    """Tokens in a batch."""
    blocks: str = "2-2-2"
    """Layers."""
    hidden_size: int = 768
    """Width; heads have 64."""
    out: Path = Path("benchmarks/results/funnel.json")
    """File for the results."""

    def run(self, console: Console) -> None:
        torch.set_num_threads(1)
        disable_progress_bar()
        rows = []
        for decoder in (False, True):
            models = self._models(decoder)
            for length in map(int, self.lengths.split(",")):
                ids = torch.randint(1000, (max(1, self.tokens // length), length))
                calls = {name: _call(model, name, ids) for name, model in models.items()}
                with torch.no_grad():
                    expected, found = calls["transformers"](), calls["whereformer"]()
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
                for training in (False, True):
                    rows += self._time(models, calls, length, len(ids), decoder, training)
                    for row in rows[-len(calls) :]:
                        label = f"n={length} {'decoder' if decoder else 'base':8}{row['direction']:9}{row['model']:28}"
                        show(console, label, row, f"FLOPs {row['flops_ratio']:.2f}  ")
        write_rows(console, self.out, __doc__, rows)

    def _models(self, decoder: bool) -> dict[str, nn.Module]:
        sizes = [int(size) for size in self.blocks.split("-")]
        heads = self.hidden_size // 64
        dropouts = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
        shape = {"d_model": self.hidden_size, "n_head": heads, "d_head": 64, "d_inner": 4 * self.hidden_size}
        config = FunnelConfig(vocab_size=1000, block_sizes=sizes, num_decoder_layers=2, **shape, **dropouts)
        torch.manual_seed(0)
        theirs = (FunnelModel if decoder else FunnelBaseModel)(config)
        with tempfile.TemporaryDirectory() as folder:
            theirs.save_pretrained(folder)
            ours = load_pretrained(folder)
            tisa = load_pretrained(folder, "tisa", segments="embedding", type_vocab_size=0)
        plain = {**ours.config.to_dict(), "blocks": str(sum(sizes)), "decoder_layers": "0", "type_vocab_size": 0}
        return {
            "transformers": theirs,
            "whereformer": ours,
            "whereformer, tisa": tisa,
            "plain, transformer_xl": Encoder(EncoderConfig.from_dict({**plain, "segments": "embedding"})),
            "plain, tisa": Encoder(
                EncoderConfig.from_dict({**plain, "segments": "embedding", "position": "tisa", "position_options": {}})
            ),
        }

    def _time(
        self,
        models: dict[str, Any],
        calls: dict[str, Callable[[], Tensor]],
        length: int,
        batch: int,
        decoder: bool,
        training: bool,
    ) -> list[dict[str, object]]:
        def step(name: str) -> None:
            if training:
                calls[name]().sum().backward()
            else:
                with torch.no_grad():
                    calls[name]()

        steps = {name: partial(step, name) for name in calls}
        flops = {
            name: count_flops(model.config, length, batch, predictions=0).layers
            for name, model in models.items()
            if name != "transformers"
        }
        flops["transformers"] = flops["whereformer"]
        direction = "training" if training else "forward"
        shape = {"n": length, "batch": batch, "decoder": decoder, "direction": direction}
        return [
            {**shape, "model": name, **measured, "flops_ratio": flops[name] / flops["whereformer"]}
            for name, measured in self.measure(steps, models, "transformers").items()
        ]


if __name__ == "__main__":
    execute(tyro.cli(Funnel, args=sys.argv[1:]))
