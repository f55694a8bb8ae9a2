"""``CompositeMethod``: several methods, joined in each layer ("learned+tisa") or in turn over the layers
("rope/rope/rope/none")."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..kernels.terms import PositionsLike, Term
from .base import ModelShape, PositionMethod
from .site import Site


class CompositeMethod(PositionMethod):
    """Several methods. Each acts in its own layers as it would in a model of only these layers.

    So a method has parameters only for its own layers, and counts these from 0. Where layers share weights, the passes
    of a layer share the method's parameters as well. Methods in the same layer act in the order of their names.

    Args:
        model: the sizes of the full model.
        builders: by name, the function that builds each method for the given sizes.
        pattern: the names of the methods in each layer; it is repeated to the depth of the model.

    Raises:
        InputError: for methods that do not go together.
    """

    def __init__(
        self,
        model: ModelShape,
        builders: Mapping[str, Callable[[ModelShape], PositionMethod]],
        pattern: Sequence[list[str]],
    ) -> None:
        super().__init__(model)
        names_per_layer = [pattern[layer % len(pattern)] for layer in range(model.num_layers)]
        self.layers = [[layer for layer, names in enumerate(names_per_layer) if name in names] for name in builders]
        """The layers of each method."""
        self.parts = nn.ModuleList(
            build(_shape_of_layers(model, layers)) for build, layers in zip(builders.values(), self.layers, strict=True)
        )
        index = {name: number for number, name in enumerate(builders)}
        self.layer_parts = [
            [(index[name], self.layers[index[name]].index(layer)) for name in names]
            for layer, names in enumerate(names_per_layer)
        ]
        """For each layer, its methods: the index in ``parts``, and the index of the layer among the method's layers."""
        uses = {all(part.uses_query_key for part in self.components(layer)) for layer in range(model.num_layers)}
        if len(uses) > 1:
            reason = "a Synthesizer with content='none' replaces query . key in all layers or in none"
            raise InputError("position", reason)
        self.uses_query_key = uses == {True}
        self.needs_query_key = any(part.needs_query_key for part in self)
        if self.needs_query_key and not self.uses_query_key:
            names = " and ".join(type(part).__name__ for part in self if part.needs_query_key)
            reason = "acts on query and key, which a Synthesizer with content='none' does not use"
            raise InputError("position", f"{names} {reason}; use content='add' or 'mix'")
        self.reads_keys = any(part.reads_keys for part in self)
        self.acts_on = frozenset().union(*(part.acts_on for part in self))
        self.extrapolates = all(part.extrapolates for part in self)
        self.accepts_fractional = all(part.accepts_fractional for part in self)
        self._depends_on_offsets_only = self._find_dependence_on_offsets()
        self.shift_invariant = all(part.shift_invariant for part in self) and self._depends_on_offsets_only
        self.embedding_scale = max(part.embedding_scale for part in self)
        for parts in map(self.components, range(model.num_layers)):
            changing = [part for part in parts if part.overrides_transform_qkv() and not part.scales_query]
            for part in parts:
                part.others_change_query |= any(changer is not part for changer in changing)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.parts)

    def components(self, layer: int | None = None) -> tuple[PositionMethod, ...]:
        parts: tuple[Any, ...] = tuple(self.parts)
        return parts if layer is None else tuple(parts[part] for part, _ in self.layer_parts[layer])

    def depends_on_offsets_only(self) -> bool:
        # Models ask in every layer of every forward.
        return self._depends_on_offsets_only

    def _find_dependence_on_offsets(self) -> bool:
        """Compute :meth:`depends_on_offsets_only` from the parts of each layer."""
        if not all(part.depends_on_offsets_only() for part in self):
            return False
        # Where rope rotates query and key by their positions, another method's products with them depend on these, too.
        # A method that reads keys reads them before they are rotated.
        for parts in map(self.components, range(self.model.num_layers)):
            on_products = [part for part in parts if part.needs_query_key and not part.reads_keys]
            if len(on_products) > 1 and any("keys" in part.acts_on for part in on_products):
                return False
        return True

    def vectors(self, positions: PositionsLike, device: torch.device | str | None = None) -> Tensor | None:
        vectors = (part.vectors(positions, device) for part in self)
        return next((rows for rows in vectors if rows is not None), None)

    def compute_shared(self, site: Site) -> tuple[object, ...]:
        return tuple(part.compute_shared(site) for part in self)

    def embed(self, hidden: Tensor, positions: PositionsLike) -> Tensor:
        for part in self:
            hidden = part.embed(hidden, positions)
        return hidden

    def _parts_at(self, site: Site) -> list[tuple[Any, Site]]:
        """Return the methods of a layer, each with the site that has the method's layer index and shared result."""
        shared = [None] * len(self.parts) if site.shared is None else site.shared
        return [
            (self.parts[part], replace(site, layer=layer, shared=shared[part]))
            for part, layer in self.layer_parts[site.layer]
        ]

    def transform_qkv(self, query: Tensor, key: Tensor, value: Tensor, site: Site) -> tuple[Tensor, Tensor, Tensor]:
        # A query factor comes first, so that it is the same in ``content_terms``, whatever other methods add to the
        # query.
        for part, part_site in sorted(self._parts_at(site), key=lambda pair: not pair[0].scales_query):
            query, key, value = part.transform_qkv(query, key, value, part_site)
        return query, key, value

    def terms(self, hidden: Tensor, site: Site) -> tuple[Term, ...]:
        return tuple(term for part, part_site in self._parts_at(site) for term in part.terms(hidden, part_site))

    def content_terms(self, query: Tensor, key: Tensor, site: Site) -> tuple[Term, ...]:
        parts = self._parts_at(site)
        if all(type(part).content_terms is PositionMethod.content_terms for part, _ in parts):
            return ()
        for part, part_site in parts:
            if part.scales_query:
                query = (query * part.query_factor(query, part_site)).to(query.dtype)
        return tuple(term for part, part_site in parts for term in part.content_terms(query, key, part_site))

    def curve(self, offsets: Tensor | Sequence[float], *, layer: int = 0) -> Tensor | None:
        curves = []
        for part, (_, part_layer) in zip(self.components(layer), self.layer_parts[layer], strict=True):
            curve = part.curve(offsets, layer=part_layer)
            if curve is not None:
                curves.append(curve)
        if curves:
            return torch.stack([curve.to(curves[0].device) for curve in curves]).sum(0)
        if self.acts_in_attention(layer) or not self.acts_in_attention():
            return None
        # No method acts in this layer. Next to the curves of other layers, its curve is zero.
        return self._like.new_zeros(self.model.num_heads, *torch.as_tensor(offsets).shape)


def _shape_of_layers(model: ModelShape, layers: Sequence[int]) -> ModelShape:
    """Return the sizes of a model that has only these of the layers, with its distinct layers numbered from 0."""
    distinct_layers = [model.layer_of_pass[layer] for layer in layers]
    numbers = {distinct: number for number, distinct in enumerate(dict.fromkeys(distinct_layers))}
    return replace(
        model, num_layers=len(layers), layer_of_pass=tuple(numbers[distinct] for distinct in distinct_layers)
    )
