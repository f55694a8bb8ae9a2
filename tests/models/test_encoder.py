"""The encoder: a well-behaved Hugging Face model. That it is BERT or ALBERT, test_pretrained_bert tests."""

import pytest
import torch
import transformers

import whereformer
from whereformer import Encoder, EncoderConfig, EncoderForMaskedLM, PositionRangeError
from whereformer.models import Block, parse_blocks

from .peers import enlarge

POSITIONS = [*whereformer.position_names(), "learned+tisa", "tupe+t5"]

SMALL = {"vocab_size": 50, "hidden_size": 16, "num_attention_heads": 2, "max_position_embeddings": 12}
SMALL |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def small_config(kind=EncoderConfig, **changes):
    return kind(**{**SMALL, "blocks": "2", **changes})


def batch():
    torch.manual_seed(1)
    ids = torch.randint(1, 50, (3, 9))
    mask = torch.ones_like(ids)
    mask[0, 6:] = 0
    types = torch.randint(0, 2, (3, 9))
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("norm", ["pre", pytest.param("post", marks=pytest.mark.slow)])
def test_saving_and_loading_changes_nothing(position, norm, tmp_path):
    config = small_config(position=position, norm=norm, embedding_size=8, blocks="1x2")
    model = enlarge(EncoderForMaskedLM(config), 0.01)
    model.save_pretrained(tmp_path)
    inputs = batch()
    expected = model(**inputs, output_hidden_states=True)
    loaded = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
    assert type(loaded) is EncoderForMaskedLM
    assert torch.equal(loaded(**inputs).logits, expected.logits)
    body = transformers.AutoModel.from_pretrained(tmp_path).eval()
    assert type(body) is Encoder
    assert torch.equal(body(**inputs).last_hidden_state, expected.hidden_states[-1])


@pytest.mark.parametrize("position", POSITIONS)
def test_fresh_parameters_follow_the_method_not_the_model(position, tmp_path):
    """Loading a checkpoint without positions draws a method's own initial values, not the linear layers'."""
    Encoder(small_config(position="none")).save_pretrained(tmp_path)
    torch.manual_seed(0)
    model = Encoder.from_pretrained(tmp_path, position=position, max_position_embeddings=12)
    torch.manual_seed(0)
    fresh = whereformer.build_position(position, hidden_size=16, num_heads=2, num_layers=2, max_length=12)
    for (name, ours), expected in zip(model.position.named_parameters(), fresh.parameters(), strict=True):
        assert torch.isfinite(ours).all(), name
        assert abs(ours.std() - expected.std()) <= 0.5 * expected.std() + 1e-8 or ours.numel() < 20, name
        assert abs(ours.mean() - expected.mean()) <= 3 * expected.std() + 1e-8, name


def test_shared_layers_have_positions_of_their_own_in_every_pass():
    model = Encoder(small_config(blocks="1x3", position="tisa"))
    assert len(model.layers) == 1
    assert model.position.amplitude.shape == (3, 2, 5)
    out = model(**batch()).last_hidden_state
    out.backward(torch.randn_like(out))
    gradients = model.position.amplitude.grad
    assert all(gradients[layer].abs().max() > 0 for layer in range(3))
    assert not torch.allclose(gradients[0], gradients[1])


def test_every_layer_runs_as_often_and_in_the_order_that_blocks_says():
    model = Encoder(small_config(blocks="2x3"))
    assert model.passes == (0, 0, 0, 1, 1, 1)
    assert model.config.num_hidden_layers == 6
    assert len(model(**batch(), output_hidden_states=True).hidden_states) == 7


@pytest.mark.parametrize("sparse", [False, True])
def test_the_loss_is_the_mean_over_labels(sparse):
    model = EncoderForMaskedLM(small_config(sparse_prediction=sparse)).eval()
    inputs = batch()
    labels = torch.full_like(inputs["input_ids"], -100)
    labels[0, 1], labels[1, 3], labels[2, 8] = 7, 8, 9
    out = model(**inputs, labels=labels)
    logits = model(**inputs).logits
    chosen = logits[labels != -100]
    expected = torch.nn.functional.cross_entropy(chosen, torch.tensor([7, 8, 9]))
    torch.testing.assert_close(out.loss, expected)
    torch.testing.assert_close(out.logits, chosen if sparse else logits)
    assert model(**inputs, labels=torch.full_like(labels, -100)).loss.isnan()
    with pytest.raises(ValueError, match=r"^labels: expected shape \(3, 9\), got \(3, 8\)"):
        model(**inputs, labels=labels[:, 1:])


def test_output_embeddings_are_tied_and_resize_together():
    model = EncoderForMaskedLM(small_config())
    assert model.head.decoder.weight is model.encoder.embeddings.word.weight
    model.resize_token_embeddings(60, mean_resizing=False)
    assert model.head.decoder.weight is model.encoder.embeddings.word.weight
    assert model(torch.tensor([[59, 3]])).logits.shape == (1, 2, 60)


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ("12", (Block(12, 1),)),
        ("1x12", (Block(1, 12),)),
        ("6-3x2-3x2", (Block(6, 1), Block(3, 2), Block(3, 2))),
        (4, (Block(4, 1),)),
    ],
)
def test_blocks_notation(blocks, expected):
    assert parse_blocks(blocks) == expected


@pytest.mark.parametrize("blocks", ["", "0", "2x0", "4x0", "x3", "4-", "4--4", "-1", "4,4", "two", "a-b"])
def test_bad_blocks_are_named(blocks):
    with pytest.raises(ValueError, match=r"^blocks: expected layers as"):
        EncoderConfig(blocks=blocks)


@pytest.mark.parametrize(
    ("field", "bad", "minimum"),
    [
        *((f"{name}_size", bad, 1) for name in ("vocab", "hidden", "embedding", "intermediate") for bad in (0, -16)),
        ("num_attention_heads", 0, 1),
        ("head_dim", -8, 1),
        ("max_position_embeddings", 0, 1),
        ("type_vocab_size", -1, 0),
    ],
)
def test_numbers_that_are_too_small_are_named(field, bad, minimum):
    with pytest.raises(ValueError, match=f"^{field}: expected at least {minimum}, got {bad}$"):
        small_config(**{field: bad})


@pytest.mark.parametrize("bad", [1.0, 1, -0.1, float("nan")])
def test_attention_cannot_drop_all_weights(bad):
    """Those that stay are divided by the chance to stay."""
    with pytest.raises(ValueError, match=rf"^attention_probs_dropout_prob: expected 0 to 0.99, got {bad}$"):
        small_config(attention_probs_dropout_prob=bad)
    with pytest.raises(ValueError, match=r"^dropout_p: expected a number from 0 to 0.999999, got 1\.0$"):
        whereformer.attention(*torch.randn(3, 1, 2, 4, 8), dropout_p=1.0)


def test_errors_name_the_argument():
    with pytest.raises(ValueError, match="num_attention_heads: 3 heads do not divide hidden_size 16"):
        small_config(num_attention_heads=3)
    with pytest.raises(ValueError, match="norm: expected one of post, pre, got 'sandwich'"):
        small_config(norm="sandwich")
    model = Encoder(small_config())
    with pytest.raises(ValueError, match="input_ids and inputs_embeds"):
        model()
    with pytest.raises(ValueError, match=r"attention_mask: expected shape \(1, 2\), got \(1, 3\)"):
        model(torch.ones(1, 2, dtype=torch.long), attention_mask=torch.ones(1, 3))
    with pytest.raises(PositionRangeError, match=r"covers positions 0 to 11 .* got position 12"):
        model(torch.ones(1, 13, dtype=torch.long))
