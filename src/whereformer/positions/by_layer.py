"""``ByLayer`` gives layers different position methods: "rope/rope/rope/none" leaves every fourth without one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..kernels.terms import Positions, PositionsLike, Term
from .base import ModelShape, Place, Position, Work
from .none import NoPosition


class ByLayer(Position):
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
        super().__init__(model)
        check_places(len(builders), model.num_layers)
        distinct = list(dict.fromkeys(builders))
        self.layers = [
            [at for at in range(model.num_layers) if builders[at % len(builders)] is one] for one in distinct
        ]
        """The layers of each method."""
        self.parts = nn.ModuleList(
            build(_shape_of(model, layers)) for build, layers in zip(distinct, self.layers, strict=True)
        )
        places = {layer: (part, own) for part, layers in enumerate(self.layers) for own, layer in enumerate(layers)}
        self.places = [places[layer] for layer in range(model.num_layers)]
        """The method of each layer, and the layer's number among those of this method."""
        contents = {part.content for part in self._parts()}
        if len(contents) > 1:
            raise InputError(
                "position", "a Synthesizer with content='none' replaces query . key in all layers or in none"
            )
        self.content = contents.pop()
        self.needs_content = any(part.needs_content for part in self._parts())
        self.reads_keys = any(part.reads_keys for part in self._parts())

    @property
    def acts_on(self) -> frozenset[str]:
        return frozenset().union(*(part.acts_on for part in self._parts()))

    def methods(self) -> tuple[Position, ...]:
        return tuple(method for part in self._parts() for method in part.methods())

    def in_layer(self, layer: int) -> Position:
        return self._parts()[self.places[layer][0]].in_layer(self.places[layer][1])

    def vectors(self, positions: PositionsLike, device: torch.device | str | None = None) -> Tensor | None:
        return next((found for part in self._parts() if (found := part.vectors(positions, device)) is not None), None)

    def once(self) -> tuple[Any, ...]:
        return tuple(part("once") for part in self._parts())

    def shared(
        self, queries: PositionsLike, keys: PositionsLike, once: tuple[Any, ...] | None = None
    ) -> tuple[Any, ...]:
        given = [None] * len(self.parts) if once is None else once
        return tuple(part("shared", queries, keys, own) for part, own in zip(self._parts(), given, strict=True))

    def rotate(self, query: Tensor, key: Tensor, value: Tensor, place: Place) -> tuple[Tensor, Tensor, Tensor]:
        part, own = self._at(place)
        return part("rotate", query, key, value, own)

    def terms(self, hidden: Tensor, place: Place) -> tuple[Term, ...]:
        part, own = self._at(place)
        return part("terms", hidden, own)

    def content_terms(self, query: Tensor, key: Tensor, place: Place) -> tuple[Term, ...]:
        part, own = self._at(place)
        return part("content_terms", query, key, own)

    def curve(self, offsets: Tensor | Sequence[float], *, layer: int = 0) -> Tensor | None:
        index, own = self.places[layer]
        part = self._parts()[index]
        if isinstance(part, NoPosition):
            # Nothing is added, which is a curve beside those of other layers.
            return self._like.new_zeros(self.model.num_heads, *torch.as_tensor(offsets).shape)
        return part.curve(offsets, layer=own)

    def tabulate(self, length: int) -> None:
        for part in self._parts():
            part.tabulate(length)

    def uncounted_work(self, places: Sequence[tuple[Positions, Positions]]) -> Work:
        works = [
            part.uncounted_work([places[layer] for layer in layers if layer < len(places)])
            for part, layers in zip(self._parts(), self.layers, strict=True)
        ]
        return Work(sum(work.flops for work in works), sum(work.kept for work in works))

    def _parts(self) -> list[Any]:
        return list(self.parts)

    def _at(self, place: Place) -> tuple[Position, Place]:
        """Return the method of a layer, and the place as this method counts and shares."""
        index, own = self.places[place.layer]
        shared = None if place.shared is None else place.shared[index]
        return self._parts()[index], replace(place, layer=own, shared=shared)


def check_places(places: int, num_layers: int) -> None:
    """Raise an InputError unless a pattern of so many places divides the layers."""
    if num_layers % places:
        raise InputError("position", f"a pattern of {places} layers does not divide the model's {num_layers} layers")


def _shape_of(model: ModelShape, layers: Sequence[int]) -> ModelShape:
    """Return the sizes of a model that has only some of the layers."""
    passes = [model.passes[layer] for layer in layers]
    numbers = {distinct: number for number, distinct in enumerate(dict.fromkeys(passes))}
    return replace(model, num_layers=len(layers), passes=tuple(numbers[distinct] for distinct in passes))
