"""ELECTRA: a generator replaces some tokens, and a discriminator, the model to keep, says of each whether it is."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from ..errors import InputError
from .config import EncoderConfig
from .encoder import EncoderPreTrainedModel, check_shape
from .heads import EncoderForMaskedLM, EncoderForPreTraining


@dataclass
class ElectraOutput(ModelOutput):
    """One joint step of :class:`Electra`; losses in nats, everything a scalar where no shape is given.

    Args:
        loss: ``generator_loss + config.discriminator_weight * discriminator_loss``.
        generator_loss: mean cross-entropy over the targets.
        discriminator_loss: mean binary cross-entropy over real tokens, [CLS] and [SEP] included.
        accuracy: share of real tokens that the discriminator judges right.
        replaced_recall: share of replaced tokens that it finds; NaN where none was replaced.
        sampled_ids: (batch, n) the discriminator's input.
        generator_logits: (targets, vocab_size), row by row of the batch.
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

    ``discriminator`` is an :class:`EncoderForPreTraining` of ``config``; keep it with
    ``model.discriminator.save_pretrained(folder)``, and every model of the family can start from there. A folder that
    holds both, as ``save_pretrained`` and the Trainer leave it, is for ``Electra.from_pretrained`` and
    :func:`load_pretrained`, which takes the discriminator; other classes, AutoModel's too, find no weights of theirs in
    it and start from random ones, which transformers' report of the loading says.

    ``generator`` is an :class:`EncoderForMaskedLM` of :func:`generator_config`. The token embeddings (in its head too),
    those of token types and their norm are the discriminator's; its positions, the projection from the embeddings'
    width to its own, and all else it has for itself.

    A config with ``lm_head="tied"``, as transformers' Funnels have it, needs ``"bert"`` here, whose head the authors'
    generator has too: its states are narrower than the embeddings.

    Raises:
        ValueError: for a config that unties the embeddings, or a generator whose width does not fit; the message names
            ``generator_size`` and what that is.

    Source: Clark et al. (2020), arXiv 2003.10555, as in laiguokun/Funnel-Transformer ``electra_loss_func``.
    """

    base_model_prefix = "discriminator"

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        if not config.tie_word_embeddings:
            raise InputError("tie_word_embeddings", "generator and discriminator share their embeddings, got False")
        self.discriminator = EncoderForPreTraining(config)
        try:
            self.generator = EncoderForMaskedLM(generator_config(config))
        except ValueError as error:
            # It names a size that the generator was given by this one.
            size = config.generator_size
            raise InputError("generator_size", f"no generator {size} times as wide can be built: {error}") from None
        self._tied_weights_keys = {
            f"generator.encoder.embeddings.{name}": f"discriminator.encoder.embeddings.{name}"
            for name, _ in self.discriminator.encoder.embeddings.named_parameters()
            if not name.startswith("projection.")
        }
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.discriminator.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        for model in (self.discriminator, self.generator):
            model.set_input_embeddings(value)
            model.config.vocab_size = value.num_embeddings

    def get_output_embeddings(self) -> nn.Linear:
        return self.generator.get_output_embeddings()

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.generator.set_output_embeddings(new_embeddings)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        *,
        labels: Tensor,
        sampled_ids: Tensor | None = None,
        return_dict: bool | None = None,
    ) -> ElectraOutput | tuple[Any, ...]:
        """Let the generator predict the targets, sample from it, and let the discriminator judge every token.

        Arguments as :meth:`Encoder.forward`, and:

        Args:
            input_ids: (batch, n) token ids with the targets masked, or whatever else the generator is to see there.
            labels: (batch, n) the original ids at the targets, -100 elsewhere, where ``input_ids`` are the original.
            sampled_ids: (batch, n) the discriminator's input; by default ``input_ids`` with a sample from the
                generator's distribution at every target, also at those that are not masked. A sample that happens to be
                the original counts as original.

        Raises:
            ValueError: for shapes that do not fit, or labels without a target; the message names the argument.
        """
        check_shape("labels", labels, input_ids.shape)
        if sampled_ids is not None:
            check_shape("sampled_ids", sampled_ids, input_ids.shape)
        targets = labels != -100
        where = {
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "position_ids": position_ids,
            "document_ids": document_ids,
            "return_dict": True,
        }
        generated = self.generator(input_ids, labels=labels, **where)
        if len(generated.logits) == 0:
            raise InputError("labels", "expected a target at least, got -100 everywhere")
        if sampled_ids is None:
            sampled_ids = input_ids.masked_scatter(targets, sample(generated.logits).to(input_ids.dtype))
        original = sampled_ids == torch.where(targets, labels, input_ids)
        judged = self.discriminator(sampled_ids, labels=original, **where)
        real = torch.ones_like(targets) if attention_mask is None else attention_mask.bool()
        right = (judged.logits > 0) == original
        output = ElectraOutput(
            loss=generated.loss + self.config.discriminator_weight * judged.loss,
            generator_loss=generated.loss,
            discriminator_loss=judged.loss,
            accuracy=right[real].float().mean(),
            replaced_recall=right[real & ~original].float().mean(),
            sampled_ids=sampled_ids,
            generator_logits=generated.logits,
            discriminator_logits=judged.logits,
        )
        return output if self._wants_dict(return_dict) else output.to_tuple()


def generator_config(config: EncoderConfig) -> EncoderConfig:
    """The generator's config: width, feed-forward width and heads times ``config.generator_size``, at least 1.

    They are rounded down, as the authors do. Width of a head and of the embeddings, blocks and decoder stay.
    """
    own = deepcopy(config)
    for name in ("hidden_size", "intermediate_size", "num_attention_heads"):
        setattr(own, name, max(1, int(getattr(config, name) * config.generator_size)))
    # Logits for the whole vocabulary are wanted at the targets alone.
    own.sparse_prediction = True
    return own


@torch.no_grad()
def sample(logits: Tensor) -> Tensor:
    """Draw from the distributions that logits (targets, vocab_size) are of: their largest with Gumbel noise."""
    # Minus the logarithm of an exponential variable is Gumbel noise. Half precision has too few of its values.
    noise = torch.empty_like(logits, dtype=torch.float32).exponential_().log()
    return (logits.float() - noise).argmax(-1)
