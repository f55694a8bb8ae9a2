"""Check the GPU kernels on a GPU, in four parts of less than eight minutes each.

    python benchmarks/gpu_check.py --part first --out first.json     # whether it is right; a minute says most
    python benchmarks/gpu_check.py --part speed --out speed.json     # times next to other kernels' times
    python benchmarks/gpu_check.py --part models --out models.json   # training steps of encoders
    python benchmarks/gpu_check.py --part tiles --out tiles.json     # times of other tiles

They need only torch, Triton, NumPy and the source of this project, which need not be installed. Results are printed and
written as they come; if a step fails, its error is written and the others still run.
"""

# ruff: noqa: E402 - the source lies next to this file, installed or not
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
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

import torch
from attention_kinds import BenchProblem, Case, Packed, make_problem
from attention_peers import flex
from attention_ways import DENSE, Way, backend, make_step
from result_files import write_results
from torch import Tensor

from whereformer import OffsetBias, Positions, attention

DEVICE = "cuda"
SECONDS = 450.0
"""For a part; steps that begin later are left out."""

SHAPES = [(16, 1024, 64), (4, 4096, 64), (8, 1024, 128), (2, 4096, 128)]
"""Batch, length and width of a head of the calls to time."""

HEADS = 12

Report = dict[str, Any]
Step = Callable[[], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=list(PARTS), default="first")
    parser.add_argument("--out", type=Path, required=True, help="where to write the JSON")
    parser.add_argument("--quick", action="store_true", help="only the first step of the part")
    parser.add_argument("--only", metavar="STEP", help=argparse.SUPPRESS)
    parser.add_argument("--compile", metavar="WORKER/WORKERS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("gpu_check: needs an NVIDIA GPU, found none")
    if options.compile:
        compile_share(*map(int, options.compile.split("/")))
        return
    started, report = time.monotonic(), {}
    for name, step in PARTS[options.part]():
        if options.only not in (None, name):
            continue
        if options.part in ISOLATED and options.only is None:
            step = partial(isolated, options.part, name)
        begun = time.monotonic()
        if begun - started > SECONDS:
            report[name] = {"error": "out of time"}
        else:
            try:
                report[name] = step()
            except Exception:
                report[name] = {"error": traceback.format_exc()[-3000:]}
        print(f"{name}: {time.monotonic() - begun:.1f} s {json.dumps(report[name], default=str)[:1500]}", flush=True)
        write_results(options.out, report, DEVICE)
        torch.cuda.empty_cache()
        if options.quick:
            break


def isolated(part: str, name: str) -> Report:
    """Run a step in a separate process: after an illegal access, nothing more runs in a process."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "step.json"
        command = [sys.executable, __file__, f"--part={part}", f"--only={name}", f"--out={out}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        if not out.exists():
            raise RuntimeError((done.stdout + done.stderr)[-2000:])
        return json.loads(out.read_text())[name]


# --- the calls


def make_call(name: str, batch: int, heads: int, length: int, dim: int, dtype: str = "bfloat16") -> BenchProblem:
    """Draw the tensors of a call, in the layout that projections produce: (batch, length, heads, dim) in memory.

    The terms' numbers are small, so that queries attend to many keys.
    """
    problem = make_problem(Case(name, length, batch, heads, dim, dtype, "training"), DEVICE)
    content = {part: getattr(problem, part).detach() for part in ("query", "key", "value")}
    laid_out = {part: rows.transpose(1, 2).contiguous().transpose(1, 2) for part, rows in content.items()}
    parameters = {key: (0.3 * tensor.detach()).requires_grad_() for key, tensor in problem.parameters.items()}
    return replace(problem, **{part: rows.requires_grad_() for part, rows in laid_out.items()}, parameters=parameters)


def documents(length: int) -> Report:
    ids = (torch.arange(length, device=DEVICE) // max(length // 5, 1)).unsqueeze(0)
    return {"query_documents": ids, "key_documents": ids}


OPTIONS: dict[str, Callable[[int], Report]] = {
    "": lambda length: {},
    "causal": lambda length: {"causal": True},
    "window": lambda length: {"window": (length // 3, length // 7)},
    "padding": lambda length: {"key_mask": (torch.arange(length, device=DEVICE) < length * 0.8).unsqueeze(0)},
    "packed": documents,
    "ids": lambda length: dict.fromkeys(("query_positions", "key_positions"), torch.arange(length, device=DEVICE)),
    "stride 2": lambda length: dict.fromkeys(("query_positions", "key_positions"), Positions(3, 2, length)),
    "soft cap": lambda length: {"softcap": 5.0},
    "dropout": lambda length: {"dropout_p": 0.2},
    "sinks": lambda length: {"sinks": torch.linspace(-1, 2, 2, device=DEVICE)},
    "sinks of queries": lambda length: {"sinks": torch.linspace(-1, 2, 2 * length, device=DEVICE).view(1, 2, length)},
}

CASES = [
    *((name, "") for name in ("none", "bias", "t5", "shaw", "mirror", "factors", "decay", "dense")),
    *(("bias", option) for option in OPTIONS if option),
    *((name, option) for name in ("none", "t5") for option in ("causal", "window", "packed", "sinks")),
    ("shaw", "causal"),
]
"""Terms and options whose numbers are checked."""


# --- part "first"


def first() -> Iterator[tuple[str, Step]]:
    for name in ("none", "bias"):
        yield f"smoke {name}", partial(correct, name, "", 256)
    yield "compiled beforehand", compile_beforehand
    for length in (1000, 4097):
        for name, option in CASES:
            label = f"{name} {option}".strip()
            yield f"correct {label} n={length}", partial(correct, name, option, length)
    for dtype, dim in (("bfloat16", 128), ("bfloat16", 256), ("float16", 64), ("float32", 64)):
        for name in ("bias", "shaw"):
            yield f"correct {name} {dtype} head {dim}", partial(correct, name, "", 1000, dtype, dim)
    for way in WAYS:
        yield way, partial(same_in, way)
    yield "more than 2**31 numbers", beyond_32_bits
    for length in (16384, 131072):
        for name in ("none", "bias", "t5", "shaw"):
            yield f"memory {name} n={length}", partial(memory, name, length)


def compute(call: BenchProblem, backend_name: str) -> list[Tensor]:
    """Return the output and all gradients."""
    torch.manual_seed(3)  # for dropout
    return make_step(backend(backend_name), call)()


def errors(actual: list[Tensor], expected: list[Tensor]) -> list[float]:
    """Return the relative error of each tensor."""
    pairs = zip(actual, expected, strict=True)
    return [float((one.double() - two).norm() / two.norm().clamp_min(1e-30)) for one, two in pairs]


def correct(name: str, option: str, length: int, dtype: str = "bfloat16", dim: int = 64) -> Report:
    """Compare with float64, next to blockwise attention in the same dtype; and ten runs with one another."""
    call = replace(make_call(name, 1, 2, length, dim, dtype), options=OPTIONS[option](length))
    tensors, exact = compute(call, "triton"), compute(call.exact(), "reference")
    ours, plain = errors(tensors, exact), errors(compute(call, "blockwise"), exact)
    same = all(all(map(torch.equal, tensors, compute(call, "triton"))) for _ in range(9))
    return {
        "errors": [error if math.isfinite(error) else str(error) for error in ours],
        "blockwise": plain,
        "ok": max(ours) <= 2 * max(plain),
        "same bits ten times": same,
    }


def compile_beforehand() -> Report:
    """Compile the kernels of all cases in parallel; Triton keeps them on disk."""
    workers = max(1, min(16, len(os.sched_getaffinity(0))))
    command = [sys.executable, __file__, "--out=unused"]
    running = [subprocess.Popen([*command, f"--compile={worker}/{workers}"]) for worker in range(workers)]
    return {"workers": workers, "failed": sum(process.wait() != 0 for process in running)}


def compile_share(worker: int, workers: int) -> None:
    """Compile every case whose turn it is, for lengths that divide by 16 and others."""
    cases = [(*case, length) for case in CASES for length in (1024, 1000, 4097)]
    for name, option, length in cases[worker::workers]:
        compute(replace(make_call(name, 1, 2, length, 64), options=OPTIONS[option](length)), "triton")


WAYS = ("a CUDA graph", "torch.compile", "a second stream", "autocast", "sequences without padding", "shared keys")


def same_in(way: str) -> Report:
    """Compute a call in another way, and compare with the plain call."""
    length = 1000
    call = make_call("grouped" if way == "shared keys" else "bias", 1, 4, length, 64)

    def attend(query: Tensor, key: Tensor, value: Tensor, table: Tensor) -> Tensor:
        return attention(query, key, value, [OffsetBias(table, 1 - length)], backend="triton")

    plain = attend(*call.inputs)
    d_out = torch.randn_like(plain)
    expected = [plain, *torch.autograd.grad(plain, call.inputs, d_out)]
    step: Callable[..., Tensor] = attend
    outside: Any = nullcontext()
    match way:
        case "torch.compile":
            step = torch.compile(attend)
        case "a second stream":
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            outside = torch.cuda.stream(stream)
        case "autocast":
            outside = torch.autocast("cuda", torch.bfloat16)
        case "sequences without padding":
            starts = torch.tensor([0, length], dtype=torch.int32, device=DEVICE)
            packed = Packed(**vars(call), lengths=[length], starts=starts)
            step = lambda *inputs: packed.attend("triton")  # noqa: E731
        case "shared keys":
            step = lambda query, key, value, table: attend(  # noqa: E731
                query, key.repeat_interleave(4, 1), value.repeat_interleave(4, 1), table
            )
        case "a CUDA graph":
            # All of it is on a separate stream: nothing may wait for the default one while it is captured.
            side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                leaves = [tensor.detach().requires_grad_() for tensor in call.inputs]

                def train() -> list[Tensor]:
                    out = attend(*leaves)
                    return [out, *torch.autograd.grad(out, leaves, d_out)]

                train()
                side.synchronize()
                with torch.cuda.graph(graph, stream=side):
                    captured = train()
            graph.replay()
            torch.cuda.synchronize()
            return {"errors": errors(captured, [tensor.double() for tensor in expected])}
    with outside:
        out = step(*call.inputs)
        actual = [out, *torch.autograd.grad(out, call.inputs, d_out)]
    torch.cuda.synchronize()
    return {"errors": errors(actual, [tensor.double() for tensor in expected])}


def beyond_32_bits() -> Report:
    """Compare the last head of tensors with more than 2**31 numbers with the same head by itself."""
    batch, length = 11, 16384
    torch.manual_seed(0)
    with torch.no_grad():
        query, key = (torch.randn(batch, HEADS * 16, length, 64, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
        bias = torch.randn(HEADS * 16, 33, device=DEVICE)
        out = attention(query, key, key, [OffsetBias(bias, -16)], window=256, backend="triton")[-1:, -1:]
        last = query[-1:, -1:], key[-1:, -1:], key[-1:, -1:]
        expected = attention(*last, [OffsetBias(bias[-1:], -16)], window=256, backend="triton")
    return {"numbers": query.numel(), "equal": torch.equal(out, expected)}


def memory(name: str, length: int) -> Report:
    """Measure a training step's peak memory beyond its inputs, in MiB, and in the size of its queries."""
    call = make_call(name, 1, HEADS, length, 64)
    step = make_step(backend("triton"), call)
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    used = torch.cuda.max_memory_allocated() - before
    return {"MiB": round(used / 2**20, 1), "queries": round(used / (call.query.numel() * 2), 2)}


# --- part "speed"


def speed() -> Iterator[tuple[str, Step]]:
    for shape in SHAPES:
        yield f"times {shape}", partial(times, *shape)


def fused(kind: Any) -> Callable[[BenchProblem], Callable[[], Tensor]]:
    """Return how a way computes torch's attention with one of its kernels."""

    def prepare(call: BenchProblem) -> Callable[[], Tensor]:
        def attend() -> Tensor:
            with torch.nn.attention.sdpa_kernel(kind):
                return call.sdpa()

        return attend

    return prepare


def ways_to_attend() -> Iterator[tuple[str, Way, str, bool]]:
    """Yield the calls to time: a name, a way, the kind of terms, and whether they are causal."""
    kinds = torch.nn.attention.SDPBackend
    theirs = {"flash": kinds.FLASH_ATTENTION, "cudnn": kinds.CUDNN_ATTENTION, "efficient": kinds.EFFICIENT_ATTENTION}
    for causal, ending in ((False, ""), (True, " causal")):
        for name, kind in theirs.items():
            yield f"{name}{ending}", Way(name, fused(kind)), "none", causal
        for name in ("none", "bias", "t5", "shaw"):
            yield f"ours {name}{ending}", backend("triton"), name, causal
    yield "dense bias", DENSE, "bias", False
    yield "flex, table learned", Way("flex", flex), "bias", False
    yield "flex, table fixed", Way("flex", flex, simplify=fix_terms), "bias", False


def fix_terms(call: BenchProblem) -> BenchProblem:
    """Return the same call with tables that are not trained."""
    constants = {name: tensor.detach() for name, tensor in call.parameters.items()}
    return replace(call, parameters={}, make_terms=lambda _: call.make_terms(constants))


def times(batch: int, length: int, dim: int) -> Report:
    """Time each way, only forward and with all gradients: milliseconds of the GPU and of the host."""
    report: Report = {}
    for name, way, kind, causal in ways_to_attend():
        try:
            call = replace(make_call(kind, batch, HEADS, length, dim), options={"causal": True} if causal else {})
            forward = replace(call, case=replace(call.case, direction="forward"))
            report[name] = {"forward": timed(make_step(way, forward)), "train": timed(make_step(way, call))}
        except Exception:
            report[name] = {"error": traceback.format_exc()[-800:]}
        print(name, json.dumps(report[name])[:200], flush=True)
    return report


def timed(step: Step, repeats: int = 8) -> Report:
    """Return milliseconds: the sum of the times of a step's kernels, and how long the host takes to launch them."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    host = []
    for _ in range(repeats):
        begun = time.perf_counter()
        step()
        host.append((time.perf_counter() - begun) * 1e3)
        torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            step()
        torch.cuda.synchronize()
    device = sum(event.self_device_time_total for event in profile.key_averages()) / repeats / 1e3
    return {"gpu": round(device, 4), "host": round(statistics.median(host), 4)}


# --- part "tiles"

SWEPT = 4096
"""The length of the calls whose tiles are timed."""


def tiles() -> Iterator[tuple[str, Step]]:
    for dim in (64, 128):
        for name in ("none", "bias", "t5", "shaw", "factors"):
            for kernel in ("forward", "query", "key", *["square"] * (name in ("bias", "t5"))):
                yield f"{kernel} {name} {dim}", partial(swept, kernel, name, dim)


def swept(kernel: str, name: str, dim: int) -> Report:
    """Time a training step with a kernel's tile and with its neighbors, the fastest first, in milliseconds.

    A tile is "rows keys warps stages". A neighbor has one of these doubled or halved, or one stage more or less. Write
    the fastest into the table of kernels/triton/blocks.py, and sweep again, until no neighbor is faster.
    """
    from whereformer.kernels import remember
    from whereformer.kernels.triton import blocks, launch

    batch, usual = 256 // dim, blocks.choose_blocks
    step = make_step(backend("triton"), make_call(name, batch, HEADS, SWEPT, dim))
    chosen: list[blocks.Blocks] = []

    def milliseconds(tile: blocks.Blocks | None) -> float | str:
        def choose(name: str, call: Any) -> blocks.Blocks:
            if name != kernel:
                return usual(name, call)
            chosen.append(tile or usual(name, call))
            return chosen[-1]

        launch.choose_blocks = choose  # type: ignore[assignment, attr-defined]
        remember(True)  # the plans so far have other tiles
        try:
            return float(timed(step)["gpu"])
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:100]

    costs: dict[blocks.Blocks | None, float | str] = {None: milliseconds(None)}
    rows, keys, warps, stages = chosen[0].rows, chosen[0].keys, chosen[0].warps, chosen[0].stages
    around = [(rows * 2, keys), (rows // 2, keys), (rows, keys * 2), (rows, keys // 2)]
    if kernel == "square":
        around = [(rows * 2, rows * 2), (rows // 2, rows // 2)]
    neighbors = [blocks.Blocks(*size, warps, stages) for size in around if min(size) >= 16 and max(size) <= 128]
    neighbors += [blocks.Blocks(rows, keys, count, stages) for count in (warps * 2, warps // 2) if 2 <= count <= 8]
    neighbors += [blocks.Blocks(rows, keys, warps, depth) for depth in (stages + 1, stages - 1) if depth]
    costs |= {tile: milliseconds(tile) for tile in neighbors}
    fastest_first = sorted(costs.items(), key=lambda pair: (isinstance(pair[1], str), pair[1]))
    return {" ".join(map(str, tile.launch_options.values())) if tile else "now": cost for tile, cost in fastest_first}


# --- part "models"


def models() -> Iterator[tuple[str, Step]]:
    for compiled in (False, True):
        for name in ("bert", "none", "tisa", "t5", "shaw", "rope", "learned"):
            label = f"{name} compiled" if compiled else name
            yield label, partial(training_step, name, compiled)


def training_step(name: str, compiled: bool, rows: int = 16, length: int = 512) -> Report:
    """Time a training step of a 12-layer encoder of width 768: transformers' BERT, or ours with a position method."""
    import transformers

    from whereformer import Encoder, EncoderConfig

    torch.manual_seed(0)
    if name == "bert":
        model = transformers.BertModel(transformers.BertConfig(), add_pooling_layer=False)
    else:
        model = Encoder(EncoderConfig(blocks="12", position=name))
    model = model.to(DEVICE).train()
    ids = torch.randint(5, 30000, (rows, length), device=DEVICE)
    run = torch.compile(model) if compiled else model

    def step() -> None:
        with torch.autocast(DEVICE, torch.bfloat16):
            out = run(input_ids=ids).last_hidden_state
        out.float().square().mean().backward()
        model.zero_grad()

    begun = time.monotonic()
    for _ in range(4):
        step()
    torch.cuda.synchronize()
    first = time.monotonic() - begun
    wall = []
    for _ in range(12):
        begun = time.perf_counter()
        step()
        torch.cuda.synchronize()
        wall.append((time.perf_counter() - begun) * 1e3)
    peak = torch.cuda.max_memory_allocated() / 2**20
    return {"ms": round(statistics.median(wall), 2), **timed(step), "MiB": round(peak), "first s": round(first, 1)}


PARTS: dict[str, Callable[[], Iterator[tuple[str, Step]]]] = {
    "first": first,
    "speed": speed,
    "models": models,
    "tiles": tiles,
}
ISOLATED = ("speed", "tiles", "models")
"""Parts whose steps run in separate processes."""

if __name__ == "__main__":
    main()
