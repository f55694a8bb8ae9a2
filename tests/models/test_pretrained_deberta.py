"""DeBERTa's version 3 of transformers as ours: the same numbers and gradients, from files."""

import pytest
import torch

from whereformer import attach, load_pretrained
from whereformer.errors import InputError

from .originals import HEADS, close, make_original, rewrite, run, weighted
from .test_pretrained_bert import SIZES

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


def theirs(head="Model", **changes):
    return make_original("DebertaV2", {**VERSION3, **changes}, head)


@pytest.mark.parametrize("changes", [{}, {"position_buckets": -1, "max_relative_positions": 5, "type_vocab_size": 2}])
@pytest.mark.parametrize("head", HEADS)
def test_the_same_states_and_logits(head, changes, tmp_path):
    original = theirs(head, **changes)
    original.save_pretrained(tmp_path)
    ours = load_pretrained(tmp_path, dtype=torch.float64)
    assert type(ours) is HEADS[head]
    assert not ours.loading_report.initialized
    assert set(ours.loading_report.loaded) == set(ours.state_dict())
    ids, real = torch.randint(8, 50, (3, 11)), torch.arange(11) < torch.tensor([[11], [7], [2]])
    inputs = {"input_ids": ids, "attention_mask": real.long()}
    expected, actual = run(original, inputs), run(ours, inputs)
    close(actual, expected, 1e-5, 1e-6)  # transformers rounds the scale to float32
    weighted(expected).backward()
    weighted(actual).backward()
    # The copies of the words' projections train apart, but what reaches the words is the same.
    words, theirs_ = ours.base_model.embeddings.word, original.base_model.embeddings.word_embeddings
    torch.testing.assert_close(words.weight.grad, theirs_.weight.grad, rtol=1e-5, atol=1e-5)


def test_a_method_can_be_added(tmp_path):
    theirs().save_pretrained(tmp_path)
    model = load_pretrained(tmp_path, "deberta+tisa")
    assert {name.split(".")[0] for name in model.loading_report.initialized} == {"position"}
    assert all("parts.1" in name for name in model.loading_report.initialized)


def test_another_method_drops_the_copies_and_no_layer(tmp_path):
    theirs().save_pretrained(tmp_path)
    report = load_pretrained(tmp_path, "rope").loading_report
    assert not report.initialized
    assert "position.key_weight" in report.dropped
    assert not any("proj" in name for name in report.dropped)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"conv_kernel_size": 3}, "conv_kernel_size: expected 0, as in DeBERTa's version 3, got 3"),
        ({"share_att_key": False}, "share_att_key: expected True, as in DeBERTa's version 3, got False"),
        ({"norm_rel_ebd": "none"}, "norm_rel_ebd: expected 'layer_norm', as in DeBERTa's version 3, got 'none'"),
        ({"position_biased_input": True}, "position_biased_input: expected False, as in DeBERTa's version 3, got True"),
        ({"relative_attention": False}, "relative_attention: expected True, as in DeBERTa's version 3, got False"),
        ({"pos_att_type": ["c2p"]}, r"pos_att_type: expected \['c2p', 'p2c'\], as in .* got \['c2p'\]"),
        ({"embedding_size": 8}, "checkpoint: "),
        ({"legacy": False}, "legacy: expected True, got False"),
    ],
)
def test_options_without_a_counterpart_are_refused(fields, message, tmp_path):
    theirs().save_pretrained(tmp_path)
    rewrite(tmp_path, **fields)
    with pytest.raises(InputError, match=rf"^{message}"):
        load_pretrained(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["encoder.LayerNorm.weight", "encoder.rel_embeddings.weight", "encoder.layer.1.attention.self.key_proj.weight"],
)
def test_a_tensor_that_is_missing_is_named(name, tmp_path):
    theirs().save_pretrained(tmp_path)
    rewrite(tmp_path, lambda state: state.pop(name))
    with pytest.raises(InputError, match=f"^checkpoint: it has no '{name}', which this model needs"):
        load_pretrained(tmp_path)


@torch.no_grad()
def test_attached_scores_do_not_overflow_in_float16():
    """Products with vectors of offsets pass 65,504 before transformers divides them by the root of the width."""
    model = theirs(hidden_size=64, num_attention_heads=1).float().eval()
    for layer in model.encoder.layer:
        for projection in (layer.attention.self.query_proj, layer.attention.self.key_proj):
            torch.nn.init.eye_(projection.weight).mul_(90)
            torch.nn.init.zeros_(projection.bias)
    ids, real = torch.randint(8, 50, (2, 12)), torch.arange(12) < torch.tensor([[12], [7]])
    inputs = {"input_ids": ids, "attention_mask": real.long()}
    expected = model(**inputs).last_hidden_state[real]
    model.half()
    assert model(**inputs).last_hidden_state[real].isnan().any()
    states = attach(model, "none", verify=False)(**inputs).last_hidden_state[real]
    assert (states.float() - expected).abs().max() < 0.01 * expected.abs().max()
