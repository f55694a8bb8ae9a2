"""Translating with a trained model: lines in, as many lines out, in their order, whatever meets in a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, EncoderDecoderCache, LogitsProcessor

from ...data import batches, subwords
from ...data.parallel import split_lines
from ...errors import InputError
from ...models import Seq2SeqConfig, Seq2SeqForConditionalGeneration
from ...positions import PositionRangeError
from ...training.trainer import quiet_transformers
from .model import generation_config
from .settings import Decoding

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BATCH_TOKENS = {"cpu": 512, "cuda": 8192}
"""Tokens of source lines that are translated at a time, by device: as many as are fast."""
WINDOW = 1024
"""Lines that are read before any is translated, so that those of like length meet in batches."""
LONGER = 50
"""Tokens that a translation may have more than its source, as in Vaswani et al."""


@dataclass(frozen=True)
class Translator:
    """A model that translates lines.

    Args:
        model: on its device.
        tokenizer: of both languages.
        decoding: how, checked.
    """

    model: Seq2SeqForConditionalGeneration
    tokenizer: PreTrainedTokenizerFast
    decoding: Decoding

    @property
    def limit(self) -> int:
        """Most tokens of a line, its end included."""
        return self.decoding.max_length or self.model.config.max_position_embeddings

    def stream(
        self, lines: Iterable[str], window: int = WINDOW, advance: Callable[[int], None] = lambda count: None
    ) -> Iterator[str]:
        """The translation of each line, in their order, as soon as those of a window are there.

        Args:
            lines: to translate; empty ones stay empty.
            window: lines that are read at a time.
            advance: gets the number of lines that were just finished.

        Raises:
            InputError: if a line has too many tokens and is not to be cut; those before it are translated first, and
                so they are if ``lines`` raise it.
        """
        lines, before = iter(lines), 0
        while True:
            texts, error = _read(lines, window)
            encoded = subwords.encode(self.tokenizer, texts)
            long = self._too_long(encoded.lengths, before)
            if long is not None:
                first, error = long
                encoded = encoded.chosen(torch.arange(first))
            yield from self._translate([encoded[line] for line in range(len(encoded))], advance)
            if error is not None:
                raise error
            if len(texts) < window:
                return
            before += len(texts)

    def translate(self, lines: Sequence[str], advance: Callable[[int], None] = lambda count: None) -> list[str]:
        """The translation of each line; see :meth:`stream`.

        Raises:
            InputError: before any is translated.
        """
        long = self._too_long(subwords.encode(self.tokenizer, lines).lengths)
        if long is not None:
            raise long[1]
        return list(self.stream(lines, advance=advance))

    def _too_long(self, lengths: Tensor, before: int = 0) -> tuple[int, InputError] | None:
        """The first of some lines that is too long, and what to say; ``before`` are lines that came before them."""
        long = (lengths > self.limit).nonzero().flatten().tolist()
        if self.decoding.truncate or not long:
            return None
        first, more = long[0], f" (and {len(long) - 1} of the {len(lengths) - long[0] - 1} after it)"
        return first, InputError(
            None,
            f"line {before + first + 1} has {int(lengths[first])} tokens, the model takes {self.limit}"
            f"{more if len(long) > 1 else ''}; `truncate` cuts such lines, `max_length` takes longer ones where the "
            "position method does",
        )

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
        cut = [
            ids.long() if len(ids) <= self.limit else torch.cat((ids[: self.limit - 1].long(), end)) for ids in lines
        ]
        sources = pad_sequence(cut, batch_first=True, padding_value=subwords.PAD).to(self.model.device)
        lengths = torch.tensor([len(ids) for ids in cut], device=self.model.device)
        mask = torch.arange(sources.shape[1], device=self.model.device) < lengths.unsqueeze(1)
        # Of its own source, so that what else is in the batch changes nothing.
        most = (lengths + LONGER).clamp(max=max(self.limit, self.model.config.max_position_embeddings))
        try:
            with quiet_transformers():
                written = self.model.generate(
                    sources,
                    attention_mask=mask.long(),
                    generation_config=generation_config(
                        self.model.config, self.decoding, max_new_tokens=int(most.max())
                    ),
                    past_key_values=_OneSource(*(DynamicCache(config=self.model.config) for _ in range(2))),
                    logits_processor=[_End(most.repeat_interleave(self.decoding.beams))],
                )
        except PositionRangeError as error:
            trained = self.model.config.max_position_embeddings
            raise InputError(
                "max_length", f"expected at most {trained}, what the model was trained with, got {self.limit}: {error}"
            ) from None
        texts: list[str] = self.tokenizer.batch_decode(written, skip_special_tokens=True)
        # A line stays a line, whatever bytes the model has written.
        return [" ".join(text.split()) for text in texts]


class _End(LogitsProcessor):
    """Ends each translation where it has ``most`` (batch * beams,) tokens."""

    def __init__(self, most: Tensor) -> None:
        self.most = most

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        # The start token is no part of it, and this one will be.
        over = input_ids.shape[1] >= self.most
        ended = torch.full_like(scores[:1], -torch.inf)
        ended[:, subwords.END] = 0
        return torch.where(over.unsqueeze(1), ended, scores) if over.any() else scores


class _OneSource(EncoderDecoderCache):
    """A cache that leaves keys and values of the source where they are when beams change places.

    Beams only change with those of the same source; moving what is the same takes an eighth of the time of a search.
    """

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.self_attention_cache.reorder_cache(beam_idx)


def load(model: str, decoding: Decoding, device: torch.device) -> Translator:
    """The model of a folder, or of an id on the Hub.

    Raises:
        InputError: if there is none, or another kind of model.
    """
    from transformers import AutoConfig, AutoTokenizer

    folder = Path(model)
    if folder.is_dir() and not (folder / "config.json").exists():
        # The folder of a training is as good a name for what it made.
        if (folder / "model").is_dir():
            model = str(folder / "model")
        elif (folder / "settings.json").exists():
            raise InputError(
                "model", f"the training in {model} is not finished; the command that began it continues it"
            )
    try:
        # Without the last, a folder that brings code of its own would have it run by who answers a question with yes,
        # and the answer is read from the standard input, as the lines are.
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
        if not isinstance(config, Seq2SeqConfig):
            raise InputError(
                "model", f"expected one that `whereformer translate train` made, got a {config.model_type}"
            )
        if Path(model).is_dir() and not (Path(model) / "tokenizer.json").exists():
            raise InputError("model", f"{model} has no tokenizer.json")
        with quiet_transformers():
            found, report = Seq2SeqForConditionalGeneration.from_pretrained(
                model, config=config, use_safetensors=True, output_loading_info=True, ignore_mismatched_sizes=True
            )
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    except InputError:
        raise
    except Exception as error:
        # The libraries raise what they like for a broken file, Exception itself included.
        raise InputError("model", f"cannot read {model}: {error}") from None
    if report["missing_keys"]:
        raise InputError("model", f"{model} lacks {min(report['missing_keys'])}")
    if report["mismatched_keys"]:
        name, there, expected = min(report["mismatched_keys"])
        raise InputError("model", f"{name} of {model} is {tuple(there)}, its config.json makes it {tuple(expected)}")
    special = tokenizer.convert_tokens_to_ids(list(subwords.SPECIAL_TOKENS))
    if special != [subwords.PAD, subwords.START, subwords.END] or len(tokenizer) > config.vocab_size:
        raise InputError("model", f"the tokenizer of {model} is another model's")
    return Translator(found.to(device).eval(), tokenizer, decoding)


def lines_of(field: str, name: str, stream: BinaryIO) -> Iterator[str]:
    """The lines of a stream of UTF-8, without what ends them.

    Raises:
        InputError: naming the line that is not UTF-8.
    """
    for number, line in enumerate(stream):
        # An empty last line is one where a line feed ends it.
        yield from split_lines(field, name, line, number)


def _read(lines: Iterator[str], count: int) -> tuple[list[str], InputError | None]:
    """Some lines, and what kept them from being more."""
    texts: list[str] = []
    try:
        for line in islice(lines, count):
            texts.append(line)  # noqa: PERF402  # what was read before an error is wanted
    except InputError as error:
        return texts, error
    return texts, None
