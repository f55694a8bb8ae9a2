"""Bounds on the rounding error of attention and its gradients, number by number.

Each rounding changes a number by a share of itself, a unit roundoff at most. What that does to a result is, to first
order, the same share of what the result's formula gives when all that it adds up is positive: here called its size.
Sizes do not cancel as the numbers themselves do, so a bound that follows them holds for every processor and every order
of summation, while a wrong or missing summand is thousands of times as large.
"""

import torch

from whereformer import DistanceDecay, FactorPair
from whereformer.kernels.dropout import draw_seed, keep_mask, row_seeds
from whereformer.kernels.make_call import make_call
from whereformer.kernels.reference import attention_scores, read_columns, softmax

ROUNDINGS = 8
"""Unit roundoffs of its size that a number may be off.

What is summed goes through more roundings than that, but they go either way. Over many seeds and instruction sets the
largest seen is 1.7 of a backend and 3.3 of plain float32, both of equal weights, whose roundings all go the same way;
half of all tests stay below 0.3.
"""


def allowed_errors(inputs, terms, options, d_out, seed, dtype=torch.float32):
    """For the output and for each gradient, as ``run`` orders them, how far each of its numbers may be off.

    ``seed`` is of dropout. In half precision the scores and their softmax are taken to be float32's.
    """
    info = torch.finfo(dtype)
    sizes = _sizes(inputs, terms, options, d_out.double(), seed, dtype.itemsize == 2, info.smallest_normal)
    return [ROUNDINGS * info.eps / 2 * size for size in sizes]


def _sizes(inputs, terms, options, d_out, seed, exact_scores, smallest):
    inputs = [None if tensor is None else tensor.detach().double() for tensor in inputs]
    leaves = [None if tensor is None else _size(tensor).requires_grad_() for tensor in inputs]
    exact, positive = [], []
    for kind, tensors, first in terms:
        parts = [_size(tensor.detach().double()).requires_grad_() for tensor in tensors]
        leaves += parts
        first = () if first is None else (first,)
        exact.append(kind(*(tensor.detach().double() for tensor in tensors), *first))
        positive.append(_sum_of_levels(*parts) if kind is DistanceDecay else kind(*parts, *first))
    call = make_call(*inputs, exact, **options)
    if call.query is not None:
        # A soft cap makes errors smaller.
        options = {**options, "scale": abs(call.scale), "softcap": None}
    positive = make_call(*leaves[:3], positive, **options)
    leaves = [leaf for leaf in leaves if leaf is not None]
    weights = softmax(call, None)[0]
    if not weights.numel():
        return [torch.zeros_like(tensor) for tensor in (d_out, *leaves)]
    scores, _ = attention_scores(positive)
    dropout = 1.0
    if call.dropout_p:
        torch.manual_seed(seed)
        keys = row_seeds(draw_seed(weights.device), *weights.shape[:3])
        dropout = keep_mask(keys, torch.arange(call.n_k, device=keys.device), call.dropout_p) / (1 - call.dropout_p)
    # A weight is off by what its score is, from which a row's largest is subtracted, and by what the row's sum is.
    off = torch.ones_like(weights)
    if not exact_scores:
        reach = scores.detach().masked_fill(weights == 0, 0.0)
        off += reach + reach.amax(-1, keepdim=True)
    # Below the smallest normal number, roundings become no smaller.
    smallest_size = smallest * (weights > 0)
    of_weights = weights * (off + (weights * off).sum(-1, keepdim=True)) + smallest_size
    leaf = weights.clone().requires_grad_()
    (d_weights,) = torch.autograd.grad(_mix(call, leaf * dropout), leaf, d_out)
    (of_d_weights,) = torch.autograd.grad(_mix(positive, leaf * dropout), leaf, d_out.abs())
    centered = d_weights - (weights * d_weights).sum(-1, keepdim=True)
    of_centered = of_d_weights + (of_weights * of_d_weights).sum(-1, keepdim=True)
    of_d_scores = of_weights * centered.abs() + weights * of_centered + smallest_size
    out = _mix(positive, of_weights * dropout)
    sizes = torch.autograd.grad(out, leaves, d_out.abs(), materialize_grads=True)
    if scores.requires_grad:
        of_scores = torch.autograd.grad(scores, leaves, of_d_scores, materialize_grads=True)
        sizes = [size + through_scores for size, through_scores in zip(sizes, of_scores, strict=True)]
    return [out.detach(), *sizes]


def _size(tensor):
    """The magnitudes of numbers, but -inf, which forbids a pair, as it is."""
    return torch.where(tensor.isneginf(), tensor, tensor.abs())


def _sum_of_levels(query_levels, key_levels):
    """What a difference of levels gives when all is positive."""
    levels = (query_levels.unsqueeze(-1), key_levels.unsqueeze(-1))
    query, key = (torch.cat((one_side, torch.ones_like(one_side)), -1) for one_side in levels)
    return FactorPair(query, key.flip(-1))


def _mix(call, weights):
    """The output of attention with these weights."""
    out = weights @ call.value.repeat_interleave(call.heads // call.value.shape[1], 1)
    if call.value_table is not None:
        columns = read_columns(call, "value_table").unsqueeze(1)
        at_offset = weights.new_zeros(*weights.shape[:3], call.value_table.shape[1])
        out = out + at_offset.scatter_add(-1, columns.expand_as(weights), weights) @ call.value_table
    return out
