"""Checkpoints of transformers that ours cannot be the same as: each is refused in one line, by what does not fit."""

import re

import pytest
import torch

from whereformer import load_pretrained
from whereformer.errors import InputError

from .originals import drop, put, rewrite, theirs

DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 160000.0}
ROTATIONS = {"full_attention": DYNAMIC, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
KERNEL = "encoder.blocks.1.1.attention.r_kernel"
V3 = "as in DeBERTa's version 3"

FIELDS = [
    ("bert", "Model", {"position_embedding_type": "relative_key"}, "position_embedding_type: expected 'absolute'"),
    ("bert", "Model", {"is_decoder": True}, "is_decoder: expected False, got True"),
    ("bert", "Model", {"pruned_heads": {"0": [1]}}, "pruned_heads: expected {}, got"),
    ("bert", "Model", {"architectures": ["BertForMultipleChoice"]}, "path_or_id: expected one of BertModel, "),
    ("bert", "ForMaskedLM", {"tie_word_embeddings": False}, "checkpoint: it has no 'cls.predictions.decoder.weight'"),
    ("albert v2", "Model", {"num_hidden_groups": 3}, "num_hidden_groups: expected 1, got 3"),
    ("albert v2", "Model", {"inner_group_num": 2}, "inner_group_num: expected 1, got 2"),
    ("roberta", "ForMaskedLM", {"hidden_act": "relu"}, "hidden_act: expected 'gelu', got 'relu'"),
    ("electra", "Model", {"add_cross_attention": True}, "add_cross_attention: expected False, got True"),
    ("electra", "ForMaskedLM", {"hidden_act": "relu"}, "hidden_act: expected 'gelu', got 'relu'"),
    ("modernbert", "Model", {"local_attention": 1}, "local_attention: expected at least 2, got 1"),
    ("modernbert", "Model", {"mlp_bias": True}, "mlp_bias: expected False, got True"),
    ("modernbert", "Model", {"num_attention_heads": 3}, "num_attention_heads: 3 heads do not divide"),
    ("modernbert", "Model", {"rope_parameters": ROTATIONS}, "rope_type: expected 'default', got 'dynamic'"),
    ("modernbert", "Model", {"architectures": ["ModernBertForMultipleChoice"]}, "path_or_id: expected one of Modern"),
    (
        "modernbert",
        "Model",
        {"hidden_size": 32},
        "checkpoint: expected 'embeddings.tok_embeddings.weight' of shape (50, 32), got (50, 16)",
    ),
    (
        "modernbert",
        "ForMaskedLM",
        {"classifier_activation": "tanh"},
        "classifier_activation: expected hidden_activation's 'gelu', got 'tanh'",
    ),
    ("mpnet", "Model", {"relative_attention_num_buckets": 16}, "relative_attention_num_buckets: expected 32, got 16"),
    ("mpnet", "Model", {"pad_token_id": 0}, "pad_token_id: expected 1, got 0"),
    ("distilbert", "Model", {"n_layers": 4}, "checkpoint: it has no 'transformer.layer.3."),
    ("deberta", "Model", {"conv_kernel_size": 3}, f"conv_kernel_size: expected 0, {V3}, got 3"),
    ("deberta", "Model", {"share_att_key": False}, f"share_att_key: expected True, {V3}, got False"),
    ("deberta", "Model", {"norm_rel_ebd": "none"}, f"norm_rel_ebd: expected 'layer_norm', {V3}, got 'none'"),
    ("deberta", "Model", {"position_biased_input": True}, f"position_biased_input: expected False, {V3}, got True"),
    ("deberta", "Model", {"relative_attention": False}, f"relative_attention: expected True, {V3}, got False"),
    ("deberta", "Model", {"pos_att_type": ["c2p"]}, f"pos_att_type: expected ['c2p', 'p2c'], {V3}, got ['c2p']"),
    ("deberta", "Model", {"embedding_size": 8}, "checkpoint: "),
    ("deberta", "Model", {"legacy": False}, "legacy: expected True, got False"),
]
MISSING = [
    ("bert", "Model", "encoder.layer.2.output.dense.bias", ", which"),
    ("bert", "Model", "embeddings.position_embeddings.weight", ""),
    (
        "bert",
        "ForTokenClassification",
        "classifier.bias",
        ", which this model needs; model_class=Encoder loads only the encoder",
    ),
    ("bert", "ForMaskedLM", "cls.predictions.bias", ", which"),
    *(
        ("deberta", "Model", f"encoder.{name}.weight", ", which this model needs")
        for name in ("LayerNorm", "rel_embeddings", "layer.1.attention.self.key_proj")
    ),
    ("funnel", "Model", "encoder.blocks.2.0.attention.r_w_bias", ", which"),
]
TOO_MANY = [
    ("bert", "Model", "encoder.layer.3.output.dense.bias", torch.ones(16), ", "),
    ("bert", "Model", "adapter.weight", torch.ones(16), ", but a model with its"),
    ("funnel", "Model", "adapter.weight", torch.ones(2), ", but a model with its"),
    ("funnel", "Model", "encoder.blocks.7.0.attention.r_w_bias", torch.ones(2, 6), ", but a model with its"),
]
OTHERS = [
    (
        "bert",
        "Model",
        put("embeddings.position_embeddings.weight", torch.ones(21, 16)),
        "checkpoint: expected 'embeddings.position_embeddings.weight' of shape (20, 16), got (21, 16)",
    ),
    (
        "bert",
        "ForMaskedLM",
        put("cls.predictions.decoder.weight", torch.ones(50, 16)),
        "checkpoint: expected 'cls.predictions.decoder.weight' to equal 'embeddings.word_embeddings.weight', since",
    ),
    (
        "funnel",
        "Model",
        put(KERNEL, torch.ones(8, 2, 6)),
        f"checkpoint: expected '{KERNEL}' of shape (16, 2, 6), got (8, 2, 6)",
    ),
]
REFUSED = [
    *FIELDS,
    *((*case, drop(name), f"checkpoint: it has no '{name}'{then}") for *case, name, then in MISSING),
    *((*case, put(name, tensor), f"checkpoint: it has '{name}'{then}") for *case, name, tensor, then in TOO_MANY),
    *OTHERS,
]


@pytest.mark.parametrize(
    ("family", "head", "change", "message"), REFUSED, ids=[f"{row[0]}: {row[3]}" for row in REFUSED]
)
def test_what_does_not_fit_is_refused_in_one_line(family, head, change, message, tmp_path):
    theirs(family, head).save_pretrained(tmp_path)
    if callable(change):
        rewrite(tmp_path, change)
    else:
        rewrite(tmp_path, **change)
    with pytest.raises(InputError, match=f"^{re.escape(message)}[^\n]*$"):
        load_pretrained(tmp_path)
