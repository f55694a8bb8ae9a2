"""Trial runs: a copy of a model runs on a small batch of text or audio that fits its configuration."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

from ...errors import InputError, list_some, one_line
from .configs import all_configs

Module = TypeVar("Module", bound=nn.Module)

CACHES = ("cache", "past_key_values", "cache_params")
"""The names of caches in the arguments and outputs of models."""

AUDIO_INPUTS = ("input_features", "input_values")
"""The names of audio arguments: frames and waves."""

AUDIO_MASKS = ("attention_mask", "feature_attention_mask", "padding_mask")
"""The names of padding masks of audio arguments."""


@contextmanager
def trial_copy(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Yield a copy of a model that shares its weights, in evaluation mode and without gradients.

    Some models change when they run: BigBird-Pegasus replaces its sparse attention when it reads a short text. Buffers
    and configurations are copies, too, so the caller may change them. The copy does not have the hooks that the user
    registered, since users do not expect hooks to see made-up batches. The state of random generators is restored.
    """
    for name, module in model.named_modules():
        # A function in place of a forward would run the original module, not its copy.
        if isinstance(vars(module).get("forward"), FunctionType):
            reason = f"{name or type(model).__name__}.forward was replaced by a function, which a copy of the model"
            raise InputError("model", f"{reason} would share; attach first, then wrap")
    weights: dict[int, object] = {id(parameter): parameter for parameter in model.parameters()}
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices=devices):
        try:
            copied = copy_without_hooks(model, weights)
        except (RuntimeError, TypeError) as error:
            raise InputError("model", f"attach checks a copy of the model, and copying failed ({error})") from error
        yield copied.eval()


HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""The fields of a module that hold its hooks."""

MODEL_HOOK_PACKAGES = (__name__.partition(".")[0], "transformers.utils.output_capturing", "torch.nn.utils")
"""The packages whose hooks belong to a model: our hooks, and hooks that collect outputs or compute weights."""


def copy_without_hooks(model: Module, memo: dict[int, Any]) -> Module:
    """Return a copy of a model with the hooks that belong to the model, but without hooks that its user registered.

    ``memo`` is the argument of ``copy.deepcopy``: by the id of an object, the object that replaces it in the copy.
    """
    fields = [value for module in model.modules() for value in vars(module).values()]
    # Most fields of most modules are empty, and deepcopy takes as long for each of them as for a number.
    memo |= {id(value): type(value)() for value in fields if type(value) in (dict, set, OrderedDict) and not value}
    hook_dicts = [vars(module)[name] for module in model.modules() for name in HOOKS]
    memo |= {id(hooks): OrderedDict() for hooks in hook_dicts}
    copied = copy.deepcopy(model, memo)
    for hooks in hook_dicts:
        model_hooks = {number: hook for number, hook in hooks.items() if _belongs_to_model(hook)}
        memo[id(hooks)].update(copy.deepcopy(model_hooks, memo))
    return copied


def _belongs_to_model(hook: object) -> bool:
    origin = str(getattr(hook, "__module__", None))
    return any(origin == package or origin.startswith(f"{package}.") for package in MODEL_HOOK_PACKAGES)


def match_modules(source: nn.Module, target: nn.Module) -> dict[nn.Module, nn.Module]:
    """Map each module of ``source`` to its copy in ``target``, or back; call it before either model runs."""
    return dict(zip(source.modules(), target.modules(), strict=True))


def submodels(model: PreTrainedModel) -> list[PreTrainedModel]:
    """Return the model and all models inside it, such as its encoder."""
    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]


def owner_by_module(model: PreTrainedModel) -> dict[nn.Module, PreTrainedModel]:
    """Return the innermost model around each module."""
    return {module: submodel for submodel in submodels(model) for module in submodel.modules()}


class Example(NamedTuple):
    """A batch that a model may accept.

    Args:
        model: the model, or the one inside it without a head.
        inputs: its arguments.
        cache: the name of its cache argument, if the model reads the tokens in three parts; None: all at once.
    """

    model: PreTrainedModel
    inputs: dict[str, Any]
    cache: str | None = None

    def unmasked(self) -> Example | None:
        """Return the first row without masks, as for text without padding; None if the inputs have no masks."""
        inputs = {name: values[:1] for name, values in self.inputs.items() if not name.endswith("mask")}
        return self._replace(inputs=inputs) if len(inputs) < len(self.inputs) else None

    def run_in(self, copied: PreTrainedModel) -> list[ModelOutput]:
        """Run a copy of the model, or of the model around it, and return its outputs."""
        model = copied if type(self.model) is type(copied) else copied.base_model
        return self._replace(model=model).run()

    def run(self) -> list[ModelOutput]:
        """Run the model, always with the same random numbers, and return its outputs."""
        with warnings.catch_warnings(action="ignore"):  # the user did not pass these inputs
            # Only the generators that a forward draws from; `trial_copy` restores them.
            torch.default_generator.manual_seed(0)
            if self.model.device.type == "cuda":
                with torch.cuda.device(self.model.device):
                    torch.cuda.manual_seed(0)
            return [self.model(**self.inputs)] if self.cache is None else self._run_in_parts(self.cache)

    def _run_in_parts(self, cache: str) -> list[ModelOutput]:
        name = "decoder_input_ids" if "decoder_input_ids" in self.inputs else "input_ids"
        mask = name.replace("input_ids", "attention_mask")
        ids, outputs = self.inputs[name], []
        arguments: dict[str, object] = {**self.inputs, "use_cache": True}
        # The first half, then one token, then the remaining tokens.
        n, half = ids.shape[1], ids.shape[1] // 2 + 1
        for start, stop in ((0, half), (half, half + 1), (half + 1, n)):
            arguments[name] = ids[:, start:stop]
            if mask in self.inputs:
                arguments[mask] = self.inputs[mask][:, :stop]
            outputs.append(self.model(**arguments))
            arguments[cache] = outputs[-1][cache]
        return outputs


def run_first_example(
    model: PreTrainedModel, rows: int, length: int, cached: bool = False, before: Callable[[], object] = lambda: None
) -> tuple[Example, list[ModelOutput]]:
    """Run a model on the first of its examples that it accepts.

    Args:
        model: the model; if its head needs inputs in another form (multiple choice), the model inside runs.
        rows, length: the batch size, and the number of text tokens.
        cached: whether decoders read their tokens with a cache.
        before: called before each attempt.

    Raises:
        InputError: if it accepts none of them.
    """
    problem: Exception | None = None
    names: Iterable[str] = ()
    for candidate in dict.fromkeys((model, model.base_model)):
        for example in examples(candidate, rows, length, cached):
            before()
            try:
                return example, example.run()
            except Exception as error:
                # The first example is the likeliest one, but a model may have no cache: report the first without one.
                if problem is None and example.cache is None:
                    problem, names = error, example.inputs
    kind = type(model).__name__
    inner = [
        name
        for name, child in model.named_children()
        if isinstance(child, PreTrainedModel)
        and child is not model.base_model
        and child.main_input_name != "pixel_values"
    ]
    advice = f"; attach to a part of it: {list_some(inner)}" if inner else ""
    if problem is None:
        expected = "expected a text model, or an audio model with a known input format"
        raise InputError("model", f"{expected}; {kind} reads {model.main_input_name!r}{advice}")
    reason = one_line(str(problem) if isinstance(problem, InputError) else f"{type(problem).__name__}: {problem}")
    raise InputError("model", f"{kind} did not run on {', '.join(names)}: {reason}{advice}") from problem


def examples(model: PreTrainedModel, rows: int, length: int, cached: bool) -> Iterator[Example]:
    """Yield batches that a model may accept: first the likeliest one, which also checks the most.

    The first of three rows has no padding, the second is padded on the right and the third on the left. A decoder next
    to an encoder reads fewer tokens, so that lengths distinguish cross-attention from self-attention.
    """
    parameters = inspect.signature(type(model).forward).parameters
    input_sets: list[dict[str, Tensor]] = []
    for name in AUDIO_INPUTS if model.main_input_name != "input_ids" else ():
        if name in parameters and (values := _audio(model, name, rows)) is not None:
            masks = [mask for mask in (*AUDIO_MASKS, f"{name}_mask") if mask in parameters]
            padding = _padding(model, rows, values.shape[1])
            input_sets += [{name: values, **dict.fromkeys(masks, padding)}, {name: values}]
    if "input_ids" in parameters or model.main_input_name == "input_ids":
        text = {"input_ids": _tokens(model, rows, length)}
        if "attention_mask" in parameters:
            input_sets += [text | {"attention_mask": _padding(model, rows, length)}]
        input_sets += [text]
    decoder: dict[str, Tensor] = {}
    if model.config.is_encoder_decoder or "decoder_input_ids" in parameters:
        decoder_length = length * 3 // 4
        decoder["decoder_input_ids"] = _tokens(model, rows, decoder_length)
        if "decoder_attention_mask" in parameters:
            decoder["decoder_attention_mask"] = _padding(model, rows, decoder_length)
    cache = next((name for name in CACHES if name in parameters), None) if "use_cache" in parameters else None
    if cached and cache is not None and input_sets and (decoder or "input_ids" in input_sets[0]):
        yield Example(model, input_sets[0] | decoder, cache)
    for inputs in input_sets:
        yield Example(model, inputs | decoder)
    for inputs in input_sets if decoder else ():
        yield Example(model, inputs)


def packed_examples(model: PreTrainedModel) -> list[Example]:
    """Return a row of two texts with positions that start again, also as the first of Qwen2-VL's four axes."""
    positions = torch.tensor([[0, 1, 2, 0, 1]], device=model.device)
    row = {"input_ids": _tokens(model, 1, positions.shape[1]), "use_cache": False}
    return [Example(model, {**row, "position_ids": ids}) for ids in (positions, positions.expand(4, 1, -1))]


def _tokens(model: PreTrainedModel, rows: int, length: int) -> Tensor:
    """Return random tokens (rows, length) without special tokens."""
    configs = all_configs(model)
    sizes = [getattr(config, "vocab_size", None) for config in configs]
    size = min((size for size in sizes if type(size) is int and size > 0), default=50)
    special = {
        value
        for config in configs
        for name, value in vars(config).items()
        if name.endswith(("token_id", "token_index")) and type(value) is int
    }
    choices = torch.tensor([token for token in range(min(5, size - 1), min(size, 5000)) if token not in special] or [0])
    generator = torch.Generator().manual_seed(length)
    return choices[torch.randint(len(choices), (rows, length), generator=generator)].to(model.device)


def _padding(model: PreTrainedModel, rows: int, length: int) -> Tensor:
    """Return a padding mask (rows, length): the second row is padded on the right, the third on the left."""
    mask = torch.ones(rows, length, dtype=torch.long, device=model.device)
    mask[1:2, -length // 4 :] = 0
    mask[2:3, : length // 4] = 0
    return mask


def _audio(model: PreTrainedModel, name: str, rows: int) -> Tensor | None:
    """Return random audio for an argument; None if its format is not known."""
    shapes = [shape for config in all_configs(model) if (shape := _audio_shape(name, config)) is not None]
    if not shapes:
        return None
    noise = torch.randn(rows, *shapes[0], generator=torch.Generator().manual_seed(5))
    return noise.to(model.device, model.dtype)


def _audio_shape(name: str, config: PreTrainedConfig) -> tuple[int, ...] | None:
    """Return the shape of short audio, without the batch; None if the configuration does not specify it."""
    bins: int | None = getattr(config, "num_mel_bins", None)
    if name == "input_values":
        is_spectrogram = hasattr(config, "max_length") and not hasattr(config, "conv_stride")
        return (config.max_length, bins) if bins and is_spectrogram else (4000,)
    if bins and hasattr(config, "max_source_positions"):
        return bins, 2 * config.max_source_positions
    width = getattr(config, "feature_projection_input_dim", bins)
    if width is None and hasattr(config, "input_feat_per_channel"):
        width = config.input_feat_per_channel * config.input_channels
    # Enough for convolutions that make one frame out of eight.
    return None if width is None else (40, width)
