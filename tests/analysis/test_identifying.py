"""``identify`` finds the commonest errors of ports, in code that is written as ports are."""

import math

import pytest
import torch

from whereformer import Positions, Site, build_position
from whereformer.analysis import identify
from whereformer.errors import InputError
from whereformer.positions import name_of

SIZES = {"hidden_size": 16, "num_heads": 2, "head_dim": 8, "num_layers": 1, "max_length": 32}


def make(name, **options):
    torch.manual_seed(0)
    method = build_position(name, **SIZES, **options)
    with torch.no_grad():
        for parameter in method.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.5)
    return method


def distances(n, sign=1, off=0):
    return sign * (torch.arange(n) - torch.arange(n)[:, None] + off)


def t5_bias(table, offsets, buckets=32, furthest=128):
    """T5's bias as its ports compute it; the table is (buckets, heads)."""
    half = buckets // 2
    far = offsets.abs().float().clamp(min=1)
    log = half // 2 + (far / (half // 2)).log() / math.log(furthest / (half // 2)) * (half - half // 2)
    near = offsets.abs() < half // 2
    bucket = torch.where(near, offsets.abs(), log.long().clamp(max=half - 1)) + half * (offsets > 0)
    return table[bucket].permute(2, 0, 1)


def port_of_t5(method, sign=1, off=0, transposed=False, scale=True):
    """T5 divides nothing by the width of a head, so its ports in other code often do."""
    weight = method.weight.detach().double()  # (heads, buckets)
    table = weight.reshape(weight.shape[1], -1) if transposed else weight.mT

    def scores(query, key):
        content = query @ key.mT * (8**-0.5 if scale else 1)
        return content + t5_bias(table, distances(query.shape[2], sign, off))

    return scores


def port_of_shaw(method, off=0, sign=1):
    table = method.keys[0].detach().double()

    def scores(query, key):
        rows = distances(query.shape[2], sign, off).clamp(-method.clip, method.clip) + method.clip
        return (query @ key.mT + torch.einsum("bhid,ijd->bhij", query, table[rows])) * 8**-0.5

    return scores


def port_of_rope(layout="half", sign=1, scale=8**-0.5):
    def turn(x):
        angles = sign * torch.arange(x.shape[2])[:, None] * 10_000 ** (-torch.arange(4).double() / 4)
        cos, sin = angles.cos(), angles.sin()
        one, other = x.chunk(2, -1) if layout == "half" else (x[..., ::2], x[..., 1::2])
        turned = one * cos - other * sin, one * sin + other * cos
        return torch.cat(turned, -1) if layout == "half" else torch.stack(turned, -1).flatten(-2)

    return lambda query, key: turn(query) @ turn(key).mT * scale


def test_right_ports_are_right():
    for method, port in (
        (make("t5"), port_of_t5),
        (make("shaw", clip=3, values=False), port_of_shaw),
        (make("rope"), lambda _: port_of_rope()),
    ):
        found = identify(port(method), method)
        assert found.right, str(found)
        assert str(found) == f"these are the scores of {found.method}"


def test_the_wrong_sign_of_offsets():
    method = make("t5")
    found = identify(port_of_t5(method, sign=-1), method)
    assert (found.method, found.reading.changes()) == ("t5", ["sign"])
    assert found.cell is not None
    assert (found.cell.head, found.cell.query, found.cell.key) == (0, 0, 1)
    assert str(found).startswith("t5, but the sign of offsets is wrong (at head 0, query 0, key 1: ")


def test_offsets_that_are_off_by_one():
    method = make("shaw", clip=3, values=False)
    found = identify(port_of_shaw(method, off=1), method)
    assert (found.reading.shift, found.reading.changes()) == (1, ["shift"])
    assert "offsets are off by +1" in str(found)
    both = identify(port_of_shaw(method, off=1, sign=-1), method)
    assert (both.reading.sign, both.reading.shift) == (-1, 1)


def test_ropes_pairing_and_direction():
    found = identify(port_of_rope("interleaved"), make("rope"))
    assert (found.reading.layout, found.reading.changes()) == ("interleaved", ["layout"])
    assert "features are paired as 'interleaved'" in str(found)
    assert identify(port_of_rope("half", sign=-1), make("rope")).reading.changes() == ["sign"]
    assert identify(port_of_rope("half"), make("rope", layout="interleaved")).reading.layout == "half"


def test_a_table_that_is_transposed():
    method = make("t5")
    found = identify(port_of_t5(method, transposed=True), method)
    assert (found.reading.table, found.reading.changes()) == ("taken for its transpose", ["table"])
    assert "a table is taken for its transpose" in str(found)


def test_a_missing_scale():
    found = identify(port_of_rope(scale=1.0), make("rope"))
    assert found.content == pytest.approx(8**0.5)
    assert "query . key is multiplied by 2.82843" in str(found)
    method = make("t5")
    found = identify(port_of_t5(method, scale=False), method)
    assert (found.content, found.position) == (pytest.approx(8**0.5), pytest.approx(1.0))


def test_numbers_and_masks():
    method = make("alibi")
    slopes = torch.tensor([2.0**-4, 2.0**-8])
    bias = -slopes[:, None, None] * distances(9).abs()
    masked = bias.masked_fill(distances(9) > 0, -torch.inf)
    for scores in (bias, masked, bias[None]):
        assert identify(scores, method).right
    for number in (torch.finfo(torch.float16).min, torch.finfo(torch.float32).min, -1e9, -10_000.0):
        assert identify(torch.where(masked.isinf(), bias + number, bias), method).right
    assert identify(2 * bias, method).position == pytest.approx(2.0)
    assert identify(-bias, method).position == pytest.approx(-1.0)


def test_one_of_several_methods():
    methods = {"rope": make("rope"), "t5": make("t5"), "none": make("none")}
    assert identify(port_of_t5(methods["t5"]), methods).method == "t5"
    assert identify(port_of_rope(), methods).method == "rope"
    plain = identify(lambda query, key: query @ key.mT * 8**-0.5, methods)
    assert (plain.method, plain.right) == ("none", True)


def test_a_method_without_content_explains_a_function_alone():
    method = make("synthesizer", variant="random", content="none")
    at = Positions(0, 1, 12)
    own = method.terms(torch.zeros(1, 12, 16), Site(at, at))[0].scores.detach().double()
    assert identify(lambda query, key: own, method, length=12).method == "synthesizer"
    assert identify(lambda query, key: own + query @ key.mT, method, length=12).method is None


def test_scores_that_nothing_explains():
    method = make("t5")
    right = port_of_t5(method)

    def scores(query, key):
        out = right(query, key)
        out[0, 1, 4, 2] += 1
        return out

    found = identify(scores, method)
    assert (found.method, found.right) == (None, False)
    assert (found.cell.head, found.cell.query, found.cell.key) == (1, 4, 2)
    assert str(found).startswith("no method explains these scores; the first that differs is at head 1, query 4, key 2")


def test_arrays_of_numpy():
    method = make("alibi")
    slopes = torch.tensor([2.0**-4, 2.0**-8])
    bias = (-slopes[:, None, None] * distances(9).abs()).numpy()
    assert identify(bias, method).right
    assert identify(bias[:, ::-1, ::-1], method).right
    assert identify(lambda query, key: port_of_rope()(query, key).numpy(), make("rope")).right


def test_methods_are_named_as_they_are_built():
    for name, layers in (("transformer_xl", 1), ("t5+rope", 1), ("tisa/none/rope", 6), ("learned+tisa/learned", 2)):
        method = build_position(name, **{**SIZES, "num_layers": layers})
        assert name_of(method) == name
    plain = identify(lambda query, key: query @ key.mT * 8**-0.5, make("none"))
    assert str(plain) == "these are the scores of none"
    with pytest.raises(InputError, match=r"^scores: transformer_xl reads query and key; expected a function of them"):
        identify(torch.zeros(2, 5, 5), make("transformer_xl"))


NAN = torch.zeros(2, 5, 5).index_put((torch.tensor([1]), torch.tensor([2]), torch.tensor([3])), torch.tensor(torch.nan))


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (NAN, "expected numbers, got NaN at head 1, query 2, key 3"),
        (torch.full((2, 5, 5), -torch.inf), "expected a score that is not masked, got none"),
        (torch.zeros(2, 0, 0), r"expected shape \(heads, n, n\), n of at least 1, got \(2, 0, 0\)"),
        (torch.tensor(1.0), r"expected shape \(heads, n, n\), n of at least 1, got \(\)"),
        (torch.zeros(2, 5, 5, dtype=torch.bool), "expected real numbers, got torch.bool"),
        (None, "expected a tensor, an array or a function of query and key, got None"),
        ([[1.0]], r"expected a tensor, an array or a function of query and key, got \[\[1.0\]\]"),
        (lambda query, key: None, "expected a function that returns a tensor or an array, got None"),
        (lambda query, key: query[0, 0, 0, 0], r"expected shape \(heads, n, n\), n of at least 1, got \(\)"),
    ],
)
def test_bad_scores(scores, message):
    with pytest.raises(InputError, match=f"^scores: {message}$"):
        identify(scores, make("t5"))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("length", 0, "expected at least 1, got 0"),
        ("length", 2.5, "expected a whole number, got 2.5"),
        ("layer", 1, "the method was built for 1 layers, got layer 1, counted from 0; give build_position num_layers"),
        (
            "layer",
            -1,
            "the method was built for 1 layers, got layer -1, counted from 0; give build_position num_layers",
        ),
        ("layer", "0", "expected a whole number, got '0'"),
        ("tolerance", -1, "expected at least 0, got -1"),
        ("tolerance", math.nan, "expected a finite number, got nan"),
        ("methods", "t5", "expected a position method, or several by name, got 't5'"),
        ("methods", {"t5": "t5"}, "expected position methods, got 't5' as 't5'"),
    ],
)
def test_bad_arguments(field, value, message):
    given = {"scores": lambda query, key: query @ key.mT, "methods": make("t5"), field: value}
    with pytest.raises(InputError, match=f"^{field}: {message}$"):
        identify(**given)


def test_bad_input():
    with pytest.raises(InputError, match=r"^scores: rope reads query and key; expected a function of them, got"):
        identify(torch.zeros(2, 5, 5), make("rope"))
    with pytest.raises(InputError, match=r"^scores: expected shape \(2, 5, 5\), got \(3, 5, 5\)$"):
        identify(torch.zeros(3, 5, 5), make("t5"))
    with pytest.raises(InputError, match=r"^methods: expected at least one position method, got none$"):
        identify(torch.zeros(2, 5, 5), {})
    other = build_position("t5", **{**SIZES, "num_heads": 4, "head_dim": 4})
    with pytest.raises(InputError, match=r"^methods: expected the same heads in all, got \[2, 4\] of width \[4, 8\]"):
        identify(torch.zeros(2, 5, 5), {"one": make("t5"), "other": other})
