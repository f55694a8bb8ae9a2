"""check_position passes every method of the package, and finds what is wrong with broken ones."""

import math
import subprocess
import sys

import pytest
import torch

from tests.positions.stack import METHODS
from whereformer import DenseBias, OffsetBias, position_names
from whereformer.errors import InputError
from whereformer.kernels.terms import offsets_between, position_values
from whereformer.positions import ModelShape, PositionMethod
from whereformer.positions.alibi import Alibi
from whereformer.positions.base import OffsetFunction
from whereformer.positions.kerple import Kerple
from whereformer.positions.learned import Learned
from whereformer.positions.rope import Rope
from whereformer.positions.t5 import T5
from whereformer.positions.testing import check_position
from whereformer.positions.tisa import Tisa


@pytest.mark.parametrize(
    "method",
    # Those with a solver take longest.
    [
        pytest.param(method, marks=pytest.mark.slow) if "floater" in method and method != "floater" else method
        for method in METHODS
    ],
)
def test_every_method_of_the_package_keeps_the_laws(method):
    name, options = METHODS[method]
    check_position(name, **options)


@pytest.mark.parametrize(
    "method",
    [
        name if name == "tupe+t5" else pytest.param(name, marks=pytest.mark.slow)
        for name in METHODS
        if name in position_names() or name.startswith(("t5", "tupe+t5", "synthesizer", "sinusoidal+floater"))
    ],
)
def test_methods_compile_into_one_graph(method):
    name, options = METHODS[method]
    check_position(name, compiles=True, **options)


class Triangle(OffsetFunction):
    """A method of somebody else, as simple as they come: a trained slope up to a distance."""

    def __init__(self, model: ModelShape, *, width: int = 4) -> None:
        super().__init__(model)
        self.width = width
        self.slope = torch.nn.Parameter(torch.ones(model.num_layers, model.num_heads))

    def reset_parameters(self):
        torch.nn.init.ones_(self.slope)

    def reach(self, *, layer=0):
        return self.width

    def curve(self, offsets, *, layer=0):
        values = torch.as_tensor(offsets, device=self.slope.device).to(
            torch.promote_types(self.slope.dtype, torch.float32)
        )
        return torch.einsum("h,...->h...", self.slope[layer].to(values.dtype), values.abs().clamp(max=self.width))


def test_a_class_need_not_be_registered_and_takes_options():
    check_position(Triangle)
    check_position(Triangle, width=2, causal=True, compiles=True)
    check_position(Learned, embedding_size=16)
    check_position(FloatOffsets)


def test_the_callers_random_numbers_stay():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    check_position(Alibi)
    assert torch.equal(torch.rand(2), expected)


class Single(PositionMethod):
    def transform_qkv(self, query, key, value, site):
        return query.float(), key, value


class Lists(Tisa):
    def terms(self, hidden, site):
        return list(super().terms(hidden, site))


class Inplace(PositionMethod):
    def embed(self, hidden, positions):
        return hidden.add_(1.0)


class OtherAlone(PositionMethod):
    def compute_shared(self, site):
        return 2.0

    def transform_qkv(self, query, key, value, site):
        return query * (site.shared or 1.0), key, value


class Noisy(PositionMethod):
    def transform_qkv(self, query, key, value, site):
        return query + torch.randn_like(query), key, value


class Unused(Learned):
    def __init__(self, model):
        super().__init__(model)
        self.spare = torch.nn.Parameter(torch.ones(3))


class Detached(Tisa):
    def _curves(self, offsets, *parameters):
        return super()._curves(offsets, *parameters).detach()


class Forgets(Learned):
    def state_dict(self, *args, **kwargs):
        return {}

    def load_state_dict(self, *args, **kwargs):
        return None


class NeverReset(Triangle):
    def reset_parameters(self):
        pass


class Overwrites(Triangle):
    def reset_parameters(self):
        with torch.no_grad():
            self.slope.fill_(0.25)


class FromTheLength(Learned):
    """Rows by the index in the sequence, wherever the tokens are."""

    def vectors(self, positions, device=None):
        length = position_values(positions).shape[-1]
        return self.weight[:length]


class AffineOnly(Alibi):
    def terms(self, hidden, site):
        offsets = torch.arange(1 - site.key_positions.length, site.key_positions.length)
        return (OffsetBias(self.curve(offsets), 1 - site.key_positions.length),)


class MindsPadding(PositionMethod):
    def transform_qkv(self, query, key, value, site):
        return query * (1 if site.key_mask is None else 2), key, value


class WrongRange(Learned):
    def vectors(self, positions, device=None):
        return self.weight[position_values(positions)]


class Drifts(OffsetFunction):
    def curve(self, offsets, *, layer=0):
        distances = torch.as_tensor(offsets, dtype=torch.float64).abs()
        return -distances.expand(2, *distances.shape)

    def terms(self, hidden, site):
        queries = position_values(site.query_positions, hidden.device)
        offsets = offsets_between(queries, position_values(site.key_positions, hidden.device))
        scores = -offsets.abs() / (queries.abs().unsqueeze(-1) + 1)
        scores = scores.to(torch.float64).unsqueeze(-3).expand(*scores.shape[:-2], 2, *scores.shape[-2:])
        return (DenseBias(scores if scores.dim() == 4 else scores.unsqueeze(0)),)


class OtherCurve(Triangle):
    def curve_per_layer(self, offsets):
        return [2 * curve for curve in super().curve_per_layer(offsets)]

    def terms_at(self, site):
        (term,) = super().terms_at(site)
        if isinstance(term, OffsetBias):
            return (OffsetBias(term.table * 2, term.first),)
        return (DenseBias(term.scores * 2),)


class HalfPositions(Rope):
    def _rotations(self, positions):
        positions = position_values(positions, self._like.device)
        return super()._rotations(
            positions.to(self._like.dtype if self._like.dtype != torch.float64 else positions.dtype)
        )


class LogOfIntegers(Triangle):
    """Logarithms of int64 are float32, whatever the parameters are."""

    def curve(self, offsets, *, layer=0):
        distances = torch.as_tensor(offsets, device=self.slope.device).abs().clamp(max=self.width)
        dtype = torch.promote_types(self.slope.dtype, torch.float32)
        return torch.einsum("h,...->h...", self.slope[layer].to(dtype), torch.log1p(distances).to(dtype))


class SingleLogs(LogOfIntegers):
    def curve(self, offsets, *, layer=0):
        return super().curve(torch.as_tensor(offsets).float(), layer=layer)


class FloatOffsets(Triangle):
    """float32 has these whole numbers, so nothing is lost."""

    def curve(self, offsets, *, layer=0):
        return super().curve(torch.as_tensor(offsets).float(), layer=layer)


class HalfOffsets(Kerple):
    def curve(self, offsets, *, layer=0):
        return super().curve(torch.as_tensor(offsets).to(self.r1.dtype), layer=layer)

    def curve_per_layer(self, offsets):
        return super().curve_per_layer(torch.as_tensor(offsets).to(self.r1.dtype))


class Silent(PositionMethod):
    def transform_qkv(self, query, key, value, site):
        return query * 2, key, value


class Looks(Alibi):
    def terms(self, hidden, site):
        if hidden.sum().item() == math.inf:
            raise RuntimeError
        return super().terms(hidden, site)


class Claims(Learned):
    shift_invariant = True


class ResetsCls(T5):
    def __init__(self, model):
        super().__init__(model, reset_cls=True)
        self.shift_invariant = True


class Extrapolates(Learned):
    extrapolates = True


class Fractions(Learned):
    accepts_fractional = True


@pytest.mark.parametrize(
    ("method", "law", "how"),
    [
        (Single, "Hooks return the declared types", "transform_qkv returned a query of"),
        (Lists, "Hooks return the declared types", "terms returned a list, expected a tuple"),
        (Inplace, "Hooks return the declared types", "hidden states in place"),
        (OtherAlone, "The results that layers share may be left out", "with site.shared and without: differs by"),
        (Noisy, "", "differ"),
        (Unused, "Every parameter has a finite gradient", "spare has no gradient in any layer"),
        (Detached, "Every parameter has a finite gradient", "amplitude has no gradient"),
        (Forgets, "A state dict holds everything", "differs by"),
        (NeverReset, "reset_parameters draws every parameter", "slope after reset_parameters"),
        (Overwrites, "reset_parameters draws every parameter", "slope changes without them"),
        (FromTheLength, "Queries may be any evenly spaced part", "queries at 6, 7"),
        (AffineOnly, "Explicit positions are the same", "AttributeError"),
        (MindsPadding, "Padding changes nothing", "with padding on the right"),
        (WrongRange, "Positions out of range", "IndexError"),
        (Drifts, "The same number added to all positions", "positions from -2 instead of 0"),
        (OtherCurve, "A curve holds the numbers", "weights of the terms and of the curve"),
        (Silent, "Query and key may be left out, unless needs_query_key states", "transform_qkv changes the query"),
        (LogOfIntegers, "In float64, curves, terms and features have the precision", "differs by [1-9].*e-0[78]"),
        (SingleLogs, "In float64, curves, terms and features have the precision", "differs by [1-9].*e-0[78]"),
        (HalfPositions, "bfloat16 rounds the output", "positions from 513"),
        (HalfOffsets, "bfloat16 rounds the output", "the curve of parameters in bfloat16"),
        (Claims, "The same number added", ""),
        (ResetsCls, "The same number added", ""),
        (Extrapolates, "Positions out of range are", " extrapolates"),
        (Fractions, "Fractional positions", " fractional"),
        (Looks, "On the meta device", "RuntimeError|NotImplementedError|item"),
    ],
)
def test_broken_methods_are_found(method, law, how):
    with pytest.raises(AssertionError, match=rf"^{method.__name__} breaks the law '{law}.*(?:{how})") as caught:
        check_position(method)
    assert "\n" not in str(caught.value)


def test_a_name_that_is_not_registered_breaks_no_law():
    with pytest.raises(InputError, match="position: unknown position method 'fadding'"):
        check_position("fadding")


@pytest.mark.slow
def test_it_needs_torch_alone():
    code = """
import sys, whereformer.positions.testing
whereformer.positions.testing.check_position("tisa")
print("pytest" in sys.modules, "transformers" in sys.modules)
"""
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["False", "False"]
