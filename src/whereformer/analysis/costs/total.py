"""``cost`` and its result ``Cost``: all costs of an encoder, and their printed form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ...errors import InputError
from ...models import EncoderConfig
from .memory import Memory, memory_of
from .operations import Flops, count_flops, flops_of, linear_flops
from .paper import bert
from .parameters import Parameters, count_parameters
from .trace import Trace


@dataclass(frozen=True)
class Cost:
    """The result of :func:`cost`; it prints as a few lines.

    Args:
        lengths: the number of tokens in each block.
        relative: the operations of the layers, including the decoder's, relative to the baseline's.
        linear: the paper's approximation of ``relative``; see :func:`linear_flops`.
    """

    length: int
    batch: int
    lengths: tuple[int, ...]
    flops: Flops
    parameters: Parameters
    memory: Memory
    relative: float
    linear: float

    def to_dict(self) -> dict[str, Any]:
        """Return everything, including the sums, for JSON."""
        data = asdict(self)
        data["lengths"] = list(self.lengths)
        data["flops"] |= {name: getattr(self.flops, name) for name in ("layers", "forward", "training")}
        data["parameters"] |= {name: getattr(self.parameters, name) for name in ("encoder", "total")}
        data["memory"]["training"] = self.memory.training
        return data

    def __str__(self) -> str:
        def parts(cost: Flops | Parameters | Memory, *but: str, show: Callable[[int], str] = _si) -> str:
            given = ((name, value) for name, value in asdict(cost).items() if name not in but and value)
            return ", ".join(f"{name} {show(value)}" for name, value in given)

        flops, parameters, memory = self.flops, self.parameters, self.memory
        return "\n".join(
            (
                f"{self.batch} x {self.length} tokens"
                + (f", blocks of {', '.join(map(str, self.lengths))}" if len(self.lengths) > 1 else ""),
                f"parameters  {_si(parameters.encoder)} in the encoder ({parts(parameters, 'head')})"
                + (f", {_si(parameters.head)} more in the head" if parameters.head else "; no masked-LM head"),
                f"forward     {_si(flops.layers, 'FLOPs')} in the layers, {self.relative:.3f} of the baseline's,"
                f" which is BERT-base by default (by the linear rule {self.linear:.3f})",
                f"            {parts(flops)}",
                f"training    {_si(flops.training, 'FLOPs')} a batch, embeddings"
                + (" and head included" if parameters.head else " included"),
                f"memory      weights {_bytes(memory.weights)}, in training four times that, with gradients and Adam",
                f"            training keeps {_bytes(memory.training)} of activations"
                f" ({parts(memory, 'weights', 'head', 'inference', show=_bytes)})"
                + (f", the head {_bytes(memory.head)}" if parameters.head else ""),
                f"            inference needs {_bytes(memory.inference)} for activations",
            )
        )


def _si(value: float, unit: str = "") -> str:
    """Format a number with a prefix: 108.9M, 22.3 GFLOPs."""
    thousands = max((power for power in range(6) if value >= 1000**power), default=0)
    number = f"{value / 1000**thousands:,.1f}" if thousands else f"{value:,.0f}"
    return f"{number}{' ' if unit else ''}{('', 'k', 'M', 'G', 'T', 'P')[thousands]}{unit}"


def _bytes(value: float) -> str:
    power, unit = (10, "KiB") if value < 2**20 else (20, "MiB") if value < 10 * 2**30 else (30, "GiB")
    return f"{value / 2**power:,.1f} {unit}"


def cost(
    config: EncoderConfig,
    length: int,
    batch: int = 1,
    *,
    predictions: int | None = None,
    decoder: bool = True,
    baseline: EncoderConfig | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Cost:
    """Compute what an encoder costs.

    Args:
        config: the encoder.
        length: the number of tokens in a sequence.
        batch: the number of sequences.
        predictions: the number of tokens per sequence that the masked-LM head predicts; if None, all, or none if blocks
            pool and no decoder undoes it.
        decoder: False leaves out a decoder that the config has, as in ``Encoder(config, decoder=False)`` and in a
            sequence classifier.
        baseline: the encoder that ``relative`` compares with, at the same length and batch; BERT-base if None.
        dtype: the dtype of parameters and activations.
        device: "cpu" or "cuda", which keep different things for the backward.

    Raises:
        ValueError: for sizes that do not fit, including a length beyond the position method's range.
    """
    if batch < 1:
        raise InputError("batch", f"expected at least 1, got {batch}")
    config = config if decoder else config.without_decoder()
    if predictions is None:
        predictions = length if config.full_length else 0
    if predictions and not config.full_length:
        raise InputError(
            "predictions", f"blocks that pool need a decoder to predict tokens, got {predictions} without one"
        )
    if not 0 <= predictions <= length:
        raise InputError("predictions", f"expected 0 to length {length}, got {predictions}")
    if device not in ("cpu", "cuda"):
        raise InputError("device", f"expected 'cpu' or 'cuda', got {device!r}")
    trace = Trace(config, length, batch, dtype, torch.device(device), config.attention_backend)
    flops = flops_of(trace, predictions)
    parameters = count_parameters(config)
    return Cost(
        length=length,
        batch=batch,
        lengths=config.block_lengths(length),
        flops=flops,
        parameters=parameters,
        memory=memory_of(trace, predictions, parameters),
        relative=flops.layers / count_flops(baseline or bert(length), length, batch).layers,
        linear=linear_flops(config),
    )
