"""Encoders with heads: masked LM, classification and replaced-token detection."""

from __future__ import annotations

from math import prod
from typing import NoReturn, TypeAlias, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GenerationConfig
from transformers.activations import ACT2FN
from transformers.modeling_outputs import TokenClassifierOutput as HeadOutput

from ..errors import InputError
from .checks import check_integers, check_shape, check_tensor, classification_loss
from .config import EncoderConfig
from .encoder import Encoder, EncoderOutput, EncoderPreTrainedModel
from .inputs import EncoderInputs, accepts
from .layers import layer_norm

Predicted: TypeAlias = tuple[Tensor, Tensor | None]
"""Logits, and the labels that belong to them."""


class EncoderWithHead(EncoderPreTrainedModel):
    """The base of the models below: an encoder, logits from its last hidden state, and a loss if there are labels.

    Args:
        config: sizes and options.
        per_token: whether there is a prediction for every token. A prediction for the whole sequence uses the blocks'
            output, so the encoder is built without its decoder.

    Raises:
        ValueError: if every token needs a prediction but ``config.blocks`` pool and no decoder undoes it.
    """

    def __init__(self, config: EncoderConfig, *, per_token: bool = True) -> None:
        config = config if per_token else config.without_decoder()
        super().__init__(config)
        if per_token and not config.full_length:
            name = "decoder_layers" if config.decoder_layers == "0" else "with_decoder"
            raise InputError(name, f"a prediction for every token needs a decoder after pooling, got {config.blocks!r}")
        self.encoder = Encoder(config)
        # A sequence classifier is fine-tuned from checkpoints of models with a decoder.
        self._keys_to_ignore_on_load_unexpected = self.encoder._keys_to_ignore_on_load_unexpected

    def predict(self, encoded: EncoderOutput, labels: Tensor | None, attention_mask: Tensor | None) -> Predicted:
        """Return logits from the encoder's output, and the labels that belong to them."""
        raise NotImplementedError

    def loss(self, logits: Tensor, labels: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Return the loss, a float32 scalar: by default the mean cross-entropy in nats over labels other than -100.

        Raises:
            ValueError: for labels whose shape does not fit the logits'.
        """
        check_shape("labels", labels, logits.shape[:-1])
        return classification_loss(logits.flatten(0, -2).float(), check_integers("labels", labels).flatten())

    @accepts(EncoderInputs)
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        **inputs: Unpack[EncoderInputs],
    ) -> HeadOutput:
        """Predict and, with labels, compute the loss, as the class describes; see also :meth:`Encoder.forward`.

        Returns:
            ``loss`` and ``logits``, as the class describes, and, if requested, the ``hidden_states`` and ``attentions``
            of :class:`Encoder`.
        """
        if labels is not None:
            check_tensor("labels", labels)
        encoded = self.encoder(input_ids, attention_mask, **inputs, return_dict=True)
        logits, labels = self.predict(encoded, labels, attention_mask)
        loss = None if labels is None else self.loss(logits, labels, attention_mask)
        return HeadOutput(loss=loss, logits=logits, hidden_states=encoded.hidden_states, attentions=encoded.attentions)


class Transform(nn.Module):
    """A dense layer, an activation, and optionally a norm; without an activation, no dense layer either."""

    def __init__(self, config: EncoderConfig, activation: str | None, width: int, *, norm: bool = False) -> None:
        super().__init__()
        dense = activation is not None
        self.dense = nn.Linear(config.hidden_size, width, bias=config.biases) if dense else nn.Identity()
        self.activation = nn.Identity() if activation is None else ACT2FN[activation]
        self.norm = layer_norm(config, width) if norm else nn.Identity()

    def forward(self, hidden: Tensor) -> Tensor:
        """Transform hidden (..., hidden_size) to (..., width)."""
        return self.norm(self.activation(self.dense(hidden)))


class MaskedLMHead(Transform):
    """Logits of every token in the vocabulary: the tied embeddings and a bias, with ``config.lm_head`` before them.

    "bert" is a dense layer, activation and norm at the embeddings' width; "tied" has nothing before them, as in
    transformers' Funnel.

    Raises:
        ValueError: if the embeddings are not as wide as the hidden states and nothing is between them.
    """

    def __init__(self, config: EncoderConfig) -> None:
        bert = config.lm_head == "bert"
        if not bert and config.hidden_size != config.embedding_size:
            sizes = f"hidden_size {config.hidden_size} and embedding_size {config.embedding_size}"
            reason = f"'tied' needs hidden states as wide as the embeddings, got {sizes}; use lm_head='bert'"
            raise InputError("lm_head", reason)
        super().__init__(config, config.hidden_act if bert else None, config.embedding_size, norm=bert)
        self.decoder = nn.Linear(config.embedding_size, config.vocab_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute logits (..., vocab_size) from hidden (..., hidden_size)."""
        return self.decoder(super().forward(hidden))


class EncoderWithLMHead(EncoderWithHead):
    """The base of masked and causal language models: an :class:`Encoder` with a :class:`MaskedLMHead`."""

    _tied_weights_keys = {"head.decoder.weight": "encoder.embeddings.word.weight"}  # noqa: RUF012

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        self.head = MaskedLMHead(config)
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        return self.head.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.head.decoder = new_embeddings

    def predict(self, encoded: EncoderOutput, labels: Tensor | None, attention_mask: Tensor | None) -> Predicted:
        hidden = encoded.last_hidden_state
        if labels is not None and self.config.sparse_prediction:
            check_shape("labels", labels, hidden.shape[:-1])
            indices = label_indices(labels, self.config.label_share)
            hidden, labels = hidden.flatten(0, 1).index_select(0, indices), labels.flatten()[indices]
        return self.head(hidden), labels


class EncoderForMaskedLM(EncoderWithLMHead):
    """An :class:`Encoder` with a masked-LM head (``config.lm_head``), by default tied to the token embeddings.

    ``labels`` are (batch, n): the original ids of the tokens to predict, and -100 elsewhere. The loss is their mean
    cross-entropy in nats; as in transformers, it is NaN if there is none. ``logits`` are (batch, n, vocab_size), or
    with labels and ``config.sparse_prediction`` (:func:`label_indices`, vocab_size).
    """


class EncoderForCausalLM(EncoderWithLMHead):
    """An :class:`Encoder` that predicts the next token, with the head of :class:`EncoderForMaskedLM`.

    ``labels`` are (batch, n), usually the ids themselves, with -100 for tokens that are not to be predicted: the logits
    at a token are compared with the next label, as in transformers. In packed rows, no document predicts the first
    token of the next. The loss is the mean cross-entropy in nats, NaN without labels to predict. ``logits`` are
    (batch, n, vocab_size), or with labels and ``config.sparse_prediction`` (:func:`label_indices`, vocab_size).

    Raises:
        ValueError: unless ``config.causal``.
    """

    def __init__(self, config: EncoderConfig) -> None:
        if not config.causal:
            raise InputError("causal", "expected True for a model that predicts the next token, got False")
        super().__init__(config)
        self.generation_config = GenerationConfig()  # trl writes its tokens here

    def generate(self, *_: object, **__: object) -> NoReturn:
        """Raise a NotImplementedError, since the model keeps no keys and values between tokens."""
        advice = "attach(model, position) gives a method to a decoder of transformers, which generates"
        raise NotImplementedError(f"generate: {type(self).__name__} has no cache of keys and values; {advice}")

    def predict(self, encoded: EncoderOutput, labels: Tensor | None, attention_mask: Tensor | None) -> Predicted:
        if labels is not None:
            check_shape("labels", labels, encoded.last_hidden_state.shape[:-1])
            following = check_integers("labels", labels)[:, 1:]
            if (documents := encoded.documents) is not None:
                following = following.masked_fill(documents[:, 1:] != documents[:, :-1], -100)
            labels = functional.pad(following, (0, 1), value=-100)
        return super().predict(encoded, labels, attention_mask)


def label_indices(labels: Tensor, share: float | None) -> Tensor:
    """Return the indices of the tokens to predict, among the tokens of all rows, row by row.

    Args:
        labels: (batch, n), -100 for tokens that are not predicted.
        share: the largest number of labels in a row, as a share of n. Each row then has the same number of indices,
            max(1, round(share * n)): its first labels and, if there are fewer, other tokens. None returns the indices
            of all labels, and has to wait until the device has counted them.

    Returns:
        (indices,) int64.
    """
    if share is None:
        return (labels != -100).flatten().nonzero().squeeze(1)
    batch, n = labels.shape
    # A stable sort puts the labels first, in their order.
    first = (labels == -100).to(torch.uint8).argsort(dim=-1, stable=True)[:, : max(1, round(share * n))]
    return (first + n * torch.arange(batch, device=labels.device)[:, None]).flatten()


def classifier_dropout(config: EncoderConfig) -> float:
    """Return the dropout before a classifier's last layer."""
    return config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout


class ClassifierHead(Transform):
    """A dense layer, an activation, optionally a norm, dropout, and a last layer with ``num_outputs``."""

    def __init__(
        self, config: EncoderConfig, activation: str, num_outputs: int, *, norm: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__(config, activation, config.hidden_size, norm=norm)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(config.hidden_size, num_outputs)

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute logits (..., num_outputs) from hidden (..., hidden_size)."""
        return self.out(self.dropout(super().forward(hidden)))


def first_states(hidden: Tensor, attention_mask: Tensor | None, document_ids: Tensor | None) -> Tensor:
    """Return the state of every sequence's first token; in packed rows, of each run of equal ``document_ids``.

    Args:
        hidden: (batch, n, hidden_size).
        attention_mask: (batch, n); masked tokens are padding and never begin a document.
        document_ids: (batch, n), or None if each row is one sequence.

    Returns:
        (batch, hidden_size), or (documents, hidden_size) in order of appearance.
    """
    if document_ids is None:
        return hidden[:, 0]
    token_mask, is_first = _first_tokens(document_ids, attention_mask)
    return hidden[token_mask][is_first]


def mean_states(hidden: Tensor, attention_mask: Tensor | None, document_ids: Tensor | None) -> Tensor:
    """Return the mean of every sequence's states, without padding; arguments and result as in :func:`first_states`."""
    # In half precision, sums over a long text have too few digits, or are infinite.
    wide = torch.promote_types(hidden.dtype, torch.float32)
    if document_ids is None:
        weights = (
            torch.ones_like(hidden[..., 0], dtype=wide) if attention_mask is None else attention_mask.bool().to(wide)
        )
        mean = (hidden * weights.unsqueeze(-1)).sum(1) / weights.sum(1, keepdim=True).clamp(min=1)
    else:
        token_mask, is_first = _first_tokens(document_ids, attention_mask)
        number = is_first.cumsum(0) - 1
        sums = hidden.new_zeros(int(is_first.sum()), hidden.shape[-1], dtype=wide)
        mean = sums.index_add(0, number, hidden[token_mask].to(wide)) / number.bincount().unsqueeze(-1)
    return mean.to(hidden.dtype)


def _first_tokens(document_ids: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return a mask of tokens without padding, (batch, n), and which of these tokens begin a document, (tokens,)."""
    token_mask = torch.ones_like(document_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    rows, ids = token_mask.nonzero()[:, 0], document_ids[token_mask]
    return token_mask, functional.pad((ids[1:] != ids[:-1]) | (rows[1:] != rows[:-1]), (1, 0), value=True)


class EncoderForSequenceClassification(EncoderWithHead):
    """An :class:`Encoder` that classifies its sequence, or predicts numbers, from its first token's last state.

    With ``config.classifier_pooling="mean"``, it does so from the mean of all tokens' states.

    A funnel has no decoder here, because the first token's state is final after the blocks. Checkpoints of models with
    a decoder load without a warning. With ``truncate_seq``, poolings drop the last tokens, 2 ** (blocks - 1) - 1 at
    most: end inputs with that many [PAD], as pretraining does, or set it to False.

    ``labels`` and the loss follow ``config.problem_type``; None infers it as transformers does, from ``num_labels`` and
    the labels' dtype:

    - "regression" (``num_labels`` 1): numbers (batch, num_labels); mean squared error.
    - "single_label_classification" (integers): classes (batch,), -100 for rows to leave out; mean cross-entropy in
      nats.
    - "multi_label_classification" (anything else): 0 or 1 for every class, (batch, num_labels); mean binary
      cross-entropy in nats.

    A last dimension of 1 may be left out or added. ``logits`` are (batch, num_labels). With ``document_ids`` every
    document of a packed row is classified: logits are (documents, num_labels) in order of appearance, row by row, and
    so are the labels.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config, per_token=False)
        if config.causal and config.classifier_pooling == "cls":
            reason = "expected 'mean' with causal=True, where the first token sees no other token, got 'cls'"
            raise InputError("classifier_pooling", reason)
        dropout, norm = classifier_dropout(config), config.classifier_norm
        self.classifier = ClassifierHead(config, config.classifier_act, config.num_labels, norm=norm, dropout=dropout)
        self.post_init()

    def predict(self, encoded: EncoderOutput, labels: Tensor | None, attention_mask: Tensor | None) -> Predicted:
        pooled = first_states if self.config.classifier_pooling == "cls" else mean_states
        return self.classifier(pooled(encoded.last_hidden_state, attention_mask, encoded.documents)), labels

    def loss(self, logits: Tensor, labels: Tensor, attention_mask: Tensor | None) -> Tensor:
        is_integer = labels.dtype in (torch.int64, torch.int32)
        kind = "single_label_classification" if is_integer else "multi_label_classification"
        problem = self.config.problem_type or ("regression" if self.config.num_labels == 1 else kind)
        expected = logits.shape[:1] if problem == "single_label_classification" else logits.shape
        if labels.shape[:1] != expected[:1] or labels.numel() != prod(expected):
            raise InputError("labels", f"expected shape {tuple(expected)} for {problem}, got {tuple(labels.shape)}")
        logits, labels = logits.float(), labels.reshape(expected)
        if problem == "single_label_classification":
            return classification_loss(logits, check_integers("labels", labels))
        if problem == "regression":
            return functional.mse_loss(logits, labels.float())
        return functional.binary_cross_entropy_with_logits(logits, labels.float())


class EncoderForTokenClassification(EncoderWithHead):
    """An :class:`Encoder` that classifies every token: dropout and a linear layer, with ``config.classifier_norm``
    after a dense layer, activation and norm.

    ``labels`` are classes (batch, n), with -100 for tokens to leave out. The loss is the mean cross-entropy in nats
    over the others, NaN if there are none. ``logits`` are (batch, n, num_labels).
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        activation = config.classifier_act if config.classifier_norm else None
        self.transform = Transform(config, activation, config.hidden_size, norm=config.classifier_norm)
        self.dropout = nn.Dropout(classifier_dropout(config))
        self.token_classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def predict(self, encoded: EncoderOutput, labels: Tensor | None, *_: object) -> Predicted:
        return self.token_classifier(self.dropout(self.transform(encoded.last_hidden_state))), labels


class EncoderForPreTraining(EncoderWithHead):
    """ELECTRA's discriminator: an :class:`Encoder` that predicts for every token whether it is the original.

    ``labels`` are (batch, n), **1 for a token that is the original, 0 for one that was replaced**, so positive
    ``logits`` (batch, n) mean "original". That is the convention of Funnel-Transformer's authors, whose code trained
    the released checkpoints. The ELECTRA authors' code, their checkpoints and transformers' documentation of
    FunnelForPreTraining have it the other way round (see :func:`whereformer.load_pretrained`).

    The loss is the mean binary cross-entropy in nats over the tokens that ``attention_mask`` marks; without one, over
    all.

    Source: Clark et al. (2020), arXiv 2003.10555; laiguokun/Funnel-Transformer ``pretrain.py``, ``modeling.py``.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        self.discriminator_head = ClassifierHead(config, config.hidden_act, 1)
        self.post_init()

    def predict(self, encoded: EncoderOutput, labels: Tensor | None, *_: object) -> Predicted:
        return self.discriminator_head(encoded.last_hidden_state).squeeze(-1), labels

    def loss(self, logits: Tensor, labels: Tensor, attention_mask: Tensor | None) -> Tensor:
        check_shape("labels", labels, logits.shape)
        losses = functional.binary_cross_entropy_with_logits(logits.float(), labels.float(), reduction="none")
        if attention_mask is None:
            return losses.mean()
        token_mask = attention_mask.bool()
        return losses.where(token_mask, 0).sum() / token_mask.sum()
