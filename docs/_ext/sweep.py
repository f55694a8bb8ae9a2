"""Every configuration class of transformers, tiny and with random weights, through ``attach(model, "none")``.

``python docs/_ext/sweep.py --out FOLDER`` keeps what it finds in a folder, a file for each package of transformers,
and goes on from there; with ``--write``, it then writes ``docs/guides/attached-models.json``, from which the site makes
a table.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib
import inspect
import json
import logging
import os
import pkgutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from whereformer import attach, detach
from whereformer.errors import InputError, one_line
from whereformer.models.attachment import find_calls, verify
from whereformer.models.attachment.hooks import NAME
from whereformer.models.attachment.trial_run import trial_copy

SECONDS = 120
"""What one model class may take of a processor, in all its sizes."""
PARAMETERS = 130e6
"""Larger models are not built."""

SIZES = {
    name: size
    for size, names in {
        32: "hidden_size d_model n_embd embed_dim dim d_embed emb_dim embedding_size encoder_embed_dim "
        "decoder_embed_dim projection_dim hidden_dim decoder_hidden_size encoder_hidden_size width model_dim "
        "text_embed_dim",
        4: "num_attention_heads n_head num_heads n_heads encoder_attention_heads decoder_attention_heads "
        "num_decoder_attention_heads num_encoder_attention_heads attention_heads decoder_num_attention_heads "
        "encoder_num_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts "
        "swa_num_attention_heads",
        2: "num_key_value_heads num_kv_heads num_hidden_layers n_layer num_layers n_layers encoder_layers "
        "decoder_layers num_decoder_layers num_encoder_layers encoder_num_hidden_layers decoder_num_hidden_layers "
        "num_experts_per_tok num_experts_per_token top_k moe_k moe_topk swa_num_key_value_heads "
        "decoder_num_key_value_heads encoder_num_key_value_heads n_heads_kv depth",
        8: "head_dim d_kv kv_channels qk_rope_head_dim qk_nope_head_dim v_head_dim qk_head_dim attention_head_dim "
        "swa_head_dim",
        48: "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner moe_intermediate_size "
        "shared_expert_intermediate_size ffn_hidden_size intermediate_dim mlp_dim shared_intermediate_size "
        "decoder_intermediate_size encoder_intermediate_size dense_intermediate_size prefix_intermediate_size "
        "feed_forward_hidden_size",
        16: "q_lora_rank kv_lora_rank hidden_size_per_layer_input",
        1: "n_group topk_group n_shared_experts num_mem_blocks first_k_dense_replace num_conv_pos_embedding_groups",
        128: "vocab_size vocab_size_per_layer_input max_position_embeddings n_positions max_seq_len "
        "max_sequence_length entity_vocab_size text_vocab_size",
        6: "sliding_window sliding_window_size attention_chunk_size local_attention window_size attention_window_size",
        24: "max_source_positions",
    }.items()
    for name in names.split()
}
"""Tiny values of fields, by their names."""

RESNET = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}
RESNET |= {"layer_type": "basic", "out_features": ["stage2", "stage3", "stage4"]}
NO_TIMM = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None, "backbone_config": RESNET}
TURNS = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0, "mrope_section": [2, 1, 1]}
SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
FIELDS: dict[str, dict[str, Any]] = {
    "AutoformerConfig": {"prediction_length": 4},
    "BailingHybridConfig": {"n_group": 1, "topk_group": 1},
    "BltConfig": {"encoder_hash_byte_group_vocab": 100},
    "ChameleonConfig": {"vocabulary_map": {"<image>": 99}},
    "CohereCompassTextConfig": {"layer_types": ["sliding_attention", "full_attention"]},
    "ConditionalDetrConfig": NO_TIMM,
    "DabDetrConfig": NO_TIMM,
    "DeepseekOcr2TextConfig": {"mlp_layer_types": ["dense", "sparse"]},
    "DeformableDetrConfig": NO_TIMM,
    "DetrConfig": NO_TIMM,
    "DiffusionGemmaTextConfig": {"top_k_experts": 2},
    "DoryConfig": {"n_input_layers": 1, "n_output_layers": 1, "num_hidden_layers": 3, "layer_types": SLIDING},
    "Emu3Config": {"vocabulary_map": {"<image>": 99}},
    "EsmConfig": {"pad_token_id": 1, "mask_token_id": 32},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]]},
    "FunAsrNanoAdaptorConfig": {"intermediate_size": 8},
    "Gemma3nTextConfig": {"num_kv_shared_layers": 0},
    "GraniteMoeHybridConfig": {"layer_types": ["mamba", "attention"]},
    "HunYuanVLTextConfig": {"rope_parameters": {**TURNS, "mrope_section": [1, 1, 1, 1]}},
    "InformerConfig": {"prediction_length": 4},
    "Inkling2VisionConfig": {"text_hidden_size": 32},
    "Inkling2LoopVisionConfig": {"text_hidden_size": 32},
    "Granite4VisionConfig": {"deepstack_layer_map": [[0, 0]]},
    "LongcatFlashConfig": {"qk_head_dim": 16},
    **{f"{name}TextConfig": {"rope_parameters": TURNS} for name in ("Glm4v", "Glm4vMoe", "GlmImage", "GlmOcr")},
}
"""Fields that a configuration needs beside tiny values, by the name of its class."""

LAYERS = {name for name in SIZES if name.endswith(("layers", "n_layer", "experts", "per_tok", "group", "replace"))} | {
    "layer_types",
    "vocab_size",
}
"""The fields that alone make a model small, whatever its other sizes have to fit to."""

FINAL = ("does not dispatch", "does not hand", "does not know", "no layer in which", "of a known form", "missing")
"""Words of refusals that no other size changes."""

MODES = ("tiny", "fill none", "six layers", "keep heads", "layers only", "as it is")
"""Ways to make a configuration small, one of which its class takes."""


def smaller(default: PreTrainedConfig, mode: str) -> dict[str, Any]:
    """Tiny values for the fields of a configuration."""
    out: dict[str, Any] = {}
    if mode == "as it is":
        return out
    fields = {name: value for name, value in vars(default).items() if not name.startswith("_")}
    for alias in getattr(type(default), "attribute_map", {}):
        fields.pop(alias, None)
    for name, value in fields.items():
        if value is None and mode == "fill none" and name in SIZES:
            out[name] = SIZES[name]
        elif name == "attn_layer_indices":
            out[name] = [1]
        elif name == "layer_types" and isinstance(value, list | tuple):
            kinds = list(dict.fromkeys(value))[:4]
            out[name] = kinds * 2 if len(kinds) == 1 else kinds
        elif type(value) is int and name in SIZES and value > 0:
            size = SIZES[name]
            if name in ("num_key_value_heads", "num_kv_heads"):
                size = 4 if value == getattr(default, "num_attention_heads", None) else min(2, value)
            out[name] = min(size, value)
        elif type(value) is int and name.endswith(("token_id", "token_index")) and value >= 128:
            out[name] = 100 + sum(map(ord, name)) % 27
    if "layer_types" in out:
        for name in ("num_hidden_layers", "num_layers", "n_layer"):
            if name in out or name == "num_hidden_layers":
                out[name] = len(out["layer_types"])
    if type(fields.get("image_size")) is int and type(fields.get("patch_size")) is int:
        out["image_size"] = 2 * fields["patch_size"]
    rotation = fields.get("rope_parameters")
    if isinstance(rotation, dict) and "mrope_section" in rotation:
        pairs = int(out.get("head_dim", 8) * rotation.get("partial_rotary_factor", 1)) // 2
        section = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
        out["rope_parameters"] = {**rotation, "mrope_section": section}
    if mode == "six layers":
        for name in ("num_hidden_layers", "num_layers", "n_layer"):
            if name in out and "layer_types" not in out:
                out[name] = min(6, fields.get(name, 6))
        out = {name: value for name, value in out.items() if name not in ("n_group", "topk_group")}
    if mode == "keep heads":
        width = fields.get("head_dim") or getattr(default, "head_dim", None)
        hidden, heads = getattr(default, "hidden_size", None), getattr(default, "num_attention_heads", None)
        if not isinstance(width, int) and isinstance(hidden, int) and isinstance(heads, int):
            width = hidden // heads
        out = {name: value for name, value in out.items() if SIZES.get(name) != 8}
        if isinstance(width, int):
            out |= {name: min(fields[name], 4 * width) for name in out if SIZES.get(name) == 32}
    if mode == "layers only":
        out = {name: value for name, value in out.items() if name in LAYERS or name.endswith(("_id", "_index"))}
    return out


def tiny(kind: type[PreTrainedConfig], mode: str, depth: int = 0) -> PreTrainedConfig:
    """A tiny configuration with tiny configurations inside."""
    default = kind()
    fields = smaller(default, mode)
    for name in getattr(kind, "sub_configs", {}) or {}:
        inner = getattr(default, name, None)
        if isinstance(inner, PreTrainedConfig) and depth < 3:
            fields[name] = tiny(type(inner), mode, depth + 1)
    fields |= FIELDS.get(kind.__name__, {})
    problem: Exception | None = None
    of_heads = tuple(name for name, size in SIZES.items() if size == 8)
    of_groups = tuple(name for name, size in SIZES.items() if size == 1)
    for left_out in ((), ("layer_types",), ("head_dim",), of_heads, of_groups):
        try:
            return kind(**{name: value for name, value in fields.items() if name not in left_out})
        except Exception as error:
            problem = problem or error
    assert problem is not None
    raise problem


def draw(model: PreTrainedModel) -> None:
    """Give a model weights that are large enough for every score to count."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2:
                inputs = parameter.shape[-1] if parameter.dim() < 3 else parameter[0].numel()
                parameter.copy_(noise * min(0.3, 1.5 / max(1, inputs) ** 0.5))
            else:
                parameter.add_(noise * 0.2)


class NotBuiltError(Exception):
    """No tiny model of a class could be built."""


def models(kind: type[PreTrainedConfig], model_class: type[PreTrainedModel]) -> Iterator[PreTrainedModel]:
    """Tiny models of a class; the first that runs will do."""
    problems: list[str] = []
    for mode in MODES:
        try:
            config = tiny(kind, mode)
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in model_class(config).parameters())
            if size > PARAMETERS:
                raise ValueError(f"{size / 1e6:.0f} million parameters")
            torch.manual_seed(0)
            model = model_class(config).eval().float()
            draw(model)
        except Exception as error:
            problems.append(f"{type(error).__name__}: {one_line(str(error))[:200]}")
        else:
            yield model
    if problems:
        raise NotBuiltError(" | ".join(dict.fromkeys(problems)))


def model_classes(package: str) -> dict[type[PreTrainedConfig], list[type[PreTrainedModel]]]:
    """The configuration classes of a package of transformers, each with a base model and one with a head."""
    found: dict[type[PreTrainedConfig], list[type[PreTrainedModel]]] = {}
    modules = importlib.import_module(f"transformers.models.{package}").__path__
    for name in (module.name for module in pkgutil.iter_modules(modules) if module.name.startswith("modeling_")):
        try:
            module = importlib.import_module(f"transformers.models.{package}.{name}")
        except ImportError:
            continue  # of a package that is not installed; its configurations are named all the same
        classes: list[Any] = [each for each in vars(module).values() if inspect.isclass(each)]
        for each in classes:
            if (
                issubclass(each, PreTrainedModel)
                and each.__module__ == module.__name__
                and "forward" in vars(each)
                and each.config_class is not None
                and not each.__name__.endswith("PreTrainedModel")
            ):
                found.setdefault(each.config_class, []).append(each)
    return {kind: _two_of(kind, each) for kind, each in found.items()}


def _two_of(kind: type[PreTrainedConfig], found: list[type[PreTrainedModel]]) -> list[type[PreTrainedModel]]:
    """The base model and a model with a head; whatever there is if there are none."""
    own = kind.__name__.replace("Config", "Model")
    bases = [each for each in found if each.__name__.endswith(("Model", "Encoder", "Transformer", "Decoder"))]
    bases.sort(key=lambda each: (not each.__name__.endswith("Model"), each.__name__ != own, len(each.__name__)))
    ends = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM", "ForCTC")
    heads = [each for end in ends for each in found if each.__name__.endswith(end)]
    return list(dict.fromkeys(bases[:1] + heads[:1])) or found[:1]


class Logged(logging.Handler):
    """What a logger was told."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextlib.contextmanager
def attending(attend: Callable[..., Any]) -> Iterator[None]:
    """Let the verification call another function instead of our attention, which is the function's first argument."""
    right = vars(find_calls)["attend"]
    vars(find_calls)["attend"] = functools.partial(attend, right)
    try:
        yield
    finally:
        vars(find_calls)["attend"] = right


def judge(model: PreTrainedModel) -> dict[str, Any]:
    """What ``attach`` makes of a model."""
    logger, logged = logging.getLogger(verify.__name__), Logged()
    logger.addHandler(logged)
    try:
        own = sees_later(model)
        begun = time.perf_counter()
        attach(model, "none")
        row: dict[str, Any] = {"outcome": "right", "seconds": round(time.perf_counter() - begun, 3)}
        stacks = {name: part for name, part in model.named_modules() if hasattr(part, NAME)}
        row["parts"] = list(stacks)
        detach(model)
        if logged.lines:
            return {**row, "outcome": "not verified", "why": logged.lines[0]}
        if (served := sees_later_with_a_method(model)) is not None and served != own:
            return {**row, "outcome": "wrong", "why": f"sees later tokens: {own}, with a method: {served}"}
        # In a decoder of objects the first layer sees zeros only, whose scores do not matter.
        layers = [call.module for call in find_calls.find_calls(model)]
        return {**row, "caught": is_caught(model, layers[0]) or is_caught(model, layers[-1])}
    except InputError as error:
        return {"outcome": "refused", "why": one_line(str(error))}
    except Exception as error:
        return {
            "outcome": "crashed",
            "why": f"{type(error).__name__}: {one_line(str(error))}",
            "where": traceback.format_exc()[-900:],
        }
    finally:
        logger.removeHandler(logged)


def sees_later(model: PreTrainedModel) -> dict[str, bool]:
    """Whether states depend on a later token, in calls with a mask and without one, as far as they run."""
    reacts: dict[str, bool] = {}
    masks: tuple[dict[str, int], ...] = ({}, {"attention_mask": 1}, {"attention_mask": 0})
    for mask, name in zip(masks, ("no mask", "a mask of ones", "a mask of padding"), strict=True):
        try:
            states = [states_of(model, mask, last) for last in (7, 9)]
        except Exception:  # the model may take no text, no mask, or need one
            continue
        # How many tokens an expert gets changes the rounding of all.
        reacts[name] = bool((states[0] - states[1])[:, :-1].abs().max() > 1e-5 * states[0].abs().max())
    return reacts


def states_of(model: PreTrainedModel, mask: dict[str, int], last: int) -> torch.Tensor:
    """The first of a model's outputs with a state for each of eight tokens; ``mask`` is that of the first."""
    ids = torch.tensor([[11, 6, 12, 8, 13, 10, 14, last]])
    inputs = {"input_ids": ids, **{name: torch.ones_like(ids) for name in mask}}
    for name, first in mask.items():
        inputs[name][:, 0] = first
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs.pop("input_ids")
        inputs = {name.replace("attention_mask", "decoder_attention_mask"): each for name, each in inputs.items()}
        inputs["input_ids"] = ids[:, :5]
    with trial_copy(model) as copied:
        outputs = copied(**inputs)
    first = 0 if mask.get("attention_mask", 1) else 1
    return next(each for each in outputs.to_tuple() if torch.is_tensor(each) and each.shape[:2] == (1, 8))[:, first:]


def sees_later_with_a_method(model: PreTrainedModel) -> dict[str, bool] | None:
    """What :func:`sees_later` says with a method attached; None if the model's heads take none."""
    try:
        attach(model, "tisa")
    except InputError:
        return None
    try:
        return sees_later(model)
    finally:
        detach(model)


def is_caught(model: PreTrainedModel, layer: Any) -> bool:
    """Whether ``attach`` refuses a model in which the scores of a layer are multiplied by 1.01."""

    def multiply(right: Callable[..., Any], module: Any, query: torch.Tensor, *given: Any, **options: Any) -> Any:
        return right(module, query * 1.01 if hasattr(module, "is_wrong") else query, *given, **options)

    layer.is_wrong = True  # the copies that the verification runs have it, too
    try:
        with attending(multiply):
            attach(model, "none")
    except InputError:
        return True
    finally:
        del layer.is_wrong
    detach(model)
    return False


def sweep_class(kind: type[PreTrainedConfig], model_class: type[PreTrainedModel]) -> dict[str, Any]:
    """What ``attach`` makes of a model class: of the first of its tiny models that is right, else of the first."""
    first: dict[str, Any] | None = None
    try:
        for model in models(kind, model_class):
            row = judge(model)
            if row["outcome"] == "right":
                return row
            first = first or row
            if any(reason in row["why"] for reason in FINAL):
                break
            del model
    except NotBuiltError as error:
        first = first or {"outcome": "not built", "why": str(error)}
    assert first is not None
    return first


class TooLateError(BaseException):
    """A model took too long."""


def sweep_package(package: str, file: Path) -> None:
    """Write what ``attach`` makes of each model class of a package, one JSON object a line."""

    def late(*_: Any) -> None:
        raise TooLateError

    signal.signal(signal.SIGPROF, late)
    with file.open("w") as out:
        for kind, classes in model_classes(package).items():
            for model_class in classes:
                signal.setitimer(signal.ITIMER_PROF, SECONDS)
                try:
                    row = sweep_class(kind, model_class)
                except TooLateError:
                    row = {"outcome": "not built", "why": f"a tiny model takes more than {SECONDS} seconds"}
                except Exception as error:
                    row = {"outcome": "not built", "why": f"{type(error).__name__}: {one_line(str(error))[:300]}"}
                signal.setitimer(signal.ITIMER_PROF, 0)
                name = {"package": package, "config": kind.__name__, "class": model_class.__name__}
                out.write(json.dumps({**name, "model_type": getattr(kind, "model_type", ""), **row}) + "\n")
                out.flush()
                gc.collect()


def packages() -> list[str]:
    """The packages of models in transformers."""
    found = pkgutil.iter_modules(importlib.import_module("transformers.models").__path__)
    return sorted(each.name for each in found if each.ispkg and each.name not in ("auto", "deprecated"))


def config_classes(package: str) -> list[str]:
    """The names of a package's configuration classes."""
    path = importlib.import_module(f"transformers.models.{package}").__path__
    names = []
    for name in (each.name for each in pkgutil.iter_modules(path) if each.name.startswith("configuration_")):
        module = importlib.import_module(f"transformers.models.{package}.{name}")
        names += [
            each.__name__
            for each in vars(module).values()
            if inspect.isclass(each) and issubclass(each, PreTrainedConfig) and each.__module__ == module.__name__
        ]
    return names


def sweep(out: Path, names: list[str], processes: int) -> None:
    """Sweep packages, each in a process of its own, and keep what is found in a folder."""
    out.mkdir(parents=True, exist_ok=True)
    importlib.import_module("transformers.models.llama.modeling_llama")  # what all need, before the forks
    importlib.import_module("transformers.models.bert.modeling_bert")
    running: dict[int, str] = {}
    waiting = [name for name in names if not (out / f"{name}.jsonl").exists()]
    while waiting or running:
        while waiting and len(running) < processes:
            name = waiting.pop(0)
            process = os.fork()
            if process == 0:
                try:
                    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
                    sweep_package(name, out / f"{name}.part")
                    os.rename(out / f"{name}.part", out / f"{name}.jsonl")
                finally:
                    os._exit(0)
            running[process] = name
        ended, _ = os.waitpid(-1, os.WNOHANG)
        if ended:
            name = running.pop(ended)
            if not (out / f"{name}.jsonl").exists():
                # It was killed, as for its memory. What it had found stays.
                (out / f"{name}.part").touch()
                os.rename(out / f"{name}.part", out / f"{name}.jsonl")
        else:
            time.sleep(0.05)


DATA = Path(__file__).parents[2] / "docs" / "guides" / "attached-models.json"
"""The outcome for every configuration class, and the version of transformers."""


def measured_with() -> str:
    """The version of transformers that the outcomes are of."""
    return str(json.loads(DATA.read_text(encoding="utf-8"))["transformers"])


def results(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What a sweep found, by configuration class."""
    found: dict[str, list[dict[str, Any]]] = {}
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text().splitlines():
            row = json.loads(line)
            found.setdefault(row["config"], []).append(row)
    return found


def outcome(rows: list[dict[str, Any]]) -> str:
    """What becomes of a configuration's models: the worst, but that one model that is right is enough."""
    outcomes = {row["outcome"] for row in rows}
    return next(
        each for each in ("crashed", "wrong", "not verified", "right", "refused", "not built") if each in outcomes
    )


OUTCOMES = {"right": "served", "not built": "not tried"}
"""Names of outcomes for readers, where the sweep has other names."""
UNDISPATCHED = "does not call its attention through transformers' AttentionInterface"
NO_MODEL = "describes a part of models, or its model needs a package that was not installed"


def outcomes(swept: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The outcome for every configuration class, also for classes without models."""
    rows: list[dict[str, Any]] = []
    for config, class_rows in swept.items():
        kind = outcome(class_rows)
        row = next(row for row in class_rows if row["outcome"] == kind)
        result = {"config": config, "outcome": OUTCOMES.get(kind, kind)}
        if kind == "right":
            rows.append({**result, "parts": [part for part in row["parts"] if part]})
        else:
            why = row["why"].removeprefix("model: ").replace("`", "'")[:240]
            rows.append({**result, "why": UNDISPATCHED if "does not dispatch attention" in why else why})
    names = {name for package in packages() for name in config_classes(package)}
    rows += [{"config": name, "outcome": "no model", "why": NO_MODEL} for name in names - set(swept)]
    return sorted(rows, key=lambda row: row["config"].lower())


def write(swept: dict[str, list[dict[str, Any]]]) -> None:
    """Write the data of the page, one configuration class a line."""
    missed = sorted({row["class"] for rows in swept.values() for row in rows if row.get("caught") is False})
    lines = ",\n".join(json.dumps(row) for row in outcomes(swept))
    head = f'"transformers": {json.dumps(transformers.__version__)},\n"missed": {json.dumps(missed)}'
    DATA.write_text(f'{{\n{head},\n"outcomes": [\n{lines}\n]\n}}\n', encoding="utf-8")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packages", nargs="*", help="packages of transformers.models; all by default")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="write the data of the page of the documentation")
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    sweep(options.out, options.packages or packages(), options.processes)
    if options.write:
        write(results(options.out))


if __name__ == "__main__":
    main()
