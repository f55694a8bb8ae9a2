"""DeBERTa's versions 2 and 3 of transformers as ours: the same numbers and gradients, from files."""

import pytest
import torch

from whereformer import load_pretrained
from whereformer.errors import InputError

from .originals import HEADS, close, make_original, rewrite, run, weighted
from .test_pretrained_bert import SIZES, batch

BASE = {
    **SIZES,
    "max_position_embeddings": 40,
    "relative_attention": True,
    "pos_att_type": ["c2p", "p2c"],
    "type_vocab_size": 2,
}
VERSION3 = {
    "position_buckets": 4,
    "max_relative_positions": 9,
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
}
KINDS = {
    "version 3": {**BASE, **VERSION3},
    "version 2": {**BASE, "max_relative_positions": 5},
    "without buckets or a norm": {**BASE, "share_att_key": True, "position_biased_input": False},
    "of queries alone": {**BASE, **VERSION3, "pos_att_type": "p2c", "norm_rel_ebd": "none"},
    "of keys alone": {**BASE, **VERSION3, "pos_att_type": "c2p", "share_att_key": False},
    "of places alone": {**BASE, "relative_attention": False, "pos_att_type": None},
}


def theirs(kind, head="Model", **changes):
    return make_original("DebertaV2", {**KINDS[kind], **changes}, head)


@pytest.mark.parametrize(
    ("kind", "head"),
    [*((kind, "Model") for kind in KINDS), *(("version 3", head) for head in HEADS if head != "Model")],
)
def test_the_same_states_and_logits(kind, head, tmp_path):
    original = theirs(kind, head)
    original.save_pretrained(tmp_path)
    ours = load_pretrained(tmp_path, dtype=torch.float64)
    assert type(ours) is HEADS[head]
    assert not ours.loading_report.initialised
    assert set(ours.loading_report.kept) == set(ours.state_dict())
    given, own = batch(original.config)
    expected, found = run(original, given), run(ours, own)
    close(found, expected, 1e-5, 1e-6)  # transformers rounds the scale to float32
    weighted(expected).backward()
    weighted(found).backward()
    table = next((p for name, p in ours.named_parameters() if name.endswith("position.table")), None)
    if table is not None and "norm_rel_ebd" not in KINDS[kind]:
        rows = original.base_model.encoder.rel_embeddings.weight.grad
        assert table.grad.shape == rows.shape
        # The copies of the words' projections train apart, but what reaches the table is the same.
        torch.testing.assert_close(table.grad, rows, rtol=1e-5, atol=1e-5)


def test_a_method_can_be_added(tmp_path):
    theirs("version 3").save_pretrained(tmp_path)
    model = load_pretrained(tmp_path, "deberta+tisa")
    assert {name.split(".")[0] for name in model.loading_report.initialised} == {"position"}
    assert all("parts.1" in name for name in model.loading_report.initialised)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"conv_kernel_size": 3}, "conv_kernel_size: the checkpoint has a convolution beside its first layer"),
        ({"embedding_size": 8}, "checkpoint: "),
        ({"legacy": False}, "legacy: expected True, got False"),
        ({"relative_attention": False}, "pos_att_type: expected 'c2p' or 'p2c' with relative_attention and only then"),
    ],
)
def test_options_without_a_counterpart_are_refused(fields, message, tmp_path):
    theirs("version 3").save_pretrained(tmp_path)
    rewrite(tmp_path, **fields)
    with pytest.raises(InputError, match=rf"^{message}"):
        load_pretrained(tmp_path)
