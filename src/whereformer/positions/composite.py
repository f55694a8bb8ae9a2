"""``CompositeMethod``: several methods, joined in each layer ("learned+tisa") or in turn over the layers
("rope/rope/rope/none")."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..kernels.terms import PositionsLike, Term
from .base import ModelShape, PositionMethod
from .site import Site


class CompositeMethod(PositionMethod):
    """Several methods, each of which acts in its own layers as it would in a model of these alone.

    So a method has parameters for its own layers only, and counts these from 0. Where layers share weights, the passes
    of a layer share what the method shares. Methods in the same layer act in the given order.

    Args:
        model: the sizes of the whole model.
        builders: by name, what builds each method for the given sizes.
        places: the names at each place of a pattern, which is repeated to the depth.

    Raises:
        InputError: for methods that do not go together.
    """

    def __init__(
        self,
        model: ModelShape,
        builders: Mapping[str, Callable[[ModelShape], PositionMethod]],
        places: Sequence[list[str]],
    ) -> None:
        super().__init__(model)
        pattern = [places[layer % len(places)] for layer in range(model.num_layers)]
        self.layers = [[at for at, names in enumerate(pattern) if name in names] for name in builders]
        """The layers of each method."""
        numbers = {name: number for number, name in enumerate(builders)}
        self.parts = nn.ModuleList(
            build(_shape_of(model, layers)) for build, layers in zip(builders.values(), self.layers, strict=True)
        )
        self.places = [
            [(numbers[name], self.layers[numbers[name]].index(layer)) for name in names]
            for layer, names in enumerate(pattern)
        ]
        """The methods of each layer by number, each with the layer's number among those of this method."""
        contents = {all(part.uses_query_key for part in self.components(layer)) for layer in range(model.num_layers)}
        if len(contents) > 1:
            reason = "a Synthesizer with content='none' replaces query . key in all layers or in none"
            raise InputError("position", reason)
        self.uses_query_key = contents == {True}
        self.needs_query_key = any(part.needs_query_key for part in self)
        if self.needs_query_key and not self.uses_query_key:
            names = " and ".join(type(part).__name__ for part in self if part.needs_query_key)
            reason = "acts on query and key, which a Synthesizer with content='none' does without"
            raise InputError("position", f"{names} {reason}; use content='add' or 'mix'")
        self.reads_keys = any(part.reads_keys for part in self)
        self.acts_on = frozenset().union(*(part.acts_on for part in self))
        self.extrapolates = all(part.extrapolates for part in self)
        self.accepts_fractional = all(part.accepts_fractional for part in self)
        self.shift_invariant = all(part.shift_invariant for part in self) and self.depends_on_offsets_only()
        self.embedding_scale = max(part.embedding_scale for part in self)
        for parts in map(self.components, range(model.num_layers)):
            for part in parts:
                others = [other for other in parts if other is not part and not other.scales_query]
                part.others_change_query |= any(
                    type(other).transform_qkv is not PositionMethod.transform_qkv for other in others
                )

    def __iter__(self) -> Any:
        return iter(self.parts)

    def components(self, layer: int | None = None) -> tuple[PositionMethod, ...]:
        every: tuple[Any, ...] = tuple(self.parts)
        return every if layer is None else tuple(every[number] for number, _ in self.places[layer])

    def depends_on_offsets_only(self) -> bool:
        if not all(part.depends_on_offsets_only() for part in self):
            return False
        # Where rope turns query and key by their positions, another method's products with them depend on these too.
        # A method that reads keys reads them before they are turned.
        for parts in map(self.components, range(self.model.num_layers)):
            on_products = [part for part in parts if part.needs_query_key and not part.reads_keys]
            if len(on_products) > 1 and any("keys" in part.acts_on for part in on_products):
                return False
        return True

    def vectors(self, positions: PositionsLike, device: torch.device | str | None = None) -> Tensor | None:
        return next((found for part in self if (found := part.vectors(positions, device)) is not None), None)

    def compute_shared(self, site: Site) -> tuple[Any, ...]:
        return tuple(part.compute_shared(site) for part in self)

    def embed(self, hidden: Tensor, positions: PositionsLike) -> Tensor:
        for part in self:
            hidden = part.embed(hidden, positions)
        return hidden

    def _at(self, site: Site) -> list[tuple[Any, Site]]:
        """Return the methods of a layer, each with the site as this method counts and shares."""
        shared = [None] * len(self.parts) if site.shared is None else site.shared
        return [
            (self.parts[number], replace(site, layer=own, shared=shared[number]))
            for number, own in self.places[site.layer]
        ]

    def transform_qkv(self, query: Tensor, key: Tensor, value: Tensor, site: Site) -> tuple[Tensor, Tensor, Tensor]:
        # A factor comes first, so that it is the same in ``content_terms``, whatever others add to the query.
        for part, own in sorted(self._at(site), key=lambda pair: not pair[0].scales_query):
            query, key, value = part.transform_qkv(query, key, value, own)
        return query, key, value

    def terms(self, hidden: Tensor, site: Site) -> tuple[Term, ...]:
        return tuple(term for part, own in self._at(site) for term in part.terms(hidden, own))

    def content_terms(self, query: Tensor, key: Tensor, site: Site) -> tuple[Term, ...]:
        parts = self._at(site)
        if all(type(part).content_terms is PositionMethod.content_terms for part, _ in parts):
            return ()
        for part, own in parts:
            if part.scales_query:
                query = (query * part.query_factor(query, own)).to(query.dtype)
        return tuple(term for part, own in parts for term in part.content_terms(query, key, own))

    def curve(self, offsets: Tensor | Sequence[float], *, layer: int = 0) -> Tensor | None:
        parts: Any = zip(self.components(layer), self.places[layer], strict=True)
        curves = [curve for part, (_, own) in parts if (curve := part.curve(offsets, layer=own)) is not None]
        if curves:
            return torch.stack([curve.to(curves[0].device) for curve in curves]).sum(0)
        if self.acts_in_attention(layer) or not self.acts_in_attention():
            return None
        # Nothing is added, which is a curve beside those of other layers.
        return self._like.new_zeros(self.model.num_heads, *torch.as_tensor(offsets).shape)


def _shape_of(model: ModelShape, layers: Sequence[int]) -> ModelShape:
    """Return the sizes of a model that has only some of the layers."""
    layer_of_pass = [model.layer_of_pass[layer] for layer in layers]
    numbers = {distinct: number for number, distinct in enumerate(dict.fromkeys(layer_of_pass))}
    return replace(model, num_layers=len(layers), layer_of_pass=tuple(numbers[distinct] for distinct in layer_of_pass))
