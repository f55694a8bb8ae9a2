"""The passes of an encoder: its layers in the order in which they run, and the positions of their tokens."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from ...kernels import Positions
from ...models import EncoderConfig, parse_blocks
from ...models.pooling import Tokens


class Pass(NamedTuple):
    """One run of a layer, with the positions of its queries and keys."""

    queries: Positions
    keys: Positions

    @property
    def n_q(self) -> int:
        return self.queries.length

    @property
    def n_k(self) -> int:
        return self.keys.length


def layer_passes(config: EncoderConfig, length: int) -> list[Pass]:
    """Return every pass in order; the decoder's come last, if there is one."""
    pooling = config.make_pooling()
    whole = now = Positions(0, 1, length)
    passes: list[Pass] = []
    for index, block in enumerate(parse_blocks(config.blocks)):
        before = now
        if index and pooling.applies_to(now.length):
            pooled = pooling.sequence(Tokens(now)).positions
            assert isinstance(pooled, Positions)
            now = pooled
        passes.append(Pass(now, before if config.pool_query_only else now))
        passes += [Pass(now, now)] * (block.layers * block.repeats - 1)
    return passes + [Pass(whole, whole)] * decoder_depth(config)


def decoder_depth(config: EncoderConfig) -> int:
    """Return the number of passes of the decoder; 0 without one."""
    if config.decoder_layers == "0" or not config.with_decoder:
        return 0
    return sum(block.layers * block.repeats for block in parse_blocks(config.decoder_layers))


@lru_cache(maxsize=64)
def pairs_within(at: Pass, window: int | None, causal: bool = False) -> int:
    """Return how many pairs of a query and a key attend: those at most ``window`` positions apart, or all if it is
    None, and if ``causal`` only those whose key is not the later one."""
    if window is None and not causal:
        return at.n_q * at.n_k
    if window is None:
        window = at.n_k * at.keys.stride
    # The numbers of the first key within a query's window, and of the first one behind it
    from_first_key = at.queries.values(torch.device("cpu")) - at.keys.start
    first = (from_first_key - window + at.keys.stride - 1) // at.keys.stride
    behind = (from_first_key + (0 if causal else window)) // at.keys.stride + 1
    return int((behind.clamp(0, at.n_k) - first.clamp(0, at.n_k)).sum())
