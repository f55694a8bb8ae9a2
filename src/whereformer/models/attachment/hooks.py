"""The hooks that pass the position method, the layer's number and shared results to a model's attention.

They add keyword arguments to one forward. So no state remains between forwards, and a layer that runs again for its
gradient gets the same arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ...errors import InputError
from ...kernels import Positions
from ...kernels.tracing import can_read
from ...positions import PositionMethod, Site
from ...positions.none import NoPosition
from ..inputs import CACHE, PACKED, packed_document_ids
from .caches import RotatingCache
from .masks import MaskSpec, texts_by_positions

Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]

NAME = "whereformer"
"""The name of the attention implementation, of each stack's position submodule, and of the configuration's field."""

SEPARATE_TEXTS = "pass cu_seq_lens_q or seq_idx, which show where texts begin, or put each text in its own row"
"""The advice of errors about packed rows."""

Undo: TypeAlias = list[Callable[[], object]]
"""Functions that reverse the changes to a model, in the order of the changes. ``deepcopy`` copies them with the model,
so the functions of a copy act on the copy."""


@dataclass(eq=False)
class StackForward:
    """One forward of a stack: its method, the results that its layers share, and the number of layers that ran.

    Args:
        position: the method.
        share: whether layers may use results of other layers.
        output_attentions: whether the caller asked for attention weights; None: the caller did not pass it.
        has_position_ids: whether the caller passes positions, which may start again with each text of a row.
        documents: (batch, n), the number of each token's text by these positions; None: each row is one text.
        num_calls: the number of attention layers that ran.
        shared_cache: the last inputs of the shared results, then the results.
        texts: the last ``cu_seq_lens_q``, and the texts that they describe.
        new_site: the last site of new tokens.
        sites: the results of :meth:`get_sites` by its arguments, with the mask, whose tensors thus stay alive.
    """

    position: PositionMethod
    share: bool
    output_attentions: bool | None = None
    has_position_ids: bool = False
    documents: Tensor | None = None
    num_calls: int = 0
    shared_cache: tuple[tuple[object, ...], Tensor | None, Tensor | None, object] | None = None
    texts: tuple[Tensor | None, Tensor | None] = None, None
    new_site: Site | None = None
    sites: dict[tuple[object, ...], tuple[Site, Site, MaskSpec]] = field(default_factory=dict)

    def packed_document_ids(self, options: Mapping[str, Any], query: Tensor, n_q: int, n_k: int) -> Tensor | None:
        """Return the result of :func:`.packed_document_ids`, or if it is None, the texts by positions.

        Layers that get the same ``cu_seq_lens_q`` get the same tensor.
        """
        boundaries = options.get("cu_seq_lens_q")
        if boundaries is None or self.texts[0] is not boundaries or n_q != n_k:
            self.texts = boundaries, packed_document_ids(options, query, n_q, n_k)
        if self.texts[1] is None and self.documents is not None and n_q == n_k == self.documents.shape[1]:
            return self.documents
        return self.texts[1]

    def make_new_site(self, positions: Positions) -> Site:
        """Return the site of new tokens with the shared results; layers with the same positions get the same site."""
        if self.new_site is None or self.new_site.query_positions != positions:
            site = Site(positions, positions)
            self.new_site = replace(site, shared=self.position.compute_shared(site)) if self.share else site
        return self.new_site

    def get_sites(self, mask_spec: MaskSpec, query: Tensor, scale: float | None, new_keys: bool) -> tuple[Site, Site]:
        """Return the site of a layer's attention, and the hooks' site, which has the shared results.

        Layers with the same mask get the same sites: making them takes as long as attention to a few hundred keys.
        ``new_keys`` says that the hooks get the new keys only, because a cache holds the others.
        """
        n_q = query.shape[2]
        key = mask_spec.identity(), query.shape[0], n_q, scale, new_keys, torch.is_grad_enabled()
        if not torch.compiler.is_compiling() and key in self.sites:  # compilers cannot look up symbolic sizes
            return self.sites[key][:2]
        self.check_mask(mask_spec, n_q)
        site = mask_spec.site(query, scale)
        hooks_site = replace(site, new_key_positions=site.query_positions) if new_keys else site
        hooks_site = self.add_shared(mask_spec, hooks_site)
        if not torch.compiler.is_compiling():
            self.sites[key] = site, hooks_site, mask_spec
        return site, hooks_site

    def add_shared(self, mask_spec: MaskSpec, site: Site) -> Site:
        """Return the site with the results that the method computes once for all layers, in the first of them.

        A method that counts from the start of a row counts tokens without padding, as ``position_ids`` do in
        generation, and from 0 in each packed text.
        """
        key = torch.is_grad_enabled(), site.query_positions, site.key_positions, site.new_key_positions
        token_mask, documents = mask_spec.token_mask, mask_spec.documents
        if not self.position.depends_on_offsets_only():
            site = mask_spec.with_token_positions(site)
        if not self.share:
            return site
        cached = self.shared_cache
        if cached is None or cached[0] != key or cached[1] is not token_mask or cached[2] is not documents:
            self.shared_cache = cached = key, token_mask, documents, self.position.compute_shared(site)
        return replace(site, shared=cached[-1])

    def check_mask(self, mask_spec: MaskSpec, n_q: int) -> None:
        """Raise an InputError if the method does not support the mask."""
        causal, methods = self.position.model.causal, self.position.components()
        if mask_spec.matrix is None:
            if n_q > 1 and mask_spec.causal != causal and (causal or any(method.scales_query for method in methods)):
                reason = f"expected {causal}, as when the method was attached, got {mask_spec.causal}"
                raise InputError("is_causal", reason)
            return
        can_read_mask = not torch.compiler.is_compiling()
        one_sided = [method for method in methods if method.one_sided or (causal and method.scales_query)]
        if one_sided and can_read_mask and not mask_spec.hides_later_keys(n_q):
            kind = type(one_sided[0]).__name__
            reason = f"it lets queries see later tokens, but {kind} was built for causal attention"
            raise InputError("attention_mask", f"{reason}; attach it with causal=False")
        # Positions can be counted in each document of `documents`, but not in documents that only a matrix separates.
        from_start = [method for method in methods if method.scales_query or not method.shift_invariant]
        counts = bool(from_start) or not self.position.depends_on_offsets_only()
        # In compiled code, most masks are matrices, and texts are kept apart only if the caller passes positions.
        if counts and (can_read_mask or self.has_position_ids) and mask_spec.documents is None:
            name = "+".join(type(method).__name__ for method in from_start[:1] or methods)
            reason = f"{name} counts positions from the start of a row"
            advice = "put each text in its own row"
            raise InputError("position", f"{reason}, but a dense mask does not show where texts begin; {advice}")


@dataclass(frozen=True)
class LayerInput:
    """The values that the hook of a self-attention layer passes to the attention function.

    Args:
        forward: the forward that the layer runs in.
        layer: the layer's number, counted over the stack's passes.
        hidden: the layer's input (batch, n, hidden_size).
        output_attentions: whether to return attention weights; None: the caller did not pass it.
        cache: where the layer stores rotated keys; None if it has no cache or ``transform_qkv`` needs all keys.
    """

    forward: StackForward
    layer: int
    hidden: Tensor
    output_attentions: bool | None
    cache: RotatingCache | None = None


@dataclass(eq=False)
class BeginForwardHook:
    """A hook that begins a :class:`StackForward` before the module that runs the layers of a stack.

    Args:
        stack: the model that has the method.
        layers: its layers that may be checkpointed.
        names: the names of the module's arguments, in their order.
        separates_texts: whether the model itself keeps the texts of a row apart by positions.
        is_outer: whether the module is the stack, and a module inside runs the layers. The stack may not pass positions
            on to that module.
    """

    stack: PreTrainedModel
    layers: list[GradientCheckpointingLayer]
    names: tuple[str, ...]
    separates_texts: bool
    is_outer: bool = False

    def __call__(self, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        inputs = dict(zip(self.names, args, strict=False)) | kwargs
        if inputs.get("whereformer_forward") is not None:
            return args, kwargs
        method, causal = getattr(self.stack, NAME), inputs.get("is_causal")
        if causal is not None and causal != method.model.causal:
            reason = f"is_causal={causal} needs config.is_causal={causal} before you attach a method"
            raise InputError("is_causal", reason)
        documents = self._documents(method, inputs)
        if self.is_outer and documents is None:
            return args, kwargs
        # A checkpointed layer runs a second time without the others, whose shared results it then lacks. So it computes
        # its own results both times.
        share = not (module.training and any(layer.gradient_checkpointing for layer in self.layers))
        has_positions = inputs.get("position_ids") is not None
        forward = StackForward(method, share, inputs.get("output_attentions"), has_positions, documents)
        return args, {**kwargs, "whereformer_forward": forward}

    def _documents(self, method: PositionMethod, inputs: Mapping[str, Any]) -> Tensor | None:
        """Return the texts of packed rows, (batch, n), by positions; None: each row is one text.

        A causal model without a cache may separate texts by positions. With a method, it does so with its default
        ``use_cache=True`` and with a mask, too. "none" does not change the model's results.
        """
        positions, mask = inputs.get("position_ids"), inputs.get("attention_mask")
        if not method.model.causal or all(isinstance(component, NoPosition) for component in method.components()):
            return None
        tokens = inputs.get("input_ids") if inputs.get("inputs_embeds") is None else inputs["inputs_embeds"]
        if positions is None or tokens is None or any(inputs.get(name) is not None for name in PACKED):
            return None
        batch, length = tokens.shape[:2]
        if positions.dim() == 3 and positions.shape == (4, batch, length):
            positions = positions[0]  # Qwen2-VL: positions in the text, before three axes of images
        # A mask of pairs itself keeps texts apart.
        if positions.dim() > 2 or not (mask is None or (isinstance(mask, Tensor) and mask.dim() == 2)):
            return None
        token_mask = None if mask is None else mask[:, -length:].bool()
        documents = texts_by_positions(torch.atleast_2d(positions), token_mask)
        if documents is None:
            return None
        if can_read(documents):
            obstacle = None
            if not self.separates_texts:
                obstacle = f"{type(self.stack).__name__} does not separate texts by them"
            elif inputs.get("cache", inputs.get("past_key_values")) is not None:
                obstacle = "a cache continues one text"
            if obstacle is not None:
                raise InputError("position_ids", f"they start again within a row, but {obstacle}; {SEPARATE_TEXTS}")
        return documents.expand(batch, -1)


@dataclass(eq=False)
class EnterLayerHook:
    """A hook that runs before a self-attention layer and passes it its number.

    Args:
        stack: the model that has the method.
        layers: the layer's numbers, one for each of its passes.
        counts_passes: whether the layer runs several times per forward, so that calls are counted to find the pass.
        rotates_cached_keys: whether the layer stores its keys in a cache after the method has rotated them.
    """

    stack: PreTrainedModel
    layers: tuple[int, ...]
    counts_passes: bool
    rotates_cached_keys: bool

    def __call__(self, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        forward = kwargs.get("whereformer_forward")
        if forward is None:
            # The stack passes no keyword arguments to its layers, or only this layer runs. It then shares nothing.
            if self.counts_passes:
                kind = type(module).__name__
                raise RuntimeError(f"whereformer: {kind} was called outside the model that the method is attached to")
            forward = StackForward(getattr(self.stack, NAME), share=False)
        config = getattr(module, "config", self.stack.config)
        if not str(config._attn_implementation).startswith(NAME):
            # Another attention function would silently ignore the positions.
            reason = f"expected {NAME!r} while a method is attached, got {config._attn_implementation!r}"
            advice = "set it back or call whereformer.detach(model)"
            weights_advice = "For attention weights, pass output_attentions=True in the call"
            raise RuntimeError(f"attn_implementation: {reason}; {advice}. {weights_advice}")
        layer = self.layers[0]
        if self.counts_passes:
            # The number of layers that ran before is the number of this pass.
            layer = forward.num_calls
            forward.num_calls += 1
            if layer not in self.layers:
                kind = type(module).__name__
                reason = "layers that share weights ran in a different order than when the method was attached"
                raise RuntimeError(
                    f"whereformer: {kind} calls attention several times per forward, or {reason}, so its passes cannot "
                    "be identified"
                )
        hidden = args[0] if args else kwargs["hidden_states"]
        # Some models accept this argument but do not pass it on: GPT-2 itself, OPT in its layers.
        output_attentions = kwargs.get("output_attentions", forward.output_attentions)
        cache, rotating = kwargs.get(CACHE), None
        if self.rotates_cached_keys and isinstance(cache, DynamicCache):
            rotating = RotatingCache(cache, forward.position, forward.make_new_site, layer)
            kwargs = {**kwargs, CACHE: rotating}
        return args, {**kwargs, "whereformer": LayerInput(forward, layer, hidden, output_attentions, rotating)}
