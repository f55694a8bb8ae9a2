"""Run everything that needs a GPU: tests, correctness at real sizes, timings and memory.

    python benchmarks/gpu_check.py --out gpu.json

If a part fails, its error goes into the JSON and the other parts still run. Ratios are medians over rounds of
``plain / this``, where plain is flash attention without any bias in the same round, so 0.9 is 90% of its speed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from whereformer import OffsetBias, OffsetKeys, OffsetValues, attention
from whereformer.lab.provenance import write_results

DEVICE = "cuda"
HEADS = 12
SHAPES = [(16, 1024, 64), (4, 4096, 64), (8, 1024, 128), (2, 4096, 128)]  # batch, length, head_dim
QUICK_SHAPES = [(1, 128, 64)]
DEADLINE = 460.0  # seconds for everything

Step = Callable[[], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="where to write the JSON")
    parser.add_argument("--skip-tests", action="store_true")
    parser.add_argument("--quick", action="store_true", help="only check that it runs: one small shape, no tests")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("gpu_check: needs an NVIDIA GPU, found none")
    started = time.monotonic()
    report: dict[str, Any] = {}

    def part(name: str, function: Callable[..., Any], *inputs: Any) -> None:
        if time.monotonic() - started > DEADLINE:
            report[name] = {"error": "out of time"}
        else:
            begun = time.monotonic()
            try:
                report[name] = function(*inputs)
            except Exception:
                report[name] = {"error": traceback.format_exc()}
            print(
                f"{name}: {time.monotonic() - begun:.0f} s {json.dumps(report[name], default=str)[:1500]}", flush=True
            )
        write_results(arguments.out, report, "cuda")
        torch.cuda.empty_cache()

    part("counts", counts)
    shapes = QUICK_SHAPES if arguments.quick else SHAPES
    if not (arguments.skip_tests or arguments.quick):
        part("tests", tests, 200.0)
    part("correct", correct, torch.bfloat16, shapes[0][1], 64)
    for shape in shapes[:2]:
        part(f"speed {shape}", speed, *shape)
    if arguments.quick:
        return
    part("correct n=4096", correct, torch.bfloat16, 4096, 64)
    part("memory", memory)
    part("correct d=128", correct, torch.bfloat16, 1024, 128, ("full", "shaw"))
    for shape in SHAPES[2:]:
        part(f"speed {shape}", speed, *shape)
    for dtype in (torch.float16, torch.float32):
        part(f"correct {dtype}", correct, dtype, 1024, 64, ("t5", "shaw"))


def tests(seconds: float) -> dict[str, Any]:
    """Run the test file in several processes, because compiling its many kernels takes long."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    pytest = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    where: dict[str, Any] = {"cwd": Path(__file__).parents[1], "env": environment, "text": True}
    listed = subprocess.run(
        [*pytest, "tests/kernels/test_triton.py", "--collect-only", "-q", "-o", "addopts="],
        **where,
        capture_output=True,
        check=False,
    )
    names = [line for line in listed.stdout.splitlines() if "::" in line]
    if not names:
        return {"error": "no tests", "output": (listed.stdout + listed.stderr)[-3000:]}
    workers = max(1, min(12, os.cpu_count() or 1))
    deadline = time.monotonic() + seconds
    running = []
    for worker in range(workers):
        log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - it must stay open after the loop
        command = [*pytest, "--tb=short", "-v", "-o", "addopts=", *names[worker::workers]]
        running.append((subprocess.Popen(command, **where, stdout=log, stderr=subprocess.STDOUT), log))
    passed, unfinished, failures = 0, 0, []
    for process, log in running:
        try:
            process.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            unfinished += 1
        log.seek(0)
        output = log.read()
        passed += output.count(" PASSED")
        if process.returncode:
            failures.append(output[output.find("= FAILURES") :][-2500:])
        log.close()
    return {"tests": len(names), "passed": passed, "processes that ran out of time": unfinished, "failures": failures}


# --- what the kernels compile to


def counts() -> list[dict[str, Any]]:
    """Count registers, spills and instructions for this GPU, to compare them with the times."""
    major, minor = torch.cuda.get_device_capability()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "counts.json"
        command = [sys.executable, str(Path(__file__).with_name("gpu_static.py")), f"--gpus={10 * major + minor}"]
        subprocess.run([*command, "--dtypes=bfloat16", "--dims=64", f"--out={out}"], check=True, capture_output=True)
        kernels: list[dict[str, Any]] = json.loads(out.read_text())["kernels"]
        return kernels


# --- the variants


def terms_of(name: str, tables: list[Tensor]) -> list[Any]:
    if name == "shaw":
        return [OffsetKeys(tables[0], -16), OffsetValues(tables[1], -16)]
    return [OffsetBias(tables[0], -(tables[0].shape[1] // 2))] if tables else []


def tables_of(name: str, length: int, head_dim: int) -> list[Tensor]:
    shapes: dict[str, list[tuple[int, ...]]] = {
        "none": [],
        "full": [(HEADS, 2 * length - 1)],
        "t5": [(HEADS, 183)],
        "tisa": [(HEADS, 61)],
        "shaw": [(1, 33, head_dim), (1, 33, head_dim)],
    }
    return [(torch.randn(shape, device=DEVICE) * 0.3).requires_grad_() for shape in shapes[name]]


def content(batch: int, length: int, head_dim: int, dtype: torch.dtype) -> list[Tensor]:
    # (batch, length, heads, head_dim) in memory, the layout that projections produce.
    shape = (batch, length, HEADS, head_dim)
    return [torch.randn(shape, device=DEVICE, dtype=dtype).transpose(1, 2).detach().requires_grad_() for _ in range(3)]


# --- correctness


def correct(
    dtype: torch.dtype, length: int, head_dim: int, names: tuple[str, ...] = ("none", "full", "t5", "shaw")
) -> dict[str, Any]:
    """Measure errors against float64, next to those of plain fused attention in the same dtype."""
    found: dict[str, Any] = {}
    torch.manual_seed(0)
    global HEADS
    heads, HEADS = HEADS, 2  # the reference materializes everything in float64
    try:
        inputs = content(1, length, head_dim, dtype)
        d_out = torch.randn_like(inputs[0])

        def gradients(kind: torch.dtype, function: Callable[..., Tensor], tables: list[Tensor]) -> list[Tensor]:
            leaves = [tensor.detach().to(kind).requires_grad_() for tensor in inputs]
            own = [tensor.detach().to(torch.promote_types(kind, torch.float32)).requires_grad_() for tensor in tables]
            out = function(*leaves, own)
            return [out.detach(), *torch.autograd.grad(out, [*leaves, *own], d_out.to(kind))]

        def errors(ours: list[Tensor], truth: list[Tensor]) -> list[float]:
            return [
                float((one.double() - two).norm() / two.norm().clamp_min(1e-30))
                for one, two in zip(ours, truth, strict=True)
            ]

        for causal in (False, True):

            def plain(query: Tensor, key: Tensor, value: Tensor, tables: list[Tensor], causal: bool = causal) -> Tensor:
                return functional.scaled_dot_product_attention(query, key, value, is_causal=causal)

            baseline = max(errors(gradients(dtype, plain, []), gradients(torch.float64, plain, [])))
            for name in names:
                tables = tables_of(name, length, head_dim)

                def ours(
                    query: Tensor,
                    key: Tensor,
                    value: Tensor,
                    tables: list[Tensor],
                    backend: str = "triton",
                    name: str = name,
                    causal: bool = causal,
                ) -> Tensor:
                    return attention(query, key, value, terms_of(name, tables), causal=causal, backend=backend)

                def reference(*arguments: Any, function: Callable[..., Tensor] = ours) -> Tensor:
                    return function(*arguments, backend="reference")

                first, second = (gradients(dtype, ours, tables) for _ in range(2))
                got = errors(first, gradients(torch.float64, reference, tables))
                found[f"{name}{' causal' if causal else ''}"] = {
                    "errors": [error if math.isfinite(error) else str(error) for error in got],
                    "plain": baseline,
                    "ok": max(got) <= 2 * baseline,
                    "deterministic": all(torch.equal(*pair) for pair in zip(first, second, strict=True)),
                }
    finally:
        HEADS = heads
    return found


# --- speed


def speed(batch: int, length: int, head_dim: int) -> dict[str, Any]:
    """Measure speed ratios to flash attention without bias, forward and training, in bfloat16."""
    dtype = torch.bfloat16
    torch.manual_seed(0)
    query, key, value = content(batch, length, head_dim, dtype)
    d_out = torch.randn(batch, length, HEADS, head_dim, device=DEVICE, dtype=dtype).transpose(1, 2)
    results: dict[str, Any] = {}
    steps: dict[str, tuple[Step, Step]] = {}

    def pair(function: Callable[[], Tensor], leaves: list[Tensor]) -> tuple[Step, Step]:
        def forward() -> None:
            with torch.no_grad():
                function()

        def train() -> None:
            torch.autograd.grad(function(), leaves, d_out)

        return forward, train

    def add(name: str, function: Callable[[], Tensor], leaves: list[Tensor]) -> None:
        try:
            ways = pair(function, leaves)
            for step in ways:
                step()
            torch.cuda.synchronize()
            steps[name] = ways
        except Exception:
            results[name] = {"error": traceback.format_exc()[-1500:]}

    content_leaves = [query, key, value]
    for causal in (False, True):
        suffix = " causal" if causal else ""

        def plain(causal: bool = causal) -> Tensor:
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
                return functional.scaled_dot_product_attention(query, key, value, is_causal=causal)

        add(f"plain{suffix}", plain, content_leaves)
        for name in ("none", "full", "t5", "tisa", "shaw"):
            tables = tables_of(name, length, head_dim)

            def ours(name: str = name, tables: list[Tensor] = tables, causal: bool = causal) -> Tensor:
                return attention(query, key, value, terms_of(name, tables), causal=causal, backend="triton")

            add(f"{name}{suffix}", ours, content_leaves + tables)

    table = tables_of("full", length, head_dim)[0]
    offsets = torch.arange(length, device=DEVICE)
    columns = offsets[None, :] - offsets[:, None] + length - 1

    def dense() -> Tensor:
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=table.to(dtype)[:, columns][None])

    if batch * HEADS * length * length * 2 < 40e9:
        add("dense learnable bias", dense, [*content_leaves, table])

    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention)

    def modify(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + table[h, j - i + length - 1]

    def flex() -> Tensor:
        return compiled(query, key, value, score_mod=modify)

    add("flex learnable table", flex, [*content_leaves, table])

    for way, index in (("forward", 0), ("train", 1)):
        times: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(9):
            for name, ways in steps.items():
                times[name].append(timed(ways[index]))
        for name, seconds in times.items():
            base = times["plain causal" if name.endswith("causal") else "plain"]
            ratio = statistics.median(one / two for one, two in zip(base, seconds, strict=True))
            results.setdefault(name, {})[way] = {"ms": round(statistics.median(seconds), 4), "speed": round(ratio, 3)}
    return results


def timed(step: Step, repeats: int = 5) -> float:
    """Return milliseconds per step, by CUDA events, after one warm-up step."""
    step()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        step()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / repeats


def memory() -> dict[str, Any]:
    """Measure a training step's peak memory beyond its inputs, in MiB, at growing lengths."""
    found: dict[str, Any] = {}
    for length in (2048, 4096, 8192, 16384):
        inputs = content(1, length, 64, torch.bfloat16)
        for name in ("plain", "full", "t5", "shaw"):
            try:
                tables = [] if name == "plain" else tables_of(name, length, 64)
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                if name == "plain":
                    out = functional.scaled_dot_product_attention(*inputs)
                else:
                    out = attention(*inputs, terms_of(name, tables), backend="triton")
                torch.autograd.grad(out, [*inputs, *tables], torch.ones_like(out))
                del out
                found[f"{name} n={length}"] = round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)
            except Exception:
                found[f"{name} n={length}"] = traceback.format_exc()[-600:]
    return found


if __name__ == "__main__":
    main()
