"""Tensors that the original authors' code produced, and how to compare with them; the README beside says which."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """One run of the original code."""

    config: dict[str, Any]
    stored: dict[str, Tensor]

    def tensors(self, gradient: str = "grad_{}") -> dict[str, Tensor]:
        """Every tensor of the case; one whose gradient is stored too, under that name, is a leaf that wants it."""
        return {
            name: tensor.clone().requires_grad_(gradient.format(name) in self.stored)
            for name, tensor in self.stored.items()
        }


def groups(file: str, *prefixes: str | tuple[str, ...]) -> list[list[Any]]:
    """All cases of a file as pytest parameters, a list per prefix (the first that fits); each case must fit one."""
    grouped: dict[str | tuple[str, ...], list[Any]] = {prefix: [] for prefix in prefixes}
    with safe_open(Path(__file__).parent / f"{file}.safetensors", "pt") as opened:
        names = list(opened.keys())
        for case, config in json.loads(opened.metadata()["cases"]).items():
            prefix = next(prefix for prefix in prefixes if case.startswith(prefix))
            case_names = [name for name in names if name.startswith(f"{case}/")]
            stored = {name.removeprefix(f"{case}/"): _widen(opened.get_tensor(name)) for name in case_names}
            grouped[prefix].append(pytest.param(Case(config, stored), id=case))
    return list(grouped.values())


def check(actual: Tensor, golden: Tensor, tolerance: float) -> None:
    """``|actual - golden| <= tolerance * (1 + |golden|)`` everywhere, and the same shape."""
    torch.testing.assert_close(actual, golden, rtol=tolerance, atol=tolerance)


def check_gradients(
    tensors: dict[str, Tensor], output: Tensor, tolerance: float, *, gradient: str = "grad_{}", cotangent: str = "cot"
) -> None:
    """The gradients of ``(output * cotangent).sum()`` in every leaf equal the stored ones."""
    leaves = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
    gradients = torch.autograd.grad(
        output, list(leaves.values()), tensors[cotangent], retain_graph=True, allow_unused=True, materialize_grads=True
    )
    assert leaves, "no gradient is stored"
    for name, actual in zip(leaves, gradients, strict=True):
        torch.testing.assert_close(
            actual,
            tensors[gradient.format(name)],
            rtol=tolerance,
            atol=tolerance,
            msg=lambda message, name=name: f"gradient of {name}: {message}",
        )


def _widen(tensor: Tensor) -> Tensor:
    """Everything is compared in float64; truth values are stored as bytes, whole numbers in 32 bits."""
    if tensor.is_floating_point():
        return tensor.double()
    return tensor.bool() if tensor.dtype == torch.uint8 else tensor.long()
