"""Measure time and memory of conformers over long recordings, before and after ``whereformer.attach(model, "none")``.

Models of transformers with random weights and few narrow layers get frames of silence and noise: Wav2Vec2-BERT (Shaw's
vectors of clipped offsets), Wav2Vec2-Conformer and Parakeet (those of Transformer-XL). The models compute 12.5
(Parakeet) to 50 frames per second of sound; here it is ``--rate`` for all. Each measurement is a process of its own
with at most ``--limit`` GiB of memory: what it adds at its peak, and its CPU time with one thread, in a forward pass
and in a training step without an optimizer. "eager" and "sdpa" are transformers' own attentions. Outputs are compared
first, over 200 frames.

Run: python benchmarks/sound.py [--models a,b] [--minutes 10,20,40] [--limit 6] [--out FILE]
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from peak import OUT_OF_MEMORY, added_memory, answer, in_a_process, mebibytes
from torch import Tensor, nn

import whereformer
from whereformer.provenance import write_results

WAYS = "eager", "sdpa", "attached"


def make(name: str, layers: int, width: int) -> nn.Module:
    """Return a model with heads of width 64 and without dropout."""
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": width // 64}
    drops = dict.fromkeys(("hidden_dropout", "attention_dropout", "activation_dropout", "layerdrop"), 0.0)
    torch.manual_seed(0)
    if name == "parakeet":
        config = transformers.ParakeetEncoderConfig(
            **sizes, **{**drops, "dropout": 0.0}, intermediate_size=2 * width, subsampling_conv_channels=16
        )
        return transformers.ParakeetEncoder(config)
    drops |= {"feat_proj_dropout": 0.0, "conformer_conv_dropout": 0.0}
    if name == "wav2vec2-bert":
        config = transformers.Wav2Vec2BertConfig(**sizes, **drops, intermediate_size=2 * width)
        return transformers.Wav2Vec2BertModel(config).encoder
    config = transformers.Wav2Vec2ConformerConfig(
        **sizes, **drops, intermediate_size=2 * width, position_embeddings_type="relative"
    )
    return transformers.Wav2Vec2ConformerModel(config).encoder


MODELS = "wav2vec2-bert", "wav2vec2-conformer", "parakeet"


class Run:
    """A model in one of the ways, and what it reads."""

    def __init__(self, name: str, way: str, layers: int, width: int) -> None:
        model = make(name, layers, width)
        # The encoders of Wav2Vec2 are parts of a model, so they are attached to as such.
        self.whole = model if isinstance(model, transformers.PreTrainedModel) else _Whole(model)
        self.name, self.width = name, width
        if way == "attached":
            whereformer.attach(self.whole, "none")
        else:
            self.whole.set_attn_implementation(way)

    def __call__(self, n: int) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        if self.name == "parakeet":
            return self.whole(torch.randn(1, 8 * n, 80, generator=generator)).last_hidden_state
        return self.whole(torch.randn(1, n, self.width, generator=generator)).last_hidden_state


class _Whole(transformers.PreTrainedModel):
    """A model of transformers around an encoder that is none by itself."""

    config_class = transformers.PreTrainedConfig
    main_input_name = "input_features"
    _supports_sdpa = True

    def __init__(self, encoder: Any) -> None:
        super().__init__(encoder.config)
        self.config.feature_projection_input_dim = encoder.config.hidden_size
        self.encoder = encoder

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True

    def forward(self, input_features: Tensor, **options: object) -> object:
        return self.encoder(input_features, **options)


def measure(name: str, way: str, direction: str, n: int, layers: int, width: int, limit: float) -> dict[str, float]:
    """Return the seconds of one pass and what it adds to the process at its peak, in MiB."""
    run = Run(name, way, layers, width)
    step = (lambda n: run(n).square().mean().backward()) if direction == "training" else torch.no_grad()(run)
    step(64)  # loads what is loaded once
    # The limit is of address space, of which libraries have taken much already.
    space = mebibytes("VmSize") * 2**20 + limit * 2**30
    resource.setrlimit(resource.RLIMIT_AS, (int(space), int(space)))
    start = time.process_time()
    try:
        mib = added_memory(lambda: step(n))
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        raise SystemExit(OUT_OF_MEMORY) from None
    return {"seconds": time.process_time() - start, "mib": mib}


def check(name: str, layers: int, width: int) -> float:
    """Return the largest difference of outputs, relative to the largest output."""
    with torch.no_grad():
        expected, found = (Run(name, way, layers, width)(200) for way in ("eager", "attached"))
    return float((found - expected).abs().max() / expected.abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--minutes", default="10,20,40")
    parser.add_argument("--rate", type=float, default=12.5, help="frames per second")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--limit", type=float, default=6.0, help="GiB")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/sound.json"))
    arguments = parser.parse_args()
    rows = []
    sizes = arguments.layers, arguments.width
    for name in arguments.models.split(","):
        difference = in_a_process(check, name, *sizes)
        if not isinstance(difference, float) or difference > 1e-4:
            raise SystemExit(f"attach changed the output of {name}")
        for minutes in map(float, arguments.minutes.split(",")):
            n = round(60 * minutes * arguments.rate)
            for direction in ("forward", "training"):
                for way in arguments.ways.split(","):
                    found = in_a_process(measure, name, way, direction, n, *sizes, arguments.limit)
                    row = {"model": name, "minutes": minutes, "n": n, "direction": direction, "way": way}
                    rows.append({**row, **(found or {"seconds": None, "mib": None})})
                    said = "out of memory" if found is None else f"{found['seconds']:8.1f} s {found['mib']:8.0f} MiB"
                    print(f"{name:19}{minutes:4g} min n={n:<6} {direction:9}{way:9} {said}", flush=True)
        settings = {"layers": sizes[0], "width": sizes[1], "rate": arguments.rate, "limit_gib": arguments.limit}
        write_results(arguments.out, {**settings, "rows": rows})


if __name__ == "__main__":
    answer(measure, check)
    main()
