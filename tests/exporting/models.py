"""The models that the tests of export share: tiny, and with parameters so large that each one matters."""

import torch

from whereformer import EncoderConfig

LONGEST = 40


def exportable(kind, position, **changes):
    options = {
        "vocab_size": 50,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "blocks": "2",
        "position": position,
        "max_position_embeddings": LONGEST,
        "type_vocab_size": 0,
    }
    model = kind(EncoderConfig(**options | changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return model
