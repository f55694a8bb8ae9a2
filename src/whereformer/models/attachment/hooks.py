"""The hooks that pass the position method, the layer's number and shared results to a model's attention.

Everything travels as keyword arguments of one forward. So nothing is kept between forwards, and a layer that runs again
for its gradient sees what it saw before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer

from ...errors import InputError
from ...kernels import Positions
from ...kernels.tracing import can_read
from ...kernels.varlen import PACKED, packed_document_ids
from ...positions import PositionMethod, Site
from ...positions.none import NoPosition
from ..inputs import CACHE
from .caches import RotatingCache
from .masks import RequestedMask, texts_by_positions

NAME = "whereformer"
"""The name of the attention implementation, of each stack's position submodule, and of the configuration's field."""

APART = "give cu_seq_lens_q or seq_idx, which say where texts begin, or give each text a row of its own"

Undo: TypeAlias = list[Callable[[], Any]]
"""What takes back the changes to a model, in their order. A copy of a model has those of the copy."""


@dataclass(eq=False)
class StackForward:
    """One forward of a stack: its method, what the method shares between layers, and the number of layers that ran.

    Args:
        position: the method.
        share: whether layers may use what another one computed.
        with_weights: whether the caller wants attention weights; None: not said.
        placed: whether the caller gives positions, which may begin anew with each text of a row.
        documents: (batch, n), the number of each token's text by these positions; None: each row is one text.
    """

    position: PositionMethod
    share: bool
    with_weights: bool | None = None
    placed: bool = False
    documents: Tensor | None = None
    calls: int = 0
    kept: tuple[tuple[Any, ...], Tensor | None, Tensor | None, Any] | None = None
    texts: tuple[Tensor | None, Tensor | None] = None, None
    new_site: Site | None = None

    def packed_document_ids(self, options: Mapping[str, Any], query: Tensor, n_q: int, n_k: int) -> Tensor | None:
        """Return the result of :func:`.packed_document_ids`, or else the texts by positions.

        Layers that get the same ends get the same tensor.
        """
        ends = options.get("cu_seq_lens_q")
        if ends is None or self.texts[0] is not ends or n_q != n_k:
            self.texts = ends, packed_document_ids(options, query, n_q, n_k)
        documents = self.documents
        if self.texts[1] is None and documents is not None and n_q == n_k == documents.shape[1]:
            return documents
        return self.texts[1]

    def site_of_new(self, new: Positions) -> Site:
        """Return the site of tokens at these positions, with what layers share; they usually get the same one."""
        if self.new_site is None or self.new_site.query_positions != new:
            site = Site(new, new)
            self.new_site = replace(site, shared=self.position.compute_shared(site)) if self.share else site
        return self.new_site

    def prepare_for(self, asked: RequestedMask, site: Site) -> Site:
        """Return the site with what the method computes once for all layers; the first layer that asks computes it.

        A method that counts from the start of a row counts the real tokens, as ``position_ids`` do in generation, and
        from 0 in each packed text.
        """
        key = torch.is_grad_enabled(), site.query_positions, site.key_positions, site.new_key_positions
        if not self.position.depends_on_offsets_only():
            site = asked.counted(site)
        if not self.share:
            return site
        kept = self.kept
        if kept is None or kept[0] != key or kept[1] is not asked.real or kept[2] is not asked.documents:
            self.kept = kept = key, asked.real, asked.documents, self.position.compute_shared(site)
        return replace(site, shared=kept[-1])


@dataclass(frozen=True)
class LayerInput:
    """What a self-attention layer passes to the attention function.

    Args:
        forward: the forward that the layer runs in.
        layer: the layer's number, counted over the stack's passes.
        hidden: the layer's input (batch, n, hidden_size).
        with_weights: whether its weights are wanted; None: not said.
        cache: where the layer stores rotated keys; None if it has no cache or ``transform_qkv`` needs all keys.
    """

    forward: StackForward
    layer: int
    hidden: Tensor
    with_weights: bool | None
    cache: RotatingCache | None = None

    def check(self, asked: RequestedMask, n_q: int) -> None:
        """Raise an InputError if the method cannot serve what the layer asks for."""
        causal, methods = self.forward.position.model.causal, self.forward.position.components()
        if asked.matrix is None:
            if n_q > 1 and asked.causal != causal and (causal or any(method.scales_query for method in methods)):
                raise InputError("is_causal", f"expected {causal}, as when the method was attached, got {asked.causal}")
            return
        looks = not torch.compiler.is_compiling()
        one_sided = [method for method in methods if method.one_sided or (causal and method.scales_query)]
        if one_sided and looks and not asked.hides_later_keys(n_q):
            known = f"{type(one_sided[0]).__name__}, built for causal attention, knows nothing of them"
            raise InputError("attention_mask", f"it shows later tokens, and {known}; attach it with causal=False")
        # Keys can be counted within documents, but not within those that a matrix may keep apart.
        from_start = [method for method in methods if method.scales_query or not method.shift_invariant]
        # In compiled code, most masks are matrices, and texts are kept apart only where the caller gives positions.
        counts = bool(from_start) or not self.forward.position.depends_on_offsets_only()
        if counts and (looks or self.forward.placed) and asked.documents is None:
            name = type(from_start[0]).__name__ if from_start else "+".join(type(each).__name__ for each in methods)
            raise InputError(
                "position",
                f"{name} counts from the start of a row, and a mask matrix does not tell where texts begin; give each "
                "text a row of its own",
            )


@dataclass(eq=False)
class Start:
    """A hook that begins a :class:`StackForward` before the module that runs the layers of a stack.

    Args:
        stack: the model that has the method.
        layers: its layers that may be checkpointed.
        names: the names of the module's arguments, in their order.
        separates_texts: whether the model itself keeps the texts of a row apart by positions.
        around: whether the module is the stack, around the module that runs the layers, to which positions may not
            get.
    """

    stack: Any
    layers: list[GradientCheckpointingLayer]
    names: tuple[str, ...]
    separates_texts: bool
    around: bool = False

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        inputs = dict(zip(self.names, args, strict=False)) | kwargs
        if inputs.get("whereformer_forward") is not None:
            return args, kwargs
        method, stated = getattr(self.stack, NAME), inputs.get("is_causal")
        if stated is not None and stated != method.model.causal:
            raise InputError("is_causal", f"{stated} needs config.is_causal = {stated} before a method is attached")
        documents = self._documents(method, inputs)
        if self.around and documents is None:
            return args, kwargs
        # A checkpointed layer runs again alone and could not repeat what other layers shared, so it computes its own.
        share = not (module.training and any(layer.gradient_checkpointing for layer in self.layers))
        has_positions = inputs.get("position_ids") is not None
        forward = StackForward(method, share, inputs.get("output_attentions"), has_positions, documents)
        return args, {**kwargs, "whereformer_forward": forward}

    def _documents(self, method: PositionMethod, inputs: Mapping[str, Any]) -> Tensor | None:
        """Return the texts of packed rows, (batch, n), by positions; None: each row is one text.

        A causal model without a cache may separate texts by positions. With a method, it does so with its default
        ``use_cache=True`` and with a mask, too. "none" leaves the model as it is.
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
        # A mask of pairs says itself which texts are apart.
        if positions.dim() > 2 or not (mask is None or (isinstance(mask, Tensor) and mask.dim() == 2)):
            return None
        real = None if mask is None else mask[:, -length:].bool()
        documents = texts_by_positions(torch.atleast_2d(positions), real)
        if documents is None:
            return None
        if can_read(documents):
            kind = type(self.stack).__name__
            if not self.separates_texts:
                raise InputError(
                    "position_ids", f"they begin again in a row, and {kind} separates no texts by them; {APART}"
                )
            if inputs.get("cache", inputs.get("past_key_values")) is not None:
                raise InputError("position_ids", f"they begin again in a row, and a cache continues one text; {APART}")
        return documents.expand(batch, -1)


@dataclass(eq=False)
class Enter:
    """A hook that runs before a self-attention layer and passes it its number.

    Args:
        stack: the model that has the method.
        layers: the layer's numbers, one for each of its passes.
        counted: whether the layers that ran before have to be counted to tell the pass.
        rotates_cached_keys: whether the layer stores its keys in a cache after the method has rotated them.
    """

    stack: Any
    layers: tuple[int, ...]
    counted: bool
    rotates_cached_keys: bool

    def __call__(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        forward = kwargs.get("whereformer_forward")
        if forward is None:
            # The stack gives its layers no keyword arguments, or the layer runs alone. It then shares nothing.
            if self.counted:
                raise RuntimeError(f"whereformer: {type(module).__name__} ran outside of the model it was attached to")
            forward = StackForward(getattr(self.stack, NAME), share=False)
        config = getattr(module, "config", self.stack.config)
        if not str(config._attn_implementation).startswith(NAME):
            # Another attention function would silently ignore the positions.
            raise RuntimeError(
                f"attn_implementation: a position method is attached, so it must be {NAME!r}, "
                f"got {config._attn_implementation!r}; set it back or call whereformer.detach(model). Weights of "
                "attention need no other: give output_attentions=True in the call"
            )
        layer = self.layers[0]
        if self.counted:
            # The number of layers that ran before tells which pass of a repeated layer this is.
            layer = forward.calls
            forward.calls += 1
            if layer not in self.layers:
                raise RuntimeError(
                    f"whereformer: {type(module).__name__} attends several times each time it runs, or layers that "
                    "share weights ran in another order than when attached; no method can tell its passes apart"
                )
        hidden = args[0] if args else kwargs["hidden_states"]
        # Models that take this argument do not hand it on: GPT-2 itself, OPT in its layers.
        with_weights = kwargs.get("output_attentions", forward.with_weights)
        cache, rotating = kwargs.get(CACHE), None
        if self.rotates_cached_keys and isinstance(cache, DynamicCache):
            kwargs = {**kwargs, CACHE: (rotating := RotatingCache(cache, forward.position, forward.site_of_new, layer))}
        return args, {**kwargs, "whereformer": LayerInput(forward, layer, hidden, with_weights, rotating)}
