"""The command ``whereformer export``: write a model as a program that runs without this library."""

from __future__ import annotations

from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from rich.console import Console

from ..errors import InputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedModel

    from ..exporting import Exported
    from ..models.checkpoints.sentences import SentenceSettings

SUFFIXES = {"onnx": ".onnx", "torch": ".pt2"}


@dataclass(frozen=True)
class Export:
    """Write a model as ONNX or as a program of torch.export, which run without this library, for any batch and length.

    It takes encoders with and without a head: models of this library, BERT, ALBERT, RoBERTa, ELECTRA and
    Funnel-Transformer checkpoints of transformers, and any text model of transformers that was saved with a position
    method attached. The file is compared with the model at batches and lengths that were
    not exported. The tokenizer.json is written beside it. Prints the inputs, the outputs and a snippet that was run.
    Of a folder of sentence-transformers, the file gives the vectors of texts, too, and the tokenizer cuts off texts
    where the folder says.
    """

    FLAGS: ClassVar = {"model": "MODEL"}
    METAVARS: ClassVar = {"out": "FILE"}

    model: str
    """A folder, or an id on the Hugging Face Hub."""

    to: Literal["onnx", "torch"]
    """onnx: a file for ONNX Runtime. torch: a .pt2 file for torch.export.load."""

    out: Path | None = None
    """The file to write. Default: onnx/model.onnx or torch/model.pt2 in the model's folder."""

    quantize: Literal["int8"] | None = None
    """Round the weights to 8 bits, for ONNX: a quarter of the size, and faster on many CPUs."""

    def run(self, console: Console) -> None:
        """Export the model, write its tokenizer and print how to use them."""
        if self.quantize and self.to == "torch":
            raise InputError("quantize", "only for ONNX, whose library rounds weights; use `to` onnx")
        from ..exporting import to_onnx, to_torch
        from ..files import check_file, write_atomically
        from ..lab.terminal import say
        from ..lab.training.trainer import quiet_transformers
        from ..models.checkpoints.sentences import read_sentence_settings
        from ..studies.analyze.loading import named_errors, tokenizer_of

        out = self._out()
        sentences = read_sentence_settings(self.model)
        with named_errors(self.model), quiet_transformers():
            model = self._load(sentences)
        tokenizer, reason = tokenizer_of(self.model)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        limit = None
        if tokenizer is not None and backend is not None and sentences is not None:
            limit = min(sentences.limit or tokenizer.model_max_length, model.config.max_position_embeddings)
            _read_as(sentences, backend, limit)
        file, content = out.parent / "tokenizer.json", None if backend is None else backend.to_str()
        check_file("out", out)
        if content is not None:
            check_file("out", file)
            if file.exists() and file.read_bytes() != content.encode():
                raise InputError("out", f"{file} is another tokenizer; choose another folder")
        out.parent.mkdir(parents=True, exist_ok=True)
        with console.status("exporting"):
            pooled_as = None if sentences is None else self.model
            if self.to == "torch":
                found = to_torch(model, out, pooled_as=pooled_as)
            else:
                found = to_onnx(model, out, int8=self.quantize == "int8", pooled_as=pooled_as)
        if content is None:
            say(console, f"no tokenizer.json: {reason or 'the tokenizer is not a fast one'}")
            self._tell(console, found, None, None)
            return
        write_atomically(file, content)
        self._tell(console, found, file, limit)

    def _load(self, sentences: SentenceSettings | None) -> PreTrainedModel:
        """Load a model of this library, one that it can read, or one with a method attached; for vectors, no head."""
        from ..models import Encoder, load_attached, load_pretrained
        from ..models.attachment.saved import saved_class
        from ..models.checkpoints.files import find_config

        attached_to = saved_class(find_config(self.model))
        if attached_to is not None:
            model = load_attached(self.model, attached_to).eval()
            return model if sentences is None else model.base_model
        model = load_pretrained(self.model, model_class=None if sentences is None else Encoder)
        if model.loading_report and model.loading_report.initialised:
            raise InputError("model", f"{self.model}: it lacks {', '.join(model.loading_report.initialised)}")
        return model

    def _out(self) -> Path:
        """Return the file to write."""
        if self.out is None:
            if not Path(self.model).is_dir():
                raise InputError("out", f"needed for {self.model!r}, which is not a folder")
            return Path(self.model) / self.to / f"model{SUFFIXES[self.to]}"
        if self.out.is_dir():
            raise InputError("out", f"expected a file, got the folder {str(self.out)!r}")
        if self.out.suffix != SUFFIXES[self.to]:
            raise InputError("out", f"expected a name that ends in {SUFFIXES[self.to]}, got {str(self.out)!r}")
        return self.out

    def _tell(self, console: Console, found: Exported, tokenizer: Path | None, limit: int | None) -> None:
        """Print what was written, and run the snippet that is printed."""
        from ..lab.terminal import say

        lengths = f"at least {found.min_length}"
        if found.max_length is not None:
            lengths = f"from {found.min_length} to {found.max_length}"
        error = f"equal to the model to {found.error:.1e}"
        if found.quantized_error is not None:
            error = f"{100 * found.quantized_error:.1f}% off the model's outputs (root mean square)"
        say(console, f"wrote {found.file} ({found.file.stat().st_size / 2**20:.1f} MiB)")
        if tokenizer is not None:
            say(console, f"wrote {tokenizer}{'' if limit is None else f', which cuts off texts at {limit} tokens'}")
        say(console, f"inputs: {', '.join(found.inputs)}, each int64 (batch, length)")
        say(console, f"outputs: {', '.join(found.outputs)}, float32")
        say(console, f"batch: at least 1; length: {lengths}")
        say(console, f"checked at batches and lengths that were not exported: {error}")
        snippet = snippet_of(found, tokenizer, limit)
        output = StringIO()
        with redirect_stdout(output):
            exec(compile(snippet, "<snippet>", "exec"), {})
        say(console, f"\nThis code was run and printed {output.getvalue().strip()}:\n\n{snippet}")


def _read_as(sentences: SentenceSettings, tokenizer: Tokenizer, limit: int) -> None:
    """Make a tokenizer cut off texts, and read them in lower case, as a folder of sentence-transformers says."""
    from tokenizers.normalizers import Lowercase, Sequence

    tokenizer.enable_truncation(limit)
    tokenizer.no_padding()
    if sentences.lowercase:
        tokenizer.normalizer = Sequence([Lowercase(), *([tokenizer.normalizer] if tokenizer.normalizer else [])])


def snippet_of(found: Exported, tokenizer: Path | None, limit: int | None) -> str:
    """Return Python code that uses an exported file and prints the shape of its last output; limit is in tokens."""
    onnx = found.file.suffix == SUFFIXES["onnx"]
    library, array, imported = ("numpy", "array", "onnxruntime") if onnx else ("torch", "tensor", None)
    lines = [f"import {name}" for name in (library, imported) if name]
    if tokenizer is None:
        lines += ["", f"ids = {library}.{array}([[1] * {found.min_length + 2}] * 2)"]
        values = {"input_ids": "ids", "attention_mask": f"{library}.ones_like(ids)"}
        values["token_type_ids"] = f"{library}.zeros_like(ids)"
    else:
        lines += ["from tokenizers import Tokenizer", "", f"tokenizer = Tokenizer.from_file({str(tokenizer)!r})"]
        if found.max_length is not None or limit is not None:
            most = min(each for each in (found.max_length, limit) if each is not None)
            lines.append(f"tokenizer.enable_truncation({most})")
        least = found.min_length if found.min_length > 1 else None
        lines.append(f"tokenizer.enable_padding({'' if least is None else f'pad_to_multiple_of={least}'})")
        lines.append('rows = tokenizer.encode_batch(["A first text.", "Another text, which is longer."])')
        sources = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
        values = {name: f"{library}.{array}([row.{field} for row in rows])" for name, field in sources.items()}
    lines += ["inputs = {", *(f'    "{name}": {values[name]},' for name in found.inputs), "}"]
    outputs = f"{', '.join(found.outputs)}{',' if len(found.outputs) == 1 else ''}"
    if onnx:
        lines.append(f"session = onnxruntime.InferenceSession({str(found.file)!r})")
        lines.append(f"{outputs} = session.run(None, inputs)")
    else:
        lines.append(f"model = torch.export.load({str(found.file)!r}).module()")
        lines.append(f"{outputs} = model(**inputs)")
    return "\n".join([*lines, f"print(tuple({found.outputs[-1]}.shape))"])
