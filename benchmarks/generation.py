"""Measure the cost of a new token in generation with each position method, next to models without whereformer.

Run: .venv/bin/python benchmarks/generation.py [--decoding "512x1,4096x1,512x8"] [--translation "1x1,1x4,32x1"]

Decoding: a Llama (6 layers of 384, 6 heads) that has cached n tokens reads more, 8 in each round. Its own
"sdpa" attention is the baseline; ``attach`` gives copies of it another method. "rope" replaces its own rotation.
Translation: ``generate`` writes 30 tokens for sources of 30 tokens, greedily or with beams. Our translation model and
transformers' MarianMT, the baseline, have 6 + 6 layers of 512 and 32,000 tokens; with CTranslate2 installed, Marian's
weights run there, too. The models are not trained, and cannot stop early.
Every round runs each once, in random order, and a ratio is taken within its round. Time is the CPU time of one thread.
"linear" is the share of the baseline's time in products with weights.
"""

from __future__ import annotations

import copy
import logging
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from benchmark import Benchmark, main
from rich.console import Console
from side_by_side import time_by_turns
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import whereformer
from whereformer import Seq2SeqConfig, Seq2SeqForConditionalGeneration
from whereformer.lab.recipe import Names
from whereformer.models.inputs import CACHE

BASELINE = "its own"
VOCABULARY, TOKENS = 32_000, 30
TOKENS_A_STEP = 8
METHODS = ("none", "t5", "tisa", "shaw", "rope")


@dataclass(frozen=True, kw_only=True)
class Generation(Benchmark):
    """Measure the time of a generated token with position methods, relative to models without whereformer."""

    decoding: Names = ("512x1", "4096x1", "512x8")
    """Cached tokens and batch of the decoder, NxB each, or none."""
    translation: Names = ("1x1", "1x4", "32x1", "32x4")
    """Batch and beams of the translation model, BxB each, or none."""
    rounds: int = 9
    """Number of rounds that count. One more comes first."""
    out: Path = Path("benchmarks/results/generation.json")

    def measure(self, console: Console) -> dict[str, Any]:
        transformers.logging.set_verbosity_error()
        rows: list[dict[str, Any]] = []
        decoders = _decoders() if self.decoding != ("none",) else {}
        for name in self.decoding if decoders else ():
            length, batch = map(int, name.split("x"))
            steps = {way: _decoding_step(model, length, batch) for way, model in decoders.items()}
            rows += self._time({"part": "decoding", "cached": length, "batch": batch, "dtype": "float32"}, steps)
        translators = _translators() if self.translation != ("none",) else {}
        for name in self.translation if translators else ():
            batch, beams = map(int, name.split("x"))
            source = torch.randint(3, VOCABULARY - 1, (batch, TOKENS), generator=torch.Generator().manual_seed(0))
            steps = {way: partial(translate, source, beams) for way, translate in translators.items()}
            rows += self._time({"part": "translation", "batch": batch, "beams": beams}, steps)
        return {"method": " ".join(str(__doc__).split()), "rows": rows}

    def _time(self, label: Mapping[str, Any], steps: Mapping[str, Callable[[], object]]) -> list[dict[str, Any]]:
        """Time the steps in turns, print a line for each, and return its row."""
        title = ", ".join(f"{name} {value}" for name, value in label.items())
        share = _linear_share(steps[BASELINE])
        print(f"{title}; linear layers take {share:.0%} of the baseline's time")
        rows = []
        for name, times in time_by_turns(steps, self.rounds, BASELINE).items():
            print(f"  {name:12} {times}  {1000 * times.seconds:.2f} ms", flush=True)
            rows.append({**label, "model": name, "linear": round(share, 3), **asdict(times)})
        return rows


def _linear_share(step: Callable[[], object]) -> float:
    """Return the share of a step's CPU time that linear layers take."""
    step()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        step()
    events = profiled.key_averages()
    linear = sum(event.cpu_time_total for event in events if event.key == "aten::linear")
    return float(linear / sum(event.self_cpu_time_total for event in events))


def _decoders() -> dict[str, nn.Module]:
    """Build a Llama, and copies of it with each method attached."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1000,
        hidden_size=384,
        intermediate_size=1536,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=6,
        max_position_embeddings=8192,
    )
    model = transformers.LlamaModel(config).eval()
    models: dict[str, nn.Module] = {BASELINE: model}
    for method in METHODS:
        attached = whereformer.attach(copy.deepcopy(model), method, keep_absolute=method != "rope")
        models[method] = attached.eval()
    return models


def _decoding_step(model: Any, length: int, batch: int) -> Callable[[], object]:
    """Return a step that reads some tokens, one after the other, after ``length`` cached ones or more."""
    ids = torch.randint(1000, (batch, length), generator=torch.Generator().manual_seed(0))
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, **{CACHE: cache})

    @torch.no_grad()
    def step() -> None:
        for token in range(TOKENS_A_STEP):
            model(ids[:, token : token + 1], **{CACHE: cache})

    return step


def _translators() -> dict[str, Callable[[Tensor, int], object]]:
    """Build the translation models, and return a function of source and beams for each."""
    torch.manual_seed(0)
    sizes = dict.fromkeys(("encoder_layers", "decoder_layers"), 6)
    heads = dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 8)
    widths = dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 2048)
    special = {"pad_token_id": VOCABULARY - 1, "eos_token_id": 0, "decoder_start_token_id": VOCABULARY - 1}
    config = transformers.MarianConfig(vocab_size=VOCABULARY, d_model=512, **sizes, **heads, **widths, **special)
    marian = transformers.MarianMTModel(config).eval()
    translators: dict[str, Callable[[Tensor, int], object]] = {BASELINE: partial(_translate, marian)}
    for method in ("sinusoidal", "shaw"):
        ours = Seq2SeqConfig.preset("base", vocab_size=VOCABULARY, position=method)
        translators[method] = partial(_translate, Seq2SeqForConditionalGeneration(ours).eval())
    try:
        translators["CTranslate2"] = _in_ctranslate2(marian)
    except ImportError:
        print("CTranslate2 is not installed, so it is not timed")
    return translators


@torch.no_grad()
def _translate(model: Any, source: Tensor, beams: int) -> object:
    lengths = {"min_new_tokens": TOKENS, "max_new_tokens": TOKENS}
    mask = torch.ones_like(source)
    return model.generate(source, attention_mask=mask, num_beams=beams, do_sample=False, **lengths)


def _in_ctranslate2(model: Any) -> Callable[[Tensor, int], object]:
    """Convert a Marian model, and return a function that translates with it."""
    import ctranslate2
    from ctranslate2.converters.transformers import MarianMTLoader

    logging.getLogger("ctranslate2").setLevel(logging.ERROR)
    spec = MarianMTLoader().get_model_spec(copy.deepcopy(model))
    vocabulary = ["</s>", *(str(number) for number in range(1, VOCABULARY - 1))]
    spec.register_source_vocabulary(vocabulary)
    spec.register_target_vocabulary(vocabulary)
    spec.config.eos_token = spec.config.decoder_start_token = "</s>"
    spec.config.unk_token = "1"
    spec.validate()
    spec.optimize()
    with tempfile.TemporaryDirectory() as folder:
        spec.save(folder)
        translator = ctranslate2.Translator(folder, inter_threads=1, intra_threads=1, compute_type="float32")

    def translate(source: Tensor, beams: int) -> object:
        lines = [[vocabulary[number] for number in row] for row in source.tolist()]
        lengths = {"min_decoding_length": TOKENS, "max_decoding_length": TOKENS}
        return translator.translate_batch(lines, beam_size=beams, max_batch_size=0, **lengths)

    return translate


if __name__ == "__main__":
    main(Generation)
