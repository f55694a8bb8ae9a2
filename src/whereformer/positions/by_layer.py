"""``ByLayer`` gives layers different position methods: "rope/rope/rope/none" leaves every fourth without one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import InputError
from ..kernels.terms import Term
from .base import ModelShape, Position, Several
from .none import NoPosition
from .site import Site


class ByLayer(Several):
    """Methods that take turns over the layers: each acts in its own layers, as it would in a model of these alone.

    So a method has parameters for its own layers only, and counts these from 0. Where layers share weights, the passes
    of a layer that have the same method share what the method shares.

    Args:
        model: the sizes of the whole model.
        builders: one for each place in the pattern, which builds its method for the given sizes. Equal builders stand
            for one method in several places.

    Raises:
        InputError: if the pattern does not divide the layers, or its methods do not go together.
    """

    def __init__(self, model: ModelShape, builders: Sequence[Callable[[ModelShape], Position]]) -> None:
        check_places(len(builders), model.num_layers)
        distinct = list(dict.fromkeys(builders))
        of_parts = [[at for at in range(model.num_layers) if builders[at % len(builders)] is one] for one in distinct]
        super().__init__(
            model, (build(_shape_of(model, layers)) for build, layers in zip(distinct, of_parts, strict=True))
        )
        self.layers = of_parts
        """The layers of each method."""
        places = {layer: (part, own) for part, layers in enumerate(self.layers) for own, layer in enumerate(layers)}
        self.places = [places[layer] for layer in range(model.num_layers)]
        """The method of each layer, and the layer's number among those of this method."""
        if len({part.content for part in self}) > 1:
            raise InputError(
                "position", "a Synthesizer with content='none' replaces query . key in all layers or in none"
            )

    def in_layer(self, layer: int) -> Position:
        part, own = self._in(layer)
        return part.in_layer(own)

    def rotate(self, query: Tensor, key: Tensor, value: Tensor, site: Site) -> tuple[Tensor, Tensor, Tensor]:
        part, own = self._at(site)
        return part.rotate(query, key, value, own)

    def terms(self, hidden: Tensor, site: Site) -> tuple[Term, ...]:
        part, own = self._at(site)
        return part.terms(hidden, own)

    def content_terms(self, query: Tensor, key: Tensor, site: Site) -> tuple[Term, ...]:
        part, own = self._at(site)
        return part.content_terms(query, key, own)

    def curve(self, offsets: Tensor | Sequence[float], *, layer: int = 0) -> Tensor | None:
        part, own = self._in(layer)
        if isinstance(part, NoPosition):
            # Nothing is added, which is a curve beside those of other layers.
            return self._like.new_zeros(self.model.num_heads, *torch.as_tensor(offsets).shape)
        return part.curve(offsets, layer=own)

    def _in(self, layer: int) -> tuple[Position, int]:
        """Return the method of a layer, and the layer's number among those of this method."""
        self.check_layer(layer)
        index, own = self.places[layer]
        part = self.parts[index]
        assert isinstance(part, Position)
        return part, own

    def _at(self, site: Site) -> tuple[Position, Site]:
        """Return the method of a layer, and the site as this method counts and shares."""
        part, own = self._in(site.layer)
        shared = None if site.shared is None else site.shared[self.places[site.layer][0]]
        return part, replace(site, layer=own, shared=shared)


def check_places(places: int, num_layers: int) -> None:
    """Raise an InputError unless a pattern of so many places divides the layers."""
    if num_layers % places:
        raise InputError("position", f"a pattern of {places} layers does not divide the model's {num_layers} layers")


def _shape_of(model: ModelShape, layers: Sequence[int]) -> ModelShape:
    """Return the sizes of a model that has only some of the layers."""
    passes = [model.passes[layer] for layer in layers]
    numbers = {distinct: number for number, distinct in enumerate(dict.fromkeys(passes))}
    return replace(model, num_layers=len(layers), passes=tuple(numbers[distinct] for distinct in passes))
