"""RoPE over a grid against the modules of DINOv3 and Pixtral in transformers."""

import pytest
import torch
from transformers import BertConfig, BertModel, DINOv3ViTConfig, PixtralVisionConfig
from transformers.models.dinov3_vit import modeling_dinov3_vit as dinov3
from transformers.models.pixtral import modeling_pixtral as pixtral

from whereformer import (
    Encoder,
    EncoderConfig,
    PositionRangeError,
    Positions,
    Site,
    attach,
    build_position,
    position_names,
)

HEADS, HEAD_DIM, ROWS, COLUMNS = 2, 12, 3, 5
SIZES = {"hidden_size": HEADS * HEAD_DIM, "num_heads": HEADS, "max_length": 64, "rows": ROWS, "columns": COLUMNS}


def heads(n):
    return torch.randn(2, 1, HEADS, n, HEAD_DIM, dtype=torch.float64)


def turned(position, query, key):
    at = Positions(0, 1, query.shape[2])
    return position.rotate(query, key, key, Site(at, at))[:2]


@pytest.mark.parametrize("prefix", [0, 1, 5])
def test_dinov3(prefix):
    config = DINOv3ViTConfig(
        hidden_size=HEADS * HEAD_DIM, num_attention_heads=HEADS, image_size=(4 * ROWS, 4 * COLUMNS), patch_size=4
    )
    module = dinov3.DINOv3ViTRopePositionEmbedding(config).eval()
    cos, sin = module(torch.zeros(1, 3, 4 * ROWS, 4 * COLUMNS, dtype=torch.float64))
    query, key = heads(prefix + ROWS * COLUMNS)
    found = turned(build_position("rope2d", **SIZES, prefix=prefix, base=config.rope_theta), query, key)
    # Their angles are in float32.
    torch.testing.assert_close(found, dinov3.apply_rotary_pos_emb(query, key, cos, sin), rtol=1e-5, atol=1e-5)


def test_pixtral():
    config = PixtralVisionConfig(
        hidden_size=HEADS * HEAD_DIM, num_attention_heads=HEADS, head_dim=HEAD_DIM, image_size=4 * 8, patch_size=4
    )
    module = pixtral.PixtralVisionRotaryEmbedding(config)
    query, key = heads(ROWS * COLUMNS)
    places = torch.cartesian_prod(torch.arange(ROWS), torch.arange(COLUMNS))
    cos, sin = module(query, places)
    base = config.rope_parameters["rope_theta"]
    position = build_position("rope2d", **SIZES, base=base, frequencies="alternate", normalize=False)
    expected = pixtral.apply_rotary_pos_emb(query, key, cos, sin, unsqueeze_dim=0)
    torch.testing.assert_close(turned(position, query, key), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("frequencies", ["axial", "alternate"])
@pytest.mark.parametrize("normalize", [False, True])
def test_scores_depend_on_the_offset_in_rows_and_columns_alone(layout, frequencies, normalize):
    options = {"layout": layout, "frequencies": frequencies, "normalize": normalize}
    position = build_position("rope2d", **SIZES, prefix=1, **options).double()
    query, key = (one[:, :, :1].expand(-1, -1, 1 + ROWS * COLUMNS, -1) for one in heads(1))
    query, key = turned(position, query, key)
    scores = (query @ key.mT)[0, 0, 1:, 1:].unflatten(0, (ROWS, COLUMNS)).unflatten(2, (ROWS, COLUMNS))
    torch.testing.assert_close(scores[1:, 1:, 1:, 1:], scores[:-1, :-1, :-1, :-1], rtol=1e-10, atol=1e-10)
    # Another row or another column makes another score.
    found = {round(number, 6) for number in scores[1, 2].flatten().tolist()}
    assert len(found) == ROWS * COLUMNS


def test_positions_beyond_the_grid_are_refused():
    position = build_position("rope2d", **SIZES)
    at = Positions(0, 1, ROWS * COLUMNS + 1)
    query, key = heads(at.length)
    with pytest.raises(PositionRangeError, match=r"^rope2d covers positions 0 to 14 .*, got position 15"):
        position.rotate(query, key, key, Site(at, at))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": None}, "rows: rope2d turns by rows and columns of an image: expected their number, got None"),
        ({"columns": None}, "columns: rope2d turns by rows and columns of an image: expected their number, got None"),
        ({"rows": 0}, "rows: expected at least 1, got 0"),
        ({"columns": -4}, "columns: expected at least 1, got -4"),
        ({"columns": 2.5}, "columns: expected a whole number, got 2.5"),
        ({"rows": 2**20, "columns": 2**20}, "rows: expected at most 2147483647 cells, got 1048576 x 1048576"),
    ],
)
def test_options_that_make_no_grid_are_refused(options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        build_position("rope2d", **{**SIZES, **options})


def test_models_of_text_do_not_take_it_for_rope():
    sizes = {"vocab_size": 9, "hidden_size": 16, "num_attention_heads": 2, "blocks": "1"}
    with pytest.raises(ValueError, match=r"^rows: rope2d turns by rows and columns of an image"):
        Encoder(EncoderConfig(position="rope2d", **sizes))
    with pytest.raises(ValueError, match=r"^rows: rope2d turns by rows and columns of an image"):
        attach(
            BertModel(BertConfig(vocab_size=9, hidden_size=16, num_attention_heads=2, num_hidden_layers=1)), "rope2d"
        )
    assert "rope2d" not in position_names(for_text=True)
    assert position_names(for_text=False) == ["rope2d"]
