"""Measure time and memory of conformers over long recordings, before and after ``whereformer.attach(model, "none")``.

Models of transformers with random weights and few narrow layers get frames of silence and noise: Wav2Vec2-BERT (Shaw's
vectors of clipped offsets), Wav2Vec2-Conformer and Parakeet (Transformer-XL's vectors). The models compute 12.5
(Parakeet) to 50 frames per second of audio; here it is 12.5 for all. Each measurement has a separate process
with at most ``--limit`` GiB of memory: the memory that it adds at its peak, and its CPU time with one thread, in a
forward pass and in a training step without an optimizer. "eager" and "sdpa" are transformers' own attentions. Outputs
are compared first, over 200 frames.

Run: python benchmarks/sound.py [--models a,b] [--minutes 10,20,40] [--limit 6] [--out FILE]
"""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
from benchmark import Among, Benchmark, main
from parts import in_a_process
from peak import added_memory, mebibytes
from rich.console import Console
from torch import Tensor, nn

import whereformer
from whereformer.lab.recipe import Names, Numbers

WAYS = "eager", "sdpa", "attached"
MODELS = "wav2vec2-bert", "wav2vec2-conformer", "parakeet"
RATE = 12.5
"""Frames per second."""
LAYERS = 1


def build(name: str, width: int) -> nn.Module:
    """Return a model with heads of width 64 and without dropout."""
    sizes = {"hidden_size": width, "num_hidden_layers": LAYERS, "num_attention_heads": width // 64}
    dropouts = dict.fromkeys(("hidden_dropout", "attention_dropout", "activation_dropout", "layerdrop"), 0.0)
    options: dict[str, Any] = {**sizes, **dropouts, "intermediate_size": 2 * width}
    torch.manual_seed(0)
    if name == "parakeet":
        config = transformers.ParakeetEncoderConfig(**options, dropout=0.0, subsampling_conv_channels=16)
        return transformers.ParakeetEncoder(config)
    options |= {"feat_proj_dropout": 0.0, "conformer_conv_dropout": 0.0}
    if name == "wav2vec2-bert":
        return transformers.Wav2Vec2BertModel(transformers.Wav2Vec2BertConfig(**options)).encoder
    config = transformers.Wav2Vec2ConformerConfig(**options, position_embeddings_type="relative")
    return transformers.Wav2Vec2ConformerModel(config).encoder


class Run:
    """A model in one of the ways, with its inputs."""

    def __init__(self, name: str, way: str, width: int) -> None:
        model = build(name, width)
        # The encoders of Wav2Vec2 are parts of a model, and attach needs a model.
        self.model = model if isinstance(model, transformers.PreTrainedModel) else _Model(model)
        self.name, self.width = name, width
        if way == "attached":
            whereformer.attach(self.model, "none")
        else:
            self.model.set_attn_implementation(way)

    def __call__(self, n: int) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        if self.name == "parakeet":
            return self.model(torch.randn(1, 8 * n, 80, generator=generator)).last_hidden_state
        return self.model(torch.randn(1, n, self.width, generator=generator)).last_hidden_state


class _Model(transformers.PreTrainedModel):
    """A model of transformers around an encoder, which is not one by itself."""

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


def measure(name: str, way: str, direction: str, n: int, width: int, limit: float) -> dict[str, Any]:
    """Return the seconds of one pass and the MiB that it adds to the process at its peak; None if memory ran out."""
    run = Run(name, way, width)
    step = (lambda n: run(n).square().mean().backward()) if direction == "training" else torch.no_grad()(run)
    step(64)  # loads everything that is loaded once
    # The limit is of address space, and libraries have taken much of it already.
    space = mebibytes("VmSize") * 2**20 + limit * 2**30
    resource.setrlimit(resource.RLIMIT_AS, (int(space), int(space)))
    start = time.process_time()
    try:
        mib = added_memory(lambda: step(n))
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        return {"seconds": None, "mib": None}
    return {"seconds": time.process_time() - start, "mib": mib}


def check(name: str, width: int) -> float:
    """Return the largest difference of outputs, relative to the largest output."""
    with torch.no_grad():
        expected, actual = (Run(name, way, width)(200) for way in ("eager", "attached"))
    return float((actual - expected).abs().max() / expected.abs().max())


@dataclass(frozen=True, kw_only=True)
class Sound(Benchmark):
    """Measure time and memory of conformers over long recordings."""

    models: Annotated[Names, Among(MODELS)] = MODELS
    """Models of transformers."""
    ways: Annotated[Names, Among(WAYS)] = WAYS
    """Attentions: transformers' eager and sdpa, and attached."""
    minutes: Numbers = (10, 20, 40)
    """Lengths of recordings."""
    width: int = 128
    """Width; heads have 64."""
    limit: float = 6.0
    """GiB of memory of a process."""
    out: Path = Path("benchmarks/results/sound.json")

    def measure(self, console: Console) -> dict[str, Any]:
        rows = []
        for name in self.models:
            if not in_a_process(check, name, self.width) <= 1e-4:
                raise SystemExit(f"attach changed the output of {name}")
            for minutes in self.minutes:
                n = round(60 * minutes * RATE)
                for direction in ("forward", "training"):
                    for way in self.ways:
                        cost = in_a_process(measure, name, way, direction, n, self.width, self.limit)
                        rows.append({"model": name, "minutes": minutes, "n": n, "direction": direction, "way": way})
                        rows[-1] |= cost
                        text = "out of memory"
                        if cost["mib"] is not None:
                            text = f"{cost['seconds']:8.1f} s {cost['mib']:8.0f} MiB"
                        print(f"{name:19}{minutes:4g} min n={n:<6} {direction:9}{way:9} {text}", flush=True)
        return {"layers": LAYERS, "width": self.width, "rate": RATE, "limit_gib": self.limit, "rows": rows}


if __name__ == "__main__":
    main(Sound)
