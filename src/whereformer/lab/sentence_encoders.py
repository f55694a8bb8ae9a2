"""Sentence encoders: read one, give it more positions, and write it so that sentence-transformers loads it."""

from __future__ import annotations

import json
import re
import shutil
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import normalizers
from torch import Tensor
from torch.nn import functional

from ..errors import InputError, list_some, short_repr
from ..files import check_regular, read_json
from ..models import Encoder
from ..models.checkpoints.files import check_has_config
from ..positions.learned import Learned
from .loading import load, load_tokenizer

LIST, PROMPTS = "modules.json", "config_sentence_transformers.json"
"""The steps of a model, such as pooling; its prompts and similarity."""
READERS = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""The files that may hold the settings of the first step; sentence-transformers reads the first with settings."""
MODULES = ("Transformer", "Pooling", "Normalize")
"""The steps that are known, in this order. The last one is optional."""
POOLINGS = ("mean", "cls")
ANY = object()
"""Stands for all values of a setting that is read elsewhere, or that changes no vector and is copied."""
NOTHING: tuple[Any, ...] = (None, {}, [], "")
STATES = {"method": "forward", "method_output_name": "last_hidden_state"}
KNOWN: dict[str, dict[str, Any]] = {
    LIST: dict.fromkeys(("idx", "name", "path", "type", "kwargs"), ANY),
    "Transformer": {
        **dict.fromkeys(("max_seq_length", "do_lower_case", "unpad_inputs", "modality_config"), ANY),
        "transformer_task": ("feature-extraction",),
        "module_output_name": ("token_embeddings",),
        **dict.fromkeys(("query_length", "document_length", "query_expansion", "tokenizer_name_or_path"), NOTHING),
        **dict.fromkeys(("processing_kwargs", "model_args", "tokenizer_args", "config_args"), NOTHING),
        **dict.fromkeys(("model_kwargs", "processor_kwargs", "config_kwargs"), NOTHING),
    },
    "Pooling": dict.fromkeys(
        ("word_embedding_dimension", "embedding_dimension", "pooling_mode", "include_prompt"), ANY
    ),
    "Normalize": dict.fromkeys(("module_input_name", "module_output_name"), ("sentence_embedding", None)),
    PROMPTS: {
        **dict.fromkeys(("__version__", "prompts", "similarity_fn_name", "truncate_dim"), ANY),
        "model_type": ("SentenceTransformer", None),
        "default_prompt_name": NOTHING,
    },
}
"""By kind of file, the settings that are known, and their values that can be kept."""


@dataclass(frozen=True)
class SentenceEncoder:
    """An encoder that reads up to ``limit`` tokens, special ones included.

    ``pooling``: whether a text's vector is the mean of its tokens' states ("mean"), or the first token's ("cls").
    """

    model: Encoder
    tokenizer: Any
    pooling: str
    limit: int

    def ids(self, text: str) -> list[int]:
        """Return the token ids of a text, without special ones."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
        return ids

    def add_special_tokens(self, rows: Tensor) -> Tensor:
        """Return token ids with special tokens around them, (rows, n + 2), from ids without them, (rows, n)."""
        first, last = self.tokenizer.cls_token_id, self.tokenizer.sep_token_id
        return functional.pad(functional.pad(rows, (1, 0), value=first), (0, 1), value=last).to(self.model.device)

    def states(self, ids: Tensor) -> Tensor:
        """Return the last hidden states, (rows, n, hidden_size), of token ids, (rows, n)."""
        states: Tensor = self.model(ids).last_hidden_state
        return states

    def pool(self, states: Tensor) -> Tensor:
        """Return the vectors of texts, (rows, hidden_size), each of length 1."""
        return functional.normalize(states[:, 0] if self.pooling == "cls" else states.mean(1), dim=-1)

    def vectors(self, rows: Tensor) -> Tensor:
        """Return the vectors of texts, (rows, hidden_size), from token ids without special ones, (rows, n)."""
        return self.pool(self.states(self.add_special_tokens(rows)))


def load_encoder(path: str) -> SentenceEncoder:
    """Load the folder of a sentence-transformers model, or of an encoder, whose states are averaged.

    Raises:
        InputError: if it can't be read, has no position embeddings, or works in a way that can't be kept.
    """
    folder = Path(path)
    if not folder.is_dir():
        download = "`hf download NAME --local-dir FOLDER` gets one from the Hugging Face Hub"
        raise InputError("model", f"expected a folder with a model, got {path!r}; {download}")
    check_has_config("model", folder)
    _sentence_files(folder)
    pooling, limit, lowercase = _settings(folder)
    model = load(path)
    num_positions = len(find_position_table(model).weight)
    if "-" in model.config.blocks:
        raise InputError("model", "expected a model that doesn't pool, got a funnel")
    tokenizer = load_tokenizer(path, None)
    missing = [name for name in ("cls", "sep") if getattr(tokenizer, f"{name}_token_id") is None]
    if missing:
        raise InputError("model", f"{path}: its tokenizer has no {missing[0]} token")
    if lowercase:
        _lowercase(tokenizer)
    limit = min(limit or tokenizer.model_max_length, num_positions)
    if type(limit) is not int or limit < 3:
        raise InputError("model", f"expected one that reads at least 3 tokens, got {short_repr(limit)}")
    return SentenceEncoder(model, tokenizer, pooling, limit)


def _settings(folder: Path) -> tuple[str, int | None, bool]:
    """Read how the modules of a folder of sentence-transformers pool the states, how many tokens they read, and whether
    they write text in lowercase first.

    The number is None if the tokenizer says it. Other folders have no modules, and their states are averaged.

    Raises:
        InputError: for ``model``, if a file can't be read, or there is a module, a pooling or a setting that is not
            known.
    """
    modules = _read(folder, LIST, list)
    if modules is None:
        return "mean", None, False
    kind = (_read(folder, PROMPTS, dict) or {}).get("model_type")
    if kind not in (None, "SentenceTransformer"):
        raise InputError("model", f"expected a model that makes vectors, got a {short_repr(kind)[1:-1]}: {folder}")
    _check_settings(PROMPTS, PROMPTS, _read(folder, PROMPTS, dict) or {})
    kinds = [str(step.get("type") if isinstance(step, dict) else step) for step in modules]
    # Modules of other packages have their full names, and so are not known.
    names = tuple(re.sub(r"^sentence_transformers\..*\.", "", kind) for kind in kinds)
    if names not in (MODULES, MODULES[:2]):
        raise InputError("model", f"expected the modules {', '.join(MODULES)}, got {list_some(names)}")
    reader = _reader(folder)
    settings = _read(folder, reader, dict) or {}
    _check_settings(reader, "Transformer", settings)
    states = settings.get("modality_config", {"text": STATES})
    if not isinstance(states, dict) or states.get("text") != STATES:
        raise InputError(
            "model", f"expected the last hidden states as modality_config in {reader}, got {short_repr(states)}"
        )
    # Only the name, since a path may lead out of the folder.
    defaults = "", "1_Pooling", "2_Normalize"
    paths = [Path(str(step.get("path", path))).name for step, path in zip(modules, defaults, strict=False)]
    if paths[0]:
        raise InputError("model", f"expected '' as the path of the Transformer in {LIST}, got {short_repr(paths[0])}")
    for step in modules:
        _check_settings(LIST, LIST, step)
    later = {name: str(Path(path) / "config.json") for name, path in zip(names[1:], paths[1:], strict=True)}
    for name, file in later.items():
        _check_settings(file, name, _read(folder, file, dict) or {})
    ways = _ways(_read(folder, later["Pooling"], dict) or {})
    if len(ways) != 1 or ways[0] not in POOLINGS:
        raise InputError("model", f"expected pooling by {' or '.join(POOLINGS)}, got {list_some(ways)}")
    limit, lowercase = settings.get("max_seq_length"), settings.get("do_lower_case") or False
    if limit is not None and not (isinstance(limit, int) and limit > 0):
        raise InputError("model", f"expected a number of tokens as max_seq_length in {reader}, got {short_repr(limit)}")
    if not isinstance(lowercase, bool):
        raise InputError("model", f"expected true or false as do_lower_case in {reader}, got {short_repr(lowercase)}")
    return ways[0], limit, lowercase


def _reader(folder: Path) -> str:
    """Return the name of the file with the settings of the first step; BERT's name without such a file."""
    return next((name for name in READERS if _read(folder, name, dict)), READERS[0])


def _check_settings(file: str, kind: str, settings: dict[str, object]) -> None:
    """Raise an InputError for a setting of a file, of a kind in KNOWN, whose effect on vectors would not be kept."""
    for name, value in settings.items():
        if kind == "Pooling" and name.startswith("pooling_mode_"):
            continue
        if name not in KNOWN[kind]:
            raise InputError("model", f"{file} has {short_repr(name)}, which is not known; got {short_repr(value)}")
        known = KNOWN[kind][name]
        if known is not ANY and value not in known:
            raise InputError(
                "model", f"expected {' or '.join(map(repr, known))} as {name} in {file}, got {short_repr(value)}"
            )


def _lowercase(tokenizer: object) -> None:
    """Let a tokenizer write text in lowercase first, as sentence-transformers does if its settings say so."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise InputError("model", "do_lower_case needs a tokenizer with a tokenizer.json")
    steps = [] if backend.normalizer is None else [backend.normalizer]
    backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *steps])


def _ways(pooling: dict[str, object]) -> list[str]:
    """Return the names of the ways to pool from the settings of a step, as older and newer releases write them."""
    mode = pooling.get("pooling_mode")
    if mode is not None:
        return [*map(str, mode)] if isinstance(mode, list) else [str(mode)]
    mark = "pooling_mode_"
    older = [name.removeprefix(mark) for name, used in pooling.items() if used is True and name.startswith(mark)]
    return [name.removesuffix("_tokens").removesuffix("_token") for name in older] or ["mean"]


def _read(folder: Path, name: str, kind: type) -> Any:
    """Return the content of a JSON file in a folder; None if the file does not exist."""
    return read_json("model", folder / name, kind) if (folder / name).exists() else None


def find_position_table(model: Any) -> Learned:
    """Return the position embeddings of a model; an InputError if it has none."""
    tables = [module for module in model.modules() if isinstance(module, Learned)]
    if len(tables) != 1:
        raise InputError("model", f"expected a model with position embeddings, got one with {model.config.position!r}")
    return tables[0]


def lengthen(encoder: SentenceEncoder, length: int) -> SentenceEncoder:
    """Return a copy of an encoder that reads ``length`` tokens, special ones included.

    The position embeddings that the encoder reads are repeated until there are enough, as in Longformer (Beltagy et al.
    2020, section 5). Each token attends only to a window in which all tokens have different embeddings. Texts of up to
    half the encoder's limit then have the same vectors. If the first token's state is the vector, the last layer has no
    window.
    """
    model, weights = encoder.model, encoder.model.state_dict()
    name = next(name for name, weight in model.named_parameters() if weight is find_position_table(model).weight)
    config = deepcopy(model.config)
    config.max_position_embeddings = length
    windows = [max(1, encoder.limit // 2 - 1)] * len(model.passes)
    if encoder.pooling == "cls":
        windows[-1] = 0
    config.windows = ",".join(map(str, windows))
    student = Encoder(config).eval()
    student.load_state_dict({**weights, name: weights[name][torch.arange(length) % encoder.limit]})
    return SentenceEncoder(student, encoder.tokenizer, encoder.pooling, length)


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
    keep_sentence_settings(original, folder, limit=encoder.limit)


def _sentence_files(folder: Path) -> list[Path]:
    """Return the files of a folder that only sentence-transformers needs; other folders have none."""
    if not (folder / LIST).exists():
        return []
    # sentence-transformers numbers its steps: "1_Pooling", "2_Normalize".
    names = [LIST, PROMPTS, _reader(folder), "[0-9]*_*/*.json", "[0-9]*_*/*.safetensors"]
    files = [file for name in names for file in sorted(folder.glob(name))]
    check_regular("model", *files)
    return files


def keep_sentence_settings(source: str | Path, target: Path, *, limit: int | None = None) -> None:
    """Copy the files that sentence-transformers needs besides a model from its folder to another model's folder.

    Without them, that program averages the states of tokens up to the tokenizer's limit. If the source is
    not a sentence-transformers folder, or is a model on the Hugging Face Hub, nothing is copied.

    ``limit`` is the new model's ``max_seq_length``; if None, the original's. The target's folder exists. A device, a
    pipe or a socket among the files raises an InputError for ``model``.
    """
    source = Path(source)
    for file in _sentence_files(source):
        copy = target / file.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)
    if limit is not None and (file := target / _reader(source)).exists():
        settings = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(json.dumps({**settings, "max_seq_length": limit}, indent=2) + "\n", encoding="utf-8")
