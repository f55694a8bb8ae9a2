"""RoPE over several axes against the modules of transformers."""

import pytest
import torch
import transformers
from transformers.models.dinov3_vit import modeling_dinov3_vit as dinov3
from transformers.models.pixtral import modeling_pixtral as pixtral
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2_vl

from whereformer import Encoder, EncoderConfig, Positions, Site, attach, build_position
from whereformer.errors import InputError

HEADS, HEAD_DIM, ROWS, COLUMNS = 2, 16, 3, 5
SIZES = {"hidden_size": HEADS * HEAD_DIM, "num_heads": HEADS}
THEIRS = {"hidden_size": HEADS * HEAD_DIM, "num_attention_heads": HEADS}
SECTIONS = {"blocks": [2, 3, 3], "interleaved": [4, 2, 2]}
KINDS = {"Qwen2VL": "blocks", "Qwen3VL": "interleaved"}
GRID = {"sections": [4, 4], "arrangement": "axial"}
CELLS = torch.cartesian_prod(torch.arange(ROWS), torch.arange(COLUMNS))[None]


def heads(n, batch=2):
    return torch.randn(2, batch, HEADS, n, HEAD_DIM, dtype=torch.float64)


def turned(query, key, positions, **options):
    position = build_position("rope", **SIZES, **options).double()
    return position.transform_qkv(query, key, key, Site.self_attention(positions))[:2]


def check(actual, expected):
    """Their angles are in float32."""
    torch.testing.assert_close(list(actual), list(expected), rtol=1e-5, atol=1e-5)


def encoder(**options):
    config = EncoderConfig(
        vocab_size=9, **THEIRS, initializer_range=0.3, **{"position": "rope", "blocks": "2", **options}
    )
    return Encoder(config).double().eval()


def text_model(kind):
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": SECTIONS[KINDS[kind]]}
    sizes = {"vocab_size": 50, "num_hidden_layers": 2, "intermediate_size": 32, "head_dim": HEAD_DIM}
    config = getattr(transformers, f"{kind}TextConfig")(**THEIRS, **sizes, num_key_value_heads=1, rope_parameters=rope)
    return getattr(transformers, f"{kind}TextModel")(config).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_text_models_with_images(kind):
    query, key = heads(7)
    positions = torch.randint(0, 50, (2, 7, 3))
    cos, sin = text_model(kind).rotary_emb(query, positions.permute(2, 0, 1))
    actual = turned(query, key, positions, sections=SECTIONS[KINDS[kind]], arrangement=KINDS[kind])
    check(actual, qwen2_vl.apply_rotary_pos_emb(query, key, cos, sin))


@pytest.mark.parametrize(("kind", "base", "part"), [("sliding_attention", 1e4, 1.0), ("full_attention", 1e6, 0.5)])
def test_neomme(kind, base, part):
    module = pytest.importorskip("transformers.models.neomme.modeling_neomme")
    config = transformers.NeoMMEConfig(
        **THEIRS,
        num_key_value_heads=1,
        head_dim=HEAD_DIM,
        rope_parameters={kind: {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": part}},
    )
    query, key = heads(7)
    positions = torch.randint(0, 50, (2, 7, 2))
    cos, sin = module.NeoMMERotaryEmbedding(config)(query, positions.permute(2, 0, 1), kind)
    dim = int(HEAD_DIM * part)
    actual = turned(
        query, key, positions, base=base, rotary_dim=dim, sections=[dim // 4] * 2, arrangement="interleaved"
    )
    check(actual, module.apply_rotary_pos_emb(query, key, cos, sin))


@pytest.mark.parametrize("prefix", [0, 5])
def test_dinov3(prefix):
    """It measures places from -pi to pi; tokens before the patches do not turn."""
    image = torch.zeros(1, 3, 4 * ROWS, 4 * COLUMNS, dtype=torch.float64)
    config = transformers.DINOv3ViTConfig(**THEIRS, image_size=tuple(image.shape[2:]), patch_size=4)
    cos, sin = dinov3.DINOv3ViTRopePositionEmbedding(config).eval()(image)
    query, key = heads(prefix + ROWS * COLUMNS)
    positions = 2 * torch.pi * ((2 * CELLS.double() + 1) / torch.tensor([ROWS, COLUMNS]) - 1)
    actual = turned(
        query, key, torch.cat((positions.new_zeros(1, prefix, 2), positions), 1), base=config.rope_theta, **GRID
    )
    check(actual, dinov3.apply_rotary_pos_emb(query, key, cos, sin))


def test_pixtral_is_interleaved_with_its_features_in_another_order():
    """It has the even pairs of a head first; products of query and key are the same in any order."""
    config = transformers.PixtralVisionConfig(**THEIRS, head_dim=HEAD_DIM, image_size=4 * 8, patch_size=4)
    query, key = heads(ROWS * COLUMNS, 1)
    cos, sin = pixtral.PixtralVisionRotaryEmbedding(config)(query, CELLS[0])
    order = torch.arange(HEAD_DIM).view(2, HEAD_DIM // 4, 2).transpose(1, 2).flatten()
    theirs = pixtral.apply_rotary_pos_emb(query[..., order], key[..., order], cos, sin, unsqueeze_dim=0)
    actual = turned(
        query, key, CELLS, base=config.rope_parameters["rope_theta"], **GRID | {"arrangement": "interleaved"}
    )
    check((one[..., order] for one in actual), theirs)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("arrangement", SECTIONS)
def test_text_turns_as_without_sections(arrangement, layout):
    query, key = heads(7)
    positions = torch.randint(0, 5000, (2, 7))
    for one, same in (
        (positions, positions),
        (positions, positions[..., None].expand(-1, -1, 3)),
        (Positions(3, 1, 7), Positions(3, 1, 7)),
    ):
        actual = turned(query, key, same, sections=SECTIONS[arrangement], arrangement=arrangement, layout=layout)
        assert all(map(torch.equal, actual, turned(query, key, one, layout=layout)))


@pytest.mark.parametrize("options", [{}, {"blocks": "1-1"}, {"causal": True, "position": "rope/none"}], ids=str)
def test_an_encoder_takes_positions_of_several_axes(options):
    model = encoder(**options, position_options={"sections": [4, 4], "arrangement": "interleaved"})
    ids, cells, line = torch.randint(9, (2, 15)), CELLS.expand(2, -1, -1), torch.arange(15)

    def hidden(ids, cells):
        return model(ids, position_ids=cells).last_hidden_state

    expected, actual = hidden(ids, line), hidden(ids, cells)
    torch.testing.assert_close(hidden(ids, line[None, :, None].expand(1, -1, 2)), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(hidden(ids, cells + 7), actual, rtol=1e-10, atol=1e-10)
    assert (actual - expected).abs().max() > 1e-4
    rows = {"position_ids": CELLS.repeat(1, 2, 1), "document_ids": torch.arange(2).repeat_interleave(15)[None]}
    packed = model(ids.view(1, -1), **rows).last_hidden_state
    torch.testing.assert_close(packed.view(actual.shape), actual, rtol=1e-10, atol=1e-10)
    if "causal" in options:
        later = torch.cat((ids[:, :9], ids[:, 9:].flip(1)), 1)
        torch.testing.assert_close(hidden(later, cells)[:, :9], actual[:, :9], rtol=1e-12, atol=1e-12)


def test_methods_that_do_not_take_the_axes_say_so():
    accepts = (
        r"accepts positions \(n,\) or \(batch, n\)%s, got \(1, 15, 2\); rope accepts several axes with its option sec"
    )
    for model, message in (
        (encoder(position="learned"), f"Learned {accepts % ''}"),
        (encoder(), f"Rope {accepts % ''}"),
        (encoder(position_options={"sections": [2, 3, 3]}), rf"Rope {accepts % r' or .batch, n, 3.'}"),
    ):
        with pytest.raises(InputError, match=f"^position_ids: {message}"):
            model(torch.randint(9, (1, 15)), position_ids=CELLS)
    joined = build_position("rope+tisa", **SIZES, sections=[4, 4])
    with pytest.raises(InputError, match=f"^site.query_positions: Tisa {accepts % ''}"):
        joined.attend(torch.randn(1, 15, 32), *torch.randn(3, 1, 2, 15, 16), Site(CELLS, CELLS))
    with pytest.raises(InputError, match=f"^positions: Learned {accepts % ''}"):
        build_position("learned", **SIZES).embed(torch.randn(1, 15, 32), CELLS)


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (CELLS[:, :1], r"expected shape \(1 or 1, 15, axes\), got \(1, 1, 2\)"),
        (CELLS.expand(2, -1, -1), r"expected shape \(1 or 1, 15, axes\), got \(2, 15, 2\)"),
        (CELLS.bool(), r"expected finite numbers, got tensor.*False"),
        (CELLS + 0j, "expected finite numbers, got tensor.*j"),
        (CELLS.where(CELLS != 2, torch.nan), "expected finite numbers, got tensor"),
    ],
)
def test_bad_places_are_refused(cells, message):
    position = build_position("rope", **SIZES, sections=[4, 4])
    with pytest.raises(InputError, match=f"^site.query_positions: {message}"):
        position.attend(torch.randn(1, 15, 32), *torch.randn(3, 1, 2, 15, 16), Site(cells, CELLS))


@pytest.mark.parametrize("kind", KINDS)
def test_models_of_transformers_keep_their_axes(kind):
    model = text_model(kind)
    ids, positions = torch.randint(3, 50, (2, 9)), torch.randint(0, 6, (3, 2, 9)).cumsum(-1)
    mask = torch.tensor([[0] * 3 + [1] * 6, [1] * 9])
    expected = model(ids, position_ids=positions, attention_mask=mask).last_hidden_state[mask == 1]
    assert (expected - model(ids, attention_mask=mask).last_hidden_state[mask == 1]).abs().max() > 1e-3
    with pytest.raises(InputError, match=r"^position: the model already rotates queries and keys, and 'rope' would"):
        attach(model, "rope", sections=[4, 4])
    actual = attach(model, "none")(ids, position_ids=positions, attention_mask=mask).last_hidden_state[mask == 1]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-6)
