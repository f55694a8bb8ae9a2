"""Measure the errors of the output and of every gradient against float64, beside those of torch's own attention.

An error is the root mean square of the difference from the reference in float64, over that of the reference. Each is
divided by the error of torch's attention without positions in the same dtype: outputs by that of outputs, gradients of
query, key and value by their own, and gradients of tables by that of values. The table has the largest quotient of
each kind of terms, and what it belongs to. The goals are 2 in float32 and 1.25 in bfloat16. In bfloat16 all inputs are
rounded to it, but tables are float32, as in models under autocast.

Run: python benchmarks/exactness.py [--lengths 128,700] [--kinds none,bias,...] [--out FILE]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from attention_kinds import KINDS, Case, make_problem
from attention_ways import FLOOR, Way, backend, make_step
from torch import Tensor

from whereformer.provenance import write_results

GOALS = {"float32": 2.0, "bfloat16": 1.25}
CONTENT = ("output", "query", "key", "value")


def error(got: Tensor, want: Tensor) -> float:
    """Return the size of the difference, relative to that of what is wanted."""
    return float((got.double() - want).norm() / want.norm())


def errors(way: Way, case: Case) -> dict[str, float]:
    """Return the error of the output and of every gradient of a way."""
    problem = way.simplify(make_problem(case, torch.device("cpu")))
    wanted = make_step(backend("reference"), problem.exact())()
    names = (*CONTENT, *problem.parameters)
    return dict(zip(names, map(error, make_step(way, problem)(), wanted), strict=True))


def quotients(case: Case) -> dict[str, float]:
    """Return our errors divided by those of torch's attention without positions."""
    theirs = errors(FLOOR, case)
    return {name: found / theirs.get(name, theirs["value"]) for name, found in errors(backend("auto"), case).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--lengths", default="128,700")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--out", type=Path, help="file for the results, as JSON")
    given = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, dict[str, Any]] = {}
    for dtype, most in GOALS.items():
        for kind in given.kinds.split(","):
            cells = []
            for n in map(int, given.lengths.split(",")):
                found = quotients(Case(kind, n, 2, given.heads, 64, dtype, "training"))
                results.setdefault(f"{dtype} {kind}", {})[str(n)] = found
                name = max(found, key=lambda name: found[name])
                cells.append(f"{found[name]:5.2f} {name}{' (missed)' if found[name] > most else '':9}")
            print(f"{dtype:9} {kind:8} " + " ".join(f"{cell:28}" for cell in cells) + f" goal {most:g}", flush=True)
    if given.out is not None:
        write_results(given.out, {"goals": GOALS, "quotients": results})


if __name__ == "__main__":
    main()
