"""An encoder as an ONNX file, in float32 or with weights in int8."""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .._extras import require
from ..errors import InputError
from ..files import write_atomically
from .program import ExportableModel, Exported, trace


def to_onnx(
    model: PreTrainedModel, file: str | Path, *, int8: bool = False, pooled_as: str | Path | None = None
) -> Exported:
    """Write a model as an ONNX file.

    ONNX Runtime does not check lengths. Beyond ``max_length`` it fails with an error of its own; below ``min_length``
    of a funnel its numbers are wrong.

    Args:
        model: a model that :func:`to_torch` takes.
        file: the file to write.
        int8: whether to round the weights of products and embeddings to int8, with a scale for every output of
            a product. Inputs of products are rounded to 8 bits as they come.
        pooled_as: what :func:`to_torch` takes.

    Raises:
        ImportError: without the ``export`` extra.
        InputError: if the model can't be exported, or exceeds the 2 GB of an ONNX file.
    """
    require("export", "onnx", "onnxscript", "onnxruntime")
    exportable = ExportableModel(model, pooled_as)
    content = _converted(exportable)
    error, _ = exportable.difference(_Session(content, exportable.outputs))
    rounding = None
    if int8:
        content = _in_int8(content)
        error, rounding = exportable.difference(_Session(content, exportable.outputs))
    file = Path(file)
    write_atomically(file, content)
    return Exported(
        file, exportable.inputs, exportable.outputs, exportable.min_length, exportable.max_length, error, rounding
    )


def _converted(model: ExportableModel) -> bytes:
    """Return the contents of the ONNX file of a model."""
    axes = {0: "batch", 1: "length"}
    program = trace(model)
    with _quietly():
        found = torch.onnx.export(
            program,
            dynamo=True,
            input_names=model.inputs,
            output_names=model.outputs,
            dynamic_shapes=dict.fromkeys(model.inputs, axes),
            verbose=False,
        )
    assert found is not None
    try:
        return found.model_proto.SerializeToString()
    except ValueError as error:
        raise InputError("model", f"expected at most 2 GB, which is all that an ONNX file can hold ({error})") from None


def _in_int8(content: bytes) -> bytes:
    """Return the contents of an ONNX file with weights in int8."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with tempfile.TemporaryDirectory() as folder, _quietly():
        file = Path(folder) / "model.onnx"
        quantize_dynamic(onnx.load_from_string(content), file, per_channel=True, weight_type=QuantType.QInt8)
        return file.read_bytes()


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep the exporters' warnings to themselves: about libraries that no model here needs, and their own insides."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


class _Session:
    """The contents of an ONNX file as a function from inputs to outputs, on the CPU."""

    def __init__(self, content: bytes, outputs: tuple[str, ...]) -> None:
        import onnxruntime

        self.session: Any = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
        self.outputs = list(outputs)

    def __call__(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        arrays = {name: tensor.numpy() for name, tensor in inputs.items()}
        return tuple(torch.from_numpy(array) for array in self.session.run(self.outputs, arrays))
