"""``KINDS``: the layers of transformers whose own position scores this library says in terms.

Each function computes what the layer's own method does, from the same arguments and parameters, without an (n, n)
matrix. It gets a ``Served``, then the method's arguments. ``serve`` puts them in place.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..hooks import Undo
from ..served import Served
from ..trial import owners_of
from . import deberta, mpnet, sound

KINDS: dict[str, dict[str, Callable[..., Any]]] = {
    "wav2vec2_bert.Wav2Vec2BertSelfAttention": {"forward": sound.conformer},
    "wav2vec2_conformer.Wav2Vec2ConformerSelfAttention": {"forward": sound.conformer},
    "seamless_m4t.SeamlessM4TConformerSelfAttention": {"forward": sound.conformer},
    "seamless_m4t_v2.SeamlessM4Tv2ConformerSelfAttention": {"forward": sound.conformer},
    "seamless_m4t_v2.SeamlessM4Tv2ConformerEncoder": {"_apply_chunk_attention": sound.chunks},
    "parakeet.ParakeetEncoderAttention": {"forward": sound.parakeet},
    "wavlm.WavLMAttention": {"forward": sound.wavlm},
    "deberta.DebertaPreTrainedModel": {"forward": deberta.unpacked},
    "deberta.DisentangledSelfAttention": {"forward": deberta.deberta},
    "deberta.DebertaEncoder": {"get_attention_mask": deberta.padding, "get_rel_pos": deberta.no_distances},
    "deberta_v2.DebertaV2PreTrainedModel": {"forward": deberta.unpacked},
    "deberta_v2.DisentangledSelfAttention": {"forward": deberta.deberta_v2},
    "deberta_v2.DebertaV2Encoder": {"get_attention_mask": deberta.padding, "get_rel_pos": deberta.no_distances},
    "mpnet.MPNetPreTrainedModel": {"forward": mpnet.packed},
    "mpnet.MPNetEncoder": {"compute_position_bias": mpnet.distances},
    "mpnet.MPNetSelfAttention": {"forward": mpnet.mpnet},
}
"""By model and class, the functions that compute its methods."""


def serve(model: PreTrainedModel, undo: Undo, parts: Collection[PreTrainedModel] | None = None) -> None:
    """Let this library compute the methods of a model's layers that :data:`KINDS` names.

    Args:
        model: the model.
        undo: gets what takes it back.
        parts: the models inside, and itself, whose own layers are meant; None: all.
    """

    for module, part in owners_of(model).items():
        for name, function in _functions(type(module)).items() if parts is None or part in parts else ():
            undo.append(partial(_put_back, module, name, vars(module).get(name)))
            served = Served(module, part.config, function)
            # Trainer and generate look there for the names of arguments.
            served.__signature__ = inspect.signature(getattr(module, name))  # type: ignore[attr-defined]
            setattr(module, name, served)


def _functions(kind: type) -> dict[str, Callable[..., Any]]:
    """Return the functions for a class of transformers, or for the nearest class that it is derived from."""
    for each in kind.__mro__:
        package, _, model = each.__module__.rpartition(".modeling_")
        if package.startswith("transformers.models.") and (found := KINDS.get(f"{model}.{each.__name__}")):
            return found
    return {}


def _put_back(module: nn.Module, name: str, own: Any) -> None:
    """Restore a method: ``own`` is what the module itself had under its name, None if its class's counts."""
    delattr(module, name)
    if own is not None:
        setattr(module, name, own)
