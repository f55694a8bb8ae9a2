"""ModernBERT, DistilBERT and MPNet as ours: the same numbers, from files."""

import json
import re

import pytest
import torch
import transformers
from transformers.models.modernbert import modeling_modernbert as modernbert

from whereformer import EncoderForCausalLM, load_pretrained

from .originals import HEADS, close, compare_gradients, make_original, rewrite, run, weighted

SIZES = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 170,
    "num_labels": 3,
    "pad_token_id": 1,
    "bos_token_id": None,
    "eos_token_id": None,
}
MODERN = {**SIZES, "cls_token_id": None, "sep_token_id": None, "local_attention": 6}
DISTIL = {
    "vocab_size": 50,
    "dim": 16,
    "n_layers": 3,
    "n_heads": 2,
    "hidden_dim": 24,
    "max_position_embeddings": 170,
    "num_labels": 3,
}
# What transformers' class and configuration begin with, and what is not as in the sizes.
CASES = {
    "distilbert": ("DistilBert", DISTIL),
    "distilbert, relu": ("DistilBert", {**DISTIL, "activation": "relu"}),
    "mpnet": ("MPNet", SIZES),
    "modernbert": ("ModernBert", MODERN),
    "modernbert, odd window": ("ModernBert", {**MODERN, "local_attention": 7, "global_attn_every_n_layers": 2}),
    "modernbert, all global": ("ModernBert", {**MODERN, "global_attn_every_n_layers": 1}),
    "modernbert, window of the text": ("ModernBert", {**MODERN, "local_attention": 1000}),
    "modernbert, bases": ("ModernBert", {**MODERN, "global_rope_theta": 500.0, "local_rope_theta": 20.0}),
    "modernbert, layer types": (
        "ModernBert",
        {**MODERN, "layer_types": [*["sliding_attention"] * 2, "full_attention", "sliding_attention"]},
    ),
    "modernbert, swiglu": (
        "ModernBert",
        {**MODERN, "hidden_activation": "silu", "classifier_activation": "silu"},
    ),
    "modernbert, mean": ("ModernBert", {**MODERN, "classifier_pooling": "mean"}),
}


@pytest.fixture
def exact_rotations(monkeypatch):
    """Transformers rotates in float32 whatever the dtype; here it does so in float64."""

    def turns(self, x, position_ids, layer_type=None):
        width = self.config.hidden_size // self.config.num_attention_heads
        base = self.config.rope_parameters[layer_type]["rope_theta"]
        angles = position_ids[..., None].double() * base ** (-torch.arange(0, width, 2).double() / width)
        return torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()

    def turned(query, key, cos, sin, unsqueeze_dim=1):
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return tuple(x * cos + modernbert.rotate_half(x) * sin for x in (query, key))

    monkeypatch.setattr(modernbert.ModernBertRotaryEmbedding, "forward", turns)
    monkeypatch.setattr(modernbert, "apply_rotary_pos_emb", turned)


def batch(length):
    """A whole row, one with padding on the right, and one with a single token."""
    torch.manual_seed(length)
    mask = (torch.arange(length) < torch.tensor([[length], [length // 2 + 1], [1]])).long()
    return {"input_ids": torch.randint(2, 50, (3, length)).where(mask.bool(), 1), "attention_mask": mask}


QUICK = {
    "Model": CASES,
    "ForMaskedLM": ("distilbert", "mpnet", "modernbert"),
    "ForSequenceClassification": ("modernbert",),
}


@pytest.mark.parametrize(
    ("case", "head"),
    [
        (case, head) if case in QUICK.get(head, ()) else pytest.param(case, head, marks=pytest.mark.slow)
        for case, (name, _) in CASES.items()
        for head in HEADS
        if hasattr(transformers, f"{name}{head}")
    ],
)
def test_the_same_states_and_logits(case, head, tmp_path, exact_rotations):
    name, options = CASES[case]
    original = make_original(name, options, head)
    original.save_pretrained(tmp_path / "theirs")
    ours = load_pretrained(tmp_path / "theirs", dtype=torch.float64)
    assert type(ours) is HEADS[head]
    assert set(ours.loading_report.loaded) == set(ours.state_dict())
    assert not ours.loading_report.initialized
    for length in (1, 2, 21, 150) if head == "Model" else (21,):
        inputs = batch(length)
        with torch.no_grad():
            expected, actual = run(original, inputs), run(ours, inputs)
        assert len(actual) >= 4
        close(actual, expected, 1e-8, 1e-9)
    ours.save_pretrained(tmp_path / "ours")
    for again in (
        load_pretrained(tmp_path / "ours", dtype=torch.float64),
        type(ours).from_pretrained(tmp_path / "ours"),
    ):
        for tensor, saved in zip(again.double().state_dict().values(), ours.state_dict().values(), strict=True):
            assert torch.equal(tensor, saved)
        with torch.no_grad():
            torch.testing.assert_close(run(again, inputs), actual, rtol=0, atol=0)


@pytest.mark.parametrize("case", ["distilbert", "mpnet", "modernbert"])
def test_the_same_gradients(case, tmp_path, exact_rotations):
    """Of everything that is one tensor there and here."""
    name, options = CASES[case]
    original = make_original(name, options, "ForMaskedLM")
    original.save_pretrained(tmp_path / "theirs")
    ours = load_pretrained(tmp_path / "theirs", dtype=torch.float64)
    inputs = batch(21)
    weighted(run(original, inputs)).backward()
    weighted(run(ours, inputs)).backward()
    # Where their model has no bias, its gradient is zero.
    compare_gradients(
        ours,
        original,
        tmp_path / "gradients",
        tolerance=1e-8,
        zero=lambda name: case == "modernbert, swiglu" and name.endswith("bias"),
    )


def test_as_it_is_modernbert_is_the_same_to_float32(tmp_path):
    original = make_original("ModernBert", MODERN, "ForMaskedLM").float()
    original.save_pretrained(tmp_path)
    ours, inputs = load_pretrained(tmp_path), batch(60)
    with torch.no_grad():
        close(run(ours, inputs), run(original, inputs), 1e-4, 1e-4)


def test_the_options_of_early_modernberts_are_understood(tmp_path):
    """Checkpoints on the Hub say global_rope_theta and global_attn_every_n_layers."""
    original = make_original("ModernBert", MODERN)
    original.save_pretrained(tmp_path)
    early = {"global_rope_theta": 160000.0, "local_rope_theta": 10000.0, "global_attn_every_n_layers": 3}
    rewrite(tmp_path, **early, rope_parameters=None, layer_types=None)
    config = load_pretrained(tmp_path).config
    assert (config.windows, config.position_options) == ("0,3,3", {"base": [160000.0, 10000.0, 10000.0]})


def test_padding_on_the_left_is_not_counted_by_mpnet(tmp_path):
    original = make_original("MPNet", SIZES)
    original.save_pretrained(tmp_path)
    ours = load_pretrained(tmp_path, dtype=torch.float64)
    inputs = {name: tensor.flip(1) for name, tensor in batch(11).items()}
    with torch.no_grad():
        torch.testing.assert_close(run(ours, inputs)[-1], run(original, inputs)[-1], rtol=0, atol=1e-9)


@pytest.mark.parametrize("case", ["distilbert, relu", "modernbert"])
def test_a_masked_lm_becomes_a_causal_model_with_its_head(case, tmp_path):
    make_original(*CASES[case], "ForMaskedLM").save_pretrained(tmp_path)
    masked = load_pretrained(tmp_path)
    causal = load_pretrained(tmp_path, model_class=EncoderForCausalLM, causal=True)
    assert causal.loading_report.dropped == causal.loading_report.initialized == ()
    for name, tensor in masked.head.state_dict().items():
        assert torch.equal(causal.head.state_dict()[name], tensor), name


def test_another_position_method_in_a_modernbert(tmp_path):
    make_original("ModernBert", MODERN, "ForMaskedLM").save_pretrained(tmp_path)
    model = load_pretrained(tmp_path, "rope+tisa", num_kernels=2)
    assert model.config.position_options["num_kernels"] == 2
    assert len(model.config.position_options["base"]) == 3
    assert all(name.startswith("encoder.position.") for name in model.loading_report.initialized)


@pytest.mark.parametrize(
    ("case", "head", "fields", "message"),
    [
        ("modernbert", "Model", {"local_attention": 1}, "local_attention: expected at least 2, got 1"),
        (
            "modernbert",
            "ForMaskedLM",
            {"classifier_activation": "tanh"},
            "classifier_activation: expected hidden_activation's 'gelu', got 'tanh'",
        ),
        ("modernbert", "Model", {"mlp_bias": True}, "mlp_bias: expected False, got True"),
        (
            "modernbert",
            "Model",
            {"hidden_size": 32},
            "checkpoint: expected 'embeddings.tok_embeddings.weight' of shape (50, 32), got (50, 16)",
        ),
        ("modernbert", "Model", {"num_attention_heads": 3}, "num_attention_heads: 3 heads do not divide"),
        (
            "modernbert",
            "Model",
            {"architectures": ["ModernBertForMultipleChoice"]},
            "path_or_id: expected one of Modern",
        ),
        (
            "mpnet",
            "Model",
            {"relative_attention_num_buckets": 16},
            "relative_attention_num_buckets: expected 32, got 16",
        ),
        ("mpnet", "Model", {"pad_token_id": 0}, "pad_token_id: expected 1, got 0"),
        ("distilbert", "Model", {"n_layers": 4}, "checkpoint: it has no 'transformer.layer.3."),
    ],
)
def test_what_does_not_fit_is_one_line(case, head, fields, message, tmp_path):
    name, options = CASES[case]
    make_original(name, options, head).save_pretrained(tmp_path)
    rewrite(tmp_path, **fields)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}[^\n]*$"):
        load_pretrained(tmp_path)


def test_scaled_rotations_are_refused(tmp_path):
    make_original("ModernBert", MODERN).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["rope_parameters"]["full_attention"] |= {"rope_type": "dynamic", "factor": 2.0}
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"^rope_type: expected 'default', got 'dynamic'"):
        load_pretrained(tmp_path)
