"""Check the GPU kernels on a GPU, in six parts of less than eight minutes each.

    python benchmarks/gpu_check.py --part first --out first.json     # whether it is right; a minute says most
    python benchmarks/gpu_check.py --part speed --out speed.json     # times beside those of other kernels
    python benchmarks/gpu_check.py --part models --out models.json   # training steps of encoders
    python benchmarks/gpu_check.py --part tiles --out tiles.json     # times of other tiles
    python benchmarks/gpu_check.py --part tests --out tests.json     # the tests of the kernels
    python benchmarks/gpu_check.py --part lab --out lab.json         # commands: compare and pretrain

They need torch, Triton, NumPy and pytest, and the source of this project, which need not be installed. What was found
is printed and written as it comes; if a step fails, its error is written and the others still run.
"""

# ruff: noqa: E402 - the source lies beside this file, installed or not
from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

import torch
from torch import Tensor
from torch.nn import functional

from whereformer import (
    DenseBias,
    DistanceDecay,
    FactorPair,
    OffsetBias,
    OffsetKeys,
    OffsetQueries,
    OffsetValues,
    Positions,
    attention,
    attention_varlen,
)
from whereformer.provenance import write_results

DEVICE = "cuda"
SECONDS = 450.0
"""For a part; steps that begin later are left out."""

SHAPES = [(16, 1024, 64), (4, 4096, 64), (8, 1024, 128), (2, 4096, 128)]
"""Batch, length and width of a head of what is timed."""

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
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("gpu_check: needs an NVIDIA GPU, found none")
    if given.compile:
        compile_share(*map(int, given.compile.split("/")))
        return
    started, report = time.monotonic(), {}
    for name, step in PARTS[given.part]():
        if given.only not in (None, name):
            continue
        if given.part in ISOLATED and given.only is None:
            step = partial(isolated, given.part, name)
        begun = time.monotonic()
        if begun - started > SECONDS:
            report[name] = {"error": "out of time"}
        else:
            try:
                report[name] = step()
            except Exception:
                report[name] = {"error": traceback.format_exc()[-3000:]}
        print(f"{name}: {time.monotonic() - begun:.1f} s {json.dumps(report[name], default=str)[:1500]}", flush=True)
        write_results(given.out, report, DEVICE)
        torch.cuda.empty_cache()
        if given.quick:
            break


def isolated(part: str, name: str) -> Report:
    """Run a step in a process of its own: after an illegal access, nothing more runs in one."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "step.json"
        command = [sys.executable, __file__, f"--part={part}", f"--only={name}", f"--out={out}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        if not out.exists():
            raise RuntimeError((done.stdout + done.stderr)[-2000:])
        found: Report = json.loads(out.read_text())[name]
        return found


# --- what is computed


def table(*shape: int) -> Tensor:
    return (torch.randn(shape, device=DEVICE) * 0.3).requires_grad_()


def terms_of(name: str, batch: int, heads: int, length: int, dim: int) -> tuple[list[Any], list[Tensor]]:
    """Return the terms with this name, and their tensors."""
    every = 2 * length - 1
    rows = (batch, heads, length)
    shapes: dict[str, list[tuple[int, ...]]] = {
        "none": [],
        "full": [(heads, every)],
        "t5": [(heads, 183)],
        "shaw": [(1, 33, dim), (1, 33, dim)],
        "queries": [(1, 33, dim)],
        "factors": [(*rows, 16), (*rows, 16)],
        "decay": [rows, rows],
        "dense": [(1, heads, length, length)],
    }
    tensors = [table(*shape) for shape in shapes[name]]
    return rebuilt(name, tensors), tensors


def rebuilt(name: str, tensors: list[Tensor]) -> list[Any]:
    """Return the terms with this name of these tensors."""
    match name:
        case "none":
            return []
        case "shaw":
            return [OffsetKeys(tensors[0], -16), OffsetValues(tensors[1], -16)]
        case "queries":
            return [OffsetQueries(tensors[0], -16)]
        case "factors":
            return [FactorPair(*tensors)]
        case "decay":
            return [DistanceDecay(*tensors)]
        case "dense":
            return [DenseBias(tensors[0])]
        case _:
            return [OffsetBias(tensors[0], -(tensors[0].shape[1] // 2))]


Content = tuple[Tensor, Tensor, Tensor]


def content(batch: int, heads: int, length: int, dim: int, dtype: torch.dtype, key_heads: int = 0) -> Content:
    """Draw query, key and value."""

    def drawn(heads: int) -> Tensor:
        # (batch, length, heads, dim) in memory, the layout that projections produce.
        rows = torch.randn((batch, length, heads, dim), device=DEVICE, dtype=dtype)
        return rows.transpose(1, 2).detach().requires_grad_()

    return drawn(heads), drawn(key_heads or heads), drawn(key_heads or heads)


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
    *((name, "") for name in ("none", "full", "t5", "shaw", "queries", "factors", "decay", "dense")),
    *(("full", option) for option in OPTIONS if option),
    *((name, option) for name in ("none", "t5") for option in ("causal", "window", "packed", "sinks")),
    ("shaw", "causal"),
]
"""Terms and options whose numbers are checked."""


# --- part "first"


def first() -> Iterator[tuple[str, Step]]:
    for name in ("none", "full"):
        yield f"smoke {name}", partial(correct, name, "", 256)
    yield "compiled beforehand", compile_beforehand
    for length in (1000, 4097):
        for name, option in CASES:
            label = f"{name} {option}".strip()
            yield f"correct {label} n={length}", partial(correct, name, option, length)
    for dtype, dim in ((torch.bfloat16, 128), (torch.bfloat16, 256), (torch.float16, 64), (torch.float32, 64)):
        for name in ("full", "shaw"):
            label = f"correct {name} {str(dtype)[6:]} head {dim}"
            yield label, partial(correct, name, "", 1000, dtype, dim)
    for way in WAYS:
        yield way, partial(same_in, way)
    yield "more than 2**31 numbers", beyond_32_bits
    for length in (16384, 131072):
        for name in ("none", "full", "t5", "shaw"):
            yield f"memory {name} n={length}", partial(memory, name, length)
    for name in ("full", "shaw"):
        yield f"compute-sanitizer {name}", partial(sanitized, name)


def results_of(
    inputs: Content, name: str, tensors: list[Tensor], d_out: Tensor, options: Report, dtype: torch.dtype, backend: str
) -> list[Tensor]:
    """Return the output and all gradients in a dtype."""
    wide = torch.promote_types(dtype, torch.float32)
    query, key, value = (tensor.detach().to(dtype).requires_grad_() for tensor in inputs)
    own = [tensor.detach().to(wide).requires_grad_() for tensor in tensors]
    torch.manual_seed(3)  # of dropout
    out = attention(query, key, value, rebuilt(name, own), **options, backend=backend)
    return [out.detach(), *torch.autograd.grad(out, [query, key, value, *own], d_out.to(out.dtype))]


def errors(found: list[Tensor], truth: list[Tensor]) -> list[float]:
    """Return the relative error of each tensor."""
    pairs = zip(found, truth, strict=True)
    return [float((one.double() - two).norm() / two.norm().clamp_min(1e-30)) for one, two in pairs]


def correct(name: str, option: str, length: int, dtype: torch.dtype = torch.bfloat16, dim: int = 64) -> Report:
    """Compare with float64, beside blockwise attention in the same dtype; and ten runs with one another."""
    torch.manual_seed(0)
    inputs = content(1, 2, length, dim, dtype)
    _, tensors = terms_of(name, 1, 2, length, dim)
    run = partial(results_of, inputs, name, tensors, torch.randn_like(inputs[0]), OPTIONS[option](length))
    found = run(dtype, "triton")
    truth = run(torch.float64, "reference")
    got, plain = errors(found, truth), errors(run(dtype, "blockwise"), truth)
    same = all(all(torch.equal(*pair) for pair in zip(found, run(dtype, "triton"), strict=True)) for _ in range(9))
    return {
        "errors": [error if math.isfinite(error) else str(error) for error in got],
        "blockwise": plain,
        "ok": max(got) <= 2 * max(plain),
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
        inputs = content(1, 2, length, 64, torch.bfloat16)
        tensors = terms_of(name, 1, 2, length, 64)[1]
        results_of(inputs, name, tensors, inputs[0], OPTIONS[option](length), torch.bfloat16, "triton")


WAYS = ("a CUDA graph", "torch.compile", "a second stream", "autocast", "sequences without padding", "shared keys")


def same_in(way: str) -> Report:
    """Compute a call in another way than plainly, and compare."""
    torch.manual_seed(0)
    length = 1000
    inputs = content(1, 4, length, 64, torch.bfloat16, key_heads=2 if way == "shared keys" else 4)
    bias = table(4, 2 * length - 1)

    def call(query: Tensor, key: Tensor, value: Tensor, numbers: Tensor = bias) -> Tensor:
        return attention(query, key, value, [OffsetBias(numbers, 1 - length)], backend="triton")

    plain = call(*inputs)
    d_out = torch.randn_like(plain)
    expected = [plain, *torch.autograd.grad(plain, [*inputs, bias], d_out)]
    step: Callable[..., Tensor] = call
    outside: Any = nullcontext()
    match way:
        case "torch.compile":
            step = torch.compile(call)
        case "a second stream":
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            outside = torch.cuda.stream(stream)
        case "autocast":
            outside = torch.autocast("cuda", torch.bfloat16)
        case "sequences without padding":
            cu_seqlens = torch.tensor([0, length], dtype=torch.int32, device=DEVICE)

            def packed(*rows: Tensor) -> Tensor:
                query, key, value = (row.squeeze(0).transpose(0, 1) for row in rows)
                terms = [OffsetBias(bias, 1 - length)]
                out = attention_varlen(query, key, value, terms, cu_seqlens_q=cu_seqlens, backend="triton")
                return out.transpose(0, 1).unsqueeze(0)

            step = packed
        case "shared keys":

            def repeated(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
                return call(query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1))

            step = repeated
        case "a CUDA graph":
            # All of it is on a stream of its own: nothing may wait for the default one while it is captured.
            side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                leaves = [each.detach().requires_grad_() for each in (*inputs, bias)]

                def train() -> list[Tensor]:
                    out = call(*leaves)
                    return [out, *torch.autograd.grad(out, leaves, d_out)]

                train()
                side.synchronize()
                with torch.cuda.graph(graph, stream=side):
                    found = train()
            graph.replay()
            torch.cuda.synchronize()
            return {"errors": errors(found, [each.double() for each in expected])}
    with outside:
        out = step(*inputs)
        found = [out, *torch.autograd.grad(out, [*inputs, bias], d_out)]
    torch.cuda.synchronize()
    return {"errors": errors(found, [each.double() for each in expected])}


def beyond_32_bits() -> Report:
    """The last head of tensors with more than 2**31 numbers is what it is alone."""
    batch, length = 11, 16384
    torch.manual_seed(0)
    with torch.no_grad():
        inputs = [torch.randn(batch, HEADS * 16, length, 64, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)]
        query, key = inputs
        bias = table(HEADS * 16, 33).detach()
        whole = attention(query, key, key, [OffsetBias(bias, -16)], window=256, backend="triton")[-1:, -1:]
        last = query[-1:, -1:], key[-1:, -1:], key[-1:, -1:]
        alone = attention(*last, [OffsetBias(bias[-1:], -16)], window=256, backend="triton")
    return {"numbers": query.numel(), "equal": torch.equal(whole, alone)}


def memory(name: str, length: int) -> Report:
    """Measure a training step's peak memory beyond its inputs, in MiB, and in the size of its queries."""
    inputs = content(1, HEADS, length, 64, torch.bfloat16)
    terms, tensors = terms_of(name, 1, HEADS, length, 64)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = attention(*inputs, terms, backend="triton")
    torch.autograd.grad(out, [*inputs, *tensors], torch.ones_like(out))
    used = torch.cuda.max_memory_allocated() - before
    return {"MiB": round(used / 2**20, 1), "queries": round(used / (inputs[0].numel() * 2), 2)}


def sanitized(name: str) -> Report:
    """Run one small call under NVIDIA's compute-sanitizer, where it is installed."""
    if (tool := shutil.which("compute-sanitizer")) is None:
        return {"skipped": "compute-sanitizer is not installed"}
    program = f"import sys; sys.path.insert(0, {str(ROOT / 'benchmarks')!r}); import gpu_check as g; "
    program += f"g.correct({name!r}, '', 200)"
    done = subprocess.run([tool, sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    return {"returned": done.returncode, "output": (done.stdout + done.stderr)[-1500:]}


# --- part "speed"


def speed() -> Iterator[tuple[str, Step]]:
    for shape in SHAPES:
        yield f"times {shape}", partial(times, *shape)


def ways_to_attend(batch: int, length: int, dim: int) -> Iterator[tuple[str, Callable[[], Tensor], list[Tensor]]]:
    """Yield what is timed: a name, the forward pass, and what has gradients."""
    inputs = content(batch, HEADS, length, dim, torch.bfloat16)
    kinds = torch.nn.attention.SDPBackend
    for causal in (False, True):
        ending = " causal" if causal else ""
        others = {
            "flash": kinds.FLASH_ATTENTION,
            "cudnn": kinds.CUDNN_ATTENTION,
            "efficient": kinds.EFFICIENT_ATTENTION,
        }
        for name, kind in others.items():

            def fused(kind: Any = kind, causal: bool = causal) -> Tensor:
                with torch.nn.attention.sdpa_kernel(kind):
                    return functional.scaled_dot_product_attention(*inputs, is_causal=causal)

            yield f"{name}{ending}", fused, [*inputs]
        for name in ("none", "full", "t5", "shaw"):
            terms, tensors = terms_of(name, batch, HEADS, length, dim)
            ours = partial(attention, *inputs, terms, causal=causal, backend="triton")
            yield f"ours {name}{ending}", ours, [*inputs, *tensors]
    numbers = table(HEADS, 2 * length - 1)
    at = torch.arange(length, device=DEVICE)
    columns = at[None, :] - at[:, None] + length - 1

    def dense() -> Tensor:
        mask = numbers.to(torch.bfloat16)[:, columns][None]
        return functional.scaled_dot_product_attention(*inputs, attn_mask=mask)

    yield "dense bias", dense, [*inputs, numbers]
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention)
    for learned in (True, False):
        own = numbers if learned else numbers.detach()

        def modify(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, own: Tensor = own) -> Tensor:
            return score + own[h, j - i + length - 1]

        label = "flex, table learned" if learned else "flex, table fixed"
        yield label, partial(compiled, *inputs, score_mod=modify), [*inputs, own] if learned else [*inputs]


def times(batch: int, length: int, dim: int) -> Report:
    """Time each way, forward alone and with all gradients: milliseconds of the GPU and of the host."""
    found: Report = {}
    for name, forward, leaves in ways_to_attend(batch, length, dim):
        try:
            d_out = torch.randn_like(forward().detach())

            def train(forward: Step = forward, leaves: list[Tensor] = leaves, d_out: Tensor = d_out) -> None:
                torch.autograd.grad(forward(), leaves, d_out)

            with torch.no_grad():
                found[name] = {"forward": timed(forward)}
            found[name]["train"] = timed(train)
        except Exception:
            found[name] = {"error": traceback.format_exc()[-800:]}
        print(name, json.dumps(found[name])[:200], flush=True)
    return found


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
        for name in ("none", "full", "t5", "shaw", "factors"):
            for kernel in ("forward", "query", "key", *["square"] * (name in ("full", "t5"))):
                yield f"{kernel} {name} {dim}", partial(swept, kernel, name, dim)


def swept(kernel: str, name: str, dim: int) -> Report:
    """Time a training step with a kernel's tile and with its neighbors, the fastest first, in milliseconds.

    A tile is "rows keys warps stages". A neighbor has one of these doubled or halved, or one stage more or less. Write
    the fastest into the table of kernels/triton/blocks.py, and sweep again, until no neighbor is faster.
    """
    from whereformer.kernels import remember
    from whereformer.kernels.triton import blocks, launch

    batch, usual = 256 // dim, blocks.choose_blocks
    inputs = content(batch, HEADS, SWEPT, dim, torch.bfloat16)
    terms, tensors = terms_of(name, batch, HEADS, SWEPT, dim)
    d_out = torch.randn_like(inputs[0])
    own: list[blocks.Blocks] = []

    def step() -> None:
        torch.autograd.grad(attention(*inputs, terms, backend="triton"), [*inputs, *tensors], d_out)

    def milliseconds(tile: blocks.Blocks | None) -> float | str:
        def chosen(asked: str, call: Any) -> blocks.Blocks:
            if asked != kernel:
                return usual(asked, call)
            own.append(tile or usual(asked, call))
            return own[-1]

        launch.choose_blocks = chosen  # type: ignore[assignment, attr-defined]
        remember(True)  # what is written down has other tiles
        try:
            return float(timed(step)["gpu"])
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:100]

    found: dict[blocks.Blocks | None, float | str] = {None: milliseconds(None)}
    rows, keys, warps, stages = own[0].rows, own[0].keys, own[0].warps, own[0].stages
    around = [(rows * 2, keys), (rows // 2, keys), (rows, keys * 2), (rows, keys // 2)]
    if kernel == "square":
        around = [(rows * 2, rows * 2), (rows // 2, rows // 2)]
    neighbors = [blocks.Blocks(*size, warps, stages) for size in around if min(size) >= 16 and max(size) <= 128]
    neighbors += [blocks.Blocks(rows, keys, many, stages) for many in (warps * 2, warps // 2) if 2 <= many <= 8]
    neighbors += [blocks.Blocks(rows, keys, warps, deep) for deep in (stages + 1, stages - 1) if deep]
    found |= {tile: milliseconds(tile) for tile in neighbors}
    sorted_first = sorted(found.items(), key=lambda each: (isinstance(each[1], str), each[1]))
    return {" ".join(map(str, tile.launch_options.values())) if tile else "now": time for tile, time in sorted_first}


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


# --- part "tests"


def tests() -> Iterator[tuple[str, Step]]:
    yield "test_triton", partial(run_tests, "tests/kernels/test_triton.py", 400.0)


def run_tests(file: str, seconds: float) -> Report:
    """Run the tests of a file in several processes, because compiling their many kernels takes long."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT / "src")
    pytest = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts="]
    where: Report = {"cwd": ROOT, "env": environment, "text": True}
    listed = subprocess.run([*pytest, file, "--collect-only", "-q"], **where, capture_output=True)
    names = [line for line in listed.stdout.splitlines() if "::" in line]
    if not names:
        return {"error": "no tests", "output": (listed.stdout + listed.stderr)[-3000:]}
    workers = max(1, min(12, len(os.sched_getaffinity(0))))
    deadline = time.monotonic() + seconds
    running = []
    for worker in range(workers):
        log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - it must stay open after the loop
        command = [*pytest, "--tb=short", "-v", *names[worker::workers]]
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
            failures.append(output[max(0, output.find("= FAILURES")) :][-2500:])
        log.close()
    return {"tests": len(names), "passed": passed, "processes that ran out of time": unfinished, "failures": failures}


# --- part "lab"


def lab() -> Iterator[tuple[str, Step]]:
    medium = ("--size=medium", "--positions=none,tisa", "--rate-factors=1", "--steps=300")
    yield "compare small", partial(study, "compare", "--size=small", "--quick")
    yield "compare medium", partial(study, "compare", *medium)
    for more in ((), ("--compile",)):
        yield " ".join(["pretrain", *more]), partial(study, "pretrain", *PRETRAINED, *more)
    yield "pretrain, interrupted", interrupted_study


PRETRAINED = ("--blocks=10", "--hidden-size=512", "--num-heads=8", "--length=256", "--batch-size=64", "--steps=300")


def study(*words: str, out: Path | None = None, interrupt: float | None = None) -> Report:
    """Run a command, perhaps interrupted after some seconds. Return its time, and how busy the GPU was."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = out or Path(scratch)
        command = [sys.executable, "-m", "whereformer", *words, f"--out={folder}"]
        look = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "--loop-ms=200"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        with subprocess.Popen(look, stdout=subprocess.PIPE, text=True) as looks:
            begun = time.monotonic()
            with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
                try:
                    process.wait(interrupt)
                except subprocess.TimeoutExpired:
                    process.send_signal(signal.SIGINT)
                said = process.communicate(timeout=200)[0]
            seconds = time.monotonic() - begun
            looks.terminate()
            busy = [int(line) for line in looks.communicate()[0].split()]
        records = folder / "records.jsonl"
        lines = [json.loads(line) for line in records.read_text().splitlines()] if records.exists() else []
        taken = {line["key"]: line["seconds"] for line in lines if line.get("seconds")}
    found = {"rc": process.returncode, "seconds": round(seconds, 1), "GPU busy %": round(statistics.fmean(busy))}
    return {**found, "seconds of each": taken, "said": said[-1500:]}


def interrupted_study() -> Report:
    """Pretrain once in one go, and once with an interruption. Return both, and whether the weights are the same."""
    with tempfile.TemporaryDirectory() as scratch:
        whole, parts = Path(scratch) / "whole", Path(scratch) / "parts"
        words = ("pretrain", "--steps=600", "--every=100")
        found = {"whole": study(*words, out=whole)}
        found["interrupted"] = study(*words, out=parts, interrupt=0.6 * found["whole"]["seconds"])
        found["continued"] = study(*words, out=parts)
        weights = [(folder / "model" / "model.safetensors").read_bytes() for folder in (whole, parts)]
    return {**found, "same bits": weights[0] == weights[1]}


PARTS: dict[str, Callable[[], Iterator[tuple[str, Step]]]] = {
    "first": first,
    "speed": speed,
    "models": models,
    "tiles": tiles,
    "tests": tests,
    "lab": lab,
}
ISOLATED = ("speed", "tiles", "models")
"""Parts whose steps run in processes of their own."""

if __name__ == "__main__":
    main()
