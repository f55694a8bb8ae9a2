"""FLOATER's trajectories, attention and RoBERTa encoder equal the authors' forks of fairseq.

Left out: the convolutional network ``h`` (cases ``convh_*``), which none of the original models uses and ours lacks,
and the translation model (``model_*``), because its parts are compared.
"""

import pytest
import torch

from tests.golden import Case, check, check_gradients, groups
from tests.positions.layers import check_causal, feed_forward, install, linear, merge_heads, norm, prepare, split_heads
from whereformer import Positions, Site, attention, build_position
from whereformer.positions.floater import STEP

TRAJECTORIES, ATTENTION, _MODELS, _CONVOLUTIONAL = groups("positions/floater", "traj_", "attn_", "model_", "convh_")
[ROBERTA] = groups("positions/floater_roberta", "")
TOLERANCE = 1e-10
FLOW = ("W1", "b1", "W2", "b2")


def floater(initial, flow, heads=1, **options):
    """Our method with ``initial`` (3, layers, width) and the original's W1, b1, W2, b2."""
    _, layers, width = initial.shape
    position = build_position("floater", hidden_size=width, num_heads=heads, num_layers=layers, **options)
    names = ("hidden__weight", "hidden__bias", "out__weight", "out__bias")
    return install(position, initial=initial, **dict(zip(names, flow, strict=True)))


def bundle(initial, flow, n):
    """The trajectory of any number of vectors per layer, (n, *initial.shape); all move independently.

    Ours always has three per layer. The decoder's bundles of four and two run as four and two layers of queries.
    """
    if len(initial) == 3:
        queries_keys_values = initial
    else:
        flat = initial.flatten(0, 1)
        queries_keys_values = torch.stack((flat, torch.zeros_like(flat), torch.zeros_like(flat)))
    trajectory = floater(queries_keys_values, flow).compute_shared(Site.self_attention(Positions(0, 1, n)))
    return trajectory if len(initial) == 3 else trajectory[:, 0].unflatten(1, initial.shape[:2])


@pytest.mark.parametrize("case", TRAJECTORIES)
def test_trajectory_equals_the_original(case):
    golden = case.tensors()
    flow = [golden[name] for name in FLOW]

    trajectory = bundle(golden["proj_bias"], flow, case.config["n"])

    check(torch.arange(case.config["n"], dtype=torch.float64) * STEP, golden["t"], TOLERANCE)
    check(trajectory, golden["traj"], TOLERANCE)
    check_gradients(golden, trajectory, TOLERANCE)
    # The adjoint method, which the authors trained with, agrees only as far as the solver is accurate.
    check_gradients(golden, trajectory, 1e-4, gradient="gadj_{}")


def lengthen(biases, length):
    """Zeros for the positions that only the other side of a cross-attention has."""
    return torch.cat((biases, biases.new_zeros(length - len(biases), *biases.shape[1:])))


@pytest.mark.parametrize("case", ATTENTION)
def test_attention_equals_the_original(case):
    golden, config = case.tensors(), case.config
    memory = golden["y"] if config["cross"] else golden["x"]
    longer = max(config["T"], config["S"])
    # The biases of this case come from no flow; as `shared` they are used as they are. (n, 3, one layer, C)
    biases = torch.stack([lengthen(golden[f"bias_{name}"], longer) for name in "qkv"], 1).unsqueeze(2)
    width = config["C"]
    flow = [torch.zeros(size) for size in ((width, width + 1), (width,), (width, width + 1), (width,))]
    position = floater(torch.zeros(3, 1, width), flow, heads=config["H"])
    # Theirs is time first, and has one matrix with the rows of query, key and value.
    query, key, value = (
        split_heads(source.transpose(0, 1) @ rows.mT, config["H"])
        for source, rows in zip((golden["x"], memory, memory), golden["in_proj"].chunk(3), strict=True)
    )
    positions = (Positions(0, 1, config["T"]), Positions(0, 1, config["S"]))  # in cross-attention both count from 0

    call = prepare(position, query, key, value, shared=biases, positions=positions)
    key_mask = ~golden["key_padding"] if config["padding"] else None
    attended = merge_heads(attention(*call, key_mask=key_mask, causal=config["causal"]))
    out = (attended @ golden["out_w"].mT + golden["out_b"]).transpose(0, 1)

    if config["causal"]:
        check_causal(golden["attn_mask"])  # they add -inf
    check(out, golden["out"], TOLERANCE)
    check_gradients(golden, out, TOLERANCE, cotangent="cot_out")


def post_norm_attention(position, shared, hidden, memory, weights, name, *, layer, positions=None, **options):
    """fairseq's attention with a residual connection and a layer norm after it; its projections have no bias."""
    projections = weights[f"{name}.in_proj_weights"].chunk(3)
    query, key, value = (
        split_heads(source @ rows.mT, position.model.num_heads)
        for source, rows in zip((hidden, memory, memory), projections, strict=True)
    )
    call = prepare(position, query, key, value, layer=layer, shared=shared, positions=positions)
    attended = linear(merge_heads(attention(*call, **options)), weights, f"{name}.out_proj")
    return norm(hidden + attended, weights, f"{name}_layer_norm")


def short_names(case):
    """The stored gradients abbreviate the flow's parameters; use their names for the parameters too."""
    flow = {
        f"proj_flow.layers.{layer}.linear.{part}": f"{short}{number}"
        for number, layer in ((1, 0), (2, 2))
        for part, short in (("weight", "W"), ("bias", "b"))
    }
    names = {name: name.removeprefix("sd:") for name in case.stored}
    return Case(case.config, {flow.get(names[name], names[name]): case.stored[name] for name in names})


@pytest.mark.parametrize("case", ROBERTA)
def test_roberta_encoder_equals_the_original(case):
    """Learned positions at the input, the midpoint rule, and one trajectory through all layers."""
    case = short_names(case)
    golden, config = case.tensors(), case.config
    heads, padding, tokens = config["H"], 1, golden["tokens"]
    real = tokens != padding
    learned = build_position("learned", hidden_size=config["C"], num_heads=heads, max_length=config["max_seq_len"])
    # fairseq's table starts with padding + 1 rows that no position has; positions count real tokens only.
    install(learned, weight=golden["embed_positions.weight"][padding + 1 :])
    hidden = learned.embed(golden["embed_tokens.weight"][tokens], (real.cumsum(-1) - 1).clamp(min=0))
    hidden = norm(hidden, golden, "emb_layer_norm") * real.unsqueeze(-1)

    position = floater(golden["proj_bias"], [golden[name] for name in FLOW], heads, solver=config["solver"])
    slots = Positions(0, 1, config["T"])  # unlike the learned positions, these count padding
    shared = position.compute_shared(Site(slots, slots))
    check(shared, golden["bias"], TOLERANCE)
    for layer in range(config["L"]):
        name = f"layers.{layer}"
        parts = [golden[f"{name}.self_attn.{part}_proj.weight"] for part in "qkv"]
        weights = {**golden, f"{name}.self_attn.in_proj_weights": torch.cat(parts)}
        hidden = post_norm_attention(
            position, shared, hidden, hidden, weights, f"{name}.self_attn", layer=layer, key_mask=real
        )
        hidden = feed_forward(hidden, golden, name)

    check(hidden, golden["final"], TOLERANCE)
    check_gradients(golden, hidden, TOLERANCE)
