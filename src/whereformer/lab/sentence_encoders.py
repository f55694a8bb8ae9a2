"""Sentence encoders: read one, give it more positions, and write it so that sentence-transformers loads it."""

from __future__ import annotations

import json
import re
import shutil
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

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
POOLINGS = ("mean", "cls", "lasttoken")
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
        **dict.fromkeys(("__version__", "prompts", "default_prompt_name", "similarity_fn_name", "truncate_dim"), ANY),
        "model_type": ("SentenceTransformer", None),
    },
}
"""By kind of file, the settings that are known, and their values that can be kept."""


DOCUMENT_PROMPTS = ("document", "passage", "corpus")
"""Common names of the prompt for documents; the first that is not empty counts."""


class Settings(NamedTuple):
    """How a text becomes a vector; by default as sentence-transformers does it with a plain encoder.

    ``pooling``: a text's vector is the mean of its tokens' states ("mean"), or the state of the first ("cls") or the
    last ("lasttoken"). ``limit``: the tokens that are read; None if the tokenizer says it. ``lowercase``: whether text
    is written in lowercase first. ``prompt``: what comes before a document, such as "passage: ", and ``pools_prompt``:
    whether its tokens are part of the mean. ``normalizes``: whether vectors have length 1.
    """

    pooling: str = "mean"
    limit: int | None = None
    lowercase: bool = False
    prompt: str = ""
    pools_prompt: bool = True
    normalizes: bool = False


@dataclass(frozen=True)
class SentenceEncoder:
    """An encoder that reads up to ``limit`` tokens, special ones included.

    ``before`` and ``after`` are the token ids around every text: special ones and the prompt.
    """

    model: Encoder
    tokenizer: Any
    settings: Settings
    limit: int
    before: list[int]
    after: list[int]

    @property
    def extra(self) -> int:
        """The number of tokens around every text."""
        return len(self.before) + len(self.after)

    @property
    def room(self) -> int:
        """The most tokens of a text that the encoder reads, without the tokens around it."""
        return self.limit - self.extra

    def ids(self, text: str) -> list[int]:
        """Return the token ids of a text, without special ones."""
        return self.tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]

    def add_special_tokens(self, rows: Tensor) -> Tensor:
        """Return token ids with all that belong around a text, (rows, n + extra), from a text's own, (rows, n)."""
        around = (rows.new_tensor(ids).expand(len(rows), -1) for ids in (self.before, self.after))
        return torch.cat([next(around), rows, next(around)], dim=1).to(self.model.device)

    def states(self, ids: Tensor) -> Tensor:
        """Return the last hidden states, (rows, n, hidden_size), of token ids, (rows, n)."""
        return self.model(ids).last_hidden_state

    def pool(self, states: Tensor) -> Tensor:
        """Return the vectors of texts, (rows, hidden_size), as sentence-transformers makes them."""
        if self.settings.prompt and not self.settings.pools_prompt:
            states = states[:, len(self.before) :]
        ends = {"cls": 0, "lasttoken": -1}
        vectors = states[:, ends[self.settings.pooling]] if self.settings.pooling in ends else states.mean(1)
        return functional.normalize(vectors, dim=-1) if self.settings.normalizes else vectors

    def vectors(self, rows: Tensor) -> Tensor:
        """Return the vectors of texts, (rows, hidden_size), each of length 1, from token ids of texts, (rows, n)."""
        return functional.normalize(self.pool(self.states(self.add_special_tokens(rows))), dim=-1)


def load_encoder(path: str) -> SentenceEncoder:
    """Load the folder of a sentence-transformers model, or of an encoder, whose states are averaged.

    Raises:
        InputError: if it can't be read, its positions can't continue, or it works in a way that can't be kept.
    """
    folder = Path(path)
    if not folder.is_dir():
        download = "`hf download NAME --local-dir FOLDER` gets one from the Hugging Face Hub"
        raise InputError("model", f"expected a folder with a model, got {path!r}; {download}")
    check_has_config("model", folder)
    _sentence_files(folder)
    settings = _settings(folder)
    model = load(path)
    if "-" in model.config.blocks:
        raise InputError("model", "expected a model that doesn't pool, got a funnel")
    table = find_position_table(model)
    tokenizer = load_tokenizer(path, None)
    if settings.lowercase:
        _lowercase(tokenizer)
    limit = settings.limit or min(tokenizer.model_max_length, model.config.max_position_embeddings)
    limit = limit if table is None else min(limit, len(table.weight))
    before, after = _special_tokens(path, tokenizer)
    # Before another text, the prompt is read without a space at its end.
    prompt = tokenizer(settings.prompt.rstrip(), add_special_tokens=False)["input_ids"] if settings.prompt else []
    encoder = SentenceEncoder(model, tokenizer, settings, limit, before + prompt, after)
    if encoder.room < 1:
        raise InputError("model", f"expected one that reads at least {encoder.extra + 1} tokens, got {limit}")
    return encoder


def _special_tokens(path: str, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the token ids that a tokenizer puts before and after each text; an InputError if it changes the text's."""
    text, ids = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
    for start in range(len(ids) - len(text) + 1):
        if text and ids[start : start + len(text)] == text:
            return ids[:start], ids[start + len(text) :]
    raise InputError("model", f"{path}: expected a tokenizer that adds tokens around 'a', got {ids} from {text}")


def _settings(folder: Path) -> Settings:
    """Read the settings of a folder of sentence-transformers; folders of other programs have none.

    Raises:
        InputError: for ``model``, if a file can't be read, or there is a module, a pooling or a setting that is not
            known.
    """
    modules = _read(folder, LIST, list)
    if modules is None:
        return Settings()
    about = _read(folder, PROMPTS, dict) or {}
    kind = about.get("model_type")
    if kind not in (None, "SentenceTransformer"):
        raise InputError("model", f"expected a model that makes vectors, got a {short_repr(kind)[1:-1]}: {folder}")
    _check_settings(PROMPTS, PROMPTS, about)
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
    pooling = _read(folder, later["Pooling"], dict) or {}
    ways = _ways(pooling)
    if len(ways) != 1 or ways[0] not in POOLINGS:
        raise InputError("model", f"expected pooling by {' or '.join(POOLINGS)}, got {list_some(ways)}")
    limit, lowercase = settings.get("max_seq_length"), settings.get("do_lower_case") or False
    if limit is not None and not (isinstance(limit, int) and limit > 0):
        raise InputError("model", f"expected a number of tokens as max_seq_length in {reader}, got {short_repr(limit)}")
    if not isinstance(lowercase, bool):
        raise InputError("model", f"expected true or false as do_lower_case in {reader}, got {short_repr(lowercase)}")
    pools_prompt = pooling.get("include_prompt", True) is not False
    return Settings(ways[0], limit, lowercase, _document_prompt(about), pools_prompt, len(names) == len(MODULES))


def _document_prompt(about: dict[str, Any]) -> str:
    """Return the text before documents, from the contents of PROMPTS: their own prompt, or else the default one."""
    prompts, default = about.get("prompts") or {}, about.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str | None) for text in prompts.values()):
        raise InputError("model", f"expected texts by name as prompts in {PROMPTS}, got {short_repr(prompts)}")
    if default is not None and default not in prompts:
        raise InputError("model", f"expected one of the prompts as default_prompt_name in {PROMPTS}, got {default!r}")
    return next(filter(None, map(prompts.get, (*DOCUMENT_PROMPTS, default))), "")


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


def find_position_table(model: Encoder) -> Learned | None:
    """Return the position embeddings of a model; None if its attention depends only on how far tokens are apart.

    Raises:
        InputError: for ``model``, if it has other positions, which are not known beyond its limit.
    """
    parts = model.position.components()
    tables = [part for part in parts if isinstance(part, Learned)]
    if len(tables) > 1 or not all(part.shift_invariant for part in parts if part not in tables):
        expected = "expected a model with position embeddings or relative positions"
        raise InputError("model", f"{expected}, got one with {model.config.position!r}")
    return tables[0] if tables else None


def lengthen(encoder: SentenceEncoder, length: int) -> SentenceEncoder:
    """Return a copy of an encoder that reads ``length`` tokens, special ones included.

    The position embeddings that the encoder reads are repeated until there are enough, as in Longformer (Beltagy et al.
    2020, section 5); relative positions stay as they are. Each token attends only to a window. There, all tokens have
    different embeddings, and the encoder knows all distances. Texts of up to half the encoder's limit
    then have the same vectors. If one token's state is the vector, the last layer has no window, unless it had one.
    """
    model, weights, table = encoder.model, encoder.model.state_dict(), find_position_table(encoder.model)
    config = deepcopy(model.config)
    config.max_position_embeddings = length
    widest = max(1, encoder.limit // 2 - 1)
    windows = [min(window or widest, widest) for window in config.layer_windows()]
    if encoder.settings.pooling != "mean" and not config.layer_windows()[-1]:
        windows[-1] = 0
    config.windows = ",".join(map(str, windows))
    student = Encoder(config).eval()
    if table is not None:
        name = next(name for name, weight in model.named_parameters() if weight is table.weight)
        weights[name] = table.weight[torch.arange(length) % encoder.limit]
    student.load_state_dict(weights)
    return replace(encoder, model=student, limit=length)


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
