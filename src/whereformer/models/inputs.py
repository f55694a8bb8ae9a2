"""The keyword inputs of the models: each list is written once, shows in signatures, and admits nothing else."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import Any, Literal, TypedDict, TypeVar, cast

from torch import Tensor
from transformers import EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput
from transformers.utils import can_return_tuple

CACHE = "cache" if "cache" in {each.name for each in fields(Seq2SeqLMOutput)} else "past_key_values"
"""What transformers calls the keys and values of earlier calls, in inputs and outputs: 5.24 renamed them."""


class OutputOptions(TypedDict, total=False):
    """What a model returns besides its result; None: the configuration decides."""

    output_hidden_states: bool | None
    output_attentions: bool | None


class TokenInputs(TypedDict, total=False):
    """What is known about tokens besides their ids and mask; :meth:`Encoder.forward` describes it."""

    token_type_ids: Tensor | None
    position_ids: Tensor | None
    document_ids: Tensor | None
    seq_idx: Tensor | None
    cu_seq_lens_q: Tensor | None
    cu_seq_lens_k: Tensor | None
    max_length_q: int | None
    max_length_k: int | None


class SourceInputs(OutputOptions, total=False):
    """What every encoder takes besides ids and mask: outputs, and embedded tokens in place of ids."""

    inputs_embeds: Tensor | None


class EncoderInputs(TokenInputs, SourceInputs, total=False):
    """What :class:`Encoder`, and a model with one, takes besides ids and mask; its ``forward`` describes it."""

    use_cache: bool | None


class Seq2SeqInputs(SourceInputs, total=False):
    """What the translation Transformer takes besides ids, masks and labels; its ``forward`` describes it."""

    encoder_outputs: BaseModelOutput | tuple[Tensor, ...] | None
    past_key_values: EncoderDecoderCache | None
    cache: EncoderDecoderCache | None
    decoder_inputs_embeds: Tensor | None
    use_cache: bool | None
    num_items_in_batch: Tensor | int | None


def asks_for(output: Literal["output_hidden_states", "output_attentions"], inputs: OutputOptions, config: Any) -> bool:
    """Whether a call or, if it leaves that open, the model's configuration asks for an output."""
    asked = inputs.get(output)
    return bool(getattr(config, output) if asked is None else asked)


Forward = TypeVar("Forward", bound=Callable[..., Any])


def takes(inputs: type) -> Callable[[Forward], Forward]:
    """Decorate a ``forward`` that collects the arguments of the TypedDict ``inputs`` in ``**inputs``.

    transformers reads signatures: its Trainer keeps those columns of a data set that a model's ``forward`` names, and
    ``generate`` refuses arguments that it does not name. So the signature lists every name of the TypedDict. Any other
    argument raises a TypeError, as in any function. One more argument is ``return_dict``: if it is False, here or in
    the configuration, the output is a tuple.
    """

    def decorate(forward: Forward) -> Forward:
        signature = inspect.signature(forward)
        own = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
        collected = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            for name, annotation in {**inputs.__annotations__, "return_dict": bool | None}.items()
        ]
        names = [parameter.name for parameter in own + collected if parameter.name != "self"]
        return_either = can_return_tuple(forward)

        @wraps(forward)
        def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
            for name in kwargs:
                if name not in names:
                    kind = type(self).__name__
                    raise TypeError(f"{name}: no argument of {kind}, which takes {', '.join(names)}")
            return return_either(self, *args, **kwargs)

        checked.__signature__ = signature.replace(parameters=own + collected)  # type: ignore[attr-defined]
        return cast(Forward, checked)

    return decorate
