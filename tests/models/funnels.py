"""Encoders for tests, and what they compute written out: pooled by hand, with explicit positions and all options."""

import torch
from transformers.activations import ACT2FN

from tests.models.peers import enlarge
from tests.models.test_encoder import small_config
from tests.positions.layers import split_heads
from whereformer import DenseBias, Site, attention


def funnel_config(**changes):
    return small_config(**{"hidden_size": 8, "intermediate_size": 12, "max_position_embeddings": 40, **changes})


def strong(model):
    """The model in float64, enlarged."""
    torch.manual_seed(5)
    return enlarge(model.double())


def inputs_of(length, batch=3, types=3, seed=1):
    """Token ids, token types, and a mask that pads all rows but the first."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 50, (batch, length), generator=generator)
    kinds = torch.randint(0, types, (batch, length), generator=generator)
    real = torch.tensor([length, *(max(1, length - 3 * row + 1) for row in range(1, batch))])
    mask = (torch.arange(length) < real.unsqueeze(1)).long()
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": kinds}


def windows(length, config):
    """Which tokens become one, for each pooled token; None where there is nothing left to pool."""
    if length <= (2 if config.separate_cls else 1):
        return None
    if not config.separate_cls:
        return [range(first, min(first + 2, length)) for first in range(0, length, 2)]
    end = length - 1 if config.truncate_seq else length
    return [range(1), *(range(first, min(first + 2, end)) for first in range(1, end, 2))]


def pool(rows, groups, combine):
    return torch.stack([combine([rows[:, member] for member in group]) for group in groups], 1)


MODES = {
    "mean": lambda members: sum(members) / len(members),
    "max": lambda members: torch.stack(members).amax(0),
    "min": lambda members: torch.stack(members).amin(0),
    "any": lambda members: torch.stack(members).any(0),
    "all": lambda members: torch.stack(members).all(0),
    "first": lambda members: members[0],
}


def positions_of(config, length, poolings):
    """Where the tokens of a block are; [CLS] is as far from the first word as words are from each other."""
    stride = 2**poolings
    return torch.arange(length) * stride + (1 - stride if config.separate_cls else 0)


def segment_scores(segments, query, query_types, key_types):
    """The score of a pair by its definition, (batch, heads, n_q, n_k)."""
    queries, keys = query_types[:, :, None], key_types[:, None]
    alike = (queries == keys) | (queries == 2) | (keys == 2)
    vectors = torch.where(alike[..., None, None], segments.weight[1], segments.weight[0])
    query = (query + segments.bias.unsqueeze(1)) * query.shape[-1] ** -0.5
    scores = torch.einsum("bhid,bijhd->bhij", query, vectors)
    if segments.separate_cls:
        apart = torch.ones_like(scores)
        apart[:, :, 0], apart[..., 0] = 0, 0
        scores = scores * apart
    return scores


def attend(model, layer, queries, keys, query_tokens, key_tokens):
    """A layer's attention from ``query_tokens`` to ``key_tokens``, each (positions, mask, types)."""
    position, module = model.position, model.layers[model.passes[layer]].attention
    heads, positions = model.config.num_attention_heads, (query_tokens[0], key_tokens[0])

    def site_of(method):
        # The first token may stand before the first position, where these have no row.
        has_rows = type(method).__name__ in {"Floater", "Synthesizer", "Tupe"}
        rows = [ids.clamp(min=0) if has_rows else ids for ids in positions]
        return Site(*rows, layer, key_mask=key_tokens[1], scale=model.config.attention_scale)

    site, components = site_of(position), position.components(layer)
    terms = sum((method.terms(queries, site_of(method)) for method in components), ())
    query, key, value, options = None, None, split_heads(module.value(keys), heads), {}
    if position.uses_query_key:
        query, key = split_heads(module.query(queries), heads), split_heads(module.key(keys), heads)
        terms += position.content_terms(query, key, site)
        if module.segments is not None and query_tokens[2] is not None:
            terms += (DenseBias(segment_scores(module.segments, query, query_tokens[2], key_tokens[2])),)
        query, key, value = position.transform_qkv(query, key, value, site)
        options = {"scale": model.config.attention_scale, "sinks": module.sinks}
    options |= {"query_positions": positions[0], "key_positions": positions[1], "key_mask": key_tokens[1]}
    options |= {"causal": model.config.causal, "window": model.config.layer_windows()[layer]}
    output = attention(query, key, value, terms, **options, backend="reference")
    return module.out(output.transpose(1, 2).flatten(2))


def run_layer(model, layer, queries, keys, query_tokens, key_tokens):
    """A whole layer, whose residual is that of the queries."""
    module, config = model.layers[model.passes[layer]], model.config

    def feed(hidden):
        hidden, gate = module.up(hidden), 1.0
        if config.feed_forward == "gated":
            hidden, gate = hidden.chunk(2, -1)
        return module.down(ACT2FN[config.hidden_act](hidden) * gate)

    if config.norm == "pre":
        norm = module.attention_norm if layer or config.first_norm else torch.nn.Identity()
        normed = (norm(hidden) for hidden in (queries, keys))
        hidden = queries + attend(model, layer, *normed, query_tokens, key_tokens)
        return hidden + feed(module.feed_forward_norm(hidden))
    hidden = module.attention_norm(queries + attend(model, layer, queries, keys, query_tokens, key_tokens))
    return module.feed_forward_norm(hidden + feed(hidden))


def written_out(model, input_ids, attention_mask, token_type_ids=None):
    """The hidden states of an encoder in evaluation mode, as the definition says."""
    config, length = model.config, input_ids.shape[1]
    types = token_type_ids if config.segments == "attention" else None
    site = positions_of(config, length, 0), attention_mask.bool(), types
    words = model.embeddings.word(input_ids)
    states = [model.embeddings(words, token_type_ids, model.position, site[0])]
    layer, poolings, start = 0, 0, site
    for block, layers in enumerate(model.blocks):
        groups = windows(states[-1].shape[1], config) if block else None
        if groups is not None:
            poolings += 1
            pooled = pool(states[-1], groups, MODES[config.pooling])
            below = site
            site = (
                positions_of(config, len(groups), poolings),
                pool(below[1], groups, MODES[config.mask_pooling]),
                None if types is None else pool(below[2], groups, MODES["first"]),
            )
            keys, key_tokens = (states[-1], below) if config.pool_query_only else (pooled, site)
            states.append(run_layer(model, layer, pooled, keys, site, key_tokens))
            layer += 1
        while layer < layers.stop:
            states.append(run_layer(model, layer, states[-1], states[-1], site, site))
            layer += 1
        if block == 0:
            first = states[-1]
    if model.has_decoder:
        last, times, apart = states[-1], 2 ** (len(model.blocks) - 1), int(config.separate_cls)
        sources = [i if i < apart else apart + (i - apart) // times for i in range(length)]
        zeros = torch.zeros_like(last[:, 0])
        repeated = [last[:, source] if source < last.shape[1] else zeros for source in sources]
        states.append(torch.stack(repeated, 1) + first)
        while layer < len(model.passes):
            states.append(run_layer(model, layer, states[-1], states[-1], start, start))
            layer += 1
    if model.norm is not None:
        states[-1] = model.norm(states[-1])
    return states
