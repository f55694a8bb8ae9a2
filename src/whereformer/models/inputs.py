"""The keyword inputs of the models: each list is written once, shows in signatures, and admits nothing else."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import wraps
from typing import Any, Literal, TypedDict, TypeVar, cast

import torch
from torch import Tensor
from transformers import EncoderDecoderCache, PreTrainedConfig
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput
from transformers.utils import can_return_tuple

from ..errors import InputError, short_repr
from ..kernels.make_call import INTEGER, check_tensor
from ..kernels.tracing import can_read
from ..kernels.varlen import check_seqlens, find_sequences

CACHE = "cache" if "cache" in {field.name for field in fields(Seq2SeqLMOutput)} else "past_key_values"
"""transformers' name of the keys and values of earlier calls, in inputs and outputs: 5.24 renamed them."""

PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")
"""The arguments of transformers' collators that say where the documents of packed rows begin."""


class TokenInputs(TypedDict, total=False):
    """Information about tokens besides their ids and mask; :meth:`Encoder.forward` describes it."""

    token_type_ids: Tensor | None
    position_ids: Tensor | None
    document_ids: Tensor | None
    seq_idx: Tensor | None
    cu_seq_lens_q: Tensor | None
    cu_seq_lens_k: Tensor | None
    max_length_q: int | None
    max_length_k: int | None


class SourceInputs(TypedDict, total=False):
    """The inputs of every encoder besides ids and mask: embedded tokens instead of ids, and which outputs to return.

    If the option of an output is None, the configuration decides.
    """

    inputs_embeds: Tensor | None
    output_hidden_states: bool | None
    output_attentions: bool | None


class EncoderInputs(TokenInputs, SourceInputs, total=False):
    """The inputs of :class:`Encoder`, and of models with one, besides ids and mask; ``forward`` describes them."""

    use_cache: bool | None


class Seq2SeqInputs(SourceInputs, total=False):
    """The inputs of the translation Transformer besides ids, masks and labels; its ``forward`` describes them."""

    encoder_outputs: BaseModelOutput | tuple[Tensor, ...] | None
    past_key_values: EncoderDecoderCache | None
    cache: EncoderDecoderCache | None
    decoder_inputs_embeds: Tensor | None
    use_cache: bool | None
    num_items_in_batch: Tensor | int | None


def is_requested(
    output: Literal["output_hidden_states", "output_attentions"], inputs: SourceInputs, config: PreTrainedConfig
) -> bool:
    """Whether an output is requested by a call or, if the call does not say, by the model's configuration."""
    option = inputs.get(output)
    return bool(getattr(config, output) if option is None else option)


Forward = TypeVar("Forward", bound=Callable[..., object])


def accepts(inputs: type) -> Callable[[Forward], Forward]:
    """Decorate a ``forward`` that collects the arguments of the TypedDict ``inputs`` in ``**inputs``.

    transformers reads signatures: its Trainer keeps only those columns of a data set that a model's ``forward`` names,
    and ``generate`` refuses arguments that it does not name. So the signature lists every name of the TypedDict. Any
    other argument raises a TypeError, as in any function. Another argument is ``return_dict``: if it is False, here or
    in the configuration, the output is a tuple.
    """

    def decorate(forward: Forward) -> Forward:
        signature = inspect.signature(forward)
        declared = [
            parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD
        ]
        collected = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            for name, annotation in {**inputs.__annotations__, "return_dict": bool | None}.items()
        ]
        names = [parameter.name for parameter in declared + collected if parameter.name != "self"]
        return_either = can_return_tuple(forward)

        @wraps(forward)
        def checked(self: object, *args: object, **kwargs: object) -> object:
            for name in kwargs:
                if name not in names:
                    kind = type(self).__name__
                    raise TypeError(f"{name}: not an argument of {kind}, which accepts {', '.join(names)}")
            return return_either(self, *args, **kwargs)

        checked.__signature__ = signature.replace(parameters=declared + collected)  # type: ignore[attr-defined]
        return cast(Forward, checked)

    return decorate


def packed_document_ids(inputs: Mapping[str, Any], like: Tensor, n_q: int, n_k: int) -> Tensor | None:
    """Return document ids of a collator's packed rows, (batch, n); None if ``inputs`` has none of its arguments.

    Args:
        inputs: may hold ``cu_seq_lens_q`` and ``cu_seq_lens_k``, each of shape (documents + 1,), where the documents of
            one row begin and the last one ends, and ``seq_idx``, (batch, n), an id of each token's document.
        like: a tensor of the batch, (batch, ...), on its device.
        n_q, n_k: the number of queries and keys.

    Raises:
        InputError, TypeError, ValueError: unless they fit the tokens and each other. Values are checked where reading
            them is cheap.
    """
    query_ends, key_ends, seq_idx = (inputs.get(name) for name in PACKED)
    if seq_idx is not None:
        check_tensor("seq_idx", seq_idx, INTEGER, {"batch": None, "n": None})
    if query_ends is None and key_ends is not None:
        raise InputError("cu_seq_lens_k", "expected cu_seq_lens_q too, got None")
    ids = seq_idx
    if query_ends is not None:
        check_seqlens("cu_seq_lens_q", query_ends, "input_ids", n_k, like)
        ids = find_sequences(torch.arange(n_k, device=query_ends.device), query_ends)[None]
        other_ends = None if key_ends is query_ends else key_ends
        if other_ends is not None and can_read(query_ends) and not torch.equal(query_ends, other_ends):
            raise InputError("cu_seq_lens_k", f"expected the numbers of cu_seq_lens_q, got {short_repr(other_ends)}")
        if seq_idx is not None and can_read(seq_idx) and not torch.equal(seq_idx.diff() != 0, ids.diff() != 0):
            raise InputError("seq_idx", "expected the documents of cu_seq_lens_q, got others")
    if ids is not None and (n_q != n_k or ids.shape != (len(like), n_k)):
        name, expected = ("seq_idx", "(batch, n)") if query_ends is None else ("cu_seq_lens_q", "one row")
        raise InputError(name, f"it needs {expected} and no cache, got {len(like)} rows, {n_q} queries and {n_k} keys")
    return ids
