"""Small models of transformers with positions of their own or inputs of sound, and what they read."""

from dataclasses import dataclass
from typing import Any

import torch
import transformers

LAYERS = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
DROPS = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "layerdrop": 0.0}
WAVES = {
    **LAYERS,
    **DROPS,
    "conv_dim": (8, 8),
    "conv_kernel": (6, 3),
    "conv_stride": (4, 2),
    "feat_extract_norm": "layer",
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "feat_proj_dropout": 0.0,
    "final_dropout": 0.0,
    "apply_spec_augment": False,
}
BOTH = {
    **{f"{stack}_{name}": size for stack in ("encoder", "decoder") for name, size in
       {"layers": 2, "attention_heads": 2, "ffn_dim": 32}.items()},
    "d_model": 16,
    "vocab_size": 50,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "dropout": 0.0,
}  # fmt: skip
IMAGE = {
    **LAYERS,
    "patch_size": 4,
    "use_mask_token": False,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "drop_path_rate": 0.0,
}
WINDOWS = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 8,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "drop_path_rate": 0,
}


@dataclass(frozen=True)
class Kind:
    """A model of transformers to try.

    Args:
        name: its name there, as "Swin"; the classes are this with "Model" and "Config" behind.
        reads: "waves", "frames", "spectrograms", "images" or "text".
        options: those of its configuration.
        masked: whether it takes a mask of padding.
    """

    name: str
    reads: str
    options: dict[str, Any]
    masked: bool = True

    def make(self, **options: Any) -> transformers.PreTrainedModel:
        """A model in evaluation mode and float64, with weights that are large enough for every position to count."""
        torch.manual_seed(0)
        config = getattr(transformers, f"{self.name}Config")(**{**self.options, **options})
        model = getattr(transformers, f"{self.name}Model")(config).double().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.3)
        return model

    def inputs(
        self, model: transformers.PreTrainedModel, length: int, *, padded: bool, rows: int = 2
    ) -> dict[str, Any]:
        """Inputs with about ``length`` tokens; the last row of padded ones is shorter."""
        torch.manual_seed(1)
        config = model.config
        if self.reads == "images":
            height, width = config.image_size if isinstance(config.image_size, tuple) else (config.image_size,) * 2
            return {"pixel_values": torch.randn(rows, 3, height, width).double()}
        if self.reads == "spectrograms":
            return {"input_values": torch.randn(rows, config.max_length, config.num_mel_bins).double()}
        if self.reads == "text":
            inputs = {"input_ids": torch.randint(3, 50, (rows, length))}
        elif self.reads == "waves":
            inputs = {"input_values": torch.randn(rows, 8 * length + 6).double()}
        elif self.name == "Whisper":
            inputs = {
                "input_features": torch.randn(rows, config.num_mel_bins, 2 * config.max_source_positions).double()
            }
        else:
            inputs = {"input_features": torch.randn(rows, length, self.width(config)).double()}
        if config.is_encoder_decoder:
            inputs["decoder_input_ids"] = torch.randint(3, 50, (rows, 7))
        elif padded:
            (values,) = inputs.values()
            inputs["attention_mask"] = torch.ones(values.shape[:2], dtype=torch.long)
            inputs["attention_mask"][-1, 2 * values.shape[1] // 3 :] = 0
        return inputs

    @staticmethod
    def width(config: Any) -> int:
        """The numbers in a frame."""
        names = ("feature_projection_input_dim", "input_feat_per_channel", "num_mel_bins")
        return next(getattr(config, name) for name in names if hasattr(config, name))


SOUND = {
    name: Kind(name, "waves", WAVES) for name in ("Wav2Vec2", "Hubert", "UniSpeech", "UniSpeechSat")
} | {
    "SEW": Kind("SEW", "waves", {**WAVES, "squeeze_factor": 2}),
    "Data2VecAudio": Kind("Data2VecAudio", "waves", {**WAVES, "conv_pos_kernel_size": 3, "num_conv_pos_embeddings": 2}),
    "AST": Kind("AST", "spectrograms", {**LAYERS, "patch_size": 4, "max_length": 24, "num_mel_bins": 12}, masked=False),
    "Whisper": Kind("Whisper", "frames", {**BOTH, "num_mel_bins": 8, "max_source_positions": 11}, masked=False),
    "Speech2Text": Kind(
        "Speech2Text", "frames", {**BOTH, "input_feat_per_channel": 8, "conv_channels": 16}, masked=False
    ),
}  # fmt: skip
"""Models of sound without positions in attention."""

GRIDS = {
    "Swin": Kind("Swin", "images", {**WINDOWS, "window_size": 4}, masked=False),
    "Swin that pads": Kind("Swin", "images", {**WINDOWS, "window_size": 3}, masked=False),
    "Swinv2": Kind("Swinv2", "images", {**WINDOWS, "window_size": 4}, masked=False),
    "Swinv2 that pads": Kind("Swinv2", "images", {**WINDOWS, "window_size": 3}, masked=False),
    **{
        f"{name} {which}": Kind(name, "images", {**IMAGE, "image_size": (20, 12), **options}, masked=False)
        for name in ("Beit", "Data2VecVision")
        for which, options in {
            "in each layer": {"use_relative_position_bias": True},
            "for all layers": {"use_shared_relative_position_bias": True},
            "twice": {"use_relative_position_bias": True, "use_shared_relative_position_bias": True},
        }.items()
    },
}
"""Models with tables over rows and columns."""

SERVED = {**GRIDS}
"""Models with positions of their own in attention, which become terms."""

KINDS = {**SOUND, **SERVED}
