"""Small models of transformers with positions of their own or inputs of sound, and what they read."""

from dataclasses import dataclass
from typing import Any

import torch
import transformers

from .peers import enlarge, of_both_stacks

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
    **of_both_stacks(layers=2, attention_heads=2, ffn_dim=32),
    "d_model": 16,
    "vocab_size": 50,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "dropout": 0.0,
}  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A model of transformers to try.

    Args:
        name: its name there, as "WavLM"; the classes are this with "Model" and "Config" behind.
        reads: "waves", "frames", "spectrograms" or "text".
        options: those of its configuration.
        masked: whether it takes a mask of padding.
        tolerance: how closely it can be repeated in float64.
        part: the name of the model's class, if it is not the name with "Model" behind.
        reentrant: whether transformers can checkpoint it in PyTorch's first way.
    """

    name: str
    reads: str
    options: dict[str, Any]
    masked: bool = True
    tolerance: float = 1e-10
    part: str | None = None
    reentrant: bool = True

    def make(self, **options: Any) -> transformers.PreTrainedModel:
        """A model in evaluation mode and float64, with weights that are large enough for every position to count."""
        torch.manual_seed(0)
        config = getattr(transformers, f"{self.name}Config")(**{**self.options, **options})
        return enlarge(getattr(transformers, self.part or f"{self.name}Model")(config).double())

    def inputs(
        self, model: transformers.PreTrainedModel, length: int, *, padded: bool, rows: int = 2
    ) -> dict[str, Any]:
        """Inputs with about ``length`` tokens; the last row of padded ones is shorter."""
        torch.manual_seed(1)
        config = model.config
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
        if padded:
            (values,) = inputs.values()
            inputs["attention_mask"] = torch.ones(values.shape[:2], dtype=torch.long)
            inputs["attention_mask"][-1, 2 * values.shape[1] // 3 :] = 0
        if config.is_encoder_decoder:
            inputs["decoder_input_ids"] = torch.randint(3, 50, (rows, 7))
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

CONFORMER = {
    **LAYERS,
    **DROPS,
    "feature_projection_input_dim": 12,
    "feat_proj_dropout": 0.0,
    "conformer_conv_dropout": 0.0,
    "apply_spec_augment": False,
}
BERT = {
    **LAYERS,
    "vocab_size": 50,
    "max_position_embeddings": 400,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "relative_attention": True,
    "pos_att_type": ["c2p", "p2c"],
}
INKLING_SIZES = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 1,
    "swa_head_dim": 8,
    "sliding_window_size": 5,
    "d_rel": 3,
    "rel_extent": 6,
    "local_layer_ids": [0],
    "intermediate_size": 32,
    "mlp_layer_types": ["dense", "dense"],
}
CLIPPED = {"left_max_position_embeddings": 5, "right_max_position_embeddings": 2}
SEAMLESS = {
    **{name: size for name, size in BOTH.items() if name != "d_model" and "id" in name},
    "vocab_size": 50,
    "decoder_layers": 1,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 32,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "hidden_size": 16,
    "feature_projection_input_dim": 12,
    "speech_encoder_layers": 2,
    "speech_encoder_attention_heads": 2,
    "speech_encoder_intermediate_size": 32,
    "speech_encoder_dropout": 0.0,
    "speech_encoder_layerdrop": 0.0,
    "adaptor_dropout": 0.0,
    "add_adapter": False,
}
PARAKEET = {
    **LAYERS,
    "num_attention_heads": 4,
    "num_mel_bins": 16,
    "subsampling_factor": 2,
    "subsampling_conv_channels": 4,
    **dict.fromkeys(("dropout", "layerdrop", "activation_dropout", "attention_dropout"), 0.0),
}

PATCHED = {
    "Wav2Vec2Bert": Kind("Wav2Vec2Bert", "frames", {**CONFORMER, **CLIPPED}),
    "Wav2Vec2Bert of distances": Kind("Wav2Vec2Bert", "frames", {**CONFORMER, "position_embeddings_type": "relative"}),
    "Wav2Vec2Bert that rotates": Kind("Wav2Vec2Bert", "frames", {**CONFORMER, "position_embeddings_type": "rotary"}),
    "Wav2Vec2Bert without": Kind("Wav2Vec2Bert", "frames", {**CONFORMER, "position_embeddings_type": None}),
    "Wav2Vec2Conformer": Kind("Wav2Vec2Conformer", "waves", {**WAVES, "conformer_conv_dropout": 0.0}),
    "Wav2Vec2Conformer that rotates": Kind(
        "Wav2Vec2Conformer", "waves", {**WAVES, "conformer_conv_dropout": 0.0, "position_embeddings_type": "rotary"}
    ),
    "SeamlessM4T": Kind("SeamlessM4T", "frames", SEAMLESS, part="SeamlessM4TForSpeechToText"),
    "SeamlessM4Tv2": Kind("SeamlessM4Tv2", "frames", {**SEAMLESS, **CLIPPED}, part="SeamlessM4Tv2ForSpeechToText"),
    "SeamlessM4Tv2 in chunks": Kind(
        "SeamlessM4Tv2",
        "frames",
        {**SEAMLESS, **CLIPPED, "speech_encoder_chunk_size": 5, "speech_encoder_left_chunk_num": 1},
        part="SeamlessM4Tv2ForSpeechToText",
    ),
    # It knows no such positions, and has none then.
    "SeamlessM4Tv2 that rotates": Kind(
        "SeamlessM4Tv2",
        "frames",
        {**SEAMLESS, "position_embeddings_type": "rotary"},
        part="SeamlessM4Tv2ForSpeechToText",
    ),
    "Parakeet": Kind("ParakeetEncoder", "frames", PARAKEET, part="ParakeetEncoder"),
    "Parakeet with grouped heads": Kind(
        "ParakeetEncoder",
        "frames",
        {**PARAKEET, "num_key_value_heads": 2, "attention_bias": False},
        part="ParakeetEncoder",
    ),
    "WavLM": Kind("WavLM", "waves", {**WAVES, "num_buckets": 8, "max_bucket_distance": 6}, reentrant=False),
    "WavLM with norms first": Kind(
        "WavLM", "waves", {**WAVES, "num_buckets": 8, "do_stable_layer_norm": True}, reentrant=False
    ),
    "Deberta": Kind("Deberta", "text", BERT),
    "Deberta that clips": Kind("Deberta", "text", {**BERT, "max_relative_positions": 4}),
    "Deberta of keys": Kind("Deberta", "text", {**BERT, "pos_att_type": ["c2p"]}),
    "Deberta of queries": Kind("Deberta", "text", {**BERT, "pos_att_type": ["p2c"]}),
    "Deberta without": Kind("Deberta", "text", {**BERT, "relative_attention": False, "pos_att_type": None}),
    "DebertaV2": Kind("DebertaV2", "text", {**BERT, "max_relative_positions": 4}),
    "DebertaV2 as version 3": Kind(
        "DebertaV2",
        "text",
        {
            **BERT,
            "max_relative_positions": 10,
            "position_buckets": 4,
            "share_att_key": True,
            "norm_rel_ebd": "layer_norm",
            "position_biased_input": False,
            "type_vocab_size": 0,
        },
        reentrant=False,
    ),
    "DebertaV2 with a convolution": Kind(
        "DebertaV2", "text", {**BERT, "position_buckets": 4, "conv_kernel_size": 3, "conv_act": "gelu"}
    ),
    "DebertaV2 of keys": Kind("DebertaV2", "text", {**BERT, "pos_att_type": ["c2p"]}),
    "DebertaV2 without": Kind("DebertaV2", "text", {**BERT, "relative_attention": False}),
    "MPNet": Kind("MPNet", "text", BERT, reentrant=False),
}
"""Models with positions of their own in attention, which become terms."""

# transformers rounds what it scales to float32.
INKLING = Kind("InklingText", "text", {**INKLING_SIZES, "log_scaling_n_floor": 4}, tolerance=1e-6)
"""A model whose own positions stay a matrix, and whose layers differ in their heads if it is asked for."""

KINDS = {**SOUND, **PATCHED, "InklingText": INKLING}
