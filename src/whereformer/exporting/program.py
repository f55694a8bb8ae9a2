"""An encoder as one ``torch.export`` program, and the check that a program computes what its model does."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export, save

from ..errors import InputError
from ..files import write_atomically
from ..kernels.torch_private import asserts, size_oblivious
from ..models.encoder import Encoder, EncoderPreTrainedModel
from ..models.heads import EncoderForQuestionAnswering
from ..models.layers import Attention
from ..models.pooling import Pooling
from ..positions import PositionRangeError

TRACED_LENGTH = 24
"""The length to trace at, where the model takes it."""

Run = Callable[[Mapping[str, Tensor]], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Exported:
    """What an exported file takes, gives and was checked for.

    Args:
        file: the file.
        inputs: the names of its inputs, int64 of shape (batch, length): token ids, a mask with 1 for real tokens and,
            for a model with token types, the types.
        outputs: the names of its outputs.
        min_length: the least length. A funnel needs enough tokens for every pooling.
        max_length: the greatest length; None if there is no end.
        error: the largest absolute difference from the model's own outputs, over batches and lengths other than those
            that were traced, with padding.
        quantized_error: for int8, the root mean square of the difference from the model's own outputs, divided by that
            of the outputs; else None.
    """

    file: Path
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    min_length: int
    max_length: int | None
    error: float
    quantized_error: float | None = None


class ExportableModel(nn.Module):
    """A copy of an encoder, or of a model that has one, whose forward takes and returns tensors alone.

    The copy computes attention by the reference backend, which every runtime can follow: others choose their steps by
    the length, or are kernels of this library. What a position method computes step by step is a table.

    Args:
        model: the model.

    Raises:
        InputError: if it is no encoder of this library, or not in float32.
    """

    def __init__(self, model: EncoderPreTrainedModel) -> None:
        super().__init__()
        if not isinstance(model, EncoderPreTrainedModel) or model.base_model_prefix != Encoder.base_model_prefix:
            raise InputError("model", f"expected an Encoder or a model with one and a head, got {type(model).__name__}")
        if model.dtype != torch.float32:
            raise InputError("model", f"expected a model in float32, got {model.dtype}; load it in float32")
        self.model = deepcopy(model).cpu().eval()
        self.config = model.config
        encoder = self.model.base_model
        for module in self.model.modules():
            if isinstance(module, Attention):
                module.backend = "reference"
        encoder.position.tabulate(self.config.max_position_embeddings)
        self.inputs = ("input_ids", "attention_mask") + (("token_type_ids",) if self.config.type_vocab_size else ())
        self.outputs: tuple[str, ...] = ("logits",)
        if isinstance(model, Encoder):
            self.outputs = ("last_hidden_state",)
        elif isinstance(model, EncoderForQuestionAnswering):
            self.outputs = ("start_logits", "end_logits")
        poolings = len(encoder.blocks) - 1
        # A traced program takes no block of a single token, where broadcasting would be another operation.
        self.min_length = max(least_length(encoder.pooling, poolings), 2**poolings + 1 if poolings else 1)
        self.max_length = self._end()

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Return the outputs for inputs of shape (batch, length)."""
        found = self.model(input_ids, attention_mask, token_type_ids=token_type_ids, return_dict=True)
        return tuple(found[name] for name in self.outputs)

    def example(self, batch: int, length: int) -> dict[str, Tensor]:
        """Return inputs of shape (batch, length), in which the last row, if there are several, is half padding."""
        generator = torch.Generator().manual_seed(length)
        ids = torch.randint(self.config.vocab_size, (batch, length), generator=generator)
        mask = torch.ones_like(ids)
        types = torch.zeros_like(ids)
        types[:, length // 2 :] = min(1, self.config.type_vocab_size - 1)
        if batch > 1:
            mask[-1, (length + 1) // 2 :] = 0
        return dict(zip(self.inputs, (ids, mask, types), strict=False))

    def traced(self) -> tuple[int, int]:
        """Return the batch and length to trace at."""
        longest = TRACED_LENGTH if self.max_length is None else min(self.max_length, TRACED_LENGTH)
        return 2, max(self.min_length, longest)

    @torch.no_grad()
    def difference(self, run: Run) -> tuple[float, float]:
        """Compare a program's outputs with the model's, at batches and lengths other than the traced ones.

        Returns:
            The largest absolute difference, and the root mean square of the difference divided by the outputs'.
        """
        least, most = self.min_length, self.max_length or 3 * TRACED_LENGTH + 1
        largest, squares, of_outputs = 0.0, 0.0, 0.0
        for batch, length in ((1, least), (1, min(most, 3 * TRACED_LENGTH + 1)), (3, min(most, least + 6))):
            inputs = self.example(batch, length)
            for wanted, found in zip(self(**inputs), run(inputs), strict=True):
                gap = (found - wanted).double()
                largest = max(largest, float(gap.abs().max()))
                squares, of_outputs = squares + float(gap.square().sum()), of_outputs + float(wanted.square().sum())
        return largest, (squares / of_outputs) ** 0.5 if of_outputs else 0.0

    @torch.no_grad()
    def _end(self) -> int | None:
        """Return the greatest length, or None if the position method goes on beyond the model's."""
        most: int = self.config.max_position_embeddings
        try:
            self(**self.example(1, most + 1))
        except PositionRangeError:
            return most
        return None


def least_length(pooling: Pooling, times: int) -> int:
    """Return the least number of tokens that is long enough to pool ``times`` times."""

    def fits(length: int) -> bool:
        for _ in range(times):
            if not pooling.applies_to(length):
                return False
            length = pooling.length(length)
        return True

    return next(length for length in count(1) if fits(length))


@torch.no_grad()
def trace(model: ExportableModel) -> ExportedProgram:
    """Return the model as a program for every batch, and every length from its least to its greatest.

    Raises:
        InputError: if the model takes a single length only.
    """
    if model.min_length == model.max_length:
        raise InputError("model", f"expected one that takes more than one length, got only {model.max_length}")
    axes = {0: Dim("batch", min=1), 1: Dim("length", min=model.min_length, max=model.max_length)}
    pools = len(model.model.base_model.blocks) > 1
    with size_oblivious() if pools else nullcontext():
        program = export(
            model,
            (),
            model.example(*model.traced()),
            dynamic_shapes=dict.fromkeys(model.inputs, axes),
            strict=False,
            # Some facts about a funnel's lengths are true but beyond the solver, so every run checks them again.
            prefer_deferred_runtime_asserts_over_guards=pools,
        )
    if pools:
        _allow_single_rows(program)
    return program


_NOT_ONE = re.compile(r"expression Ne\(s\d+(?:, 1|\*(\()?(.+)(?(1)\)), \2)\) on node")
"""That a size is not 1, in torch's words, or that its product with a number is not that number."""


def _allow_single_rows(program: ExportedProgram) -> None:
    """Remove the assertions that a size is not 1, in place.

    Where some operations would broadcast a single row, torch traces those for several rows and asserts that there are
    several. They compute the same for one row, which :meth:`ExportableModel.difference` checks.
    """
    graph = program.graph_module.graph
    for node in list(graph.nodes):
        if asserts(node) and _NOT_ONE.search(str(node.args[1])):
            graph.erase_node(node)
    graph.eliminate_dead_code()
    program.graph_module.recompile()


def to_torch(model: EncoderPreTrainedModel, file: Path) -> Exported:
    """Write a model as a ``.pt2`` file, which ``torch.export.load`` reads where only torch is installed.

    Args:
        model: an :class:`~whereformer.Encoder`, or a model that has one, in float32.
        file: the file to write.

    Raises:
        InputError: if the model can't be exported.
    """
    exportable = ExportableModel(model)
    program = trace(exportable)
    content = io.BytesIO()
    save(program, content)
    module = program.module()
    error, _ = exportable.difference(lambda inputs: module(**inputs))
    write_atomically(file, content.getvalue())
    return Exported(file, exportable.inputs, exportable.outputs, exportable.min_length, exportable.max_length, error)
