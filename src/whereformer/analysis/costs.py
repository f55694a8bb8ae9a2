"""What an encoder costs: parameters, floating-point operations and memory, measured on torch's "meta" device.

There tensors have shapes but no memory, so the real model runs at any size. Torch counts its matrix products, with two
operations per multiply-add, and reports the tensors that autograd keeps for the backward. As in the Funnel-Transformer
paper (Dai et al. 2020, arXiv 2006.03236), norms, activations, softmax and dropout do not count.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from ..errors import InputError
from ..kernels.fields import Call
from ..models import Encoder, EncoderConfig
from ..models.heads import MaskedLMHead

META = torch.device("meta")


@dataclass(frozen=True)
class Parameters:
    """The numbers of trained parameters; ``encoder`` is all but the masked-LM head, whose tied embeddings count once.

    An encoder that pools without a decoder has no such head.
    """

    embeddings: int
    position: int
    layers: int
    head: int

    @property
    def encoder(self) -> int:
        return self.embeddings + self.position + self.layers

    @property
    def total(self) -> int:
        return self.encoder + self.head


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of one forward of the whole batch.

    Pairs that a window or causality keeps apart do not count, unless the reference computes them.

    Args:
        layers: all layers, the decoder's included, and what positions and segments need; models are compared by this.
        embeddings: the projection of embeddings that are narrower than the model.
        head: the masked-LM head; 0 for an encoder that pools without a decoder.
    """

    layers: int
    embeddings: int
    head: int

    @property
    def forward(self) -> int:
        """All operations of the forward."""
        return self.layers + self.embeddings + self.head

    @property
    def training(self) -> int:
        """The operations of forward and backward: each product has two gradients of the same size."""
        return 3 * self.forward


@dataclass(frozen=True)
class Memory:
    """Bytes of one batch without padding. What lives for a moment only is not counted.

    Args:
        weights: the parameters; training needs four times this, with their gradients and Adam's two moments.
        activations: what the encoder keeps for the backward, as on the CPU; on a GPU, masks of dropout take a byte.
        head: what the masked-LM head and its loss keep, including the logits.
    """

    weights: int
    activations: int
    head: int


@dataclass(frozen=True)
class Cost:
    """The result of :func:`cost`; it prints as a few lines.

    Args:
        lengths: the number of tokens in each block.
        relative: the operations of the layers, including the decoder's, relative to BERT-base's.
    """

    length: int
    batch: int
    lengths: tuple[int, ...]
    flops: Flops
    parameters: Parameters
    memory: Memory
    relative: float

    def __str__(self) -> str:
        flops, parameters, memory = self.flops, self.parameters, self.memory
        parts = ", ".join(f"{name} {_si(getattr(parameters, name))}" for name in ("embeddings", "position", "layers"))
        head = f", {_si(parameters.head)} more in the head" if parameters.head else "; no masked-LM head"
        blocks = f", blocks of {', '.join(map(str, self.lengths))}" if len(self.lengths) > 1 else ""
        included = "embeddings and head" if parameters.head else "embeddings"
        return "\n".join(
            (
                f"{self.batch} x {self.length} tokens{blocks}",
                f"parameters  {_si(parameters.encoder)} in the encoder ({parts}){head}",
                f"forward     {_si(flops.layers, 'FLOPs')} in the layers, {self.relative:.3f} of BERT-base's",
                f"training    {_si(flops.training, 'FLOPs')} a batch, {included} included",
                f"memory      weights {_bytes(memory.weights)}, in training four times that, with gradients and Adam",
                f"            training keeps {_bytes(memory.activations)} of activations"
                + (f", the head {_bytes(memory.head)}" if memory.head else ""),
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
    dtype: torch.dtype = torch.float32,
) -> Cost:
    """Measure what an encoder costs, without memory for it.

    Args:
        config: the encoder.
        length: the number of tokens in a sequence.
        batch: the number of sequences.
        predictions: the number of tokens per sequence that the masked-LM head predicts; if None, all, or none if blocks
            pool and no decoder undoes it.
        dtype: the dtype of parameters and activations.

    Raises:
        ValueError: for sizes that do not fit, including a length beyond the position method's range.
    """
    if batch < 1:
        raise InputError("batch", f"expected at least 1, got {batch}")
    lengths = config.block_lengths(length)
    if predictions is None:
        predictions = length if config.full_length else 0
    if predictions and not config.full_length:
        raise InputError(
            "predictions", f"blocks that pool need a decoder to predict tokens, got {predictions} without one"
        )
    if not 0 <= predictions <= length:
        raise InputError("predictions", f"expected 0 to length {length}, got {predictions}")
    parameters = count_parameters(config)
    flops, memory = _measured(config, length, batch, predictions, dtype)
    return Cost(
        length=length,
        batch=batch,
        lengths=lengths,
        flops=flops,
        parameters=parameters,
        memory=Memory(parameters.total * dtype.itemsize, *memory),
        relative=flops.layers / _bert_flops(length, batch),
    )


def count_parameters(config: EncoderConfig) -> Parameters:
    """Count the parameters of an :class:`~whereformer.Encoder` and its masked-LM head, without allocating them."""

    def size(module: nn.Module) -> int:
        return sum(parameter.numel() for parameter in module.parameters())

    head = 0
    with META:
        encoder = Encoder(config)
        if config.full_length:
            module = MaskedLMHead(config)
            head = size(module) - (module.decoder.weight.numel() if config.tie_word_embeddings else 0)
    embeddings, position = size(encoder.embeddings), size(encoder.position)
    return Parameters(embeddings=embeddings, position=position, layers=size(encoder) - embeddings - position, head=head)


@cache
def _bert_flops(length: int, batch: int) -> int:
    """Return the operations of the layers of BERT-base."""
    config = EncoderConfig(max_position_embeddings=max(512, length))
    return _measured(config, length, batch, 0, torch.float32)[0].layers


def _measured(
    config: EncoderConfig, length: int, batch: int, predictions: int, dtype: torch.dtype
) -> tuple[Flops, tuple[int, int]]:
    """Run an encoder in training, and return its operations and the bytes that it and its head keep."""
    config = copy.deepcopy(config)
    if config.attention_backend != "reference":
        # It keeps what the kernels keep, and takes tensors on any device.
        config.attention_backend = "blockwise"
    with META:
        encoder = Encoder(config).to(dtype)
        head = MaskedLMHead(config).to(dtype) if predictions else None
        ids = torch.empty(batch, length, dtype=torch.int64)
        types = ids if config.type_vocab_size else None

    def forward(measure: Callable[[], int]) -> tuple[int, int]:
        """Return what is measured after the encoder, and what more there is after the head."""
        hidden = encoder(ids, token_type_ids=types).last_hidden_state
        of_encoder = measure()
        if head is None:
            return of_encoder, 0
        logits = head(hidden[:, :predictions].clone())  # as if the tokens were gathered
        # The loss has to be there, or nothing is kept for it.
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, :predictions].flatten())
        of_both = measure()
        del loss
        return of_encoder, of_both - of_encoder

    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.whereformer.blockwise_forward: attention_flops})
    with torch.enable_grad():
        with counter:
            of_encoder, of_head = forward(counter.get_total_flops)
        # A mode such as the counter has layers keep more.
        kept = _Kept([ids, *encoder.parameters(), *([] if head is None else head.parameters())])
        with kept.hooks():
            memory = forward(kept.bytes)
    embeddings = sum(counter.get_flop_counts().get("Encoder.embeddings", {}).values())
    return Flops(of_encoder - embeddings, embeddings, of_head), memory


class _Kept:
    """Counts the bytes of tensors that autograd keeps for a backward, each storage once and without some."""

    def __init__(self, without: Sequence[Tensor]) -> None:
        self._without = {StorageWeakRef(tensor.untyped_storage()) for tensor in without}
        self._sizes: dict[StorageWeakRef, int] = {}

    def hooks(self) -> saved_tensors_hooks:
        """Return a context in which everything that autograd saves is counted."""

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            self._sizes[StorageWeakRef(storage)] = storage.nbytes()
            return tensor

        return saved_tensors_hooks(pack, lambda tensor: tensor)

    def bytes(self) -> int:
        """Return the bytes of what is still kept."""
        return sum(
            size for storage, size in self._sizes.items() if storage not in self._without and not storage.expired()
        )


def attention_flops(*arguments: Any, out_shape: Any) -> int:
    """Return the operations of attention by a compiled kernel, from an operator's arguments with shapes for tensors.

    Terms are merged. Every row takes one product with a table over offsets, or with what its window shows of it.
    """
    of: Any = Call(*arguments)
    batch, _, n_k, value_dim = of.value
    heads = out_shape[0][1]
    pairs = _pairs(of, n_k)
    low, high = of.min_offset, of.max_offset
    shown = None if low is None or high is None else high - low + 1
    products = batch * heads * pairs * (value_dim + (0 if of.query is None else of.query[3]))
    for table, rows in ((of.key_table, of.n_q), (of.query_table, n_k), (of.value_table, of.n_q)):
        if table is not None:
            columns = table[1] if shown is None else min(table[1], shown)
            products += batch * heads * rows * columns * table[2]
    if of.query_factors is not None:
        products += max(of.query_factors[0], of.key_factors[0]) * heads * pairs * of.query_factors[3]
    return 2 * int(products)


def _pairs(of: Any, n_k: int) -> int:
    """Return how many pairs of a query and a key are within the offsets that a call allows; all, if positions vary."""
    if of.query_positions is not None or of.key_positions is not None:
        return int(of.n_q * n_k)
    start, stride, first_key, key_stride = of.affine
    query = start - first_key + stride * torch.arange(of.n_q)
    first = 0 if of.min_offset is None else ((query + of.min_offset + key_stride - 1) // key_stride).clamp(0, n_k)
    behind = n_k if of.max_offset is None else ((query + of.max_offset) // key_stride + 1).clamp(0, n_k)
    return int((torch.zeros_like(query) + behind - first).sum())
