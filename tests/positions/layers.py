"""The plain layers around a position method that the golden tests of this folder share."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from whereformer import DenseBias, FactorPair, OffsetBias, Positions, Site


def install(position: nn.Module, **parameters: Tensor) -> nn.Module:
    """Put tensors in the place of parameters, so that gradients reach what the tensors were computed from.

    A submodule's parameter is written with two underscores: ``norm__weight``.
    """
    for path, tensor in parameters.items():
        *owners, name = path.split("__")
        owner = position.get_submodule(".".join(owners))
        assert getattr(owner, name).shape == tensor.shape, (path, getattr(owner, name).shape, tensor.shape)
        delattr(owner, name)
        setattr(owner, name, tensor)
    assert not list(position.parameters()), "every parameter must come from the golden file"
    return position


def prepare(position, query, key, value, *, hidden=None, layer=0, shared=None, positions=None):
    """What an encoder hands to ``whereformer.attention``: query, key, value and terms; queries are right-aligned."""
    n_k = value.shape[2]
    n_q = n_k if query is None else query.shape[2]
    positions = positions or (Positions(n_k - n_q, 1, n_q), Positions(0, 1, n_k))
    shared = position.compute_shared(Site(*positions)) if shared is None else shared
    site = Site(*positions, layer, shared)
    if query is not None:
        query, key, value = position.transform_qkv(query, key, value, site)
    if hidden is None:
        hidden = value.new_zeros(len(value), n_q, position.model.hidden_size)
    terms = position.terms(hidden, site)
    return (query, key, value, terms) if position.uses_query_key else (None, None, value, terms)


def scores(terms, n_q: int, n_k: int) -> Tensor:
    """What terms add to the scores by their definitions, (1 or batch, heads, n_q, n_k); right-aligned queries."""
    offsets = torch.arange(n_k) - torch.arange(n_k - n_q, n_k).unsqueeze(-1)
    total = torch.zeros(())
    for term in terms:
        match term:
            case OffsetBias(table, first):
                total = total + table[:, (offsets - first).clamp(0, table.shape[1] - 1)]
            case FactorPair(query_factors, key_factors):
                total = total + query_factors @ key_factors.mT
            case DenseBias(dense):
                total = total + dense
    return total


def check_causal(mask_bias: Tensor) -> None:
    """An additive mask of an original forbids what ``causal=True`` forbids to right-aligned queries."""
    n_q, n_k = mask_bias.shape
    assert torch.equal(mask_bias == 0, torch.ones(n_q, n_k).tril(n_k - n_q) == 1)


def split_heads(features: Tensor, heads: int) -> Tensor:
    """(batch, n, heads * d) -> (batch, heads, n, d)."""
    return features.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(features: Tensor) -> Tensor:
    """(batch, heads, n, d) -> (batch, n, heads * d)."""
    return features.transpose(1, 2).flatten(2)


def linear(features: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    return functional.linear(features, weights[f"{name}.weight"], weights[f"{name}.bias"])


def norm(features: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    weight = weights[f"{name}.weight"]
    return functional.layer_norm(features, weight.shape, weight, weights[f"{name}.bias"], eps=1e-5)


def feed_forward(features: Tensor, weights: dict[str, Tensor], layer: str) -> Tensor:
    """The second half of fairseq's post-norm layer."""
    inner = torch.relu(linear(features, weights, f"{layer}.fc1"))
    return norm(features + linear(inner, weights, f"{layer}.fc2"), weights, f"{layer}.final_layer_norm")
