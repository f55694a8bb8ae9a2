"""Count registers, spills, shared memory, products and instructions of the compiled GPU kernels, without a GPU.

Run: .venv/bin/python benchmarks/gpu_static.py [--gpus 90] [--dims 64,128] [--dtypes bfloat16] [--terms plain,bias]
     .venv/bin/python benchmarks/gpu_static.py --page

Triton's package includes NVIDIA's assembler, so a call and its backward pass compile every kernel that they would run
on a GPU that is not there. "Instructions a score" is the length of a loop divided by the scores that a thread computes
in it: a GPU issues one instruction of a warp per cycle, so it is a lower bound of the loop's time. Loads and stores of
spilled registers go to memory. The counts say nothing about latency and bandwidth. Writes a JSON file.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

os.environ.pop("TRITON_INTERPRET", None)  # Triton reads it when it is imported.

import torch
import triton
from result_files import write_results
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from whereformer import DistanceDecay, OffsetBias, OffsetKeys, OffsetQueries, OffsetValues, attention
from whereformer.kernels.triton import available
from whereformer.kernels.triton import launch as host

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
HEADS, LENGTH, CLIP, SHORT, RANK = 2, 256, 16, 127, 16
"""Sizes of the call: Shaw's tables end at CLIP, T5's at SHORT; factors have RANK columns. Triton compiles the same code
for most sizes."""

REGISTERS, THREADS, SHARED = 65536, 2048, {80: 163, 90: 227, 100: 227}
"""A multiprocessor's registers, threads and, by compute capability, KiB of shared memory; others have 99."""

FLASH_T5 = {
    ("plain", "forward"): 9.6,
    ("plain", "query_gradients"): 9.2,
    ("plain", "key_gradients"): 12.6,
    ("bias", "forward"): 13.1,
    ("bias", "query_gradients"): 13.1,
    ("bias", "key_gradients"): 17.1,
}
"""Instructions a score of flashT5's Triton kernels with their own tiles, the latter with its dense bias: compiled for
compute capability 9.0, bfloat16 and a head_dim of 64 by the same means on 2026-11-22, with Triton 3.6. The tiles are
those for an A100; with those that its code selects on this GPU, it has 30.0, 20.9 and 26.2 with a bias."""

LIMITS = {
    **FLASH_T5,
    ("plain", "forward"): 10.0,
    ("bias", "forward"): 13.0,
    ("bias", "query_gradients"): 13.0,
    ("bias", "key_gradients"): 15.0,
    ("bias", "diagonals"): 14.5,
    ("shaw", "forward"): 24.0,
    ("shaw", "query_gradients"): 41.0,
    ("shaw", "key_gradients"): 26.0,
}
"""The maximum of instructions a score in the main loop of these kernels, in the case of FLASH_T5. Tiles that need fewer
were slower on an H100: with these, two programs fit on a multiprocessor."""

MASKED_LIMIT = 16.5
"""The maximum in the same case in the masked tiles of the forward pass with a window."""

MAX_SPILLS = {256: 256}
"""Loads and stores of spilled registers that a kernel in 16 bits may have, by head_dim; otherwise 0."""


def _table(*size: int) -> torch.Tensor:
    return torch.zeros(size, requires_grad=True)


def _bias(dim: int) -> list[Any]:
    """A table for every offset."""
    return [OffsetBias(_table(HEADS, 2 * LENGTH - 1), 1 - LENGTH)]


TERMS: dict[str, Callable[[int], list[Any]]] = {
    "plain": lambda dim: [],
    "bias": _bias,
    "t5": lambda dim: [OffsetBias(_table(HEADS, 2 * SHORT + 1), -SHORT)],
    "masked": _bias,
    "packed": _bias,
    "window": _bias,
    "grouped": _bias,
    "shaw": lambda dim: [
        OffsetKeys(_table(1, 2 * CLIP + 1, dim), -CLIP),
        OffsetValues(_table(1, 2 * CLIP + 1, dim), -CLIP),
    ],
    "profiles": lambda dim: [OffsetKeys(_table(HEADS, 2 * SHORT + 1, RANK), -SHORT, 1, _table(1, HEADS, LENGTH, RANK))],
    "mirror": lambda dim: [OffsetQueries(_table(1, 2 * CLIP + 1, dim), -CLIP)],
    "decay": lambda dim: [DistanceDecay(_table(1, HEADS, LENGTH), _table(1, HEADS, LENGTH))],
}

OPTIONS: dict[str, dict[str, Any]] = {
    "masked": {"causal": True, "dropout_p": 0.1, "key_mask": torch.ones(1, LENGTH, dtype=torch.bool)},
    "packed": dict.fromkeys(("query_documents", "key_documents"), torch.zeros(1, LENGTH, dtype=torch.long)),
    "window": {"window": (LENGTH // 3, 0)},
    "grouped": {"window": (LENGTH // 3, 0)},
}
"""Options of the calls with these terms."""

PAGE = (
    ("90", "64", "bfloat16,float32", ",".join(TERMS)),
    ("80,100", "64", "bfloat16", ",".join(TERMS)),
    ("80,100", "64", "float32", "plain,bias,t5,shaw"),
    ("90", "128", "bfloat16", "plain,bias,t5,masked,shaw"),
    ("90", "128", "float32", "bias,shaw"),
    ("90", "256", "bfloat16,float32", "bias,shaw"),
    ("80", "128", "bfloat16", "plain,bias"),
    ("90", "64", "float16", "bias"),
    ("89,120", "64", "bfloat16", "plain,bias"),
    ("120", "128", "bfloat16", "plain,bias"),
)
"""The cases of docs/results/gpu.md, as values of the options ``gpus``, ``dims``, ``dtypes`` and ``terms``."""

KEY_HEADS = {"grouped": 1}
"""Heads of the keys and values with these terms; otherwise, the heads of the queries."""


@dataclass(frozen=True)
class Counts:
    """The counts of a compiled kernel."""

    gpu: int
    dim: int
    dtype: str
    term: str
    kernel: str
    tile: tuple[int, int]
    warps: int
    registers: int
    loads: int
    """Of spilled registers, in all of the kernel."""
    stores: int
    shared: int
    """Bytes."""
    programs: int
    """That fit on a multiprocessor at once."""
    products: str
    """The kind of tensor-core instruction, and their number."""
    instructions: tuple[float, ...]
    """Per score, in each loop over tiles, in the kernel's order: beyond the left end of a table, inside it, beyond its
    right end, and with masks. The gradients of keys have them in the other order; diagonals, inside, with masks, and in
    both."""

    @property
    def inside(self) -> float:
        """Instructions a score in the main loop, which reads the table if there is one."""
        if self.kernel == "key_gradients":
            return self.instructions[{1: 0, 2: 1, 3: 1}.get(len(self.instructions), 2)]
        return self.instructions[1 if len(self.instructions) > 2 and self.kernel != "diagonals" else 0]


def _no_gpu(capability: int) -> Any:
    """Return enough of a driver to compile for a GPU that is not there."""
    return SimpleNamespace(
        launcher_cls=None,
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_current_device=lambda: capability,  # Triton keeps compiled kernels by device
        get_current_stream=lambda device=None: 0,
        get_active_torch_device=lambda: torch.device("cpu"),
        map_python_to_cpp_type=lambda name: "int",
    )


@contextmanager
def _compiling(capability: int, kernels: Sequence[str] = ()) -> Iterator[list[tuple[Any, dict[str, Any]]]]:
    """Compile these kernels (all if none are named) instead of launching; yields the compiled with their options."""
    compiled: list[tuple[Any, dict[str, Any]]] = []
    launch = JITFunction.run

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if not kernels or self.__name__ in kernels:
            compiled.append((launch(self, *arguments, grid=grid, warmup=True, **options), options))

    driver.set_active(_no_gpu(capability))
    with (
        patch.object(JITFunction, "run", compile_only),
        patch.object(available, "_unavailable_on", lambda device: None),
        patch.object(torch.cuda, "get_device_capability", lambda device: divmod(capability, 10)),
        patch.object(host, "record", lambda compute, inputs: (compute(), None)),  # a plan needs launches
    ):
        yield compiled


def count(gpu: int, dim: int, dtype: str, term: str, kernels: Sequence[str] = ()) -> list[Counts]:
    """Compile a call and its backward pass; count each kernel, or only the named ones."""
    return [count_kernel(*kernel, gpu, dim, dtype, term) for kernel in compiled_for(gpu, dim, dtype, term, kernels)]


def compiled_for(
    gpu: int, dim: int, dtype: str, term: str, kernels: Sequence[str] = ()
) -> list[tuple[Any, dict[str, Any]]]:
    """Return each compiled kernel of a call and its backward pass, or the named ones, with its launch options."""
    with _compiling(gpu, kernels) as compiled:
        _call(dim, dtype, term, LENGTH)
    return list({kernel.metadata.name: (kernel, options) for kernel, options in compiled}.values())


def _call(dim: int, dtype: str, term: str, length: int) -> None:
    shared = KEY_HEADS.get(term, HEADS)
    query, key, value = (
        torch.zeros((1, heads, length, dim), dtype=getattr(torch, dtype), requires_grad=True)
        for heads in (HEADS, shared, shared)
    )
    out = attention(query, key, value, TERMS[term](dim), **OPTIONS.get(term, {}), backend="triton")
    out.backward(torch.ones_like(out))


def compilations(gpu: int, term: str, lengths: Sequence[int]) -> dict[str, int]:
    """Return how often each kernel would be compiled for calls of these lengths, in bfloat16 and for a head of 64."""
    kinds: dict[str, set[str]] = {}

    def look(self: Any, *arguments: Any, grid: Any, warmup: bool, **launch_options: Any) -> None:
        binder = self.device_caches[driver.active.get_current_device()][-1]
        _, specialization, options = binder(*arguments, debug=False, **launch_options)
        kinds.setdefault(self.__name__, set()).add(f"{specialization} {options}")

    with _compiling(gpu):
        JITFunction.run = look
        for length in lengths:
            _call(64, "bfloat16", term, length)
    return {name: len(variants) for name, variants in kinds.items()}


def count_kernel(kernel: Any, options: dict[str, Any], gpu: int, dim: int, dtype: str, term: str) -> Counts:
    """Count one compiled kernel, which was launched with these options."""
    sass = _tool("nvdisasm", kernel.asm["cubin"], "-c")
    usage = re.search(r"REG:(\d+)", _tool("cuobjdump", kernel.asm["cubin"], "-res-usage"))
    assert usage is not None
    registers, shared, warps = int(usage[1]), kernel.metadata.shared, kernel.metadata.num_warps
    names = Counter(re.findall(r"\b(LDL|STL|HMMA|HGMMA|UTC[A-Z]*MMA)\b", sass))
    spills = names.pop("LDL", 0), names.pop("STL", 0)
    tile = (options.get("BLOCK_M", options.get("BLOCK", 0)), options.get("BLOCK_N", options.get("BLOCK", 0)))
    scores = tile[0] * tile[1] / (32 * warps)
    return Counts(
        *(gpu, dim, dtype, term, kernel.metadata.name, tile, warps, registers, *spills, shared),
        programs=min(
            REGISTERS // (-(-registers // 8) * 8 * 32 * warps),
            THREADS // (32 * warps),
            SHARED.get(gpu, 99) * 1024 // (shared + 1024),
        ),
        products=" ".join(f"{name} {number}" for name, number in names.items()) or "-",
        instructions=tuple(round(body.total() / scores, 1) for body in loops(sass)) if scores else (),
    )


def exceeded(kernels: list[Counts]) -> list[str]:
    """Return a line for each limit that is not met."""
    lines = []
    for counts in kernels:
        name = f"sm_{counts.gpu} {counts.dtype} {counts.dim} {counts.term} {counts.kernel}"
        if counts.loads + counts.stores > (0 if counts.dtype == "float32" else MAX_SPILLS.get(counts.dim, 0)):
            lines.append(f"{name}: {counts.loads} loads and {counts.stores} stores of spilled registers")
        if (counts.gpu, counts.dtype, counts.dim) != MAIN:
            continue
        limit = LIMITS.get((counts.term, counts.kernel))
        if limit and counts.inside > limit:
            lines.append(f"{name}: {counts.inside} instructions a score, the limit is {limit}")
        if (counts.term, counts.kernel) == ("window", "forward"):
            masked = max(counts.instructions[0], counts.instructions[-1])
            if masked > MASKED_LIMIT:
                lines.append(f"{name}: {masked} instructions a score in masked tiles, the limit is {MASKED_LIMIT}")
    return lines


MAIN = (90, "bfloat16", 64)
"""The GPU, type and width of a head of the limits."""


def _tool(name: str, cubin: bytes, *options: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([TOOLS / name, *options, file.name], capture_output=True, text=True, check=True).stdout


def loops(sass: str) -> list[Counter[str]]:
    """Return the instructions of every loop that multiplies matrices, by their names."""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    for line in sass.splitlines():
        if match := re.match(r"\s*(\.L_[x_0-9]+):", line):
            labels[match[1]] = len(instructions)
        elif match := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?);", line):
            instructions.append(match[1])
    ends = {}
    for index, text in enumerate(instructions):
        match = re.search(r"BRA[^`]*`\((\.L_[x_0-9]+)\)", text)
        if match and labels.get(match[1], index) < index:
            ends[labels[match[1]]] = index
    bodies: list[Counter[str]] = []
    for start, end in ends.items():
        if any("EXIT" in text for text in instructions[start : end + 1]):
            continue  # It jumps back from the code after the kernel's end, which waits for memory.
        body = (re.sub(r"^@!?U?P\w+\s+", "", text) for text in instructions[start : end + 1])
        names = Counter(text.split()[0].split(".")[0] for text in body)
        if sum(number for name, number in names.items() if name.endswith("MMA")) or names["FFMA"] > 64:
            bodies.append(names)
    return bodies


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the results of compiling the GPU kernels, without a GPU.")
    parser.add_argument("--gpus", default="80,90,100", help="compute capabilities, times 10")
    parser.add_argument("--dims", default="64,128,256", help="widths of a head")
    parser.add_argument("--dtypes", default="bfloat16,float32", help="types of the inputs")
    parser.add_argument("--terms", default="plain,bias,t5,masked,shaw", help=f"of the call: {', '.join(TERMS)}")
    parser.add_argument("--page", action="store_true", help="count the cases of docs/results/gpu.md instead")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_static.json"), help="file for the results")
    options = parser.parse_args()
    kernels: list[Counts] = []
    print("\t".join(COLUMNS))
    for case in PAGE if options.page else [(options.gpus, options.dims, options.dtypes, options.terms)]:
        gpus, dims, dtypes, terms = (values.split(",") for values in case)
        for gpu, dtype, dim, term in itertools.product(gpus, dtypes, dims, terms):
            for counts in count(int(gpu), int(dim), dtype, term):
                kernels.append(counts)
                if counts.instructions:
                    print("\t".join(_cells(counts)), flush=True)
            write_results(options.out, {"kernels": list(map(asdict, kernels)), "exceeded": exceeded(kernels)})
    for line in exceeded(kernels):
        print(f"over its limit: {line}")
    print(f"wrote {options.out}")


COLUMNS = ("case", "kernel", "tile", "regs", "spills", "KiB", "an SM", "products", "a score, by loop", "flashT5")


def _cells(counts: Counts) -> list[str]:
    return [
        f"sm_{counts.gpu} {counts.dtype} {counts.dim} {counts.term}",
        counts.kernel.removesuffix("_gradients"),
        "x".join(map(str, counts.tile)) + f" {counts.warps}w",
        str(counts.registers),
        f"{counts.loads}/{counts.stores}" if counts.loads + counts.stores else "-",
        f"{counts.shared / 1024:.0f}",
        str(counts.programs),
        counts.products,
        " ".join(f"{number:.1f}" for number in counts.instructions),
        str(FLASH_T5.get((counts.term, counts.kernel), "")) if counts.dim == 64 else "",
    ]


if __name__ == "__main__":
    main()
