"""Models as programs that run without this library: ``torch.export`` and ONNX, for any batch and length."""

from __future__ import annotations

from .._extras import require

require("hf", "transformers", "safetensors")

from .onnx import to_onnx  # noqa: E402
from .program import Exported, to_torch  # noqa: E402

__all__ = ["Exported", "to_onnx", "to_torch"]
