"""Verifies that a model gives the same results with this library's attention, before a position method is added.

One copy of the model runs on a tiny batch with its own attention, and a second copy with this library's. The second one
compares the output of each attention layer with the first copy's, and then continues with the first copy's output. So
rounding errors do not add up, a mixture of experts chooses the same experts in both runs, and the first layer that
differs is the one that is wrong. The same is done for one text without a mask.
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
from transformers.utils import ModelOutput

from ...errors import InputError
from .builtin_positions import pass_bias_tables
from .configs import all_configs
from .find_calls import PROBE, AttentionCall, collect_calls, find_calls, set_implementation, submodels_with
from .patches import patch_layers
from .trial_run import Example, match_modules, run_first_example, trial_copy

TOLERANCE = {torch.float64: 2e-5, torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""The largest error of an output that passes, relative to its largest value.

In half precision, only gross errors are found. Many models compute the softmax in float32, even if their weights are
float64.
"""

ROWS, LENGTH = 3, 14
"""The size of the batch; it is shorter for models with fewer positions."""

WINDOW_FIELDS = ("sliding_window", "attention_chunk_size", "local_attention")
"""The fields of configurations that limit attention to near tokens."""
WINDOW = 6
"""Their value in these runs, unless it is below half of the batch's length already."""


def verify_same_outputs(model: PreTrainedModel) -> list[AttentionCall]:
    """Compare a model's results with its results under this library's attention. The model does not change.

    Returns:
        The calls of its attention.

    Raises:
        InputError: if the results differ; the message names the layer and the difference.
    """
    calls = find_calls(model)
    for original in _run_original(model, calls) if calls else ():
        _compare_with_ours(model, calls, original)
    return calls


@dataclass
class _Run:
    """A run of a model: its input, the name and output of each attention layer in order, and its outputs by path."""

    example: Example
    layer_outputs: list[tuple[str, Tensor]]
    outputs: dict[str, Tensor]

    def nan_layer(self) -> str | None:
        """Return the name of a layer that computed NaN only, if there is one."""
        return next((name for name, output in self.layer_outputs if output.isnan().all()), None)


def _layers(model: PreTrainedModel, calls: list[AttentionCall]) -> dict[str, nn.Module]:
    """Return the layers that call attention, by their names."""
    names = {module: name for name, module in model.named_modules()}
    return {names[call.module]: call.module for call in calls}


def _run_original(model: PreTrainedModel, calls: list[AttentionCall]) -> list[_Run]:
    """Run a model with its own attention, with and without a mask; [], with a line in the log, if it does not run."""
    reason = f"weights of {model.dtype} on {model.device.type!r} cannot be compared"
    if model.device.type != "meta" and model.dtype in TOLERANCE:
        max_length = getattr(model.config, "max_position_embeddings", None)
        length = max(8, min(LENGTH, max_length)) if type(max_length) is int else LENGTH
        try:
            runs = [
                _record_original(
                    model, calls, lambda copied, before: run_first_example(copied, ROWS, length, True, before)
                )
            ]
            if (unmasked := runs[0].example.unmasked()) is not None:
                with suppress(Exception):  # a model may need its mask
                    runs.append(_record_original(model, calls, lambda copied, _: (unmasked, unmasked.run_in(copied))))
            nan_layer = runs[0].nan_layer()
            if nan_layer is None:
                return [run for run in runs if run.nan_layer() is None]
            reason = f"layer {nan_layer} computes NaN"
        except InputError as error:
            # The model's own attention may need something that is missing, such as a GPU.
            reason = error.reason
    message = "could not verify that %s gives the same results with whereformer's attention: %s"
    logging.getLogger(__name__).warning(message, type(model).__name__, reason)
    return []


def _record_original(
    model: PreTrainedModel,
    calls: list[AttentionCall],
    run: Callable[[PreTrainedModel, Callable[[], None]], tuple[Example, list[ModelOutput]]],
) -> _Run:
    """Record a run of a copy of a model with its own attention.

    ``run`` gets the copy, and a function to call before each attempt, which discards the outputs of failed attempts.
    """
    layer_outputs: list[tuple[str, Tensor]] = []

    def remember(name: str, module: nn.Module, args: object, output: object) -> None:
        layer_outputs.extend((name, tensor.clone()) for tensor in _first_tensor(output))

    with trial_copy(model) as copied, _full_precision(model):
        copies = match_modules(model, copied)
        _shorten_windows(copied)
        for name, module in _layers(model, calls).items():
            copies[module].register_forward_hook(partial(remember, name))
        example, outputs = run(copied, layer_outputs.clear)
    return _Run(example, layer_outputs, dict(_tensors(outputs)))


def _compare_with_ours(model: PreTrainedModel, calls: list[AttentionCall], original: _Run) -> None:
    """Run a copy with this library's attention; raise an InputError at the first layer or output that differs."""
    limit, expected_outputs = TOLERANCE[model.dtype], iter(original.layer_outputs)

    def check(name: str, module: nn.Module, args: object, output: Any) -> Any:
        for tensor in _first_tensor(output):
            expected_name, expected = next(expected_outputs, (None, tensor))
            if expected_name != name:
                raise _mismatch_error(model, f"layer {name} ran where {expected_name} was expected")
            # The layer's last call is the one that computed this output.
            masks = (call.ignored_queries.clone() for call in reversed(recorded) if call.module is module)
            ignored_queries = next(masks, None)
            if ignored_queries is not None and len(ignored_queries) == ROWS:
                ignored_queries[0] = False  # this row has no padding, so all of it is compared
            _check(model, f"layer {name}", tensor, expected, limit, ignored_queries)
            if isinstance(output, Tensor):
                return expected.clone()
            index = next(i for i, item in enumerate(output) if isinstance(item, Tensor))
            return (*output[:index], expected.clone(), *output[index + 1 :])
        return None

    with trial_copy(model) as copied, _full_precision(model), collect_calls() as recorded:
        copy_of = match_modules(model, copied)
        copied_calls = [call.for_copy(copy_of) for call in calls]
        _shorten_windows(copied)
        patch_layers(copied, [], submodels_with(copied, copied_calls))
        pass_bias_tables(dict.fromkeys(call.module for call in copied_calls), [])
        set_implementation(copied, copied_calls, PROBE, [])
        for name, module in _layers(copied, copied_calls).items():
            module.register_forward_hook(partial(check, name))
        try:
            outputs = original.example.run_in(copied)
        except InputError:
            raise
        except Exception as error:
            reason = f"{type(model).__name__} did not run with whereformer's attention: {error}"
            raise InputError("model", reason) from error
    if next(expected_outputs, None) is not None:
        raise _mismatch_error(model, "fewer layers ran than in the original model")
    for path, tensor in _tensors(outputs):
        if path in original.outputs:  # some models also return attention weights if their attention computes them
            _check(model, f"output{path}", tensor, original.outputs[path], limit, None)


def _check(
    model: PreTrainedModel, what: str, output: Tensor, expected: Tensor, limit: float, ignored_queries: Tensor | None
) -> None:
    """Raise an InputError if two outputs differ by more than the limit, relative to the largest value."""
    if output.shape != expected.shape:
        raise _mismatch_error(model, f"{what} has the shape {tuple(output.shape)}, expected {tuple(expected.shape)}")
    if ignored_queries is not None and ignored_queries.shape == output.shape[:2]:
        output, expected = output[~ignored_queries], expected[~ignored_queries]
    # Values that are NaN in the model's own run cannot be compared.
    differs = ~expected.isnan() & (output != expected)
    if not bool(differs.any()):
        return
    largest = expected.nan_to_num(0, 0, 0).abs().max().double()
    error = float((output[differs].double() - expected[differs].double()).abs().max() / largest)
    if not error <= limit:
        difference = f"{what} differs by {error:.2g}, relative to its largest value; expected at most {limit:g}"
        raise _mismatch_error(model, difference)


def _mismatch_error(model: PreTrainedModel, difference: str) -> InputError:
    return InputError(
        "model",
        f"{type(model).__name__} gives different results with whereformer's attention, even before a method is added: "
        f"{difference}. The model is unchanged",
    )


def _first_tensor(output: object) -> list[Tensor]:
    """Return the first tensor that a layer returns, which its attention computed; [] if it returns no tensor."""
    items = output if isinstance(output, tuple | list) else [output]
    return [item for item in items if isinstance(item, Tensor)][:1]


def _tensors(value: object, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the floating-point tensors of an output and their paths, except those in caches."""
    if isinstance(value, Tensor) and value.is_floating_point():
        yield path, value
    elif isinstance(value, dict):
        for name, item in value.items():
            if "past" not in name and "cache" not in name:
                yield from _tensors(item, f"{path}.{name}")
    elif isinstance(value, tuple | list):
        for i, item in enumerate(value):
            yield from _tensors(item, f"{path}[{i}]")


@contextmanager
def _full_precision(model: PreTrainedModel) -> Iterator[None]:
    """Multiply float32 as float32, even if TF32, bfloat16 or autocast are allowed elsewhere."""
    backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    saved = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        with torch.autocast(model.device.type, enabled=False):
            yield
    finally:
        for backend, precision in zip(backends, saved, strict=True):
            backend.fp32_precision = precision


def _shorten_windows(model: PreTrainedModel) -> None:
    """Make windows shorter than half of the batch, so that they have an effect in it."""
    for owner in (*model.modules(), *all_configs(model)):
        for name in WINDOW_FIELDS:
            size = vars(owner).get(name)
            if type(size) is int and size >= LENGTH // 2:
                setattr(owner, name, WINDOW)
