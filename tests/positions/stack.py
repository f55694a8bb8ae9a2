"""The smallest model around a position method, run by the tests that hold for all methods."""

import pytest
import torch

from whereformer import build_position, position_names
from whereformer.positions.testing import HEADS, LAYERS, MAX_LENGTH, WIDTH, randomize_parameters

# The authors' five solver steps per position would only take longer, and no sequence here reaches a threshold of 512.
QUICK = {
    "floater": {"substeps": 1},
    "fire": {"initial_threshold": 8.0},
    "deberta": {"num_buckets": 8, "max_distance": 12},
    "inkling": {"rank": 2, "extent": 6},
}

METHODS = {
    **{name: (name, QUICK.get(name, {})) for name in position_names()},
    "sinusoidal blocks": ("sinusoidal", {"layout": "blocks"}),
    "shaw keys": ("shaw", {"values": False}),
    "shaw per head": ("shaw", {"per_head": True, "clip": 3}),
    "shaw values": ("shaw", {"keys": False, "clip": 2}),
    "t5 causal": ("t5", {"causal": True, "num_buckets": 8, "max_distance": 5}),
    "t5 without [CLS]": ("t5", {"reset_cls": True}),
    "floater midpoint": ("floater", {"solver": "midpoint", "substeps": 1}),
    "synthesizer factorized_random": ("synthesizer", {"variant": "factorized_random"}),
    "synthesizer dense": ("synthesizer", {"variant": "dense"}),
    "synthesizer factorized_dense": ("synthesizer", {"variant": "factorized_dense"}),
    "synthesizer factorized_dense tile": ("synthesizer", {"variant": "factorized_dense", "tiling": "tile"}),
    "synthesizer random add": ("synthesizer", {"content": "add"}),
    "synthesizer factorized_random mix": ("synthesizer", {"variant": "factorized_random", "content": "mix"}),
    "synthesizer dense mix": ("synthesizer", {"variant": "dense", "content": "mix"}),
    "synthesizer factorized_dense mix": ("synthesizer", {"variant": "factorized_dense", "content": "mix"}),
    "synthesizer random+dense": ("synthesizer", {"variant": "random+dense"}),
    "synthesizer random+dense sum": ("synthesizer", {"variant": "random+dense", "mixture": "sum", "content": "add"}),
    "synthesizer dense+factorized_dense mix": ("synthesizer", {"variant": "dense+factorized_dense", "content": "mix"}),
    "rope interleaved": ("rope", {"layout": "interleaved"}),
    "rope partial": ("rope", {"rotary_dim": 4}),
    "rope linear": ("rope", {"scaling": {"rope_type": "linear", "factor": 3.0}}),
    "rope yarn": (
        "rope",
        {"scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 4.0}},
    ),
    "rope proportional": ("rope", {"scaling": {"rope_type": "proportional", "partial_rotary_factor": 0.5}}),
    "tisa shared": ("tisa", {"share_layers": True}),
    "tisa without kernels": ("tisa", {"num_kernels": 0}),
    "kerple power": ("kerple", {"variant": "power"}),
    "deberta clipped": ("deberta", {"num_buckets": None, "max_distance": 5}),
    "deberta c2p": ("deberta", {"num_buckets": 8, "max_distance": 12, "p2c": False}),
    "deberta p2c": ("deberta", {"num_buckets": 8, "max_distance": 12, "c2p": False}),
    "fire causal": ("fire", {"causal": True, "initial_threshold": 8.0}),
    "transformer_xl factorized": ("transformer_xl", {"form": "factorized"}),
    "transformer_xl without [CLS]": ("transformer_xl", {"reset_cls": True}),
    "transformer_xl factorized without [CLS]": ("transformer_xl", {"form": "factorized", "reset_cls": True}),
    "rope of axes": ("rope", {"sections": [2, 2], "arrangement": "axial"}),
    "inkling causal": ("inkling", {"causal": True, "rank": 3, "extent": 5, "log_scaling": 3}),
    "inkling far": ("inkling", {"rank": 1, "extent": 3}),
    "fox causal": ("fox", {"causal": True}),
    "logn su": ("logn", {"kind": "su", "train_length": 4}),
    "logn causal": ("logn", {"causal": True}),
    "learned+tisa": ("learned+tisa", {}),
    "tupe+t5": ("tupe+t5", {}),
    "rope+logn": ("rope+logn", {}),
    "rope+shaw": ("rope+shaw", {}),
    "rope+transformer_xl": ("rope+transformer_xl", {"reset_cls": True}),
    "fox+logn": ("fox+logn", {}),
    "sinusoidal+floater": ("sinusoidal+floater", {"substeps": 1}),
}

EACH_METHOD = [
    method if method in position_names() else pytest.param(method, marks=pytest.mark.slow) for method in METHODS
]
"""The same; what is not a method by itself with its own options takes part in slow tests only."""


def build(name, num_layers=LAYERS, *, dtype=torch.float64, **options):
    """The method with parameters far from their small or special initial values, so that each one matters."""
    position = build_position(
        name, hidden_size=WIDTH, num_heads=HEADS, num_layers=num_layers, max_length=MAX_LENGTH, **options
    ).to(dtype)
    randomize_parameters(position)
    return position


def embeddings(length, batch=2, dtype=torch.float64):
    return torch.randn(batch, length, WIDTH, dtype=dtype)


def make(method, **overrides):
    """The method of that name in METHODS."""
    name, options = METHODS[method]
    return build(name, **{**options, **overrides})


def parts_of(method):
    return set(METHODS[method][0].split("+"))
