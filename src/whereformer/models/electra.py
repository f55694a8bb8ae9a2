"""ELECTRA: a generator replaces some tokens, and a discriminator, the model to keep, predicts which are replaced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Unpack

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from ..errors import InputError
from .checks import check_shape
from .config import EncoderConfig
from .encoder import EncoderPreTrainedModel
from .heads import EncoderForMaskedLM, EncoderForPreTraining, label_indices
from .inputs import TokenInputs, accepts


class ElectraPretrainingConfig(EncoderConfig):
    """The discriminator's :class:`EncoderConfig`, with the generator's size and the weight of the discriminator's loss.

    Args:
        generator_size: the generator's width divided by the discriminator's.
        discriminator_weight: the weight of the discriminator's loss, where the generator's is 1.

    The other fields are as in :class:`EncoderConfig`.

    Raises:
        ValueError: for a combination that fits no model; the message names the field.
    """

    # It is not named ElectraConfig, because transformers' auto classes look configurations up by class name, and
    # transformers has a class with that name.
    model_type = "whereformer_electra"
    bounds: ClassVar[dict[str, tuple[float, float]]] = {
        **EncoderConfig.bounds,
        "generator_size": (1e-3, 1e3),
        "discriminator_weight": (0.0, 1e9),
    }

    generator_size: float = 0.25
    discriminator_weight: float = 50.0

    def discriminator_config(self) -> EncoderConfig:
        """Return the discriminator's configuration."""
        config: EncoderConfig = EncoderConfig.from_dict(self.to_dict())
        return config

    def generator_config(self) -> EncoderConfig:
        """Return the generator's configuration: width, feed-forward width and heads times ``generator_size``.

        Each is rounded down, as the authors do, and at least 1. The width of a head and of the embeddings, the blocks
        and the decoder stay.
        """
        config = self.discriminator_config()
        for name in ("hidden_size", "intermediate_size", "num_attention_heads"):
            setattr(config, name, max(1, int(getattr(self, name) * self.generator_size)))
        # Only the targets' logits over the vocabulary are needed.
        config.sparse_prediction = True
        return config


@dataclass
class ElectraOutput(ModelOutput):
    """The result of one joint step of :class:`Electra`. Losses are in nats, and fields without a shape are scalars.

    Args:
        loss: ``generator_loss + config.discriminator_weight * discriminator_loss``.
        generator_loss: mean cross-entropy over the targets.
        discriminator_loss: mean binary cross-entropy over tokens without padding, including [CLS] and [SEP].
        accuracy: the share of these tokens that the discriminator classifies correctly.
        replaced_recall: the share of replaced tokens that it detects; NaN if none was replaced.
        sampled_ids: (batch, n) the discriminator's input.
        generator_logits: (targets, vocab_size), row by row of the batch. With ``config.label_share``, targets are
            :func:`~whereformer.models.heads.label_indices`.
        discriminator_logits: (batch, n), positive for "original".
    """

    loss: Tensor | None = None
    generator_loss: Tensor | None = None
    discriminator_loss: Tensor | None = None
    accuracy: Tensor | None = None
    replaced_recall: Tensor | None = None
    sampled_ids: Tensor | None = None
    generator_logits: Tensor | None = None
    discriminator_logits: Tensor | None = None


class Electra(EncoderPreTrainedModel):
    """Pretraining by replaced-token detection, generator and discriminator in one model and one step.

    ``discriminator`` is an :class:`EncoderForPreTraining` of ``config.discriminator_config()``. Keep it with
    ``model.discriminator.save_pretrained(folder)``, and every model of the family can start from there. A folder that
    holds both models, as ``save_pretrained`` and the Trainer write it, is read by ``Electra.from_pretrained``, by
    ``AutoModelForPreTraining`` and, for the discriminator, by :func:`load_pretrained`. ``from_pretrained`` of other
    classes finds none of their weights there and starts from random ones, which transformers reports.

    ``generator`` is an :class:`EncoderForMaskedLM` of ``config.generator_config()``. It shares the discriminator's
    embeddings of tokens (also in its head) and token types, and their norm. It has its own positions, its own
    projection from the embeddings' width, and its own layers.

    ``lm_head="tied"``, as in transformers' Funnels, does not fit a generator narrower than the embeddings. Use
    ``"bert"``, which is the head of the authors' generator too.

    Args:
        config: sizes and options.

    Raises:
        TypeError: if ``config`` is not an :class:`ElectraPretrainingConfig`.
        ValueError: for a config that unties the embeddings, or a generator whose width does not fit; the message names
            ``generator_size`` and the size that does not fit.

    Source: Clark et al. (2020), arXiv 2003.10555, as in laiguokun/Funnel-Transformer ``electra_loss_func``.
    """

    config_class = ElectraPretrainingConfig
    base_model_prefix = "discriminator"

    def __init__(self, config: ElectraPretrainingConfig) -> None:
        super().__init__(config)
        if not isinstance(config, ElectraPretrainingConfig):
            raise TypeError(f"config: expected an ElectraPretrainingConfig, got {type(config).__name__}")
        if not config.tie_word_embeddings:
            raise InputError("tie_word_embeddings", "generator and discriminator share their embeddings, got False")
        self.discriminator = EncoderForPreTraining(config.discriminator_config())
        try:
            self.generator = EncoderForMaskedLM(config.generator_config())
        except ValueError as error:
            # The message names a size of the generator, which follows from generator_size.
            size = config.generator_size
            raise InputError("generator_size", f"no generator {size} times as wide can be built: {error}") from None
        self._tied_weights_keys = {
            f"generator.encoder.embeddings.{name}": f"discriminator.encoder.embeddings.{name}"
            for name, _ in self.discriminator.encoder.embeddings.named_parameters()
            if not name.startswith("projection.")
        }
        self.post_init()

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        for model in (self.discriminator, self.generator):
            model.set_input_embeddings(value)
            model.config.vocab_size = value.num_embeddings

    def get_output_embeddings(self) -> nn.Linear:
        return self.generator.get_output_embeddings()

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.generator.set_output_embeddings(new_embeddings)

    @accepts(TokenInputs)
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        labels: Tensor,
        sampled_ids: Tensor | None = None,
        uniforms: Tensor | None = None,
        **inputs: Unpack[TokenInputs],
    ) -> ElectraOutput:
        """Let the generator predict the targets, sample from it, and let the discriminator classify every token.

        Arguments as :meth:`Encoder.forward`, and:

        Args:
            input_ids: (batch, n) token ids with the targets masked, or replaced by other tokens for the generator.
            labels: (batch, n) the original ids at the targets; -100 elsewhere, where ``input_ids`` are the originals.
            sampled_ids: (batch, n) the discriminator's input; by default ``input_ids`` with a sample from the
                generator's distribution at every target, masked or not. A sample that happens to be the original counts
                as original.
            uniforms: (batch, n) random numbers from 0 to 1; the numbers at the targets draw the samples. By default,
                new numbers are drawn. With the same numbers and the same logits, the samples are the same.

        Raises:
            ValueError: for shapes that do not fit, or labels without a target; the message names the argument.
        """
        check_shape("labels", labels, input_ids.shape)
        if sampled_ids is not None:
            check_shape("sampled_ids", sampled_ids, input_ids.shape)
        targets = labels != -100
        generated = self.generator(input_ids, attention_mask, labels=labels, **inputs, return_dict=True)
        if len(generated.logits) == 0:
            raise InputError("labels", "expected at least one target, got -100 everywhere")
        if sampled_ids is None:
            indices = label_indices(labels, self.config.label_share)
            tokens = sample(generated.logits, None if uniforms is None else uniforms.flatten()[indices])
            samples = input_ids.flatten().scatter(0, indices, tokens.to(input_ids.dtype)).view_as(input_ids)
            sampled_ids = torch.where(targets, samples, input_ids)
        is_original = sampled_ids == torch.where(targets, labels, input_ids)
        predicted = self.discriminator(sampled_ids, attention_mask, labels=is_original, **inputs, return_dict=True)
        token_mask = torch.ones_like(targets) if attention_mask is None else attention_mask.bool()
        is_correct = (predicted.logits > 0) == is_original
        is_replaced = token_mask & ~is_original
        return ElectraOutput(
            loss=generated.loss + self.config.discriminator_weight * predicted.loss,
            generator_loss=generated.loss,
            discriminator_loss=predicted.loss,
            accuracy=(is_correct & token_mask).sum() / token_mask.sum(),
            replaced_recall=(is_correct & is_replaced).sum() / is_replaced.sum(),
            sampled_ids=sampled_ids,
            generator_logits=generated.logits,
            discriminator_logits=predicted.logits,
        )


@torch.no_grad()
def sample(logits: Tensor, uniforms: Tensor | None = None) -> Tensor:
    """Sample token ids (targets,) from the distributions of logits (targets, vocab_size).

    A sample is the token whose interval has the uniform number; ``uniforms`` (targets,), from 0 to 1, 1 excluded, are
    drawn if None.
    """
    if uniforms is None:
        uniforms = torch.rand(len(logits), device=logits.device)
    # In single precision, the sum of many small probabilities would be too coarse for rare tokens.
    stops = logits.float().softmax(-1).cumsum(-1, dtype=torch.float64)
    # The interval of a token with probability 0 is empty, so no number is in it.
    return torch.searchsorted(stops, uniforms.double().unsqueeze(1) * stops[:, -1:], right=True).squeeze(1)
