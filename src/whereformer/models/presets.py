"""Presets: the options of published encoders, by name; sizes are the user's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import InputError, shown
from ..positions import method_names

_WITHOUT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

PRESETS: dict[str, dict[str, Any]] = {
    "bert": {},
    "albert": {"blocks": "1x12", "hidden_act": "gelu_pytorch_tanh", **_WITHOUT_DROPOUT},
    "electra": {"classifier_act": "gelu"},
    "funnel": {
        "blocks": "4-4-4",
        "decoder_layers": "2",
        "position": "transformer_xl",
        "segments": "attention",
        "query_bias": False,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-9,
    },
    "modernbert": {
        "position": "rope",
        "position_options": {"base": [160_000.0, 10_000.0, 10_000.0]},
        "windows": "0,64,64",
        "norm": "pre",
        "first_norm": False,
        "feed_forward": "gated",
        "biases": False,
        "classifier_act": "gelu",
        "classifier_norm": True,
        "type_vocab_size": 0,
        "layer_norm_eps": 1e-5,
        **_WITHOUT_DROPOUT,
    },
    "hybrid": {
        "position": "logn/rope/rope/rope",
        "windows": "0,64,64,64",
        "norm": "pre",
        "feed_forward": "gated",
        "biases": False,
        "type_vocab_size": 0,
        "layer_norm_eps": 1e-5,
        **_WITHOUT_DROPOUT,
    },
}
"""Fields of :class:`EncoderConfig` that are not its defaults, by the name of a published model.

"hybrid" is what many language models of 2025 and 2026 do, as an encoder: rotations in windows, and in every fourth
layer all tokens, no positions, and scores that grow with the length (Llama 4, SmolLM3, Command A).

Sources: Devlin et al. (2019, arXiv 1810.04805), Lan et al. (2020, 1909.11942; version 2 of the checkpoints), Clark et
al. (2020, 2003.10555), Dai et al. (2020, 2006.03236), Warner et al. (2024, 2412.13663).
"""


def preset_fields(name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a preset with changes.

    Another position method takes no options of the preset's, unless it joins the preset's own.

    Raises:
        ValueError: for another name.
    """
    if not isinstance(name, str) or name not in PRESETS:
        raise InputError("preset", f"expected one of {', '.join(PRESETS)}, got {shown(name)}")
    preset = {field: value for field, value in PRESETS[name].items() if field not in changes}
    if "position" in changes and PRESETS[name].get("position") not in method_names(changes["position"]):
        preset.pop("position_options", None)
    return {**preset, **changes}
