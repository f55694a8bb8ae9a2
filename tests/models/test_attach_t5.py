"""T5's kin: the encoders of T5Gemma 2 and LongT5 are served, or refused with what to do instead."""

import pytest
import torch
from transformers import LongT5Config, LongT5EncoderModel, T5Gemma2Config, T5Gemma2Model
from transformers.models.longt5.modeling_longt5 import LongT5LocalAttention, _get_local_attention_mask

from whereformer import OffsetBias, attach, attention
from whereformer.errors import InputError
from whereformer.positions.t5 import buckets

from ..recipes.sentence_models import SIZES

GROUPS = {"num_key_value_heads": 1, "head_dim": 4, "sliding_window": 8, "pad_token_id": 0}
TEXT = {**SIZES, **GROUPS, "layer_types": ["sliding_attention", "full_attention"]}
IMAGES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}


def test_the_encoder_of_t5gemma_2_is_served_as_a_part():
    torch.manual_seed(0)
    encoder = {"text_config": TEXT, "vision_config": IMAGES, "image_token_index": 49}
    model = T5Gemma2Model(T5Gemma2Config(encoder=encoder, decoder=TEXT)).eval()
    ids, mask = torch.randint(5, 40, (2, 30)), torch.ones(2, 30, dtype=torch.int64)
    mask[1, 20:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids[:, :9]}
    with pytest.raises(InputError, match=r"attach to a part of it: encoder, decoder$"):
        attach(model, "none")
    with torch.no_grad():
        expected = model(**inputs).last_hidden_state
        attach(model.encoder, "none")
        torch.testing.assert_close(model(**inputs).last_hidden_state, expected, atol=1e-5, rtol=1e-4)


def test_the_local_encoder_of_longt5_is_a_bias_in_a_window():
    config = LongT5Config(vocab_size=50, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4, local_radius=7)
    with pytest.raises(InputError, match=r"AttentionInterface; its local attention is T5's bias with window=7, see"):
        attach(LongT5EncoderModel(config), "none")
    with pytest.raises(InputError, match=r"AttentionInterface; global tokens are not supported$"):
        attach(LongT5EncoderModel(LongT5Config(**SIZES, encoder_attention_type="transient-global")), "none")
    torch.manual_seed(0)
    layer, radius = LongT5LocalAttention(config, has_relative_attention_bias=True).eval(), 7
    hidden, real = torch.randn(2, 30, 16), torch.ones(2, 30)
    real[1, 20:] = 0
    expected, _ = layer(hidden, _get_local_attention_mask(real, radius + 1, hidden.device))
    query, key, value = (
        project(hidden).unflatten(2, (4, 4)).transpose(1, 2) for project in (layer.q, layer.k, layer.v)
    )
    table = layer.relative_attention_bias.weight.T[:, buckets(32, 128, True)[128 - radius : 128 + radius + 1]]
    bias = OffsetBias(table, first=-radius)
    out = attention(query, key, value, [bias], window=radius, scale=1.0, key_mask=real.bool())
    torch.testing.assert_close(layer.o(out.transpose(1, 2).flatten(2))[real.bool()], expected[real.bool()])
