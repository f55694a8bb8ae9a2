"""Measure the errors of the output and of every gradient against float64, relative to torch's own attention.

An error is the root mean square of the difference from the reference in float64, over the root mean square of the
reference. Each is divided by the error of torch's attention without positions in the same dtype: the output's by the
output's, a gradient's by the gradient's of the same tensor, and a table's by the values'. The table has the largest
quotient of each kind of terms, and the tensor that it belongs to. The goals are 2 in float32 and 1.25 in bfloat16. In
bfloat16 all inputs are rounded to it, but tables are float32, as in models under autocast.

Run: python benchmarks/exactness.py [--lengths 128,700] [--kinds none,bias,...] [--out FILE]
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from attention_kinds import KINDS, Case, make_problem
from attention_ways import FLOOR, Way, backend, make_step
from benchmark import Among, Benchmark, main
from rich.console import Console
from torch import Tensor

from whereformer.lab.recipe import Counts, Names

GOALS = {"float32": 2.0, "bfloat16": 1.25}
CONTENT = ("output", "query", "key", "value")


def error(actual: Tensor, expected: Tensor) -> float:
    """Return the size of the difference, relative to the size of the expected tensor."""
    return float((actual.double() - expected).norm() / expected.norm())


def errors(way: Way, case: Case) -> dict[str, float]:
    """Return the error of the output and of every gradient of a way."""
    problem = way.simplify(make_problem(case))
    expected = make_step(backend("reference"), problem.exact())()
    names = (*CONTENT, *problem.parameters)
    return dict(zip(names, map(error, make_step(way, problem)(), expected), strict=True))


def quotients(case: Case) -> dict[str, float]:
    """Return our errors divided by the errors of torch's attention without positions."""
    theirs = errors(FLOOR, case)
    return {name: error / theirs.get(name, theirs["value"]) for name, error in errors(backend("auto"), case).items()}


@dataclass(frozen=True, kw_only=True)
class Exactness(Benchmark):
    """Measure errors of outputs and gradients relative to the errors of torch's attention."""

    lengths: Counts = (128, 700)
    """Numbers of tokens."""
    kinds: Annotated[Names, Among(KINDS)] = tuple(KINDS)
    """Kinds of terms."""
    heads: int = 3
    """Attention heads."""
    out: Path = Path("runs/exactness.json")

    def measure(self, console: Console) -> dict[str, Any]:
        results: dict[str, dict[str, Any]] = {}
        for dtype, goal in GOALS.items():
            for kind in self.kinds:
                cells = []
                for n in self.lengths:
                    ratios = quotients(Case(kind, n, 2, self.heads, 64, dtype, "training"))
                    results.setdefault(f"{dtype} {kind}", {})[str(n)] = ratios
                    name = max(ratios, key=lambda name: ratios[name])
                    cells.append(f"{ratios[name]:5.2f} {name}{' (missed)' if ratios[name] > goal else '':9}")
                print(f"{dtype:9} {kind:8} " + " ".join(f"{cell:28}" for cell in cells) + f" goal {goal:g}", flush=True)
        return {"goals": GOALS, "quotients": results}


if __name__ == "__main__":
    main(Exactness)
