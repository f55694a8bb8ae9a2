"""Translate lines with a trained model, in order. A line's translation does not depend on the rest of its batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, EncoderDecoderCache, LogitsProcessor

from ...data import batches, subwords
from ...errors import InputError
from ...files import check_regular_in
from ...lab.training.trainer import quiet_transformers
from ...models import Seq2SeqConfig, Seq2SeqForConditionalGeneration
from ...models.checkpoints.files import find_weights, read_header
from ...models.checkpoints.loading import check_header, check_weights
from ...models.inputs import CACHE
from ...positions import PositionRangeError
from .model import generation_config
from .settings import Decoding

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BATCH_TOKENS = {"cpu": 512, "cuda": 8192}
"""Tokens of source lines that are translated at a time, for each device: the fastest number."""
WINDOW = 1024
"""Lines that are read before any is translated, so that a batch has lines of similar length."""
LONGER = 50
"""A translation may have this number of tokens more than its source, as in Vaswani et al."""


@dataclass(frozen=True)
class Translator:
    """A model that translates lines.

    Args:
        model: the model, on its device.
        tokenizer: the tokenizer of both languages.
        decoding: the checked search settings.
    """

    model: Seq2SeqForConditionalGeneration
    tokenizer: PreTrainedTokenizerFast
    decoding: Decoding

    @property
    def limit(self) -> int:
        """The most tokens in a source line, including its end."""
        return self.decoding.max_length or self.model.config.max_position_embeddings

    def stream(
        self, lines: Iterable[str], window: int = WINDOW, advance: Callable[[int], None] = lambda count: None
    ) -> Iterator[str]:
        """Yield the translation of each line, in order, as soon as its window is translated.

        Args:
            lines: the lines to translate; empty lines stay empty.
            window: lines that are read at a time.
            advance: called with the number of lines that have just been translated.

        Raises:
            InputError: if a line has too many tokens and should not be truncated, or ``lines`` raises one. The lines
                before it are translated first.
        """
        lines, before = iter(lines), 0
        while True:
            texts, error = _read(lines, window)
            encoded = [torch.tensor(ids) for ids in subwords.encode(self.tokenizer, texts)]
            long = self._too_long(encoded, before)
            if long is not None:
                first, error = long
                encoded = encoded[:first]
            yield from self._translate(encoded, advance)
            if error is not None:
                raise error
            if len(texts) < window:
                return
            before += len(texts)

    def translate(self, lines: Sequence[str], advance: Callable[[int], None] = lambda count: None) -> list[str]:
        """Translate all lines; see :meth:`stream`.

        Raises:
            InputError: as for :meth:`stream`, but before any line is translated.
        """
        long = self._too_long(subwords.encode(self.tokenizer, lines))
        if long is not None:
            raise long[1]
        return list(self.stream(lines, advance=advance))

    def _too_long(self, lines: Iterable[Sized], before: int = 0) -> tuple[int, InputError] | None:
        """Return the index of the first line that is too long and its error; ``before`` lines came before these."""
        for line, ids in enumerate(lines):
            if len(ids) > self.limit and not self.decoding.truncate:
                return line, InputError(
                    None,
                    f"line {before + line + 1} has {len(ids)} tokens, but the model takes {self.limit}; use `truncate` "
                    "to truncate such lines, or a larger `max_length` if the position method allows it",
                )
        return None

    def _translate(self, lines: Sequence[Tensor], advance: Callable[[int], None]) -> list[str]:
        found = [""] * len(lines)
        full = [place for place, ids in enumerate(lines) if len(ids) > 1]
        advance(len(lines) - len(full))
        if full:
            lengths = torch.tensor([[min(len(lines[place]), self.limit)] for place in full])
            batch_tokens = self.decoding.batch_tokens or BATCH_TOKENS[self.model.device.type]
            for batch in batches.by_length_and_tokens(lengths, batch_tokens):
                places = [full[row] for row in batch]
                for place, text in zip(places, self._batch([lines[place] for place in places]), strict=True):
                    found[place] = text
                advance(len(places))
        return found

    @torch.no_grad()
    def _batch(self, lines: Sequence[Tensor]) -> list[str]:
        end = torch.tensor([subwords.END])
        cut = [ids if len(ids) <= self.limit else torch.cat((ids[: self.limit - 1], end)) for ids in lines]
        sources = pad_sequence(cut, batch_first=True, padding_value=subwords.PAD).to(self.model.device)
        lengths = torch.tensor([len(ids) for ids in cut], device=self.model.device)
        mask = torch.arange(sources.shape[1], device=self.model.device) < lengths.unsqueeze(1)
        # Each line's limit depends only on its own source, so the rest of the batch changes nothing.
        most = (lengths + LONGER).clamp(max=max(self.limit, self.model.config.max_position_embeddings))
        try:
            with quiet_transformers():
                written = self.model.generate(
                    sources,
                    attention_mask=mask.long(),
                    generation_config=generation_config(
                        self.model.config, self.decoding, max_new_tokens=int(most.max())
                    ),
                    **{CACHE: _OneSource(*(DynamicCache(config=self.model.config) for _ in range(2)))},
                    logits_processor=[_End(most.repeat_interleave(self.decoding.beams))],
                )
        except PositionRangeError as error:
            trained = self.model.config.max_position_embeddings
            raise InputError(
                "max_length",
                f"expected at most {trained}, the length that the model was trained with, got {self.limit}: {error}",
            ) from None
        texts: list[str] = self.tokenizer.batch_decode(written, skip_special_tokens=True)
        # A translation stays on one line, whatever bytes the model writes.
        return [" ".join(text.split()) for text in texts]


class _End(LogitsProcessor):
    """Ends each translation after its limit of tokens, ``most`` (batch * beams,)."""

    def __init__(self, most: Tensor) -> None:
        self.most = most

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        # The start token does not count, and the next token does.
        over = input_ids.shape[1] >= self.most
        ended = torch.full_like(scores[:1], -torch.inf)
        ended[:, subwords.END] = 0
        return torch.where(over.unsqueeze(1), ended, scores) if over.any() else scores


class _OneSource(EncoderDecoderCache):
    """A cache that does not move the keys and values of the source when beams change places.

    Beams only change places with beams of the same source, whose entries are equal. Moving them would take an eighth of
    the search time.
    """

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.self_attention_cache.reorder_cache(beam_idx)


def load(model: str, decoding: Decoding, device: torch.device) -> Translator:
    """Load a translation model from a folder or an id on the Hub.

    Raises:
        InputError: if there is none, it is another kind of model, or its files don't fit together.
    """
    from transformers import AutoConfig, AutoTokenizer

    folder = Path(model)
    if folder.is_dir() and not (folder / "config.json").exists():
        # The folder of a training also names the model that it made.
        if (folder / "model").is_dir():
            model = str(folder / "model")
        elif (folder / "results.json").exists():
            raise InputError("model", f"the training in {model} is not finished; run its command again to continue it")
    try:
        check_regular_in("model", model)
        # Without trust_remote_code=False, transformers would ask whether to run code from the folder, and would read
        # the answer from standard input, where the lines to translate come from.
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
        if not isinstance(config, Seq2SeqConfig):
            raise InputError(
                "model", f"expected a model made by `whereformer translate train`, got a {config.model_type}"
            )
        if Path(model).is_dir() and not (Path(model) / "tokenizer.json").exists():
            raise InputError("model", f"{model} has no tokenizer.json")
        check_header(lambda: Seq2SeqForConditionalGeneration(config), read_header(find_weights(model)))
        with quiet_transformers():
            found, report = Seq2SeqForConditionalGeneration.from_pretrained(
                model, config=config, use_safetensors=True, output_loading_info=True
            )
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        check_weights(found.state_dict())
    except InputError as error:
        raise InputError("model", error.reason if error.field == "model" else f"{model}: {error}") from None
    except Exception as error:
        # For a broken file the libraries raise all kinds of errors, even a plain Exception.
        raise InputError("model", f"cannot read {model}: {error}") from None
    if report["missing_keys"]:
        raise InputError("model", f"{model} lacks {min(report['missing_keys'])}")
    special = tokenizer.convert_tokens_to_ids(list(subwords.SPECIAL_TOKENS))
    if special != [subwords.PAD, subwords.START, subwords.END] or len(tokenizer) > config.vocab_size:
        raise InputError("model", f"the tokenizer of {model} belongs to another model")
    return Translator(found.to(device).eval(), tokenizer, decoding)


def _read(lines: Iterator[str], count: int) -> tuple[list[str], InputError | None]:
    """Read up to ``count`` lines; also return the error, if any, that ended them early."""
    texts: list[str] = []
    try:
        for line in islice(lines, count):
            texts.append(line)  # noqa: PERF402  # lines before an error are kept
    except InputError as error:
        return texts, error
    return texts, None
