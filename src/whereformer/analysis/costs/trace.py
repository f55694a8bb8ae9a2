"""Traces what position and segments cost in every layer, by running their own code without data.

The code runs on torch's "meta" device, where tensors have shapes but no memory. There torch counts the operations and
reports everything that autograd keeps, so the counts cannot disagree with the code that runs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from ...kernels import (
    DenseBias,
    DistanceDecay,
    FactorPair,
    OffsetBias,
    OffsetKeys,
    OffsetQueries,
    OffsetValues,
    Positions,
)
from ...kernels.call import Call, make_call
from ...kernels.choose import choose
from ...kernels.terms import Term
from ...models import EncoderConfig
from ...models.encoder import position_of
from ...models.layers import SegmentScores
from ...models.pooling import Tokens
from ...positions import Place, Position
from .attention import training
from .kept import KeptTensors
from .passes import Pass, layer_passes, pairs_within

META = torch.device("meta")


class Trace:
    """One forward of a model in training, by layer.

    The cost of the terms that position and segments return to attention follows from the terms.

    Args:
        config: the encoder.
        length: tokens of a sequence.
        batch: sequences.
        dtype: of parameters and activations.
        device: the device that the model will run on.
        backend: the backend of attention.

    Attributes:
        passes: every layer as it runs.
        windows: how far each layer attends to each side, by pass; None without a limit.
        content: whether scores include query . key.
        embed_flops: operations that position adds to the embeddings.
        flops: operations of position, by pass.
        segment_flops: operations of segment scores, by pass.
        trained: the backend in training, by pass.
        inferred: the backend without gradients, by pass.
        kept_by_pass: bytes that position and segments keep, by pass.
        kept: the total bytes that they keep.
    """

    def __init__(
        self, config: EncoderConfig, length: int, batch: int, dtype: torch.dtype, device: torch.device, backend: str
    ) -> None:
        self.config, self.length, self.batch, self.dtype = config, length, batch, dtype
        self.device, self.backend = device, backend
        self.passes = layer_passes(config, length)
        self.windows = config.layer_windows()[: len(self.passes)]
        self.flops: list[int] = []
        self.segment_flops: list[int] = []
        self.trained: list[str] = []
        self.inferred: list[str] = []
        self.kept_by_pass: list[int] = []
        with META:
            method = position_of(config).to(dtype)
            self.content = method.content
            attended = self.content and config.segments == "attention"
            segments = SegmentScores(config).to(dtype) if attended else None
        self._kept = KeptTensors()
        self._kept.leave_out(*method.parameters(), *([] if segments is None else segments.parameters()))
        uncounted = method.uncounted_work(self.passes)
        self._others_kept = uncounted.kept
        with FlopCounterMode(display=False) as counter, torch.enable_grad(), self._kept.hooks():
            words = self._made(length, config.embedding_size)
            method.embed(words, Positions(0, 1, length))
            self._kept.leave_out(words)
            self.embed_flops = counter.get_total_flops()
            self._run(method, segments, counter)
        self.flops[0] += uncounted.flops
        self.kept = self._kept.size() + self._others_kept

    def _run(self, method: Position, segments: SegmentScores | None, counter: FlopCounterMode) -> None:
        """Run position and segments in every pass. Work that is done once counts for the first pass."""
        counted, kept = counter.get_total_flops(), self._kept.size()
        prepared = method.prepare()
        shared: dict[Pass, Any] = {}
        for layer, at in enumerate(self.passes):
            if at not in shared:
                shared[at] = method.prepare_for(at.queries, at.keys, prepared)
            call = self._call(method, segments, at, Place(at.queries, at.keys, layer, shared[at]))
            self._note(call)
            applied = [2 * self._applied(term, call, layer) for term in call.terms]
            self.segment_flops.append(0 if segments is None else applied.pop())
            self.flops.append(counter.get_total_flops() - counted + sum(applied))
            self.kept_by_pass.append(self._kept.size() - kept)
            counted, kept = counter.get_total_flops(), self._kept.size()

    def _made(self, *size: int) -> Tensor:
        return torch.empty(self.batch, *size, dtype=self.dtype, device=META, requires_grad=True)

    def _call(self, method: Position, segments: SegmentScores | None, at: Pass, place: Place) -> Call:
        """Do what an attention layer does before its call, with the segments' term last."""
        config = self.config

        def heads(n: int) -> Tensor:
            return self._made(n, config.num_attention_heads, config.head_dim).transpose(1, 2)

        hidden, value = self._made(at.n_q, config.hidden_size), heads(at.n_k)
        first_query, first_key = (heads(at.n_q), heads(at.n_k)) if self.content else (None, None)
        query, key, new_value, terms = method.act(hidden, first_query, first_key, value, place)
        # The layer keeps its input anyway, and attention keeps one query, key and value; a method may also keep what it
        # changed.
        pairs = ((first_query, query), (first_key, key), (value, new_value))
        self._kept.leave_out(hidden, *(old for old, new in pairs if old is new and old is not None))
        if segments is not None and first_query is not None:
            tokens = (
                Tokens(positions, segments=torch.empty(self.batch, n, dtype=torch.int64, device=META))
                for positions, n in ((at.queries, at.n_q), (at.keys, at.n_k))
            )
            terms += (segments(first_query, *tokens),)
        return make_call(
            query,
            key,
            new_value,
            terms,
            dropout_p=config.attention_probs_dropout_prob,
            causal=config.causal,
            window=self.windows[place.layer],
            query_positions=at.queries,
            key_positions=at.keys,
        )

    def _note(self, call: Call) -> None:
        """Record how attention computes a call, and what it keeps of the call's terms."""
        found = training(call, self.backend, self.device)
        self.trained.append(found.backend)
        self._kept.add(*found.read)
        self._others_kept += found.bytes
        with torch.no_grad():
            self.inferred.append(choose(replace(call, dropout_p=0.0), self.backend, self.device))

    def pairs(self, layer: int) -> int:
        """Return how many pairs of a query and a key attend in a layer, per head and sequence."""
        return pairs_within(self.passes[layer], self.windows[layer], self.config.causal)

    def _applied(self, term: Term, call: Call, layer: int) -> int:
        """Return the multiply-adds of a term in attention; one number per pair is only added.

        Scores that the whole batch shares count once, although some backends compute them for each item.
        """
        heads = self.config.num_attention_heads
        match term:
            case OffsetKeys() | OffsetQueries() | OffsetValues():
                # Every row takes one product with the whole table, or with what its window shows of it, and every pair
                # picks its offset's number.
                low, high = call.offset_limits()
                columns = term.table.shape[1]
                if low is not None and high is not None:
                    columns = min(columns, high - low + 1)
                rows = call.n_k if isinstance(term, OffsetQueries) else call.n_q
                return self.batch * heads * rows * columns * term.table.shape[2]
            case FactorPair():
                items = max(len(term.query_factors), len(term.key_factors))
                return items * heads * self.pairs(layer) * term.query_factors.shape[3]
            case OffsetBias() | DistanceDecay() | DenseBias():
                return 0
