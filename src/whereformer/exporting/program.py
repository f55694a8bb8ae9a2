"""An encoder as one ``torch.export`` program, and the check that a program computes what its model does."""

from __future__ import annotations

import inspect
import io
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export, save
from transformers import PreTrainedModel

from ..errors import InputError
from ..files import write_atomically
from ..kernels.choose import written_out
from ..kernels.torch_private import asserts, size_oblivious
from ..models.attachment.attaching import is_attached
from ..models.checkpoints.sentences import read_sentence_settings
from ..models.encoder import Encoder, EncoderPreTrainedModel
from ..models.layers import Attention
from ..models.pooling import Pooling
from ..positions import Position, PositionRangeError

TRACED_LENGTH = 24
"""The length to trace at, where the model takes it."""
STATES, VECTOR = "last_hidden_state", "sentence_embedding"
"""The outputs of a model without a head. The second name is that of sentence-transformers."""

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
        model: the model, one of this library or one of transformers with a method attached.
        pooled_as: a folder of sentence-transformers; the vectors that its modules make of the states are an output.

    Raises:
        InputError: if it is neither, does not read text alone, or is not in float32; or if its states can't be pooled.
    """

    def __init__(self, model: PreTrainedModel, pooled_as: str | Path | None = None) -> None:
        super().__init__()
        own = isinstance(model, EncoderPreTrainedModel) and model.base_model_prefix == Encoder.base_model_prefix
        if not own and not (isinstance(model, PreTrainedModel) and is_attached(model)):
            kinds = "an Encoder, a model with one and a head, or one of transformers with a method attached"
            raise InputError("model", f"expected {kinds}, got {type(model).__name__}")
        if model.main_input_name != "input_ids" or model.config.is_encoder_decoder:
            raise InputError("model", f"expected one that reads a text and writes none, got {type(model).__name__}")
        if model.dtype != torch.float32:
            raise InputError("model", f"expected a model in float32, got {model.dtype}; load it in float32")
        self.model = deepcopy(model).cpu().eval()
        self.config = model.config
        self.sentences = None if pooled_as is None else read_sentence_settings(pooled_as)
        if pooled_as is not None and self.sentences is None:
            raise InputError("pooled_as", f"expected a folder of sentence-transformers, got {str(pooled_as)!r}")
        taken = inspect.signature(model.forward).parameters
        typed = "token_type_ids" in taken and bool(getattr(self.config, "type_vocab_size", False))
        self.inputs = ("input_ids", "attention_mask") + (("token_type_ids",) if typed else ())
        self.options = {"return_dict": True} | ({"use_cache": False} if "use_cache" in taken else {})
        for module in self.model.modules():
            if isinstance(module, Attention):
                module.backend = "reference"
            if isinstance(module, Position):
                module.tabulate(self.config.max_position_embeddings)
        self.outputs = self._outputs()
        poolings = len(self.model.base_model.blocks) - 1 if own else 0
        self.pools = poolings > 0
        # A traced program takes no block of a single token, where broadcasting would be another operation.
        self.min_length = 1
        if self.pools:
            self.min_length = max(least_length(self.model.base_model.pooling, poolings), 2**poolings + 1)
        self.max_length = self._end()

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Return the outputs for inputs of shape (batch, length)."""
        found = self._run(input_ids, attention_mask, token_type_ids)
        if self.sentences is not None:
            found[VECTOR] = self.sentences.vectors(found[STATES], attention_mask)
        return tuple(found[name] for name in self.outputs)

    def _run(self, *given: Tensor | None) -> Any:
        with written_out():
            return self.model(**dict(zip(self.inputs, given, strict=False)), **self.options)

    @torch.no_grad()
    def _outputs(self) -> tuple[str, ...]:
        """Return the names of the outputs that say what the model predicts; of a base model, states and vectors."""
        # RoBERTa keeps two of its positions for itself.
        length = min(TRACED_LENGTH, max(1, self.config.max_position_embeddings - 2))
        found = self._run(*self.example(1, length).values())
        logits = tuple(name for name in found if name.endswith("logits"))
        if self.sentences is None:
            return logits or (STATES,)
        if logits or found[STATES].shape[1] != length:
            why = "a head" if logits else "no state for every token"
            raise InputError("model", f"expected a model whose states make vectors, got one with {why}")
        return (STATES, VECTOR)

    def example(self, batch: int, length: int) -> dict[str, Tensor]:
        """Return inputs of shape (batch, length), in which the last row, if there are several, is half padding."""
        generator = torch.Generator().manual_seed(length)
        ids = torch.randint(self.config.vocab_size, (batch, length), generator=generator)
        mask = torch.ones_like(ids)
        types = torch.zeros_like(ids)
        if "token_type_ids" in self.inputs:
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
        """Return the greatest length, or None if the positions go on beyond the model's."""
        most: int = self.config.max_position_embeddings
        # A program takes no text that is longer than a buffer of its positions, even one that is of no use.
        buffers = self.model.named_buffers()
        held = min((len(each[0]) for name, each in buffers if name.endswith("position_ids")), default=None)
        # RoBERTa keeps the first positions, up to that of padding, for itself.
        for length in range(most + 1, most - 3, -1):
            try:
                self(**self.example(1, length))
            except (PositionRangeError, IndexError, RuntimeError):
                continue
            return length if length <= most else held
        raise InputError(
            "model", f"{type(self.model).__name__} runs on no text of about {most} tokens, its greatest length"
        )


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
    if model.max_length is not None and model.min_length >= model.max_length:
        found = f"one of {model.max_length} tokens at most, which needs {model.min_length}"
        raise InputError("model", f"expected a model that takes several lengths, got {found}")
    axes = {0: Dim("batch", min=1), 1: Dim("length", min=model.min_length, max=model.max_length)}
    with size_oblivious() if model.pools else nullcontext():
        program = export(
            model,
            (),
            model.example(*model.traced()),
            dynamic_shapes=dict.fromkeys(model.inputs, axes),
            strict=False,
            # Some facts about a funnel's lengths are true but beyond the solver, so every run checks them again.
            prefer_deferred_runtime_asserts_over_guards=model.pools,
        )
    if model.pools:
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


def to_torch(model: PreTrainedModel, file: str | Path, *, pooled_as: str | Path | None = None) -> Exported:
    """Write a model as a ``.pt2`` file, which ``torch.export.load`` reads where only torch is installed.

    Args:
        model: an :class:`~whereformer.Encoder`, a model that has one, or a transformers model of text to which
            :func:`~whereformer.attach` gave a method (one with an encoder and a decoder excepted), in float32.
        file: the file to write.
        pooled_as: a folder of sentence-transformers, or its id on the Hugging Face Hub. The file then gives the vectors
            of texts, too, as ``sentence_embedding`` of shape (batch, hidden_size). Its modules may be a Transformer,
            Pooling (by the mean, the first token or the maximum) and Normalize.

    Raises:
        InputError: if the model can't be exported.
    """
    exportable = ExportableModel(model, pooled_as)
    program = trace(exportable)
    content = io.BytesIO()
    save(program, content)
    module = program.module()
    error, _ = exportable.difference(lambda inputs: module(**inputs))
    write_atomically(Path(file), content.getvalue())
    return Exported(
        Path(file), exportable.inputs, exportable.outputs, exportable.min_length, exportable.max_length, error
    )
