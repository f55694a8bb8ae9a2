"""``PATCHES``: functions that replace methods of transformers' layers and express their position scores as terms.

Each function returns the same results as the method that it replaces, from the same arguments and parameters, without
an (n, n) matrix. It gets a ``PatchedForward``, then the method's arguments. ``patch_layers`` puts them in place.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from functools import partial

from torch import nn
from transformers import PreTrainedModel

from ..hooks import Undo
from ..patched_forward import PatchedForward
from ..trial_run import owner_by_module
from . import audio, deberta, mpnet

PATCHES: dict[str, dict[str, Callable[..., object]]] = {
    "wav2vec2_bert.Wav2Vec2BertSelfAttention": {"forward": audio.conformer},
    "wav2vec2_conformer.Wav2Vec2ConformerSelfAttention": {"forward": audio.conformer},
    "seamless_m4t.SeamlessM4TConformerSelfAttention": {"forward": audio.conformer},
    "seamless_m4t_v2.SeamlessM4Tv2ConformerSelfAttention": {"forward": audio.conformer},
    "seamless_m4t_v2.SeamlessM4Tv2ConformerEncoder": {"_apply_chunk_attention": audio.chunks},
    "parakeet.ParakeetEncoderAttention": {"forward": audio.parakeet},
    "wavlm.WavLMAttention": {"forward": audio.wavlm},
    "deberta.DebertaPreTrainedModel": {"forward": deberta.unpacked},
    "deberta.DisentangledSelfAttention": {"forward": deberta.disentangled},
    "deberta.DebertaEncoder": {"get_attention_mask": deberta.padding, "get_rel_pos": deberta.no_distances},
    "deberta_v2.DebertaV2PreTrainedModel": {"forward": deberta.unpacked},
    "deberta_v2.DisentangledSelfAttention": {"forward": deberta.disentangled},
    "deberta_v2.DebertaV2Encoder": {"get_attention_mask": deberta.padding, "get_rel_pos": deberta.no_distances},
    "mpnet.MPNetPreTrainedModel": {"forward": mpnet.packed},
    "mpnet.MPNetEncoder": {"compute_position_bias": mpnet.distances},
    "mpnet.MPNetSelfAttention": {"forward": mpnet.mpnet},
}
"""By model and class, the functions that replace its methods."""


def patch_layers(model: PreTrainedModel, undo: Undo, submodels: Collection[PreTrainedModel] | None = None) -> None:
    """Replace the methods of a model's layers that :data:`PATCHES` names; ``undo`` gets the reversal of each change.

    Only the layers of ``submodels`` are patched, the model itself or models inside it; None: all layers.
    """
    for module, owner in owner_by_module(model).items():
        for name, function in _functions(type(module)).items() if submodels is None or owner in submodels else ():
            undo.append(partial(_restore, module, name, vars(module).get(name)))
            patched = PatchedForward(module, owner.config, function)
            # Trainer and generate read the names of arguments from the signature.
            patched.__signature__ = inspect.signature(getattr(module, name))  # type: ignore[attr-defined]
            setattr(module, name, patched)


def _functions(layer_class: type) -> dict[str, Callable[..., object]]:
    """Return the functions for a class of transformers, or for its nearest base class that has some."""
    for base in layer_class.__mro__:
        package, _, model = base.__module__.rpartition(".modeling_")
        if package.startswith("transformers.models.") and (functions := PATCHES.get(f"{model}.{base.__name__}")):
            return functions
    return {}


def _restore(module: nn.Module, name: str, original: object) -> None:
    """Restore a method; ``original`` is the attribute of the module itself, or None if the class defines the method."""
    delattr(module, name)
    if original is not None:
        setattr(module, name, original)
