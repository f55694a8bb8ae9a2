"""``prove``: a model computes the same as before when this library computes its attention, with its own positions only.

The model runs on a tiny batch twice: as it is, and served. So it does on a text without a mask. The output of each
attention layer is compared where it arises; then the second run goes on with the first one's output. So rounding does
not add up, an expert that a hair decides on is chosen twice, and the first layer that differs is the one that is wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...errors import InputError
from .configs import configs_of
from .found import PROBE, AttentionCall, find_calls, parts_with, recording, set_implementation
from .kinds import serve
from .own import serve_tables
from .trial import Example, run_any, trial, twins

TOLERANCE = {torch.float64: 2e-5, torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""How far an output may be off, relative to the largest value. Half precision shows gross errors only.

Many models compute the softmax in float32, also those in float64.
"""

ROWS, LENGTH = 3, 14
"""The size of the batch; of a model with fewer positions, it is shorter."""

WINDOWS = ("sliding_window", "attention_chunk_size", "local_attention")
"""The fields of configurations by which attention is limited to near tokens."""
WINDOW = 6
"""What they become, if they are longer than the batch."""


def prove(model: PreTrainedModel) -> list[AttentionCall]:
    """Compare a model with itself when this library computes its attention, and leave it as it was.

    Returns:
        The calls of its attention.

    Raises:
        InputError: if it computes something else; by how much, and in which layer.
    """
    calls = find_calls(model)
    for reference in _as_it_is(model, calls) if calls else ():
        _compare(model, calls, reference)
    return calls


@dataclass
class _Run:
    """A run of a model: what went in, and what came out of its attention layers, in their order, and at its end."""

    example: Example
    outputs: list[tuple[str, Tensor]]
    finals: dict[str, Tensor]

    def nan_layer(self) -> str | None:
        """Return the name of a layer that computed NaN only, if there is one."""
        return next((name for name, output in self.outputs if output.isnan().all()), None)


def _layers(model: PreTrainedModel, calls: list[AttentionCall]) -> dict[str, nn.Module]:
    """Return the layers that call attention, by their names."""
    names = {module: name for name, module in model.named_modules()}
    return {names[call.module]: call.module for call in calls}


def _as_it_is(model: PreTrainedModel, calls: list[AttentionCall]) -> list[_Run]:
    """Run a model with its own attention, with and without a mask; [], with a line in the log, if it does not run."""
    reason = f"weights of {model.dtype} on {model.device.type!r} cannot be compared"
    if model.device.type != "meta" and model.dtype in TOLERANCE:
        most = getattr(model.config, "max_position_embeddings", None)
        length = max(8, min(LENGTH, most)) if type(most) is int else LENGTH
        try:
            runs = [_run_own(model, calls, lambda copied, before: run_any(copied, ROWS, length, True, before))]
            if (unmasked := runs[0].example.unmasked()) is not None:
                with suppress(Exception):  # a model may need its mask
                    runs.append(_run_own(model, calls, lambda copied, _: (unmasked, unmasked.run_in(copied))))
            lost = runs[0].nan_layer()
            if lost is None:
                return [run for run in runs if run.nan_layer() is None]
            reason = f"layer {lost} computes NaN"
        except InputError as error:
            reason = error.reason
    # It may be missing what its own attention needs, such as a GPU.
    message = "not proven to compute the same as before with whereformer's attention: %s: %s"
    logging.getLogger(__name__).warning(message, type(model).__name__, reason)
    return []


def _run_own(
    model: PreTrainedModel,
    calls: list[AttentionCall],
    run: Callable[[PreTrainedModel, Callable[[], None]], tuple[Example, list[Any]]],
) -> _Run:
    """Run a copy of a model with its own attention; ``run`` gets what to call before each try."""
    outputs: list[tuple[str, Tensor]] = []

    def remember(name: str, module: nn.Module, args: Any, output: Any) -> None:
        outputs.extend((name, tensor.clone()) for tensor in _first_of(output))

    with trial(model) as copied, _full_precision(model):
        copies = twins(model, copied)
        _shorten_windows(copied)
        for name, module in _layers(model, calls).items():
            copies[module].register_forward_hook(partial(remember, name))
        example, finals = run(copied, outputs.clear)
    return _Run(example, outputs, dict(_tensors(finals)))


def _compare(model: PreTrainedModel, calls: list[AttentionCall], reference: _Run) -> None:
    """Run a model served, and raise an InputError at the first layer, or the first output, that differs."""
    limit, awaited = TOLERANCE[model.dtype], iter(reference.outputs)

    def check(name: str, module: nn.Module, args: Any, output: Any) -> Any:
        for found in _first_of(output):
            known, expected = next(awaited, (None, found))
            if known != name:
                raise _differs(model, f"layer {name} runs where {known} did before")
            dead = next((call.dead.clone() for call in reversed(made) if call.module is module), None)
            if dead is not None and len(dead) == ROWS:
                dead[0] = False  # This row has no padding, so that all of it counts.
            _check(model, f"layer {name}", found, expected, limit, dead)
            if isinstance(output, Tensor):
                return expected.clone()
            place = next(i for i, each in enumerate(output) if isinstance(each, Tensor))
            return (*output[:place], expected.clone(), *output[place + 1 :])
        return None

    with trial(model) as copied, _full_precision(model), recording() as made:
        own = twins(model, copied)
        here = [call.of(own) for call in calls]
        _shorten_windows(copied)
        serve(copied, [], parts_with(copied, here))
        serve_tables(dict.fromkeys(call.module for call in here), [])
        set_implementation(copied, here, PROBE, [])
        for name, module in _layers(copied, here).items():
            module.register_forward_hook(partial(check, name))
        try:
            finals = reference.example.run_in(copied)
        except InputError:
            raise
        except Exception as error:
            raise InputError(
                "model", f"{type(model).__name__} did not run with whereformer's attention: {error}"
            ) from error
    if next(awaited, None) is not None:
        raise _differs(model, "fewer layers run than before")
    for name, found in _tensors(finals):
        if name in reference.finals:  # some models return weights of attention unasked, if they have them
            _check(model, f"output{name}", found, reference.finals[name], limit, None)


def _check(
    model: PreTrainedModel, what: str, found: Tensor, expected: Tensor, limit: float, dead: Tensor | None
) -> None:
    """Raise an InputError if two outputs differ by more than the limit, relative to the largest value."""
    if found.shape != expected.shape:
        raise _differs(model, f"{what} has the shape {tuple(found.shape)}, before {tuple(expected.shape)}")
    if dead is not None and dead.shape == found.shape[:2]:
        found, expected = found[~dead], expected[~dead]
    # Rows that are not a number in the model's own run cannot be compared.
    counts = ~expected.isnan() & (found != expected)
    if not bool(counts.any()):
        return
    largest = expected.nan_to_num(0, 0, 0).abs().max().double()
    error = float((found[counts].double() - expected[counts].double()).abs().max() / largest)
    if not error <= limit:
        raise _differs(model, f"{what} is off by {error:.2g} of its largest value, expected at most {limit:g}")


def _differs(model: PreTrainedModel, how: str) -> InputError:
    return InputError(
        "model",
        f"{type(model).__name__} computes something else with whereformer's attention, even without a position "
        f"method: {how}. It was left as it was",
    )


def _first_of(output: Any) -> list[Tensor]:
    """Return the first tensor that a layer returns: what its attention computed."""
    parts = output if isinstance(output, tuple | list) else [output]
    return [part for part in parts if isinstance(part, Tensor)][:1]


def _tensors(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Return the numbers in an output, with where they stand, but for caches."""
    if isinstance(value, Tensor) and value.is_floating_point():
        yield path, value
    elif isinstance(value, dict):
        for name, part in value.items():
            if "past" not in name and "cache" not in name:
                yield from _tensors(part, f"{path}.{name}")
    elif isinstance(value, tuple | list):
        for i, part in enumerate(value):
            yield from _tensors(part, f"{path}[{i}]")


@contextmanager
def _full_precision(model: PreTrainedModel) -> Iterator[None]:
    """Multiply float32 as float32, whatever is allowed elsewhere: TF32, bfloat16 or autocast."""
    products = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    allowed = [each.fp32_precision for each in products]
    try:
        for each in products:
            each.fp32_precision = "ieee"
        with torch.autocast(model.device.type, enabled=False):
            yield
    finally:
        for each, before in zip(products, allowed, strict=True):
            each.fp32_precision = before


def _shorten_windows(model: PreTrainedModel) -> None:
    """Make windows shorter than the batch, so that they limit something in it."""
    for owner in (*model.modules(), *configs_of(model)):
        for name in WINDOWS:
            size = vars(owner).get(name)
            if type(size) is int and size >= LENGTH // 2:
                setattr(owner, name, WINDOW)
