"""Read a sentence encoder, give it more positions, and write it so that sentence-transformers loads it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

from ...errors import InputError
from ...files import check_regular
from ...lab.training.trainer import quiet_transformers
from ...models.checkpoints.files import find_config
from ..analyze.loading import named_errors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TABLE = "embeddings.position_embeddings.weight"
"""The end of the name of the weights that hold a model's position embeddings."""
KNOWN_MODULES = ("Transformer", "Pooling", "Normalize")
"""The modules of sentence-transformers that a model may have, in this order."""


@dataclass(frozen=True)
class SentenceEncoder:
    """A transformers encoder, with the way from its states to the vector of a text.

    Args:
        model: the encoder, which is never in training mode: without dropout it can agree with another exactly.
        tokenizer: its tokenizer.
        pooling: whether a text's vector is the mean of its tokens' states, or the first token's.
        limit: how many tokens it reads, special ones included.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    pooling: Literal["mean", "cls"]
    limit: int

    def states(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return the last hidden states, (rows, n, hidden_size), of token ids and their mask, (rows, n) each."""
        found: Tensor = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
        return found

    def pool(self, states: Tensor, mask: Tensor) -> Tensor:
        """Return the vectors of texts, (rows, hidden_size), each of length 1."""
        if self.pooling == "cls":
            return functional.normalize(states[:, 0], dim=-1)
        return functional.normalize((states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True), dim=-1)

    def vectors(self, rows: Sequence[Tensor]) -> Tensor:
        """Return the vectors of texts, (rows, hidden_size); each row is the text's token ids without special ones."""
        ids, mask = self.padded(rows)
        return self.pool(self.states(ids, mask), mask)

    def padded(self, rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the ids of texts between special tokens, padded, and their mask, (rows, n) each."""
        first, last, pad = (getattr(self.tokenizer, f"{name}_token_id") for name in ("cls", "sep", "pad"))
        ids = torch.full((len(rows), 2 + max(map(len, rows))), pad)
        mask = torch.zeros_like(ids)
        for row, tokens in enumerate(rows):
            end = len(tokens) + 1
            ids[row, 0], ids[row, 1:end], ids[row, end] = first, tokens, last
            mask[row, : end + 1] = 1
        return ids, mask


def load_encoder(path: str) -> SentenceEncoder:
    """Load the folder of a sentence-transformers model, or of a transformers encoder, whose states are averaged.

    Raises:
        InputError: if it can't be read, has no position embeddings, or works in a way that can't be kept.
    """
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise InputError("model", f"expected a folder with a config.json, got {path!r}")
    pooling = _pooling(folder)
    with named_errors(path), quiet_transformers():
        find_config(path)  # which is checked before anything is built by it
        model = AutoModel.from_pretrained(path, dtype=torch.float32, use_safetensors=True)
        tokenizer = AutoTokenizer.from_pretrained(path)
    table = table_name(model)
    if not all(bool(weights.isfinite().all()) for weights in model.state_dict().values()):
        raise InputError("model", f"{path}: some weights are not finite")
    lacking = [name for name in ("cls", "sep", "pad") if getattr(tokenizer, f"{name}_token_id") is None]
    if lacking:
        raise InputError("model", f"{path}: its tokenizer has no {lacking[0]} token")
    most = len(model.state_dict()[table]) - first_row(model)
    told = _read(folder / "sentence_bert_config.json").get("max_seq_length") or tokenizer.model_max_length
    if told > most and told < 2**30:
        raise InputError("model", f"{path}: its tokenizer gives up to {told} tokens, and it has {most} positions")
    return SentenceEncoder(model.eval(), tokenizer, pooling, min(told, most))


def table_name(model: PreTrainedModel) -> str:
    """Return the name of the weights that hold a model's position embeddings.

    Raises:
        InputError: if it has none.
    """
    names = [name for name in model.state_dict() if name.endswith(TABLE)]
    relative = getattr(model.config, "position_embedding_type", None) not in (None, "absolute")
    if len(names) != 1 or relative:
        raise InputError("model", f"expected a model with position embeddings, got {model.config.model_type!r}")
    return names[0]


def first_row(model: PreTrainedModel) -> int:
    """Return the row of the first token's position: RoBERTa's come after that of padding."""
    padding = model.get_submodule(table_name(model).removesuffix(".weight")).padding_idx
    return 0 if padding is None else int(padding) + 1


def extended(encoder: SentenceEncoder, length: int, *, keep: int | None = None) -> SentenceEncoder:
    """Return a copy of an encoder that reads ``length`` tokens.

    The first rows of its position embeddings stay as they are, so texts that it could read have the same vectors; the
    others are interpolated over the new positions. Many sentence models read less than they have rows; the rows behind
    their limit come from pretraining.

    Args:
        encoder: the original.
        length: tokens, special ones included.
        keep: the number of rows that stay; by default the encoder's limit. 0 interpolates all of them.
    """
    model, name = encoder.model, table_name(encoder.model)
    first, weights = first_row(model), model.state_dict()
    kept = encoder.limit if keep is None else keep
    table = weights[name][first:]
    # With nothing behind the trained rows, the second half of those is repeated, stretched.
    rest = table[kept:] if len(table) - kept > 1 else table[kept // 2 :]
    longer = functional.interpolate(rest.T[None], size=length - kept, mode="linear", align_corners=True)[0].T
    config = deepcopy(model.config)
    config.max_position_embeddings = first + length
    with quiet_transformers():
        student = AutoModel.from_config(config, dtype=torch.float32)
    student.load_state_dict({**weights, name: torch.cat([weights[name][:first], table[:kept], longer])})
    return SentenceEncoder(student.eval(), encoder.tokenizer, encoder.pooling, length)


def save_encoder(encoder: SentenceEncoder, original: Path, folder: Path) -> None:
    """Write an encoder to an empty folder, with the modules and prompts of the original's folder."""
    encoder.model.save_pretrained(folder)
    tokenizer = deepcopy(encoder.tokenizer)
    tokenizer.model_max_length = encoder.limit
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:  # its file may say at which length it truncates, whatever the model
        backend.no_truncation()
        backend.no_padding()
    tokenizer.save_pretrained(folder)
    modules = [("0", "", "Transformer"), ("1", "1_Pooling", "Pooling"), ("2", "2_Normalize", "Normalize")]
    told = _read(original / "sentence_bert_config.json")
    files: dict[str, Any] = {
        "modules.json": [
            {"idx": index, "name": name, "path": path, "type": f"sentence_transformers.models.{kind}"}
            for index, (name, path, kind) in enumerate(modules)
        ],
        "sentence_bert_config.json": {
            "max_seq_length": encoder.limit,
            "do_lower_case": bool(told.get("do_lower_case", False)),
        },
        "1_Pooling/config.json": {
            "word_embedding_dimension": encoder.model.config.hidden_size,
            "pooling_mode_cls_token": encoder.pooling == "cls",
            "pooling_mode_mean_tokens": encoder.pooling == "mean",
        },
    }
    prompts = _read(original / "config_sentence_transformers.json")
    if prompts:
        files["config_sentence_transformers.json"] = prompts
    (folder / "1_Pooling").mkdir()
    (folder / "2_Normalize").mkdir()
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _pooling(folder: Path) -> Literal["mean", "cls"]:
    """Return how a folder's modules make a vector of states.

    Raises:
        InputError: if they have a module or a pooling that is not known.
    """
    if not (folder / "modules.json").is_file():
        return "mean"
    modules = _read(folder / "modules.json")
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    if kinds not in (list(KNOWN_MODULES), list(KNOWN_MODULES[:2])):
        raise InputError("model", f"expected the modules {', '.join(KNOWN_MODULES)}, got {', '.join(kinds) or 'none'}")
    found = _read(folder / modules[1].get("path", "1_Pooling") / "config.json")
    mark = "pooling_mode_"
    ways = [name.removeprefix(mark) for name, used in found.items() if used is True and name.startswith(mark)]
    if isinstance(found.get("pooling_mode"), str):
        ways = [found["pooling_mode"]]
    if ways in (["mean_tokens"], ["mean"], []):
        return "mean"
    if ways in (["cls_token"], ["cls"]):
        return "cls"
    raise InputError("model", f"expected pooling by the mean or by the first token, got {', '.join(ways)}")


def _read(path: Path) -> Any:
    """Return what a JSON file holds; nothing if there is none.

    Raises:
        InputError: if it is not JSON, or not a regular file.
    """
    if path.exists():
        check_regular("model", path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InputError("model", f"cannot read {str(path)!r}: {error}") from None
