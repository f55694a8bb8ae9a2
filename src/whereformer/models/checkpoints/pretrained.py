"""Models from checkpoints of other libraries, and back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, FunnelConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.funnel import modeling_funnel
from transformers.utils import cached_file, logging

from ...positions import describe
from ..config import EncoderConfig, parse_blocks
from ..electra import ElectraPretrainingConfig
from ..encoder import Encoder, EncoderPreTrainedModel
from ..heads import (
    EncoderForMaskedLM,
    EncoderForPreTraining,
    EncoderForQuestionAnswering,
    EncoderForSequenceClassification,
    EncoderForTokenClassification,
)
from .bert import FAMILIES, Family, bert_config, from_bert
from .funnel import both, from_authors, from_funnel, funnel_config, funnel_names, funnel_positions, to_funnel
from .loading import BODY, Checkpoint, fill, no_place

# Transformers' model, ours, and the names of the head's parts: ours first.
_FUNNELS: dict[str, tuple[type[EncoderPreTrainedModel], Mapping[str, str]]] = {
    "FunnelModel": (Encoder, {}),
    "FunnelBaseModel": (Encoder, {}),
    "FunnelForMaskedLM": (EncoderForMaskedLM, {"head.decoder.bias": "lm_head.bias"}),
    "FunnelForPreTraining": (
        EncoderForPreTraining,
        both(
            {
                "discriminator_head.dense": "discriminator_predictions.dense",
                "discriminator_head.out": "discriminator_predictions.dense_prediction",
            }
        ),
    ),
    "FunnelForSequenceClassification": (
        EncoderForSequenceClassification,
        both({"classifier.dense": "classifier.linear_hidden", "classifier.out": "classifier.linear_out"}),
    ),
    "FunnelForTokenClassification": (EncoderForTokenClassification, both({"token_classifier": "classifier"})),
    "FunnelForQuestionAnswering": (EncoderForQuestionAnswering, both({"span": "qa_outputs"})),
}

OURS = (EncoderConfig.model_type, ElectraPretrainingConfig.model_type)
KINDS = (*OURS, "funnel", *FAMILIES)
"""What a checkpoint's model_type has to be for :func:`load_pretrained`."""

# Under transformers' own logger, for its handler and its verbosity.
_log = logging.get_logger("transformers.whereformer")


def load_pretrained(
    path_or_id: str | Path,
    position: str | None = None,
    *,
    model_class: type[EncoderPreTrainedModel] | None = None,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> EncoderPreTrainedModel:
    """A pretrained model as one of ours, in evaluation mode; weights are read from safetensors only.

    BERT, ALBERT, RoBERTa, ELECTRA and Funnel-Transformer of transformers, and models of this library. With the
    checkpoint's own position method the numbers are transformers'. ``loading_report`` of what is returned says which
    tensors were kept, dropped and freshly initialised; there is a warning if any were dropped or initialised.

    Args:
        path_or_id: a folder, or an id on the Hugging Face Hub.
        position: another position method in place of the checkpoint's. Methods that are in both are kept, as the
            trained position embeddings of a BERT in "learned+tisa"; the others have fresh parameters.
        model_class: what to build; by default what the checkpoint was saved from. Parts that the checkpoint lacks, as
            the head of another task, are fresh. BERT's and ALBERT's pooler is the dense layer of an
            :class:`EncoderForSequenceClassification`.
        dtype: of the weights, whatever the checkpoint's is.
        options: fields of :class:`EncoderConfig` to change, as ``mask_pooling="all"`` for the masks of transformers'
            Funnel; what is no such field is an option of the position method. With another ``num_labels`` the
            classifier's last layer is fresh.

    Where transformers goes by other conventions:

    - RoBERTa's positions are counted here from 0 and in the order of the row, there from ``pad_token_id + 1`` and
      without the padding. So rows padded on the right are the same, and for ones padded on the left ``position_ids``
      have to say where a row begins.
    - An ELECTRA discriminator's logits are as it was trained, positive for a token that was *replaced*, where our own
      :class:`EncoderForPreTraining` and Funnel's say "original": label replaced tokens 1.
    - Without token types a Funnel's segments say nothing, as in the authors' code; transformers takes them to be 0,
      which is not the same: give zeros for its numbers.
    - RoBERTa's and ELECTRA's classifiers of sequences have, in training, one dropout more: on the first token's state.

    Raises:
        ValueError: for a checkpoint of another kind, or one without a tensor that is needed, with one that has no
            place, or of another size.
        TypeError: for an option that neither the configuration nor the position method has.
        OSError: if there is no such checkpoint, or none in safetensors that can be read.
    """
    source = _source(find_config(path_or_id), model_class, options)
    config = EncoderConfig.from_dict(_changed(source.fields, position, options))
    model = (model_class or source.built_as)(config).to(dtype)
    if not isinstance(model.base_model, Encoder):
        raise TypeError(f"model_class: expected Encoder or a model that has one, got {type(model).__name__}")
    before = source.fields.get("position", "learned")
    checkpoint, fresh = _recomposed(source.translate(read_weights(path_or_id)), before, config.position)
    relabelled = config.num_labels != EncoderConfig.from_dict(dict(source.fields)).num_labels
    whole = type(model) is source.built_as
    model.loading_report = fill(model, checkpoint, fresh=fresh, whole=whole, relabelled=relabelled)
    if model.loading_report.dropped or model.loading_report.initialised:
        _log.warning(f"{path_or_id} as {type(model).__name__}\n{model.loading_report}")
    return model.eval()


def read_config(path_or_id: str | Path, model_class: type[EncoderPreTrainedModel] | None = None) -> dict[str, Any]:
    """What the config.json of a checkpoint says that :func:`load_pretrained` takes, as far as that needs no weights.

    Raises:
        OSError, ValueError: as there.
    """
    found = find_config(path_or_id)
    _source(found, model_class, {})
    return found


def find_config(path_or_id: str | Path) -> dict[str, Any]:
    """What the config.json of a checkpoint says, whatever model it is of.

    Raises:
        OSError: if there is none.
    """
    try:
        found: dict[str, Any] = PreTrainedConfig.get_config_dict(path_or_id)[0]
    except OSError as error:
        # What it says is about the rules for names on the Hub, also where a folder was meant.
        raise OSError(
            "path_or_id: expected a folder with a checkpoint, or an id on the Hugging Face Hub that can be read, "
            f"got {str(path_or_id)!r}"
        ) from error
    return found


def from_authors_weights(state: Mapping[str, Tensor], blocks: str, **options: Any) -> Encoder:
    """The authors' PyTorch Funnel-Transformer, from its state dict, in evaluation mode.

    Their files are pickles, which this library does not open; ``torch.load(file, weights_only=True)`` gives the state
    dict. Sizes are read off its weights. Their PyTorch models have no decoder.

    Args:
        state: of ``FunnelTFM``.
        blocks: the layout, as "6-3x2-3x2"; the weights don't tell.
        options: other fields of :class:`EncoderConfig`, as ``truncate_seq=False``.

    Raises:
        ValueError: if a weight is missing; the message names it.
    """
    kernel, inner, words = "attn_layers.0.r_kernel", "pffn_layers.0.pffn.0.bias", "input_layer.0.lookup_table"
    for name in (kernel, inner, words):
        if name not in state:
            raise ValueError(f"state: it has no {name!r}, so it is not of the authors' model")
    width, heads, head_dim = state[kernel].shape
    sizes = {"d_model": width, "n_head": heads, "d_head": head_dim, "block_sizes": [1]}
    sizes["vocab_size"], sizes["d_inner"] = (
        len(state[words]),
        len(state[inner]),
    )
    config = EncoderConfig.from_dict({**funnel_config(sizes, decoder=False), "blocks": blocks, **options})
    model = Encoder(config)
    model.load_state_dict(from_funnel(from_authors(state, config), config))
    return model.eval()


def to_transformers(model: EncoderPreTrainedModel) -> PreTrainedModel:
    """The same Funnel-Transformer as a model of transformers, which then saves itself.

    Padded batches differ there unless ours has ``mask_pooling="all"``; and where no token types are given, transformers
    takes all of them to be 0.

    Raises:
        TypeError: for a model that is none of the encoder's.
        ValueError: for what transformers' Funnel cannot be: another position method, pre-norm, a narrower embedding...
    """
    known = {ours: name for name, (ours, _) in _FUNNELS.items() if ours is not Encoder}
    if isinstance(model, Encoder):
        encoder, name = model, "FunnelModel" if model.has_decoder else "FunnelBaseModel"
    else:
        found = next((ours for ours in known if isinstance(model, ours)), None)
        if found is None:
            expected = ", ".join(["Encoder", *(ours.__name__ for ours in known)])
            raise TypeError(f"model: expected one of {expected}, got {type(model).__name__}")
        encoder, name = model.encoder, known[found]
    config = model.config
    _check_is_funnel(config, encoder)
    if name not in _WITHOUT_DECODER and not encoder.has_decoder:
        # It would add the last states to themselves.
        raise ValueError(f"blocks: transformers' {name} has a decoder, for which a single block is too few")
    blocks = parse_blocks(config.blocks)
    theirs = FunnelConfig(
        vocab_size=config.vocab_size,
        block_sizes=[block.layers for block in blocks],
        block_repeats=[block.repeats for block in blocks],
        num_decoder_layers=int(config.decoder_layers),
        d_model=config.hidden_size,
        n_head=config.num_attention_heads,
        d_head=config.head_dim,
        d_inner=config.intermediate_size,
        hidden_act={"gelu_pytorch_tanh": "gelu_new"}.get(config.hidden_act, config.hidden_act),
        hidden_dropout=config.hidden_dropout_prob,
        attention_dropout=config.attention_probs_dropout_prob,
        activation_dropout=config.activation_dropout_prob,
        layer_norm_eps=config.layer_norm_eps,
        pooling_type=config.pooling,
        attention_type=_FORMS[(config.position_options or {}).get("form", "shifted")],
        separate_cls=config.separate_cls,
        truncate_seq=config.truncate_seq,
        pool_q_only=config.pool_query_only,
        type_vocab_size=config.type_vocab_size,
        id2label=config.id2label,
        label2id=config.label2id,
        problem_type=config.problem_type,
        pad_token_id=config.pad_token_id,
    )
    state = to_funnel(encoder.state_dict(), config)
    if encoder is not model:
        state = {f"funnel.{key}": tensor for key, tensor in state.items()}
    own = model.state_dict()
    state |= {their_name: own[our_name] for our_name, their_name in _FUNNELS[name][1].items()}
    translated: PreTrainedModel = getattr(modeling_funnel, name)(theirs)
    missing, unexpected = translated.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing
    translated.tie_weights()
    return translated.train(model.training)


_FORMS = {"shifted": "relative_shift", "factorized": "factorized"}
_WITHOUT_DECODER = ("FunnelBaseModel", "FunnelForSequenceClassification")
_TIED = "lm_head.weight"  # a copy of the embeddings


class _Source(NamedTuple):
    """What a checkpoint's configuration says: our class, its configuration's fields, and how to read the tensors."""

    built_as: type[EncoderPreTrainedModel]
    fields: Mapping[str, Any]
    translate: Callable[[Mapping[str, Tensor]], Checkpoint]


def _source(
    found: Mapping[str, Any], model_class: type[EncoderPreTrainedModel] | None, options: Mapping[str, Any]
) -> _Source:
    """How to read the checkpoint of a configuration as found in its file."""
    try:
        return _source_of_kind(found, model_class, options)
    except StrictDataclassError as error:
        raise ValueError(f"path_or_id: in its config.json: {' '.join(str(error).split())}") from None


def _source_of_kind(
    found: Mapping[str, Any], model_class: type[EncoderPreTrainedModel] | None, options: Mapping[str, Any]
) -> _Source:
    kind = found.get("model_type")
    attached = found.get("whereformer")
    if attached and kind not in OURS:
        method = attached.get("position") if isinstance(attached, dict) else attached
        raise ValueError(
            f"path_or_id: expected a model without an attached position method, got one with {method!r}; "
            "whereformer.load_attached reads it"
        )
    if kind in FAMILIES:
        return _of_family(found, FAMILIES[kind], model_class)
    if kind == "funnel":
        return _of_funnel(found, options)
    if kind in OURS:
        return _of_ours(found)
    kinds = ", ".join(KINDS)
    raise ValueError(f"path_or_id: expected a checkpoint of model_type {kinds}; got {kind!r}")


def _of_family(found: Mapping[str, Any], family: Family, model_class: type[EncoderPreTrainedModel] | None) -> _Source:
    known = {family.name + suffix: model for suffix, model in family.models.items()}
    built_as, head = _saved_as(found, known)
    masked_lm = built_as is EncoderForMaskedLM and model_class in (None, built_as)
    fields = bert_config(found, family, masked_lm=masked_lm)
    config = EncoderConfig.from_dict(fields)
    return _Source(built_as, fields, partial(from_bert, family=family, config=config, head=head, tied=masked_lm))


def _of_funnel(found: Mapping[str, Any], options: Mapping[str, Any]) -> _Source:
    built_as, head = _saved_as(found, _FUNNELS)
    if built_as is EncoderForMaskedLM and not found.get("tie_word_embeddings", True):
        raise ValueError("path_or_id: expected a masked-LM head tied to the embeddings, got tie_word_embeddings False")
    saved_as = (found.get("architectures") or [""])[0]
    # The file may leave out what is transformers' default.
    fields = funnel_config(AutoConfig.for_model(**found).to_dict(), decoder=saved_as not in _WITHOUT_DECODER)
    own = EncoderConfig.from_dict(dict(fields))
    # The layers that are wanted, since the position method's tensors are stacked over them.
    config = EncoderConfig.from_dict({**fields, **_config_options(options)})
    return _Source(built_as, fields, partial(_from_funnel_model, own=own, config=config, head=head))


def _of_ours(found: Mapping[str, Any]) -> _Source:
    names = found.get("architectures") or []
    # What ELECTRA trains for use is its discriminator.
    own = {model.__name__: model for model, _ in _FUNNELS.values()} | {"Electra": EncoderForPreTraining}
    return _Source(next((own[name] for name in names if name in own), Encoder), found, _from_own)


def _saved_as(
    found: Mapping[str, Any], known: Mapping[str, tuple[type[EncoderPreTrainedModel], Mapping[str, str]]]
) -> tuple[type[EncoderPreTrainedModel], Mapping[str, str]]:
    """What is known of the class that a checkpoint was saved from; of the first where it does not say."""
    name = (found.get("architectures") or list(known))[0]
    if name not in known:
        raise ValueError(f"path_or_id: expected one of {', '.join(known)}, got {name}")
    return known[name]


def _config_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the options that are fields of the configuration."""
    known = {*EncoderConfig().to_dict(), "num_labels"}
    return {name: value for name, value in options.items() if name in known}


def _changed(fields: Mapping[str, Any], position: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration's fields with another position method and other options, where they are given."""
    own = _config_options(options)
    # The dtype is the model's, and names of labels are for a number of them.
    gone = {"dtype", "torch_dtype"} | ({"id2label", "label2id"} if "num_labels" in own else set())
    changed = {name: value for name, value in fields.items() if name not in gone} | own
    kept = fields.get("position_options") or {}
    if position is not None:
        stay = [part for part in _parts(fields.get("position", "learned")) if part in _parts(position)]
        known = {option for part in stay for option in describe(part)[1]}
        changed["position"] = position
        kept = {name: value for name, value in kept.items() if name in known}
    others = {name: value for name, value in options.items() if name not in own}
    changed["position_options"] = kept | (own.get("position_options") or {}) | others
    return changed


def _parts(position: str) -> list[str]:
    return [part.strip() for part in position.split("+")]


def _places(position: str) -> dict[str, str]:
    """What the names of each method's tensors begin with, in a composition or alone."""
    parts = _parts(position)
    if len(parts) == 1:
        return {parts[0]: f"{BODY}position."}
    return {part: f"{BODY}position.parts.{index}." for index, part in enumerate(parts)}


def _recomposed(checkpoint: Checkpoint, before: str, after: str) -> tuple[Checkpoint, list[str]]:
    """A checkpoint for a model with another position method, and what its methods' names begin with that are fresh."""
    if _parts(before) == _parts(after):
        return checkpoint, []
    old, new = _places(before), _places(after)
    state, names, unused = {}, dict(checkpoint.names), list(checkpoint.unused)
    for name, tensor in checkpoint.state.items():
        part = next((part for part, place in old.items() if name.startswith(place)), None)
        if part is None:
            state[name] = tensor
        elif part in new:
            moved = new[part] + name.removeprefix(old[part])
            state[moved], names[moved] = tensor, checkpoint.names.get(name, name)
        else:
            unused.append(checkpoint.names.get(name, name))
    return Checkpoint(state, names, tuple(unused)), [place for part, place in new.items() if part not in old]


def read_weights(path_or_id: str | Path, part: str = "", **hub: Any) -> dict[str, Tensor]:
    """The weights of a checkpoint whose names contain ``part``, from one file or several.

    Raises:
        OSError: if there is no such checkpoint, or none in safetensors.
    """

    def find(name: str) -> Any:
        return cached_file(path_or_id, name, _raise_exceptions_for_missing_entries=False, **hub)

    files = [find("model.safetensors")]
    if files == [None]:
        index = find("model.safetensors.index.json")
        if index is None:
            message = f"path_or_id: {path_or_id} has no model.safetensors; weights are read from safetensors only"
            if find("pytorch_model.bin") is not None:
                message += (
                    ", since its pytorch_model.bin is a pickle, which can run any code when it is opened; if you trust "
                    "it, load it in transformers with the class that its config.json names, and "
                    "save_pretrained(a folder)"
                )
            raise OSError(message)
        names = sorted(set(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values()))
        files = [cached_file(path_or_id, name, **hub) for name in names]
    weights = {}
    for file in files:
        try:
            with safe_open(str(file), "pt") as opened:
                weights.update({name: opened.get_tensor(name) for name in opened.keys() if part in name})  # noqa: SIM118
        except SafetensorError as error:
            raise OSError(f"path_or_id: {file} is not safetensors, or not all of it was downloaded ({error})") from None
    return weights


def _from_funnel_model(
    state: Mapping[str, Tensor], own: EncoderConfig, config: EncoderConfig, head: Mapping[str, str]
) -> Checkpoint:
    """A checkpoint of transformers' Funnel by our names.

    Args:
        state: its tensors.
        own: its configuration.
        config: that of the model that is wanted.
        head: names of the parts of its head.

    Raises:
        ValueError: for a tensor that is missing, or that no such model has; the message names it.
    """
    state = {name.removeprefix("funnel."): tensor for name, tensor in state.items()}
    heads = {theirs for _, names in _FUNNELS.values() for theirs in names.values()}
    for name in sorted(state.keys() - _funnel_tensors(own) - heads - {_TIED}):
        raise no_place(name)
    found = {BODY + ours: tensor for ours, tensor in from_funnel(state, config).items()}
    found |= {ours: state[theirs] for ours, theirs in head.items() if theirs in state}
    names = {BODY + ours: theirs for ours, theirs in funnel_names(config).items()} | dict(head)
    read = _funnel_tensors(config) | set(head.values()) | {_TIED}
    return Checkpoint(found, names, tuple(name for name in state if name not in read))


def _funnel_tensors(config: EncoderConfig) -> set[str]:
    """What transformers calls the tensors of a Funnel without its head."""
    stacked = (name for stack in funnel_positions(config).values() for name in stack)
    return {*funnel_names(config).values(), *stacked}


def _from_own(state: Mapping[str, Tensor]) -> Checkpoint:
    """A checkpoint of this library by names as in a model with a head."""
    part = "discriminator."
    if any(name.startswith(part) for name in state):
        own = {name.removeprefix(part): tensor for name, tensor in state.items() if name.startswith(part)}
        return Checkpoint(own, unused=tuple(name for name in state if not name.startswith(part)))
    if not any(name.startswith(BODY) for name in state):
        return Checkpoint(
            {BODY + name: tensor for name, tensor in state.items()}, {BODY + name: name for name in state}
        )
    return Checkpoint(state)


def _check_is_funnel(config: EncoderConfig, encoder: Encoder) -> None:
    """Raise unless transformers' Funnel can be this model."""
    wanted = {
        "position": "transformer_xl",
        "norm": "post",
        "embedding_size": config.hidden_size,
        "segments": "attention",
        "query_bias": False,
        "lm_head": "tied",
        "tie_word_embeddings": True,
        "classifier_act": "tanh",
        "classifier_dropout": None,
    }
    for name, value in wanted.items():
        if getattr(config, name) != value:
            raise ValueError(f"{name}: transformers' Funnel has {value!r} only, this model {getattr(config, name)!r}")
    if config.pooling == "min" or "x" in config.decoder_layers:
        what = "pooling" if config.pooling == "min" else "decoder_layers"
        raise ValueError(f"{what}: transformers' Funnel has no {getattr(config, what)!r}")
    options = config.position_options or {}
    if options.get("reset_cls", config.separate_cls) != config.separate_cls or options.get("dropout"):
        raise ValueError(f"position_options: transformers' Funnel has none but its form, this model {options!r}")
    first = parse_blocks(config.blocks)[0]
    if encoder.has_decoder and first.repeats > 1:
        # It would add the states of an earlier pass.
        raise ValueError(f"blocks: transformers' decoder is wrong where the first block repeats, got {config.blocks!r}")
