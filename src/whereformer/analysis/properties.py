"""What a position method can do, measured: the columns of Table 1 of Wennberg & Henter (2021) as numbers.

Each function measures one thing and judges nothing: thresholds stand in ``experiments/properties/ticks.py``. The
column "inductive" is missing here because it takes training; ``experiments/properties/run.py`` measures it.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..kernels import Positions, attention
from ..kernels.torch_private import DispatchMode, changes_arguments, leaves
from ..models.encoder import Encoder
from ..models.heads import EncoderForMaskedLM
from ..models.layers import AttentionContext, Layer
from ..positions import Place, Position, PositionRangeError, build_position
from ..positions.none import NoPosition

SHIFTS = (1, 10, 100, 1000)
"""By how many tokens :func:`shift_change` moves a sequence: far, because FIRE notices only from 512 on."""

LENGTHS = (64, 256)
"""Between which a chain of operations may grow."""

BASE_SIZES = {"hidden_size": 768, "num_heads": 12, "num_layers": 12, "max_length": 512}
"""BERT-base, where parameters are counted."""


@dataclass(frozen=True)
class Reached:
    """How many of a method's trained numbers one gradient reaches.

    Args:
        nonzero: those whose gradient is not 0.
        total: all of them.
    """

    nonzero: int
    total: int


def reached_parameters(model: EncoderForMaskedLM, input_ids: Tensor, labels: Tensor) -> Reached:
    """Count the positional parameters that get a gradient from the masked-LM loss of one batch.

    Args:
        model: is left as it was; gradients that it has are not touched.
        input_ids, labels: (batch, n).
    """
    parameters = [parameter for parameter in model.encoder.position.parameters() if parameter.requires_grad]
    if not parameters:
        return Reached(0, 0)
    loss = model(input_ids, labels=labels).loss
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    nonzero = sum(int(gradient.count_nonzero()) for gradient in gradients if gradient is not None)
    return Reached(nonzero, sum(parameter.numel() for parameter in parameters))


@dataclass(frozen=True)
class Growth:
    """A method's parameters at one size, and the powers with which they grow.

    Args:
        count: positional parameters.
        attention: parameters of the attention layers' four projections at that size, to compare with.
        length, width, depth: how often doubling that size doubles ``count``: 0 not at all, 1 in proportion, 2 with
            its square. Width doubles with the number of heads, as in larger models; a head stays as wide.
    """

    count: int
    attention: int
    length: float
    width: float
    depth: float


def parameter_growth(name: str, **options: Any) -> Growth:
    """Count the parameters of a method at :data:`BASE_SIZES` and at doubled ones, without memory for them.

    Args:
        name: as :func:`whereformer.build_position` takes it.
        options: the method's own.
    """

    def count(**doubled: bool) -> int:
        sizes: dict[str, Any] = {size: value * (2 if doubled.get(size) else 1) for size, value in BASE_SIZES.items()}
        with torch.device("meta"):
            position = build_position(name, **sizes, **options)
        return sum(parameter.numel() for parameter in position.parameters())

    base = count()

    def power(**doubled: bool) -> float:
        return math.log2(count(**doubled) / base) if base else 0.0

    return Growth(
        base,
        4 * BASE_SIZES["num_layers"] * BASE_SIZES["hidden_size"] ** 2,
        length=power(max_length=True),
        width=power(hidden_size=True, num_heads=True),
        depth=power(num_layers=True),
    )


@dataclass(frozen=True)
class Shifted:
    """What moving a whole sequence changes.

    Args:
        scores: the largest change of any layer's score, as a multiple of the scores' root mean square; what all
            scores of a row have in common is left out of both, because a softmax ignores it.
        output: the largest change of the encoder's output, likewise a multiple.
        shifts: the shifts that the method could be given, in tokens.
    """

    scores: float
    output: float
    shifts: tuple[int, ...]


@torch.no_grad()
def shift_change(encoder: Encoder, input_ids: Tensor, shifts: Sequence[int] = SHIFTS) -> Shifted:
    """Move all positions of a batch by a constant, and see by how much scores and output change, in float64.

    Everything goes through the encoder's own hooks, so methods that act on embeddings are seen too. The sequence starts
    at position 1, because some methods keep 0 for [CLS] and treat it as no other.

    Args:
        encoder: of one block; is left as it was.
        input_ids: (batch, n).
        shifts: in tokens; those that bring a token where the method has no position are left out.
    Raises:
        PositionRangeError: if the method can't be given any of them.
    """
    encoder = in_float64(encoder)
    at = torch.arange(1, input_ids.shape[1] + 1)
    scores, output = _scores_and_output(encoder, input_ids, at)
    changes, tried = [], []
    for shift in shifts:
        try:
            moved, moved_output = _scores_and_output(encoder, input_ids, at + shift)
        except PositionRangeError as error:
            refused = error
            continue
        tried.append(shift)
        changes.append((_largest_change(scores, moved), _largest_change([output], [moved_output])))
    if not tried:
        raise refused
    return Shifted(max(change[0] for change in changes), max(change[1] for change in changes), tuple(tried))


def in_float64(encoder: Encoder) -> Encoder:
    """A copy in float64 that drops nothing."""
    return copy.deepcopy(encoder).to("cpu", torch.float64).eval()


def _scores_and_output(encoder: Encoder, input_ids: Tensor, positions: Tensor) -> tuple[list[Tensor], Tensor]:
    """Every layer's scores and the last hidden state."""
    found = encoder(input_ids, position_ids=positions, output_attentions=True)
    return [_scores(weights) for weights in found.attentions], found.last_hidden_state


def _scores(weights: Tensor) -> Tensor:
    """Scores up to what a row has in common, from attention weights (batch, heads, n_q, n_k)."""
    scores = weights.clamp(min=torch.finfo(weights.dtype).tiny).log()
    return scores - scores.mean(-1, keepdim=True)


def _largest_change(before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    """The largest difference, as a multiple of each tensor's root mean square; infinite if one is not a number."""
    changes = []
    for old, new in zip(before, after, strict=True):
        size = float(old.square().mean().sqrt())
        change = float((new - old).abs().max())
        if not math.isfinite(change):
            return math.inf
        # Where scores are all alike but for rounding, so that nothing is large or small.
        changes.append(change / size if size > 1e-12 else change)
    return max(changes)


@dataclass(frozen=True)
class CurveShare:
    """How much of what a method does to scores is a curve over offsets.

    Args:
        share: of the variance over all layers, 0 .. 1; None if the method does nothing to scores.
        layers: the same for each layer.
    """

    share: float | None
    layers: tuple[float | None, ...]


@torch.no_grad()
def curve_share(encoder: Encoder, input_ids: Tensor) -> CurveShare:
    """The share of a method's effect on scores that one number per layer, head and offset explains, in float64.

    The effect is what scores are when tokens stand where they stand, minus what they are when all stand in one place
    (position 1, as 0 is [CLS]'s with some methods). It is the direct one: a layer's input is the same for both, but for
    the embeddings in it, which hold what ``embed`` adds; where layers normalise their input they are a summand of every
    layer's, else only the first's. What all scores of a row have in common counts for nothing, because a softmax
    ignores it. Effects on values are no effects on scores.

    Args:
        encoder: of one block, with real weights; is left as it was.
        input_ids: (batch, n) of real text, so that what depends on tokens differs from one to the next.
    """
    encoder = in_float64(encoder)
    length = input_ids.shape[1]
    here, together = (
        _layer_calls(encoder, input_ids, positions)
        for positions in (torch.arange(length), torch.ones(length, dtype=torch.long))
    )
    embeddings = together[0].hidden - here[0].hidden
    basis = _curve_basis(length)
    explained, whole = [], []
    for layer, (real, same) in enumerate(zip(here, together, strict=True)):
        others = real.hidden + embeddings if real.module.pre or layer == 0 else real.hidden
        scores = _scores_of(real.module, real.hidden, layer, real.context)
        without = _scores_of(real.module, others, layer, same.context)
        effect = scores - without
        total = float(effect.square().sum())
        if total <= 1e-20 * max(float(scores.square().sum()), 1e-20):
            total = 0.0
        mean = effect.mean(0).flatten(1)  # (heads, n * n)
        explained.append(len(effect) * float((mean @ basis).square().sum()) if total else 0.0)
        whole.append(total)
    return CurveShare(
        sum(explained) / sum(whole) if sum(whole) else None,
        tuple(part / total if total else None for part, total in zip(explained, whole, strict=True)),
    )


@dataclass(frozen=True)
class _LayerCall:
    """A call of an encoder's layer."""

    module: Layer
    hidden: Tensor
    context: AttentionContext


def _layer_calls(encoder: Encoder, input_ids: Tensor, positions: Tensor) -> list[_LayerCall]:
    """What every layer is called with, in the order in which they run."""
    calls: list[_LayerCall] = []

    def note(module: nn.Module, given: tuple[Any, ...]) -> None:
        assert isinstance(module, Layer)
        hidden, _, context, *_ = given
        calls.append(_LayerCall(module, hidden, context))

    hooks = [layer.register_forward_pre_hook(note) for layer in encoder.layers]
    try:
        encoder(input_ids, position_ids=positions)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _scores_of(module: Layer, hidden: Tensor, layer: int, context: AttentionContext) -> Tensor:
    """A layer's scores for this input, (batch, heads, n, n)."""
    weights = module(hidden, layer, replace(context, with_weights=True))[1]
    return _scores(weights)


def _curve_basis(length: int) -> Tensor:
    """An orthonormal basis of all (n, n) matrices of a curve over offsets whose rows have mean 0; (n * n, rank)."""
    at = torch.arange(length)
    offsets = (at - at.unsqueeze(1) + length - 1).flatten()
    diagonals = nn.functional.one_hot(offsets, 2 * length - 1).to(torch.float64).view(length, length, -1)
    centred = (diagonals - diagonals.mean(1, keepdim=True)).flatten(0, 1)
    left, sizes, _ = torch.linalg.svd(centred, full_matrices=False)
    return left[:, sizes > 1e-9 * sizes[0]] if length > 1 else left[:, :0]


@dataclass(frozen=True)
class Steps:
    """What an attention layer with a method depends on, at two lengths, from the embeddings to its output.

    Args:
        lengths: in tokens.
        chain: the longest chain of operations of which each needs the one before, at each length.
        operations: all of them.
        seconds: of the CPU, for one sequence; medians.
        plain_seconds: the same without positions.
    """

    lengths: tuple[int, int]
    chain: tuple[int, int]
    operations: tuple[int, int]
    seconds: tuple[float, float]
    plain_seconds: tuple[float, float]

    @property
    def growth(self) -> float:
        """The power of the length with which the chain grows: 0 if not at all, 1 in proportion."""
        return math.log(self.chain[1] / self.chain[0]) / math.log(self.lengths[1] / self.lengths[0])


def sequential_steps(build: Callable[[int], Position], lengths: tuple[int, int] = LENGTHS, repeats: int = 7) -> Steps:
    """Follow which operation needs the result of which while a method does its part of a forward.

    Operations are those of the backend that defines attention, which goes through no loop; time is that of the backend
    that would be used.

    Args:
        build: makes the method for so many tokens.
        lengths: a short and a long one.
        repeats: how often the time is taken.
    """
    chains, times = [], []
    for length in lengths:
        position = build(length)
        with torch.no_grad(), Chain() as chain:
            _work(position, length, "reference")()
        chains.append(chain)
        works = [_work(each, length, "auto") for each in (position, NoPosition(position.model))]
        found: list[list[float]] = [[], []]
        for _ in range(repeats):
            for work, seconds in zip(works, found, strict=True):
                started = time.process_time()
                with torch.no_grad():
                    work()
                seconds.append(time.process_time() - started)
        times.append([statistics.median(seconds) for seconds in found])
    (short, plain_short), (long, plain_long) = times
    return Steps(
        lengths,
        (chains[0].longest, chains[1].longest),
        (chains[0].operations, chains[1].operations),
        (short, long),
        (plain_short, plain_long),
    )


def _work(position: Position, length: int, backend: str) -> Callable[[], None]:
    """All that one layer's attention does for one sequence, and what a method does below it."""
    model = position.model
    generator = torch.Generator().manual_seed(0)
    embedded = torch.randn(1, length, model.embedding_size, generator=generator)
    hidden = torch.randn(1, length, model.hidden_size, generator=generator)
    query, key, value = torch.randn(3, 1, model.num_heads, length, model.head_dim, generator=generator)
    at = Positions(0, 1, length)

    def work() -> None:
        position.embed(embedded, at)
        place = Place(at, at, shared=position.shared(at, at))
        terms = position.terms(hidden, place)
        if not position.content:
            attention(None, None, value, terms, query_positions=at, key_positions=at, backend=backend)
            return
        terms += position.query_terms(query, place)
        rotated = position.rotate(query, key, value, place)
        attention(*rotated, terms, query_positions=at, key_positions=at, backend=backend)

    return work


class Chain(DispatchMode):
    """Within it, the longest chain of tensor operations of which each needs the result of the one before.

    A view is no operation of its own; one that writes into a tensor comes after whatever wrote there before.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.longest = 0
        self.operations = 0
        # By memory, so that a view has the depth of what it views. Weak references keep addresses from being reused.
        self._depths: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, one deeper than what it reads."""
        kwargs = kwargs or {}
        read = _memory((args, kwargs))
        result = operation(*args, **kwargs)
        written = _memory(result)
        if not changes_arguments(operation):
            written = written - read
            if not written:
                return result
        depth = 1 + max((self._depths.get(memory, 0) for memory in read), default=0)
        self.operations += 1
        self.longest = max(self.longest, depth)
        self._depths.update(dict.fromkeys(written, depth))
        return result


def _memory(values: Any) -> set[StorageWeakRef]:
    """The memory of all tensors among these."""
    return {StorageWeakRef(leaf.untyped_storage()) for leaf in leaves(values) if isinstance(leaf, Tensor)}
