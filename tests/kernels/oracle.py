"""An independent attention with all gradients, in float64 NumPy, and bounds on a backend's rounding error.

Shares no code with the package: it is written from the docstrings of ``whereformer.attention`` and its terms. Beside
each number stands a bound on its error, made of what rounding can do and of nothing that was measured:

- A sum of n products in a precision with the unit roundoff u is off by at most ``u * n * sum |products|``. Errors of
  many roundings mostly cancel, and ``8 sqrt(n)`` in place of n holds with all but certainty (Higham and Mary 2019), so
  the smaller of both is taken.
- Scores are off by such a bound, which large biases dominate: beside a bias of 1e4, float32 knows scores to 1e-3 only.
  What that does to the softmax follows from the smallest and largest scores there may be (no derivative is taken, so
  the bound holds however large the error).
- Where one huge bias, the same for all keys that have any weight, leaves nothing of the other terms, a backend may
  compute what is left (equal weights) or the truth (if it takes the bias off first), but nothing else.
- Weights sum to 1 however wrong scores may be, in the backward as in the forward. So what biases do to scores cancels
  in ``sums``: a backward that makes scores again must round biases as the forward did. Products alone may differ in
  their last digits from one time to the next, as libraries take sums apart by the shape of all they are given.
- Inputs of half precision are exact, but backends may round weights, outputs and gradients of scores to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray


@dataclass(frozen=True)
class Precision:
    """What a backend computes in.

    Args:
        unit: the unit roundoff of sums and of the softmax.
        narrow: of the operands of products after the softmax, if they may be narrower than that; else 0.
        narrow_scores: of products before it, likewise.
        smallest: the smallest positive number of the narrow type: what is below half of it is lost.
    """

    unit: float
    narrow: float = 0.0
    narrow_scores: float = 0.0
    smallest: float = 0.0


class Table(NamedTuple):
    """``OffsetBias`` (no width), ``OffsetKeys``, ``OffsetQueries`` or ``OffsetValues``: (heads or 1, T) or (heads or 1,
    T, width); and the factors of queries or keys, if it has any."""

    kind: str
    table: Array
    first: int
    step: int
    factors: Array | None = None

    def rows(self, inputs: Inputs, item: int, head: int, key_head: int) -> tuple[Array, float]:
        """What vectors of keys or queries meet in a head, and the factor on their products."""
        if self.factors is not None:
            return self.factors[item % len(self.factors), head], 1.0
        rows = inputs.query if self.kind == "OffsetKeys" else inputs.key
        assert rows is not None
        return rows[item, head if self.kind == "OffsetKeys" else key_head], inputs.scale


class Factors(NamedTuple):
    """``FactorPair``."""

    query: Array
    key: Array


class Decay(NamedTuple):
    """``DistanceDecay``."""

    query: Array
    key: Array

    def differences(self, item: int, head: int) -> Array:
        query, key = (levels[item % len(levels), head] for levels in self)
        return query[:, None] - key[None, :]


class Dense(NamedTuple):
    """``DenseBias``."""

    scores: Array


@dataclass(frozen=True)
class Inputs:
    """A call, as float64; positions (1 or batch, n), the mask and the ids of queries and keys (batch, n).

    Keys and values may have fewer heads than queries.
    """

    query: Array | None
    key: Array | None
    value: Array
    terms: list[Table | Factors | Decay | Dense]
    scale: float
    causal: bool
    query_positions: Array
    key_positions: Array
    key_mask: Array | None = None
    documents: tuple[Array, Array] | None = None
    window: tuple[int | None, int | None] = (None, None)
    softcap: float | None = None


@dataclass
class Bounded:
    """Numbers and how far from them a backend may be."""

    number: Array
    error: Array

    @classmethod
    def zeros(cls, *shape: int) -> Bounded:
        return cls(np.zeros(shape), np.zeros(shape))

    def add(self, where: Any, number: Array, error: Array) -> None:
        self.number[where] += number
        self.error[where] += error


def terms_in_a_sum(n: int) -> float:
    """How many units of roundoff a sum of n numbers may lose."""
    return min(n, 8 * math.sqrt(n))


class Oracle:
    """All results for a call and the gradient of its output.

    ``results`` has the output as "out", the log of its rows' sums of exponentials as "lse", and the gradients as
    "query", "key", "value" and "terms[0].table" and so on; ``exact`` says whether the truth is wanted where a huge bias
    may or may not swallow all else; ``swallows`` whether that is anywhere the case.
    """

    def __init__(
        self, inputs: Inputs, d_out: Array, precision: Precision, *, exact: bool, d_lse: Array | None = None
    ) -> None:
        self.inputs, self.d_out, self.precision, self.exact = inputs, d_out, precision, exact
        self.swallows = False
        batch, heads, self.n_q, self.value_dim = d_out.shape
        self.n_k = inputs.value.shape[2]
        self.sharing = heads // max(1, inputs.value.shape[1])
        self.d_lse = np.zeros(d_out.shape[:3]) if d_lse is None else d_lse
        self.results = {"out": Bounded.zeros(*d_out.shape), "lse": Bounded.zeros(*d_out.shape[:3])}
        self.results["lse"].number[:] = -np.inf
        for name, array in self.inputs_with_gradients():
            self.results[name] = Bounded.zeros(*array.shape)
        self.mass = Bounded.zeros(batch, heads, self.value_dim)
        self.balance = Bounded.zeros(batch, heads, self.n_q)
        with np.errstate(all="ignore"):
            for item in range(batch):
                for head in range(heads * bool(self.n_q and self.n_k)):
                    self.one_head(item, head)

    def inputs_with_gradients(self) -> list[tuple[str, Array]]:
        """What has a gradient."""
        inputs = self.inputs
        arrays = [("query", inputs.query), ("key", inputs.key), ("value", inputs.value)]
        for index, term in enumerate(inputs.terms):
            match term:
                case Table():
                    which = "query" if term.kind == "OffsetKeys" else "key"
                    arrays += [(f"terms[{index}].table", term.table), (f"terms[{index}].{which}_factors", term.factors)]
                case Decay():
                    arrays += [(f"terms[{index}].{which}_levels", levels) for which, levels in term._asdict().items()]
                case Factors():
                    arrays.append((f"terms[{index}].query_factors", term.query))
                    arrays.append((f"terms[{index}].key_factors", term.key))
                case Dense():
                    arrays.append((f"terms[{index}].scores", term.scores))
        return [(name, array) for name, array in arrays if array is not None]

    def offsets(self, item: int) -> Array:
        queries, keys = self.inputs.query_positions, self.inputs.key_positions
        return keys[item % len(keys)][None, :] - queries[item % len(queries)][:, None]

    def columns(self, term: Table, item: int) -> Array:
        offsets = self.offsets(item).astype(np.int64)
        return np.clip((offsets - term.first) // term.step, 0, term.table.shape[1] - 1)

    def allowed(self, item: int) -> Array:
        inputs = self.inputs
        allowed = np.ones((self.n_q, self.n_k), dtype=bool)
        if inputs.key_mask is not None:
            allowed &= inputs.key_mask[item][None, :]
        offsets = self.offsets(item)
        if inputs.causal:
            allowed &= offsets <= 0
        before, after = inputs.window
        near = np.ones_like(allowed)
        if before is not None:
            near &= offsets >= -before
        if after is not None:
            near &= offsets <= after
        allowed &= near
        if inputs.documents is not None:
            queries, keys = inputs.documents
            allowed &= queries[item][:, None] == keys[item][None, :]
        return allowed

    def one_head(self, item: int, head: int) -> None:
        inputs, precision = self.inputs, self.precision
        unit, narrow = precision.unit, precision.narrow
        allowed = self.allowed(item)
        d_out = self.d_out[item, head]
        # What keys have in common with every query: small scores, and how large their parts are.
        scores = np.zeros((self.n_q, self.n_k))
        parts = np.zeros((self.n_q, self.n_k))
        inner = 0
        biases: list[Array] = []
        query = key = None
        slope = Bounded(np.ones_like(scores), np.zeros_like(scores))
        if inputs.query is not None and inputs.key is not None:
            query, key = inputs.query[item, head], inputs.key[item, head // self.sharing]
            inner += query.shape[1]
            products = inputs.scale * (query @ key.T)
            parts += abs(inputs.scale) * (abs(query) @ abs(key).T)
            if inputs.softcap is not None:
                tangents = np.tanh(products / inputs.softcap)
                products = inputs.softcap * tangents
                rounding = (unit * (terms_in_a_sum(inner) + 6) + 4 * precision.narrow_scores) * parts
                # The slope of the tangent's derivative is at most 0.77.
                slope = Bounded(1 - tangents**2, np.minimum(1.0, 0.77 / inputs.softcap * rounding + 8 * unit))
            scores += products
        columns = {}
        for index, term in enumerate(inputs.terms):
            match term:
                case Table(kind="OffsetBias"):
                    columns[index] = self.columns(term, item)
                    biases.append(term.table[head % len(term.table)][columns[index]])
                case Table(kind="OffsetKeys"):
                    columns[index] = self.columns(term, item)
                    vectors = term.table[head % len(term.table)]
                    rows, scale = term.rows(inputs, item, head, head // self.sharing)
                    inner += len(vectors[0]) * (term.factors is not None)
                    per_offset = scale * (rows @ vectors.T)
                    scores += np.take_along_axis(per_offset, columns[index], 1)
                    # A backend may take a row's first product off the others.
                    parts += (abs(scale) * (abs(rows) @ abs(vectors).T)).max(1, keepdims=True)
                case Table(kind="OffsetQueries"):
                    columns[index] = self.columns(term, item)
                    vectors = term.table[head % len(term.table)]
                    rows, scale = term.rows(inputs, item, head, head // self.sharing)
                    inner += len(vectors[0]) * (term.factors is not None)
                    pairs = np.arange(self.n_k)[None, :], columns[index]
                    scores += scale * (rows @ vectors.T)[pairs]
                    parts += abs(scale) * (abs(rows) @ abs(vectors).T)[pairs]
                case Decay():
                    difference = abs(term.differences(item, head))
                    scores -= difference
                    parts += difference
                case Table():
                    columns[index] = self.columns(term, item)
                case Factors():
                    query_factors = term.query[item % len(term.query), head]
                    key_factors = term.key[item % len(term.key), head]
                    inner += query_factors.shape[1]
                    scores += query_factors @ key_factors.T
                    parts += abs(query_factors) @ abs(key_factors).T
                case Dense():
                    biases.append(term.scores[item % len(term.scores), head])
        for bias in biases:
            allowed &= bias != -np.inf
        attends = allowed.any(1)
        biases = [np.where(allowed, bias, 0.0) for bias in biases]
        weights, weights_error, again, lse = self.softmax(scores, parts, inner, biases, allowed)
        self.results["lse"].number[item, head], self.results["lse"].error[item, head] = lse.number, lse.error

        # The output, row by row: what a key's value and a pair's offset give together.
        value = inputs.value[item, head // self.sharing]
        values = [
            (index, term.table[head % len(term.table)])
            for index, term in enumerate(inputs.terms)
            if isinstance(term, Table) and term.kind == "OffsetValues"
        ]
        long = terms_in_a_sum(self.n_k) + 10
        wide = terms_in_a_sum(self.value_dim) + 10
        # Rounded weights, and each operand and result of a product once more.
        rough = 4 * narrow
        lost = precision.smallest / 2
        out, out_error = np.zeros((self.n_q, self.value_dim)), np.zeros((self.n_q, self.value_dim))
        d_weights, d_weights_size = np.zeros((self.n_q, self.n_k)), np.zeros((self.n_q, self.n_k))
        size = np.zeros((self.n_q, self.value_dim))
        for row in range(self.n_q):
            vectors, sizes = value, abs(value)
            for index, table in values:
                added = table[columns[index][row]]
                vectors, sizes = vectors + added, sizes + abs(added)
            out[row] = weights[row] @ vectors
            size[row] = weights[row] @ sizes
            # Weights sum to 1, so what all vectors have in common does not suffer from their errors.
            out_error[row] = weights_error[row] @ abs(vectors - out[row])
            out_error[row] += lost * (allowed[row] @ sizes)
            d_weights[row] = vectors @ d_out[row]
            d_weights_size[row] = sizes @ abs(d_out[row])
        out_error += (unit * long + rough) * size
        self.results["out"].add((item, head), out, out_error)

        delta = (out * d_out).sum(1, keepdims=True)
        delta_size = (size * abs(d_out)).sum(1, keepdims=True)
        d_weights_error = (unit * wide + 2 * precision.narrow_scores) * d_weights_size
        delta_error = (
            (weights_error * abs(d_weights - delta)).sum(1, keepdims=True)
            + (weights * d_weights_error).sum(1, keepdims=True)
            + (unit * (long + wide) + rough) * delta_size
            + lost * (allowed * d_weights_size).sum(1, keepdims=True)
        )
        d_lse = np.where(attends, self.d_lse[item, head], 0.0)[:, None]
        d_scores = weights * (d_weights - delta + d_lse)
        d_scores_error = (
            (weights_error + again) * abs(d_weights - delta + d_lse)
            + (weights + weights_error) * (d_weights_error + delta_error + 2 * unit * abs(d_lse))
            + (10 * unit + rough) * abs(d_scores)
            + lost * allowed * (1 + d_weights_size + delta_size)
        )

        self.gradients(
            *(item, head, query, key, d_out, columns, slope),
            Bounded(weights, weights_error + again + lost * allowed * (1 + self.n_k * weights)),
            Bounded(d_scores, d_scores_error),
        )
        # What must hold whatever the scores are.
        self.mass.number[item, head] = d_out[attends].sum(0)
        many = long + terms_in_a_sum(self.n_q)
        self.mass.error[item, head] = (unit * many + rough) * abs(d_out[attends]).sum(0)
        self.mass.error[item, head] += again.sum(1) @ abs(d_out)
        self.mass.error[item, head] += lost * (allowed.T @ (1 + self.n_k * abs(d_out))).sum(0)
        balance = (unit * (long + wide) + rough) * ((weights * d_weights_size).sum(1) + delta_size[:, 0])
        balance += (again * abs(d_weights - delta + d_lse)).sum(1) + (unit * (long + 10) + rough) * abs(d_lse[:, 0])
        self.balance.number[item, head] = d_lse[:, 0]
        self.balance.error[item, head] = balance + lost * (allowed * (1 + d_weights_size + delta_size)).sum(1)

    def softmax(
        self, scores: Array, parts: Array, inner: int, biases: list[Array], allowed: Array
    ) -> tuple[Array, Array, Array, Bounded]:
        """The weights, how far from them a backend's may be, how far its weights of two computations may differ, and
        the log of the rows' sums of exponentials."""
        unit, n_k = self.precision.unit, self.n_k
        large = sum(abs(bias) for bias in biases) if biases else np.zeros_like(scores)
        bias = sum(biases) if biases else np.zeros_like(scores)
        # Taken off before the content is added, a huge bias swallows nothing here.
        peak = np.where(allowed, bias, -np.inf).max(1, keepdims=True, initial=-np.inf)
        peak = np.where(np.isfinite(peak), peak, 0.0)
        scores = np.where(allowed, scores + (bias - peak), -np.inf)
        top = scores.max(1, keepdims=True, initial=-np.inf)
        top = np.where(np.isfinite(top), top, 0.0)
        scores = scores - top
        rounding = (unit * (terms_in_a_sum(inner) + 6) + 4 * self.precision.narrow_scores) * parts
        common = 6 * unit * (abs(peak) + abs(top)) + 2 * unit * np.where(allowed, -scores, 0.0)
        weights, error = _between(scores, rounding + 6 * unit * large + common, allowed)

        # Rows in which one bias leaves nothing of all else, and is the same for all keys that can have weight.
        possible = allowed & (weights + error > 1e-30)
        with_bias = np.where(possible, rounding + 6 * unit * (large + abs(scores + peak + top)), 0.0)
        lse = np.log(np.exp(scores).sum(1)) + peak[:, 0] + top[:, 0]
        lse_error = with_bias.max(1, initial=0.0) + unit * (terms_in_a_sum(n_k) + 10) * (1 + abs(lse))
        empty = ~allowed.any(1)
        logs = Bounded(np.where(empty, -np.inf, lse), np.where(empty, 0.0, lse_error))
        largest = np.zeros_like(scores)
        for one_bias in biases:
            largest = np.where(abs(one_bias) > abs(largest), one_bias, largest)
        low = np.where(possible, largest, np.inf).min(1, keepdims=True, initial=np.inf)
        high = np.where(possible, largest, -np.inf).max(1, keepdims=True, initial=-np.inf)
        rest = np.where(possible, parts + (large - abs(largest)), 0.0).max(1, keepdims=True, initial=0.0)
        grain = 2 * unit * 2.0 ** np.floor(np.log2(np.maximum(abs(low), 1e-300)))
        swallowed = (low == high) & (rest < 0.2 * grain)
        # Where that makes no difference, the bounds above do.
        swallowed &= error.max(1, keepdims=True, initial=0.0) > 1e-3
        if swallowed.any():
            self.swallows = True
            if self.exact:
                true, near = _between(scores, rounding + 2 * unit * np.where(allowed, -scores, 0.0), allowed)
            else:
                true, near = possible / np.maximum(possible.sum(1, keepdims=True), 1), np.zeros_like(error)
            weights = np.where(swallowed, true, weights)
            error = np.where(swallowed, near, error)
        error = error + (unit * (terms_in_a_sum(n_k) + 10) + 2 * self.precision.narrow) * weights
        again = 2 * weights * (rounding + 2 * unit * np.where(allowed, -scores, 0.0))
        return weights, error, again, logs

    def gradients(
        self,
        item: int,
        head: int,
        query: Array | None,
        key: Array | None,
        d_out: Array,
        columns: dict[int, Array],
        slope: Bounded,
        weights: Bounded,
        d_scores: Bounded,
    ) -> None:
        """Add what an item's head contributes to all gradients."""
        inputs, results, precision = self.inputs, self.results, self.precision
        batch, heads = self.d_out.shape[:2]
        of_key = item, head // self.sharing
        scale = inputs.scale
        rough = 4 * precision.narrow

        def product(left: Bounded, right: Array, n: int, factor: float = 1.0) -> tuple[Array, Array]:
            error = left.error @ abs(right)
            error += (precision.unit * (terms_in_a_sum(n) + 10) + rough) * (abs(left.number) @ abs(right))
            return factor * (left.number @ right), abs(factor) * error

        def transposed(bounded: Bounded) -> Bounded:
            return Bounded(bounded.number.T, bounded.error.T)

        def by_column(bounded: Bounded, column: Array, length: int) -> Bounded:
            """Sums over a row's pairs with the same offset, (rows, length)."""
            rows, num_columns = bounded.number.shape
            cells = (np.arange(rows)[:, None] * length + column).ravel()
            sums = [
                np.bincount(cells, numbers.ravel(), rows * length).reshape(rows, length)
                for numbers in (bounded.number, bounded.error, abs(bounded.number))
            ]
            error = sums[1] + precision.unit * (terms_in_a_sum(num_columns) + 10) * sums[2]
            return Bounded(sums[0], error)

        # A sum may go on over all heads and items of the batch.
        all_rows = self.n_q * batch * heads
        results["value"].add(of_key, *product(transposed(weights), d_out, self.n_q * self.sharing))
        if query is not None and key is not None:
            d_products = Bounded(
                d_scores.number * slope.number, d_scores.error * slope.number + abs(d_scores.number) * slope.error
            )
            results["query"].add((item, head), *product(d_products, key, self.n_k, scale))
            results["key"].add(of_key, *product(transposed(d_products), query, self.n_q * self.sharing, scale))
        for index, term in enumerate(inputs.terms):
            name = f"terms[{index}]"
            match term:
                case Table(kind="OffsetBias"):
                    sums = by_column(d_scores, columns[index], term.table.shape[1])
                    ones = np.ones((self.n_q, 1))
                    number, error = product(transposed(sums), ones, self.n_k + all_rows)
                    results[f"{name}.table"].add(head % len(term.table), number[:, 0], error[:, 0])
                case Table(kind="OffsetKeys" | "OffsetQueries"):
                    table, of_queries = term.table[head % len(term.table)], term.kind == "OffsetQueries"
                    rows, factor = term.rows(inputs, item, head, head // self.sharing)
                    if of_queries:
                        sums = by_column(transposed(d_scores), columns[index].T, len(table))
                    else:
                        sums = by_column(d_scores, columns[index], len(table))
                    owner = of_key if of_queries else (item, head)
                    what, n = ("key", self.n_q * self.sharing) if of_queries else ("query", self.n_k)
                    if term.factors is not None:
                        owner, n = (item % len(term.factors), head), n * batch
                        what = f"{name}.{what}_factors"
                    results[what].add(owner, *product(sums, table, n, factor))
                    table_gradient = product(
                        transposed(sums), rows, (self.n_k if of_queries else self.n_q) * batch * heads, factor
                    )
                    results[f"{name}.table"].add(head % len(term.table), *table_gradient)
                case Decay():
                    sign = np.sign(term.differences(item, head))
                    of_pairs = Bounded(d_scores.number * sign, d_scores.error * abs(sign))
                    for which, pairs_by_row, factor in (("query", of_pairs, -1), ("key", transposed(of_pairs), 1)):
                        rows, num_columns = pairs_by_row.number.shape
                        number, error = product(pairs_by_row, np.ones((num_columns, 1)), num_columns * batch, factor)
                        owner = item % len(getattr(term, which)), head
                        results[f"{name}.{which}_levels"].add(owner, number[:, 0], error[:, 0])
                case Table():
                    sums = by_column(weights, columns[index], term.table.shape[1])
                    table_gradient = product(transposed(sums), d_out, all_rows)
                    results[f"{name}.table"].add(head % len(term.table), *table_gradient)
                case Factors():
                    query_factors = term.query[item % len(term.query), head]
                    key_factors = term.key[item % len(term.key), head]
                    owner = item % len(term.query), head
                    results[f"{name}.query_factors"].add(owner, *product(d_scores, key_factors, self.n_k * batch))
                    key_gradient = product(transposed(d_scores), query_factors, self.n_q * batch)
                    results[f"{name}.key_factors"].add((item % len(term.key), head), *key_gradient)
                case Dense():
                    error = d_scores.error + precision.unit * batch * abs(d_scores.number)
                    results[f"{name}.scores"].add((item % len(term.scores), head), d_scores.number, error)

    def sums(self, name: str, gradient: Array, narrow: float) -> list[tuple[str, Array, Array, Array]]:
        """Sums over a gradient that scores' errors leave alone: what of, what it is, should be, and how far it may be.

        ``narrow`` is the unit roundoff of the gradient's type.
        """
        mass, unit = self.mass, self.precision.unit
        if name == "value":
            number, error = (
                array.reshape(len(array), array.shape[1] // self.sharing, self.sharing, array.shape[2]).sum(2)
                for array in (mass.number, mass.error)
            )
            error = error + (narrow + unit) * abs(gradient).sum(2)
            return [("sum over keys of its gradient", gradient.sum(2), number, error)]
        if not name.startswith("terms"):
            return []
        term = self.inputs.terms[int(name[6 : name.index("]")])]
        match term:
            case Table(kind="OffsetBias"):
                number, error = (array.sum((0, 2)) for array in (self.balance.number, self.balance.error))
                error = error + (narrow + unit) * abs(gradient).sum(1)
                return [("sum over offsets of its gradient", gradient.sum(1), number, error)]
            case Table(kind="OffsetValues"):
                over = (0,) if len(term.table) > 1 or mass.number.shape[1] == 1 else (0, 1)
                number, error = (array.sum(over).reshape(len(gradient), -1) for array in (mass.number, mass.error))
                error = error + (narrow + unit) * abs(gradient).sum(1)
                return [("sum over offsets of its gradient", gradient.sum(1), number, error)]
            case Dense() if len(gradient):
                number, error = (
                    array.reshape(len(gradient), len(array) // len(gradient), *array.shape[1:]).sum(1)
                    for array in (self.balance.number, self.balance.error)
                )
                error = error + (narrow + unit) * abs(gradient).sum(3)
                return [("sum over keys of its gradient", gradient.sum(3), number, error)]
        return []


def _between(scores: Array, rounding: Array, allowed: Array) -> tuple[Array, Array]:
    """The softmax of scores, and how far from it that of scores can be which are off by at most ``rounding``."""
    high, low = (np.where(allowed, scores + sign * rounding, -np.inf) for sign in (1, -1))
    weights = _weights(scores, scores)
    highest, lowest = _weights(high, low), _weights(low, high)
    return weights, np.maximum(highest - weights, weights - lowest)


def _weights(scores: Array, other_scores: Array) -> Array:
    """exp(own) over the sum of itself and all exp(others) of the row but its own."""
    minus_infinity = np.full((len(scores), 1), -np.inf)
    before = np.logaddexp.accumulate(np.concatenate((minus_infinity, other_scores[:, :-1]), 1), 1)
    after = np.logaddexp.accumulate(np.concatenate((minus_infinity, other_scores[:, :0:-1]), 1), 1)[:, ::-1]
    rest = np.logaddexp(before, after)
    return np.where(scores == -np.inf, 0.0, 1 / (1 + np.exp(rest - scores)))
