"""Finds a model's attention calls by running one small forward, and groups them by encoder and decoder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from .attention_function import attend, mask_spec_for
from .configs import all_configs
from .hooks import NAME, LayerInput, Undo
from .masks import Mask, make_mask_spec, visible_pairs
from .patched_forward import is_patched
from .patches import patch_layers
from .trial_run import match_modules, owner_by_module, packed_examples, run_first_example, submodels, trial_copy

PROBE = f"{NAME}_probe"
"""The name of the attention implementation that records its calls."""

IMPLEMENTATION = "_attn_implementation_internal"
"""The configurations' field for its name; the public field also changes inner configurations, or refuses our names."""


@dataclass(frozen=True)
class AttentionCall:
    """One call of the attention function.

    Args:
        module: the layer that calls it.
        n_q, n_k: the numbers of queries and keys.
        num_heads, head_dim: the number of heads, and the width of one.
        received: the values that the hooks of an attached method passed on; None without a method.
        causal: whether no query sees a later key; in the results of this module, both with a padding mask and without
            one.
        ignored_queries: (batch, n_q) bool, True = the output has no meaning: the token sees no key, or is padding.
        mask_decides_causality: whether attention is causal only with a padding mask, or only without one.
        separates_texts: whether the texts of a row are kept apart.
    """

    module: nn.Module
    n_q: int
    n_k: int
    num_heads: int
    head_dim: int
    received: LayerInput | None
    causal: bool
    ignored_queries: Tensor
    mask_decides_causality: bool = False
    separates_texts: bool = False

    def for_copy(self, modules: Mapping[nn.Module, nn.Module]) -> AttentionCall:
        """Return the call of the same layer in a copy of its model."""
        return replace(self, module=modules[self.module])


_recorded: ContextVar[list[AttentionCall]] = ContextVar("recorded")


def _probe(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend, and record the call.

    Queries that see no key are ignored: transformers averages over all keys there. They are the ones whose outputs are
    exactly zero, as this library's are then. So are queries that are padding: models differ in the keys that padding
    sees.
    """
    out, weights = attend(module, query, key, value, attention_mask, is_causal=is_causal, **options)
    (batch, num_heads, n_q, head_dim), n_k = query.shape, key.shape[2]
    mask_spec = mask_spec_for(module, attention_mask, query, key, is_causal, options)
    ignored_queries, token_mask = (out == 0).flatten(2).all(-1), mask_spec.key_mask(batch)
    if token_mask is not None and n_q == n_k:
        ignored_queries = ignored_queries | ~token_mask
    if mask_spec.matrix is not None:
        ignored_queries = ignored_queries | ~visible_pairs(mask_spec.matrix).any(1).any(-1)
    call = AttentionCall(
        module,
        n_q,
        n_k,
        num_heads,
        head_dim,
        received=options.get("whereformer"),
        causal=mask_spec.hides_later_keys(n_q),
        ignored_queries=ignored_queries,
        separates_texts=mask_spec.documents is not None,
    )
    _recorded.get().append(call)
    return out, weights


def find_calls(model: PreTrainedModel) -> list[AttentionCall]:
    """Return the attention calls of a small forward, in order; none if the model does not dispatch its attention.

    Raises:
        InputError: if the model does not run on any of the small inputs.
    """
    with trial_copy(model) as copied:
        originals = match_modules(copied, model)
        patch_layers(copied, [])
        if not (copied._can_set_attn_implementation() or any(map(is_patched, copied.modules()))):
            return []
        for config in all_configs(copied):
            setattr(config, IMPLEMENTATION, PROBE)
        return [call.for_copy(originals) for call in _record_calls(copied)]


def record_calls(model: PreTrainedModel, calls: list[AttentionCall]) -> list[AttentionCall]:
    """Record the attention calls of a small forward of a model with a method, in the submodels of earlier ``calls``."""
    with trial_copy(model) as copied:
        copies = match_modules(model, copied)
        set_implementation(copied, [call.for_copy(copies) for call in calls], PROBE, [])
        return _record_calls(copied)


def text_separating_layers(model: PreTrainedModel, calls: list[AttentionCall]) -> set[nn.Module]:
    """Return the layers that keep the texts of a row apart by positions that start again, without a mask or a cache."""
    with trial_copy(model) as copied:
        originals, copies = match_modules(copied, model), match_modules(model, copied)
        set_implementation(copied, [call.for_copy(copies) for call in calls], PROBE, [])
        with collect_calls() as packed_calls:
            for example in packed_examples(copied.base_model):
                with suppress(Exception):  # a model may not accept positions, or only positions with other axes
                    example.run()
        return {originals[call.module] for call in packed_calls if call.separates_texts}


def _record_calls(model: PreTrainedModel) -> list[AttentionCall]:
    """Record the calls of a forward with a padding mask, and see whether they are causal without one, too."""
    with collect_calls() as calls:
        example, _ = run_first_example(model, rows=1, length=5, before=calls.clear)
    unmasked = example.unmasked()
    if unmasked is None:
        return calls
    causal: dict[nn.Module, bool] = {}
    # A model may need its mask.
    with collect_calls() as unmasked_calls, suppress(Exception):
        unmasked.run()
        for call in unmasked_calls:
            causal[call.module] = call.causal and causal.get(call.module, True)
    pairs = [(call, causal.get(call.module, call.causal)) for call in calls]
    return [
        replace(call, causal=call.causal and without_mask, mask_decides_causality=call.causal != without_mask)
        for call, without_mask in pairs
    ]


@contextmanager
def collect_calls() -> Iterator[list[AttentionCall]]:
    """Yield the list to which calls of :data:`PROBE` are added."""
    token = _recorded.set([])
    try:
        yield _recorded.get()
    finally:
        _recorded.reset(token)


def set_implementation(model: PreTrainedModel, calls: list[AttentionCall], name: str, undo: Undo) -> None:
    """Switch the attention implementation of the submodels that have these calls.

    No example ran the other submodels, such as those that read images, so nothing is known about their attention.
    """
    configs = [submodel.config for submodel in submodels_with(model, calls)]
    configs += [call.module.config for call in calls if hasattr(call.module, "config")]
    for config in {id(config): config for config in configs}.values():
        undo.append(partial(setattr, config, IMPLEMENTATION, getattr(config, IMPLEMENTATION)))
        setattr(config, IMPLEMENTATION, name)


def group_by_stack(
    model: PreTrainedModel, calls: list[AttentionCall]
) -> list[tuple[PreTrainedModel, list[AttentionCall]]]:
    """Group the self-attention calls by the innermost PreTrainedModel around them: an encoder or a decoder."""
    owners = owner_by_module(model)
    stacks: dict[PreTrainedModel, list[AttentionCall]] = {}
    for call in calls:
        if call.n_q == call.n_k:
            stacks.setdefault(owners[call.module], []).append(call)
    return list(stacks.items())


def submodels_with(model: PreTrainedModel, calls: list[AttentionCall]) -> list[PreTrainedModel]:
    """Return the model and its submodels that contain layers with calls."""
    layers = {call.module for call in calls}
    return [submodel for submodel in submodels(model) if not layers.isdisjoint(submodel.modules())]


AttentionInterface.register(PROBE, _probe)
AttentionMaskInterface.register(PROBE, make_mask_spec)
