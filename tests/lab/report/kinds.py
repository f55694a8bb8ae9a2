"""Made-up reports of every kind, for tests that open their pages."""

from tests.lab.report.findings import model_of
from tests.recipes import test_comparison_report as compare
from tests.recipes import test_finetune_report as finetune
from whereformer.lab.report import score_report
from whereformer.lab.report.report import Report
from whereformer.recipes.extend import Extend, ExtendResult
from whereformer.recipes.head_report import build_report
from whereformer.recipes.probe import Probe, ProbeResult


def _probe():
    recipe = Probe(out="x", seeds=2)
    scores = [[0.9876, 0.5, 0.01], [0.1234, 0.1, 0.01], "no positions there"]
    keys = [(seed, task, name) for seed in range(2) for task in recipe.tasks for name in recipe.positions]
    return recipe.report({key: ProbeResult(scores) for key in keys}, range(2))


def _extend():
    result = ExtendResult(40, 3, 16, [[0, 0.9123, 0.8, 0.5], [4, 0.9912, 0.9, 0.75]], 0.8, [3.0, 2.0, 1.5, 1.25])
    return Extend(model="m", out="x", steps=4).report(result)


def _pretrain():
    losses = [(step, 5 - step / 100) for step in range(1, 100)]
    return Report("How well?", ["Well."], score_report.build_sections(losses, [(50, {"loss": 4.5, "accuracy": 0.3})]))


REPORTS = {
    "analyze": lambda: build_report([model_of()]),
    "analyze-wide": lambda: build_report([model_of(heads=12)]),
    "several": lambda: build_report([model_of(f"m{i}", n=16, noise=0.5 + i) for i in range(3)]),
    "compare": lambda: compare.report_of(seeds=2),
    "compare-wide": compare.wide_report,
    "finetune": lambda: finetune.report_of(finetune.TWO),
    "probe": _probe,
    "extend": _extend,
    "pretrain": _pretrain,
}
