"""Tries a model: a copy of it runs on a small batch of text or sound, whose form the configuration says."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...errors import InputError, list_some, one_line
from .configs import configs_of

CACHES = ("cache", "past_key_values", "cache_params")
"""The names under which models take and return their caches."""

SOUNDS = ("input_features", "input_values")
"""The names under which models take sound, as frames and as waves."""

SOUND_MASKS = ("attention_mask", "feature_attention_mask", "padding_mask")
"""The names under which models take masks of padded sound."""


@contextmanager
def trial(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Return a copy of a model with the same weights in the same memory, to run for evaluation without gradients.

    Some models change when they run: BigBird-Pegasus replaces its sparse attention when it reads a short text. Buffers
    and configurations are copies, too, so the caller may change them. The hooks of the model's user are left out, who
    does not expect to see made-up batches. Random numbers stay as they are.
    """
    for name, module in model.named_modules():
        # A function that stands for a forward would run the module itself, not its copy.
        if isinstance(vars(module).get("forward"), FunctionType):
            told = f"the forward of {name or type(model).__name__} was replaced by a function"
            raise InputError("model", f"{told}, which a copy of the model would share; attach first, and wrap it then")
    weights: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices=devices):
        try:
            copied = copy_without_hooks(model, weights)
        except (RuntimeError, TypeError) as error:
            raise InputError("model", f"it cannot be copied, as attach tries it ({error})") from error
        yield copied.eval()


HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""The fields of a module that hold what runs before and after it."""

OF_MODELS = (__name__.partition(".")[0], "transformers.utils.output_capturing", "torch.nn.utils")
"""Where hooks come from that are part of a model: ours, and hooks that collect its outputs or compute its weights."""


def copy_without_hooks(model: nn.Module, memo: dict[int, Any]) -> Any:
    """Return a copy of a model that has its own hooks, but not those that its user registered.

    Args:
        model: the model, whose hooks stay as they are.
        memo: the memo of ``copy.deepcopy``: by the id of an object, the object that replaces it in the copy.
    """
    hooks = [vars(module)[name] for module in model.modules() for name in HOOKS]
    memo |= {id(registered): OrderedDict() for registered in hooks}
    copied = copy.deepcopy(model, memo)
    for registered in hooks:
        model_hooks = {number: hook for number, hook in registered.items() if _is_of_model(hook)}
        memo[id(registered)].update(copy.deepcopy(model_hooks, memo))
    return copied


def _is_of_model(hook: Any) -> bool:
    origin = str(getattr(hook, "__module__", None))
    return any(origin == package or origin.startswith(f"{package}.") for package in OF_MODELS)


def twins(one: nn.Module, other: nn.Module) -> dict[nn.Module, nn.Module]:
    """Return the module of a copy for each module of a model, or the other way round; before either of them runs."""
    return dict(zip(one.modules(), other.modules(), strict=True))


def parts_of(model: PreTrainedModel) -> list[PreTrainedModel]:
    """Return a model and the models inside, such as its encoder."""
    return [part for part in model.modules() if isinstance(part, PreTrainedModel)]


def owners_of(model: PreTrainedModel) -> dict[nn.Module, PreTrainedModel]:
    """Return the innermost model around each module."""
    return {module: part for part in parts_of(model) for module in part.modules()}


class Example(NamedTuple):
    """A batch that a model may take.

    Args:
        model: the model, or the one inside it without a head.
        inputs: its arguments.
        cache: the name of its cache, if it is to read the tokens in three parts; None: all at once.
    """

    model: PreTrainedModel
    inputs: dict[str, Any]
    cache: str | None = None

    def unmasked(self) -> Example | None:
        """Return the first row without masks, as for text without padding; None if the inputs have no masks."""
        inputs = {name: values[:1] for name, values in self.inputs.items() if not name.endswith("mask")}
        return self._replace(inputs=inputs) if len(inputs) < len(self.inputs) else None

    def run_in(self, copied: PreTrainedModel) -> list[Any]:
        """Run a copy of the model, or of the model around it, and return its outputs."""
        part = copied if type(self.model) is type(copied) else copied.base_model
        return self._replace(model=part).run()

    def run(self) -> list[Any]:
        """Run the model, the random numbers always the same, and return its outputs."""
        with warnings.catch_warnings(action="ignore"):  # they concern nothing that a user gave
            # Only the generators that a forward draws from, which are put back.
            torch.default_generator.manual_seed(0)
            if self.model.device.type == "cuda":
                with torch.cuda.device(self.model.device):
                    torch.cuda.manual_seed(0)
            return self._run()

    def _run(self) -> list[Any]:
        if self.cache is None:
            return [self.model(**self.inputs)]
        name = "decoder_input_ids" if "decoder_input_ids" in self.inputs else "input_ids"
        mask = name.replace("input_ids", "attention_mask")
        ids, outputs = self.inputs[name], []
        given: dict[str, Any] = {**self.inputs, "use_cache": True}
        # The first part, one token, and several tokens behind others.
        n, first = ids.shape[1], ids.shape[1] // 2 + 1
        for begin, end in ((0, first), (first, first + 1), (first + 1, n)):
            given[name] = ids[:, begin:end]
            if mask in self.inputs:
                given[mask] = self.inputs[mask][:, :end]
            outputs.append(self.model(**given))
            given[self.cache] = outputs[-1][self.cache]
        return outputs


def run_any(
    model: PreTrainedModel,
    rows: int,
    length: int,
    cached: bool = False,
    before: Callable[[], Any] = lambda: None,
) -> tuple[Example, list[Any]]:
    """Run a model on the first of its examples that it takes.

    Args:
        model: the model; if its head takes inputs of another form (multiple choice), the model inside.
        rows, length: the batch size, and the number of tokens of text.
        cached: whether decoders read their tokens with a cache.
        before: what is called before each try.

    Raises:
        InputError: if it takes none.
    """
    problem: Exception | None = None
    tried: Iterable[str] = ()
    for part in dict.fromkeys((model, model.base_model)):
        for example in examples(part, rows, length, cached):
            before()
            try:
                return example, example.run()
            except Exception as error:
                # Of those without a cache, which a model may not have, the first is the likeliest to be right.
                if problem is None and example.cache is None:
                    problem, tried = error, example.inputs
    name = type(model).__name__
    parts = {name: part for name, part in model.named_children() if isinstance(part, PreTrainedModel)}
    inner = [
        name for name, part in parts.items() if part is not model.base_model and part.main_input_name != "pixel_values"
    ]
    instead = f"; attach to a part of it: {list_some(inner)}" if inner else ""
    if problem is None:
        main = model.main_input_name
        raise InputError("model", f"expected one of text, or of sound of a known form, {name} reads {main!r}{instead}")
    reason = one_line(str(problem) if isinstance(problem, InputError) else f"{type(problem).__name__}: {problem}")
    raise InputError("model", f"{name} did not run on {', '.join(tried)}: {reason}{instead}") from problem


def examples(model: PreTrainedModel, rows: int, length: int, cached: bool) -> Iterator[Example]:
    """Return batches that a model may take, the likeliest and most telling first.

    Of three rows, one is whole, one is padded on the right and one on the left.
    A decoder beside an encoder reads fewer tokens, so that lengths tell cross-attention from self-attention.
    """
    takes = inspect.signature(type(model).forward).parameters
    mains: list[dict[str, Tensor]] = []
    for name in SOUNDS if model.main_input_name != "input_ids" else ():
        if name in takes and (values := _sound(model, name, rows)) is not None:
            masks = [mask for mask in (*SOUND_MASKS, f"{name}_mask") if mask in takes]
            padding = _padding(model, rows, values.shape[1])
            mains += [{name: values, **dict.fromkeys(masks, padding)}, {name: values}]
    if "input_ids" in takes or model.main_input_name == "input_ids":
        text = {"input_ids": _tokens(model, rows, length)}
        mains += [text | {"attention_mask": _padding(model, rows, length)}] if "attention_mask" in takes else []
        mains += [text]
    decoder: dict[str, Tensor] = {}
    if model.config.is_encoder_decoder or "decoder_input_ids" in takes:
        fewer = length * 3 // 4
        decoder["decoder_input_ids"] = _tokens(model, rows, fewer)
        if "decoder_attention_mask" in takes:
            decoder["decoder_attention_mask"] = _padding(model, rows, fewer)
    cache = next((name for name in CACHES if name in takes), None) if "use_cache" in takes else None
    if cached and cache is not None and mains and (decoder or "input_ids" in mains[0]):
        yield Example(model, mains[0] | decoder, cache)
    for inputs in mains:
        yield Example(model, inputs | decoder)
    for inputs in mains if decoder else ():
        yield Example(model, inputs)


def packed_examples(model: PreTrainedModel) -> list[Example]:
    """Return a row of two texts, whose positions begin again, also as the first of Qwen2-VL's four axes."""
    positions = torch.tensor([[0, 1, 2, 0, 1]], device=model.device)
    row = {"input_ids": _tokens(model, 1, positions.shape[1]), "use_cache": False}
    return [Example(model, {**row, "position_ids": ids}) for ids in (positions, positions.expand(4, 1, -1))]


def _tokens(model: PreTrainedModel, rows: int, length: int) -> Tensor:
    """Return random tokens (rows, length), none of them a special one."""
    configs = configs_of(model)
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
    """Return a mask of padding: the second row is padded on the right, the third on the left."""
    mask = torch.ones(rows, length, dtype=torch.long, device=model.device)
    mask[1:2, -length // 4 :] = 0
    mask[2:3, : length // 4] = 0
    return mask


def _sound(model: PreTrainedModel, name: str, rows: int) -> Tensor | None:
    """Return random sound for an argument; None if its form is not known."""
    shapes = [shape for config in configs_of(model) if (shape := _shape(name, config)) is not None]
    if not shapes:
        return None
    noise = torch.randn(rows, *shapes[0], generator=torch.Generator().manual_seed(5))
    return noise.to(model.device, model.dtype)


def _shape(name: str, config: Any) -> tuple[int, ...] | None:
    """Return the shape of a short sound, without the batch; None if the configuration does not tell it."""
    bins: Any = getattr(config, "num_mel_bins", None)
    if name == "input_values":
        spectrogram = bins and hasattr(config, "max_length") and not hasattr(config, "conv_stride")
        return (config.max_length, bins) if spectrogram else (4000,)
    if bins and hasattr(config, "max_source_positions"):
        return bins, 2 * config.max_source_positions
    width = getattr(config, "feature_projection_input_dim", bins)
    if width is None and hasattr(config, "input_feat_per_channel"):
        width = config.input_feat_per_channel * config.input_channels
    # Enough for convolutions that make one of eight.
    return None if width is None else (40, width)
