"""Measures properties of a position method: the columns of Table 1 of Wennberg & Henter (2021) as numbers.

Each function only measures one property; the thresholds are in ``properties.py``. The column "inductive" is
missing because it needs training; it follows from the losses of a comparison.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from distillation import fit_curves
from torch import Tensor

from whereformer.analysis.toeplitz import diagonal_sums, from_diagonals
from whereformer.kernels import Positions
from whereformer.kernels.torch_private import TorchDispatchMode
from whereformer.models.encoder import Encoder
from whereformer.models.heads import EncoderForMaskedLM
from whereformer.models.layers import Layer
from whereformer.positions import PositionMethod, PositionRangeError, Site, build_position
from whereformer.positions.base import position_parameters

SHIFTS = (1, 10, 100, 1000)
"""The shifts of :func:`shift_change`, in tokens. Some are large, because FIRE changes only from 512 on."""
LENGTHS = (64, 256)
"""The two lengths between which the number of operations may grow."""
BASE_SIZES = {"hidden_size": 768, "num_heads": 12, "num_layers": 12, "max_length": 512}
"""The sizes of BERT-base, at which parameters are counted."""
ATTENTION = 4 * BASE_SIZES["num_layers"] * BASE_SIZES["hidden_size"] ** 2
"""The parameters of its attention layers' four projections, to compare with."""


def reached_parameters(model: EncoderForMaskedLM, input_ids: Tensor, labels: Tensor) -> tuple[int, int]:
    """Count the trained numbers of position: those that the gradient of one batch's masked-LM loss reaches, and all.

    Args:
        model: is left as it was; gradients that it has are not touched.
        input_ids, labels: (batch, n).
    """
    parameters = [parameter for parameter in position_parameters(model).values() if parameter.requires_grad]
    if not parameters:
        return 0, 0
    loss = model(input_ids, labels=labels).loss
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    nonzero = sum(int(gradient.count_nonzero()) for gradient in gradients if gradient is not None)
    return nonzero, sum(parameter.numel() for parameter in parameters)


def parameter_growth(name: str, *, sinks: bool = False, **options: Any) -> tuple[int, float]:
    """Count the parameters of a method at :data:`BASE_SIZES` and at twice the length, without memory for them.

    The arguments are as in :func:`whereformer.build_position`; ``sinks``: whether every head also has a trained sink.

    Returns:
        their number, and the exponent of its growth with the length: 0 if it is constant, 1 if it is proportional.
    """
    counts = []
    for length in (BASE_SIZES["max_length"], 2 * BASE_SIZES["max_length"]):
        with torch.device("meta"):
            position = build_position(name, **{**BASE_SIZES, "max_length": length}, **options)
        num_sinks = BASE_SIZES["num_layers"] * BASE_SIZES["num_heads"] if sinks else 0
        counts.append(num_sinks + sum(parameter.numel() for parameter in position.parameters()))
    few, many = counts
    return few, math.log2(many / few) if few else 0.0


@torch.no_grad()
def shift_change(encoder: Encoder, input_ids: Tensor, shifts: Sequence[int] = SHIFTS) -> float | None:
    """Move all positions of a batch by a constant, and measure how much scores and output change, in float64.

    Everything goes through the encoder's own hooks, so methods that act on embeddings are measured too. The sequence
    starts at position 1, because some methods reserve 0 for [CLS] and treat it differently.

    Args:
        encoder: an encoder of one block, which is not changed.
        input_ids: (batch, n).
        shifts: the shifts in tokens; a shift that moves a token beyond the method's positions is left out.

    Returns:
        the largest change of any layer's score or of the output, as a multiple of their root mean square, without
        the mean of each row's scores, which a softmax ignores. None if one is not finite.

    Raises:
        PositionRangeError: if every shift is beyond the method's positions.
    """
    encoder = _in_float64(encoder)
    positions = torch.arange(1, input_ids.shape[1] + 1)
    before, changes, refused = _scores_and_output(encoder, input_ids, positions), list[float](), None
    for shift in shifts:
        try:
            changes.append(_largest_change(before, _scores_and_output(encoder, input_ids, positions + shift)))
        except PositionRangeError as error:
            refused = error
    if refused is not None and not changes:
        raise refused
    return max(changes) if math.isfinite(max(changes)) else None


def _in_float64(encoder: Encoder) -> Encoder:
    return copy.deepcopy(encoder).to("cpu", torch.float64).eval()


def _scores_and_output(encoder: Encoder, input_ids: Tensor, positions: Tensor) -> list[Tensor]:
    """Return every layer's scores, and the last hidden state."""
    output = encoder(input_ids, position_ids=positions, output_attentions=True)
    return [*map(_scores, output.attentions), output.last_hidden_state]


def _scores(weights: Tensor) -> Tensor:
    """Recover scores, up to a constant per row, from attention weights (batch, heads, n_q, n_k)."""
    scores = weights.clamp(min=torch.finfo(weights.dtype).tiny).log()
    return scores - scores.mean(-1, keepdim=True)


def _largest_change(before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    """Return the largest difference in multiples of each tensor's root mean square; infinite if one is NaN."""
    changes = []
    for old, new in zip(before, after, strict=True):
        size = float(old.square().mean().sqrt())
        change = float((new - old).abs().max())
        if not math.isfinite(change):
            return math.inf
        # If scores are equal up to rounding, their size is not a unit for changes.
        changes.append(change / size if size > 1e-12 else change)
    return max(changes)


@torch.no_grad()
def curve_share(encoder: Encoder, input_ids: Tensor) -> float | None:
    """Measure the share of a method's effect on scores that one number per layer, head and offset explains, in float64.

    The effect is the scores with the tokens at their positions, minus the scores with all tokens at one position
    (position 1, because 0 belongs to [CLS] in some methods). Only the direct effect counts: a layer's input is the same
    for both, except for the embeddings in it, which contain what ``embed`` adds. If layers normalize their input, the
    embeddings are part of every layer's input, else only of the first's. The mean of each row's scores does not count,
    because a softmax ignores it. Effects on values do not count either.

    Args:
        encoder: an encoder of one block, with trained weights, which is not changed.
        input_ids: (batch, n) of real text, so that effects that depend on tokens vary.

    Returns:
        the share of the variance over all layers, 0 to 1; None if the method has no effect on scores.
    """
    encoder = _in_float64(encoder)
    length = input_ids.shape[1]
    normal_calls, together_calls = (
        _layer_calls(encoder, input_ids, positions)
        for positions in (torch.arange(length), torch.ones(length, dtype=torch.long))
    )
    embeddings = together_calls[0].hidden - normal_calls[0].hidden
    explained = total = 0.0
    for layer, (normal, together) in enumerate(zip(normal_calls, together_calls, strict=True)):
        moved = normal.hidden + embeddings if normal.module.is_pre_norm or layer == 0 else normal.hidden
        scores, without = (
            _scores(normal.module(hidden, encoder.position, site, None, True)[1])
            for hidden, site in ((normal.hidden, normal.site), (moved, together.site))
        )
        effect = scores - without
        size = float(effect.square().sum())
        if size > 1e-20 * max(float(scores.square().sum()), 1e-20):  # more than rounding
            mean = effect.mean(0)  # (heads, n, n)
            part = from_diagonals(fit_curves(diagonal_sums(mean), 1))  # the best fit besides a number for each row
            explained, total = explained + len(effect) * float((mean * part).sum()), total + size
    return explained / total if total else None


class _LayerCall(NamedTuple):
    module: Layer
    hidden: Tensor
    site: Site


def _layer_calls(encoder: Encoder, input_ids: Tensor, positions: Tensor) -> list[_LayerCall]:
    """Record the arguments of every layer, in running order."""
    calls: list[_LayerCall] = []

    def record(module: Any, arguments: tuple[Any, ...]) -> None:
        hidden, _, site, *_ = arguments
        calls.append(_LayerCall(module, hidden, site))

    hooks = [layer.register_forward_pre_hook(record) for layer in encoder.layers]
    try:
        encoder(input_ids, position_ids=positions)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


@torch.no_grad()
def count_operations(position: PositionMethod, length: int) -> int:
    """Count the tensor operations of a method's forward, which run one after another.

    The count is for the "reference" backend, which has no loop, from the embeddings to the output of one attention
    layer, for one sequence of ``length`` tokens.
    """
    model = position.model
    embedded = torch.randn(1, length, model.embedding_size)
    hidden = torch.randn(1, length, model.hidden_size)
    query, key, value = torch.randn(3, 1, model.num_heads, length, model.head_dim)
    positions = Positions(0, 1, length)
    with _Counter() as counter:
        position.embed(embedded, positions)
        position.attend(hidden, query, key, value, Site(positions, positions), backend="reference")
    return counter.count


class _Counter(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return operation(*args, **(kwargs or {}))
