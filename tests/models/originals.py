"""Models of transformers that ours are compared with, what both compute, and changes of their checkpoints."""

import json

import torch
import transformers
from safetensors.torch import load_file, save_file

from whereformer import (
    Encoder,
    EncoderForMaskedLM,
    EncoderForSequenceClassification,
    EncoderForTokenClassification,
    load_pretrained,
)

from .peers import enlarge

SIZES = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 20,
    "num_labels": 3,
}
LONG = {**SIZES, "num_hidden_layers": 4, "max_position_embeddings": 170, "pad_token_id": 1}
LONG |= {"bos_token_id": None, "eos_token_id": None}
MODERN = {**LONG, "cls_token_id": None, "sep_token_id": None, "local_attention": 6}
DISTIL = {
    "vocab_size": 50,
    "dim": 16,
    "n_layers": 3,
    "n_heads": 2,
    "hidden_dim": 24,
    "max_position_embeddings": 170,
    "num_labels": 3,
}
VERSION3 = {
    **SIZES,
    "max_position_embeddings": 40,
    "relative_attention": True,
    "pos_att_type": "c2p|p2c",
    "type_vocab_size": 0,
    "position_buckets": 4,
    "max_relative_positions": 9,
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
}
FUNNEL = {"vocab_size": 40, "d_model": 16, "n_head": 2, "d_head": 6, "d_inner": 24, "num_labels": 3}
FUNNEL |= {"block_sizes": [1, 2, 1], "block_repeats": [1, 1, 2]}
LAYER_TYPES = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
FAMILIES = {
    "bert": ("Bert", SIZES),
    "albert v1": ("Albert", {**SIZES, "embedding_size": 6, "hidden_act": "gelu"}),
    "albert v2": ("Albert", {**SIZES, "embedding_size": 6, "hidden_act": "gelu_new", "classifier_dropout_prob": 0.3}),
    "roberta": ("Roberta", {**SIZES, "type_vocab_size": 1, "pad_token_id": 1, "layer_norm_eps": 1e-5}),
    "roberta, padding last": ("Roberta", {**SIZES, "pad_token_id": 7}),
    "xlm-roberta": ("XLMRoberta", {**SIZES, "type_vocab_size": 1, "pad_token_id": 1}),
    "camembert": ("Camembert", {**SIZES, "type_vocab_size": 1, "pad_token_id": 1}),
    "electra": ("Electra", {**SIZES, "embedding_size": 6}),
    "electra base": ("Electra", {**SIZES, "embedding_size": 16}),
    "distilbert": ("DistilBert", DISTIL),
    "distilbert, relu": ("DistilBert", {**DISTIL, "activation": "relu"}),
    "mpnet": ("MPNet", LONG),
    "modernbert": ("ModernBert", MODERN),
    "modernbert, odd window": ("ModernBert", {**MODERN, "local_attention": 7, "global_attn_every_n_layers": 2}),
    "modernbert, all global": ("ModernBert", {**MODERN, "global_attn_every_n_layers": 1}),
    "modernbert, window of the text": ("ModernBert", {**MODERN, "local_attention": 1000}),
    "modernbert, bases": ("ModernBert", {**MODERN, "global_rope_theta": 500.0, "local_rope_theta": 20.0}),
    "modernbert, layer types": ("ModernBert", {**MODERN, "layer_types": LAYER_TYPES}),
    "modernbert, swiglu": ("ModernBert", {**MODERN, "hidden_activation": "silu", "classifier_activation": "silu"}),
    "modernbert, mean": ("ModernBert", {**MODERN, "classifier_pooling": "mean"}),
    "deberta": ("DebertaV2", VERSION3),
    "deberta, clipped": (
        "DebertaV2",
        {**VERSION3, "position_buckets": -1, "max_relative_positions": 5, "type_vocab_size": 2},
    ),
    "funnel": ("Funnel", FUNNEL),
}
"""What transformers' classes begin with, and the sizes and options of a small model."""
LONG_TEXTS = [name for name in FAMILIES if name.startswith(("distilbert", "mpnet", "modernbert"))]

HEADS = {
    "Model": Encoder,
    "ForMaskedLM": EncoderForMaskedLM,
    "ForSequenceClassification": EncoderForSequenceClassification,
    "ForTokenClassification": EncoderForTokenClassification,
}


def theirs(family="bert", head="Model", **changes):
    """A model of transformers in float64, with parameters so large that each one matters."""
    torch.manual_seed(0)
    name, options = FAMILIES[family]
    options = {**options, **changes}
    config = getattr(transformers, f"{name}Config")(**options)
    return enlarge(getattr(transformers, f"{name}{head}")(config).double())


def run(model, inputs):
    """All hidden states and what the head says, at real tokens."""
    out = model(**inputs, output_hidden_states=True)
    real = inputs["attention_mask"].bool()
    tensors = [*out.hidden_states]
    for name in ("last_hidden_state", "logits", "prediction_logits"):
        tensors += [out[name]] if name in out else []
    return [tensor[real] if tensor.shape[:2] == real.shape else tensor for tensor in tensors]


def close(actual, expected, rtol=1e-9, atol=1e-10):
    """Compare what two models computed, the number of tensors too."""
    for number, golden in zip(actual, expected, strict=True):
        torch.testing.assert_close(number, golden, rtol=rtol, atol=atol)


def weighted(outputs):
    generator = torch.Generator().manual_seed(2)
    return sum((x * torch.randn(x.shape, generator=generator, dtype=x.dtype)).sum() for x in outputs)


def compare_gradients(ours, original, folder, *, tolerance=1e-9):
    """Compare gradients of all parameters, none of which is zero there.

    A checkpoint that holds the original's gradients in place of its weights is read with the same names.
    """
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    original.save_pretrained(folder)
    gradients = load_pretrained(folder, dtype=torch.float64)
    for (name, parameter), golden in zip(ours.named_parameters(), gradients.parameters(), strict=True):
        assert golden.any(), name
        torch.testing.assert_close(
            parameter.grad, golden, rtol=1e-8, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )


def rewrite(folder, change=None, **config):
    """Change the tensors of a checkpoint, and fields of its configuration; None for one that is not there."""
    if change is not None:
        file = folder / "model.safetensors"
        state = load_file(file)
        change(state)
        save_file(state, file, {"format": "pt"})
    file = folder / "config.json"
    fields = {**json.loads(file.read_text()), **config}
    file.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))


def drop(name):
    return lambda state: state.pop(name)


def put(name, tensor):
    return lambda state: state.update({name: tensor})
