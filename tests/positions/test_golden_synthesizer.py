"""Synthesizers equal the authors' two implementations; cases in which those have bugs are left out."""

import pytest
import torch

from tests.golden import check, check_gradients, groups
from tests.positions.layers import install, merge_heads, prepare, split_heads
from whereformer import Positions, Site, attention, attention_weights, build_position

_, MESH = groups("positions/synthesizer_mesh", "factorized_", ("random_", "dense_"))
_, LRA = groups("positions/synthesizer_lra", "dense_bug", "")
FACTORIZED_DENSE, _ = groups("positions/synthesizer_fdense", "fdense_", "dense_")


def synthesizer(*, hidden_size, heads, head_dim, max_length, parameters, **options):
    position = build_position(
        "synthesizer", hidden_size=hidden_size, num_heads=heads, head_dim=head_dim, max_length=max_length, **options
    )
    # One layer: the originals' tensors get our leading layer axis.
    tensors = {
        name if name == "alpha" else f"tables__{name}": tensor.unsqueeze(0) for name, tensor in parameters.items()
    }
    return install(position, **tensors)


def mesh_sizes(config):
    """The original's length is always 512; stored is the part that n positions read."""
    return {"hidden_size": config["C"], "heads": config["H"], "head_dim": config["d_kv"], "max_length": config["n"]}


@pytest.mark.parametrize("case", MESH)
def test_layer_equals_mesh_tensorflow(case):
    golden, config = case.tensors(), case.config
    variant, *mixture = config["mode"].split("_")
    content = {"_plus": "add", "_plus_alpha": "mix"}.get("".join(f"_{word}" for word in mixture), "none")
    if variant == "random":
        parameters = {"random": golden["R"].transpose(0, 1)}  # theirs is (query, head, key)
    else:
        # The content query doubles as the hidden layer, without biases; columns of Wq are head-major.
        parameters = {
            "first": golden["Wq"].mT,
            "first_bias": torch.zeros(golden["Wq"].shape[1], dtype=torch.float64),
            "second": golden["pi"],
            "second_bias": torch.zeros(config["n"], dtype=torch.float64),
        }
    if content == "mix":
        parameters["alpha"] = golden["alpha"].squeeze(0)
    position = synthesizer(**mesh_sizes(config), parameters=parameters, variant=variant, content=content)
    # Without content scores one projection serves as key and value.
    names = ("Wq", "Wk", "Wv") if content != "none" else (None, None, "Wkv")
    query, key, value = (name and split_heads(golden["x"] @ golden[name], config["H"]) for name in names)

    # No 1 / sqrt(d): the original folds it into the initial query weights.
    call = prepare(position, query, key, value, hidden=golden["x"])
    scale = 1.0 if content != "none" else None
    out = merge_heads(attention(*call, scale=scale, causal=config["causal"])) @ golden["Wo"]

    check(out, golden["out"], 1e-5)
    check_gradients(golden, out, 5e-5)


def lra_position(golden, config, mode):
    """A Synthesizer with every summand of the mode; theirs are added."""
    parameters = {
        "random": lambda: {"random": golden["random"]},
        "factorized_random": lambda: {"query_factors": golden["random1"], "key_factors": golden["random2"]},
        "dense": lambda: {
            # Theirs are (C, head, d) and (head, d).
            "first": golden["dense_syn_kernel"].flatten(1).mT,
            "first_bias": golden["dense_syn_bias"].flatten(),
            "second": golden["dense_syn_len_kernel"],
            "second_bias": golden["dense_syn_len_bias"],
        },
    }
    options = {"rank": config["k"]} if config["k"] else {}
    return synthesizer(
        hidden_size=config["C"],
        heads=config["H"],
        head_dim=config["d"],
        max_length=config["max_length"],
        parameters={name: tensor for variant in mode.split("+") for name, tensor in parameters[variant]().items()},
        variant=mode,
        mixture="sum",
        content="none" if config["ignore_dot_product"] else "add",
        **options,
    )


def lra_projection(golden, name):
    """(batch, heads, n, d); their kernels are (C, head, d)."""
    projected = torch.einsum("bnc,chd->bhnd", golden["x"], golden[f"{name}_kernel"])
    return projected + golden[f"{name}_bias"].unsqueeze(1)


def lra_output(golden, attended):
    return torch.einsum("bhnd,hdc->bnc", attended, golden["out_kernel"]) + golden["out_bias"]


@pytest.mark.parametrize("case", LRA)
def test_layer_equals_long_range_arena(case):
    golden, config = case.tensors(), case.config
    position = lra_position(golden, config, config["mode"])
    value = lra_projection(golden, "value")
    query = key = None
    if not config["ignore_dot_product"]:
        query, key = lra_projection(golden, "query"), lra_projection(golden, "key")

    call = prepare(position, query, key, value, hidden=golden["x"])
    out = lra_output(golden, attention(*call, causal=config["causal"]))

    check(out, golden["out"], 1e-11)
    check_gradients(golden, out, 1e-11)


def single_head(golden, position):
    """The third party's layer: one head, no output projection."""
    length = golden["x"].shape[1]
    value = (golden["x"] @ golden["Wv"].mT + golden["bv"]).unsqueeze(1)
    terms = position.terms(golden["x"], Site.self_attention(Positions(0, 1, length)))
    return attention(None, None, value, terms).squeeze(1), attention_weights(None, None, value, terms).squeeze(1)


@pytest.mark.parametrize(("reading", "tiling"), [("outer", "pairs"), ("tile", "tile")])
@pytest.mark.parametrize("case", FACTORIZED_DENSE)
def test_factorized_dense_equals_both_readings(case, reading, tiling):
    gradient = f"grad_{{}}_{reading}"
    golden, config = case.tensors(gradient), case.config
    position = synthesizer(
        hidden_size=config["C"],
        heads=1,
        head_dim=config["C"],
        max_length=config["L"],
        parameters={"near": golden["Wa"], "near_bias": golden["ba"], "far": golden["Wb"], "far_bias": golden["bb"]},
        variant="factorized_dense",
        tiling=tiling,
    )

    out, weights = single_head(golden, position)

    check(out, golden[f"out_{reading}"], 1e-12)
    check(weights, golden[f"weights_{reading}"], 1e-12)
    check_gradients(golden, out, 1e-12, gradient=gradient)
