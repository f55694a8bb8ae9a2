"""What an encoder costs, before it is paid: floating-point operations, parameters and memory.

Operations are those of matrix products, two for each multiply-add; norms, activations, softmax and dropout, less than
one percent of a usual model, are not counted, as in the Funnel-Transformer paper (Dai et al. 2020, arXiv 2006.03236).
Parameters are counted on the model itself, and what position adds is read off the position method, both built on
torch's "meta" device, where tensors have shapes but no memory; so neither can disagree with the code that runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode
from transformers.activations import ACT2FN

from ..attention import DenseBias, FactorPair, OffsetBias, OffsetKeys, OffsetValues, Positions
from ..attention.choose import FEW_SCORES
from ..attention.short import MOST_SCORES
from ..attention.terms import Term
from ..models import Encoder, EncoderConfig, EncoderForMaskedLM, parse_blocks
from ..models.encoder import position_of
from ..positions import Position, Sum
from ..positions.floater import Floater

META = torch.device("meta")


class Pass(NamedTuple):
    """A layer as it runs once: ``n_q`` queries, each ``step`` keys further than the last, attend to ``n_k`` keys."""

    n_q: int
    n_k: int
    step: int


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of one forward of the whole batch.

    Args:
        linear: projections and feed-forward networks of the blocks' layers.
        attention: their scores and weighted sums of values.
        position: what their positions add, by whatever method.
        segments: what "attention" segments add to their scores.
        decoder: all of the same in the decoder's layers.
        embeddings: the projection of embeddings that are narrower than the model.
        head: the masked-LM head.
    """

    linear: int
    attention: int
    position: int
    segments: int
    decoder: int
    embeddings: int
    head: int

    @property
    def layers(self) -> int:
        """Without embeddings and head: what models are compared by, here as in the paper."""
        return self.linear + self.attention + self.position + self.segments + self.decoder

    @property
    def forward(self) -> int:
        """Everything."""
        return self.layers + self.embeddings + self.head

    @property
    def training(self) -> int:
        """Forward and backward: each product has two gradients of the same size."""
        return 3 * self.forward


@dataclass(frozen=True)
class Parameters:
    """Numbers that are trained; ``encoder`` is all but the masked-LM head, whose tied embeddings count once."""

    embeddings: int
    position: int
    layers: int
    head: int

    @property
    def encoder(self) -> int:
        return self.embeddings + self.position + self.layers

    @property
    def total(self) -> int:
        return self.encoder + self.head


@dataclass(frozen=True)
class Memory:
    """Bytes that the activations of one batch need: an estimate, checked against measurements on the CPU.

    Training keeps for the backward: inputs of products, norms and activations, dropout masks (which the CPU keeps as
    numbers, a GPU as bytes) and what attention and the position method keep. What lives for a moment and gradients are
    not counted: in float32 the peak of a training step was 2 to 12% above the estimate (19% for fire, and more where
    tables of numbers per pair are trained, as in a random Synthesizer). Inference was within 2% for most methods; for
    those that need much for a moment (tupe, fire, floater, synthesizer) it may be half too low or too high. A batch
    without padding is assumed.

    Args:
        weights: the parameters; training needs them four times with their gradients and Adam's two moments.
        layers: kept by the layers outside of attention's scores.
        scores: kept by attention with a number per query and key, as it is done for short sequences.
        position: kept by the position method.
        embeddings: kept by the embeddings.
        head: kept by the masked-LM head and its loss, the logits included.
        inference: the most that live at once without gradients, in the encoder.
    """

    weights: int
    layers: int
    scores: int
    position: int
    embeddings: int
    head: int
    inference: int

    @property
    def training(self) -> int:
        """What the encoder keeps for the backward, without the head."""
        return self.layers + self.scores + self.position + self.embeddings


@dataclass(frozen=True)
class Cost:
    """What :func:`cost` returns; printed, a few lines.

    Args:
        lengths: tokens in each block.
        relative: operations of the layers, decoder included, relative to the baseline's.
        linear: the paper's approximation of that, see :func:`linear_flops`.
    """

    length: int
    batch: int
    lengths: tuple[int, ...]
    flops: Flops
    parameters: Parameters
    memory: Memory
    relative: float
    linear: float

    def to_dict(self) -> dict[str, Any]:
        """Everything, also the sums, for JSON."""
        data = asdict(self)
        data["lengths"] = list(self.lengths)
        data["flops"] |= {name: getattr(self.flops, name) for name in ("layers", "forward", "training")}
        data["parameters"] |= {name: getattr(self.parameters, name) for name in ("encoder", "total")}
        data["memory"]["training"] = self.memory.training
        return data

    def __str__(self) -> str:
        def parts(cost: Flops | Parameters | Memory, *but: str, show: Callable[[int], str] = _si) -> str:
            given = ((name, value) for name, value in asdict(cost).items() if name not in but and value)
            return ", ".join(f"{name} {show(value)}" for name, value in given)

        flops, parameters, memory = self.flops, self.parameters, self.memory
        return "\n".join(
            (
                f"{self.batch} x {self.length} tokens" + (f", {self._lengths()}" if len(self.lengths) > 1 else ""),
                f"parameters  {_si(parameters.encoder)} in the encoder ({parts(parameters, 'head')})"
                f", {_si(parameters.head)} more in the head",
                f"forward     {_si(flops.layers, 'FLOPs')} in the layers, {self.relative:.3f} of the baseline's"
                f" (by the linear rule {self.linear:.3f})",
                f"            {parts(flops)}",
                f"training    {_si(flops.training, 'FLOPs')} a step, embeddings and head included",
                f"memory      weights {_bytes(memory.weights)}, in training four times that, with gradients and Adam",
                f"            training keeps {_bytes(memory.training)} of activations"
                f" ({parts(memory, 'weights', 'head', 'inference', show=_bytes)}), the head {_bytes(memory.head)}",
                f"            inference needs {_bytes(memory.inference)} for activations",
            )
        )

    def _lengths(self) -> str:
        return "blocks of " + ", ".join(map(str, self.lengths))


def _si(value: float, unit: str = "") -> str:
    """With a prefix: 108.9M, 22.3 GFLOPs."""
    thousands = max((power for power in range(6) if value >= 1000**power), default=0)
    number = f"{value / 1000**thousands:,.1f}" if thousands else f"{value:,.0f}"
    return f"{number}{' ' if unit else ''}{('', 'k', 'M', 'G', 'T', 'P')[thousands]}{unit}"


def _bytes(value: float) -> str:
    power, unit = (10, "KiB") if value < 2**20 else (20, "MiB") if value < 10 * 2**30 else (30, "GiB")
    return f"{value / 2**power:,.1f} {unit}"


def cost(
    config: EncoderConfig,
    length: int,
    batch: int = 1,
    *,
    predictions: int | None = None,
    baseline: EncoderConfig | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Cost:
    """What an encoder costs.

    Args:
        config: the encoder.
        length: tokens of a sequence.
        batch: sequences.
        predictions: tokens of a sequence that the masked-LM head predicts; all of them if None.
        baseline: what ``relative`` compares with, at the same length and batch; BERT-base if None.
        dtype: of parameters and activations.
        device: "cpu" or "cuda", which keep different things for the backward.

    Raises:
        ValueError: for sizes that do not fit, among them a length beyond a position method's range.
    """
    if batch < 1:
        raise ValueError(f"batch: expected at least 1, got {batch}")
    if predictions is None:
        predictions = length
    if not 0 <= predictions <= length:
        raise ValueError(f"predictions: expected 0 to length {length}, got {predictions}")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device: expected 'cpu' or 'cuda', got {device!r}")
    trace = _Trace(config, length, batch, dtype)
    flops = _flops(trace, predictions)
    parameters = count_parameters(config)
    return Cost(
        length=length,
        batch=batch,
        lengths=config.block_lengths(length),
        flops=flops,
        parameters=parameters,
        memory=_memory(trace, predictions, device, parameters),
        relative=flops.layers / count_flops(baseline or _bert(length), length, batch).layers,
        linear=linear_flops(config),
    )


def count_flops(config: EncoderConfig, length: int, batch: int = 1, predictions: int = 0) -> Flops:
    """Operations of a forward; ``predictions`` tokens of every sequence go through the masked-LM head."""
    return _flops(_Trace(config, length, batch, torch.float32), predictions)


def count_parameters(config: EncoderConfig) -> Parameters:
    """Parameters of an :class:`~whereformer.EncoderForMaskedLM`, exactly: the model is built, without memory."""
    with META:
        model = EncoderForMaskedLM(config)

    def size(module: nn.Module) -> int:
        return sum(parameter.numel() for parameter in module.parameters())

    encoder: Encoder = model.encoder
    embeddings, position = size(encoder.embeddings), size(encoder.position)
    return Parameters(
        embeddings=embeddings,
        position=position,
        layers=size(encoder) - embeddings - position,
        head=size(model) - size(encoder),
    )


def linear_flops(config: EncoderConfig) -> float:
    """The paper's relative FLOPs: layers by their length and squared width, in units of BERT-base's twelve.

    ``sum_b depth_b / 2 ** b`` plus the decoder's depth, times ``(hidden_size / 768) ** 2 / 12``: right where
    projections and feed-forward networks of the usual proportions are all that costs.
    """
    depth = sum(block.layers * block.repeats / 2**index for index, block in enumerate(parse_blocks(config.blocks)))
    return (depth + _decoder_depth(config)) * (config.hidden_size / 768) ** 2 / 12


def layer_passes(config: EncoderConfig, length: int) -> list[Pass]:
    """Every layer as it runs, the decoder's last."""
    lengths = config.block_lengths(length)
    passes: list[Pass] = []
    for block, (before, now) in zip(parse_blocks(config.blocks), pairwise((length, *lengths)), strict=True):
        square = [Pass(now, now, 1)] * (block.layers * block.repeats)
        if now != before and config.pool_query_only:
            square[0] = Pass(now, before, 2)
        passes += square
    return passes + [Pass(length, length, 1)] * _decoder_depth(config)


def _decoder_depth(config: EncoderConfig) -> int:
    if config.decoder_layers == "0":
        return 0
    return sum(block.layers * block.repeats for block in parse_blocks(config.decoder_layers))


def _bert(length: int) -> EncoderConfig:
    return EncoderConfig(max_position_embeddings=max(512, length))


class _Kept:
    """Collects tensors that a backward keeps, each storage once; the tensors of ``leave_out`` count elsewhere."""

    def __init__(self) -> None:
        self.tensors: dict[int, Tensor] = {}
        self.left_out: dict[int, Tensor] = {}

    def add(self, *tensors: Tensor) -> None:
        self.tensors |= {tensor.untyped_storage()._cdata: tensor for tensor in tensors}

    def leave_out(self, *tensors: Tensor) -> None:
        self.left_out |= {tensor.untyped_storage()._cdata: tensor for tensor in tensors}

    def hooks(self) -> saved_tensors_hooks:
        """A context in which autograd's own saved tensors are added."""

        def pack(tensor: Tensor) -> Tensor:
            self.add(tensor)
            return tensor

        return saved_tensors_hooks(pack, lambda tensor: tensor)

    def size(self) -> int:
        """Bytes."""
        return sum(
            tensor.untyped_storage().nbytes() for key, tensor in self.tensors.items() if key not in self.left_out
        )


class _Trace:
    """What the position method adds to every pass of a model: its operations, and the bytes kept for a backward.

    The method's hooks run on the meta device, where torch counts their operations and names all that autograd keeps;
    what they return to attention costs what the terms say.
    """

    def __init__(self, config: EncoderConfig, length: int, batch: int, dtype: torch.dtype) -> None:
        self.config, self.length, self.batch, self.dtype = config, length, batch, dtype
        self.passes = layer_passes(config, length)
        self.embed_flops = 0
        self.flops = [0] * len(self.passes)
        self.has_terms = [config.segments == "attention"] * len(self.passes)
        self.kept = 0
        self.kept_by_pass = [0] * len(self.passes)
        self.content = True
        names = [name.strip() for name in config.position.split("+")]
        if not set(names) <= set(CLOSED_FORMS):
            with META:
                method = position_of(config).to(dtype)
            self.content = method.content
            parts = list(method) if isinstance(method, Sum) else [method]
            for name, part in zip(names, parts, strict=True):
                if name not in CLOSED_FORMS:
                    self._run(part)
        for name in names:
            if name in CLOSED_FORMS:
                for layer, place in enumerate(self.passes):
                    multiply_adds, numbers = CLOSED_FORMS[name](config, place, batch)
                    self.flops[layer] += 2 * multiply_adds
                    self.has_terms[layer] = True
                    self.kept_by_pass[layer] += numbers * dtype.itemsize
                    self.kept += numbers * dtype.itemsize

    def _run(self, part: Position) -> None:
        """Run the hooks of one method, as an encoder would."""
        config, kept = self.config, _Kept()
        kept.leave_out(*part.parameters())

        def made(*size: int) -> Tensor:
            return torch.empty(self.batch, *size, dtype=self.dtype, device=META, requires_grad=True)

        def heads(n: int) -> Tensor:
            return made(config.num_attention_heads, n, config.head_dim)

        with FlopCounterMode(display=False) as counter, kept.hooks():
            words = made(self.length, config.embedding_size)
            # Sizes are all that matters here, so no position has a stride.
            part.embed(words, Positions(0, 1, self.length))
            kept.leave_out(words)
            before, kept_before = counter.get_total_flops(), kept.size()
            self.embed_flops += before
            shared: dict[Pass, Any] = {}
            for layer, place in enumerate(self.passes):
                queries = Positions(0, 1, place.n_q)
                keys = queries if place.n_k == place.n_q else Positions(0, 1, place.n_k)
                if place not in shared:
                    if isinstance(part, Floater):
                        shared[place], flops, size = _trajectory(part, self.length)
                        self.flops[layer] += flops
                        self.kept += size
                    else:
                        shared[place] = part.shared(queries, keys)
                options = {"layer": layer, "shared": shared[place]}
                if self.content:
                    given = heads(place.n_q), heads(place.n_k), heads(place.n_k)
                    rotated = part.rotate(*given, queries, keys, **options)
                    # Attention keeps one query, key and value in any case; a method may keep what it changed as well.
                    kept.leave_out(*(old for old, new in zip(given, rotated, strict=True) if old is new))
                hidden = made(place.n_q, config.hidden_size)
                terms = part.terms(hidden, queries, keys, **options)
                kept.leave_out(hidden)
                kept.add(*(value for term in terms for value in vars(term).values() if isinstance(value, Tensor)))
                after = counter.get_total_flops()
                applied = sum(_applied(term, config, place, self.batch) for term in terms)
                self.flops[layer] += after - before + 2 * applied
                self.has_terms[layer] |= bool(terms)
                self.kept_by_pass[layer] += kept.size() - kept_before
                before, kept_before = after, kept.size()
        self.kept += kept.size()


def _applied(term: Term, config: EncoderConfig, place: Pass, batch: int) -> int:
    """Multiply-adds of a term in attention; what is one number per pair is only added.

    Scores that the whole batch shares count once, though some backends make them for each item.
    """
    heads = config.num_attention_heads
    match term:
        case OffsetKeys() | OffsetValues():
            # One product with the whole table for every query, from which every key takes its offset's number.
            return batch * heads * place.n_q * term.table.shape[1] * term.table.shape[2]
        case FactorPair():
            items = max(len(term.query_factors), len(term.key_factors))
            return items * heads * place.n_q * place.n_k * term.query_factors.shape[3]
        case OffsetBias() | DenseBias():
            return 0


def _trajectory(method: Floater, length: int) -> tuple[Tensor, int, int]:
    """FLOATER's vectors, the operations that make them and the bytes kept; its thousands of steps are all alike."""
    initial = method.initial
    evaluations = {"rk4": 4, "midpoint": 2}[method.solver] * method.substeps * (length - 1)
    # In each two linear maps, which keep what goes in.
    flops = evaluations * 2 * 2 * initial.numel() * initial.shape[2]
    kept = evaluations * 2 * initial.numel() * initial.element_size()
    return torch.empty(length, *initial.shape, dtype=initial.dtype, device=META, requires_grad=True), flops, kept


def _transformer_xl(config: EncoderConfig, place: Pass, batch: int) -> tuple[int, int]:
    """Transformer-XL's relative attention as in Funnel-Transformer's code: multiply-adds, and numbers kept.

    "shifted": every layer projects the sinusoids of all distances, once for the batch, and multiplies them with every
    query. "factorized": queries go through the projection instead and meet the keys' sinusoids over the whole width.
    """
    n_q, n_k, step = place
    heads, width = config.num_attention_heads, config.hidden_size
    inner = heads * config.head_dim
    if (config.position_options or {}).get("form", "shifted") == "factorized":
        rotated = batch * n_q * heads * width
        return batch * n_q * width * inner + 2 * rotated * n_k + 2 * rotated, 2 * rotated + n_k * width
    distances = step * n_q + n_k
    return distances * inner * (width + batch * n_q), distances * inner


CLOSED_FORMS: dict[str, Callable[[EncoderConfig, Pass, int], tuple[int, int]]] = {"transformer_xl": _transformer_xl}
"""Methods whose cost is a formula, because that is what their paper counts."""


def _flops(trace: _Trace, predictions: int) -> Flops:
    config, batch, passes = trace.config, trace.batch, trace.passes
    width, inner = config.hidden_size, config.num_attention_heads * config.head_dim
    encoder = len(passes) - _decoder_depth(config)
    parts = []
    for place, position in zip(passes, trace.flops, strict=True):
        n_q, n_k, _ = place
        # The projections of queries and of the output are of queries, those of keys and values of keys.
        of_queries, of_keys = (2, 2) if trace.content else (1, 1)
        linear = width * inner * (of_queries * n_q + of_keys * n_k) + 2 * n_q * width * config.intermediate_size
        attention = (2 if trace.content else 1) * n_q * n_k * inner
        segments = 2 * n_q * inner if config.segments == "attention" else 0
        parts.append((2 * batch * linear, 2 * batch * attention, position, 2 * batch * segments))
    linear, attention, position, segments = (sum(part) for part in zip(*parts[:encoder], strict=True))
    narrow = config.embedding_size if config.embedding_size != width else 0
    transform = width * config.embedding_size if config.lm_head == "bert" else narrow * width
    return Flops(
        linear=linear,
        attention=attention,
        position=position,
        segments=segments,
        decoder=sum(map(sum, parts[encoder:])),
        embeddings=2 * batch * trace.length * narrow * width + trace.embed_flops,
        head=2 * batch * predictions * (transform + config.embedding_size * config.vocab_size),
    )


class _Kind(NamedTuple):
    """What one way of computing attention keeps besides query, key and value."""

    score_bytes: int
    """For every head, query and key."""
    outputs: int
    """Copies of its output, the one that the next projection keeps included."""
    row_numbers: int
    """Numbers for every head and query."""


def _attention_kind(config: EncoderConfig, place: Pass, has_terms: bool, dtype: torch.dtype, device: str) -> _Kind:
    """What the backend keeps that a batch without padding is computed by in training."""
    drops = config.attention_probs_dropout_prob > 0
    if _writes_scores(config, place, has_terms, drops, device):
        # The weights; with dropout also a mask, which torch's own has as numbers, and the weights that are left.
        wide = max(4, dtype.itemsize)
        return _Kind(wide + (wide + (1 if has_terms else wide) if drops else 0), 1, 0)
    if config.attention_backend == "auto" and not has_terms and not (device == "cpu" and drops):
        return _Kind(0, 1, 1)
    if device == "cpu" and dtype in (torch.float32, torch.float64) and place.n_q * place.n_k <= MOST_SCORES:
        return _Kind(dtype.itemsize, 1, 0)
    return _Kind(0, 2, 2)


def _writes_scores(config: EncoderConfig, place: Pass, has_terms: bool, drops: bool, device: str) -> bool:
    """Whether all scores are written out, step by step: by the reference, or by torch for dropout on the CPU."""
    if config.attention_backend != "auto":
        return bool(config.attention_backend == "reference")
    return device == "cpu" and place.n_q * place.n_k <= FEW_SCORES and (has_terms or drops)


def _activation_bytes(config: EncoderConfig, dtype: torch.dtype, *, with_output: bool) -> float:
    """Bytes that an activation keeps for each of its numbers, ``with_output`` if what follows keeps that."""
    kept = _Kept()
    given = torch.empty(1024, dtype=dtype, device=META, requires_grad=True)
    with kept.hooks():
        output = ACT2FN[config.hidden_act](given)
    if with_output:
        kept.add(output)
    return kept.size() / given.numel()


def _memory(trace: _Trace, predictions: int, device: str, parameters: Parameters) -> Memory:
    config, batch, length = trace.config, trace.batch, trace.length
    heads, width, wide = config.num_attention_heads, config.hidden_size, config.intermediate_size
    narrow, inner = config.embedding_size, heads * config.head_dim
    # Norms and the softmax keep float32 at least.
    size, exact = trace.dtype.itemsize, max(4, trace.dtype.itemsize)
    mask = size if device == "cpu" else 1
    hidden_mask = mask if config.hidden_dropout_prob else 0
    drops_between = config.activation_dropout_prob > 0
    per_wide = _activation_bytes(config, trace.dtype, with_output=not drops_between)
    # An activation needs about as much for a moment as it keeps, and never less than what goes in and what comes out.
    wide_copies = max(2.0, per_wide / size)
    per_wide += mask + size if drops_between else 0
    norm = 2 * exact
    layers, scores, inference, words = 0.0, 0, 0.0, size * length * narrow
    for layer, (place, has_terms) in enumerate(zip(trace.passes, trace.has_terms, strict=True)):
        n_q, n_k, _ = place
        kind = _attention_kind(config, place, has_terms, trace.dtype, device)
        # What keys are made of, and queries where they are not the same tokens
        inputs = n_k + (n_q if n_q != n_k else 0)
        projected = inner * (n_q + 2 * n_k if trace.content else n_k)
        # Two residual sums with their norms and dropout masks, and what goes into the feed-forward network
        layers += size * (inputs * width + projected + kind.outputs * n_q * inner + 3 * n_q * width)
        layers += n_q * (2 * hidden_mask * width + 2 * norm + kind.row_numbers * exact * heads + per_wide * wide)
        scores += heads * n_q * n_k * kind.score_bytes
        # In attention: the words, the input, projections, the output twice, what the last projection makes and what
        # the method needs. In the feed-forward network: the words, the layer's input, attention's output, the
        # network's own input and the wide ones.
        attending: float = words + size * (inputs * width + projected + 2 * n_q * inner + n_q * width)
        attending += trace.kept_by_pass[layer] / batch
        if _writes_scores(config, place, has_terms, False, device):
            attending += 2 * exact * heads * n_q * n_k
        feeding = words + size * n_q * (3 * width + wide_copies * wide)
        inference = max(inference, attending, feeding)
    last = trace.passes[-1].n_q
    layers += last * (size * width + (size * width + norm if config.norm == "pre" else 0))
    embedded = narrow * (size + hidden_mask) + norm + (narrow * size if narrow != width else 0)
    head = 0.0
    if config.lm_head == "bert":
        per_narrow = _activation_bytes(config, trace.dtype, with_output=True) + size
        head = per_narrow * narrow + norm + (width * size if config.sparse_prediction else 0)
    # The logits, and their logarithmic softmax
    head += config.vocab_size * (size + exact)
    return Memory(
        weights=parameters.total * size,
        layers=round(batch * layers),
        scores=batch * scores,
        position=trace.kept,
        embeddings=batch * length * embedded,
        head=round(batch * predictions * head),
        inference=round(batch * inference),
    )


class PaperRow(NamedTuple):
    """A model of the paper, and its relative FLOPs by column."""

    model: str
    relative: dict[str, float]
    """The columns are "linear", then length and form of position as in "128 shifted"."""


PAPER_MODELS = (
    ("12", 768),
    ("6", 768),
    ("3-4-4", 768),
    ("4-4-4", 768),
    ("6-3x2-3x2", 768),
    ("6-6-6", 768),
    ("24", 1024),
    ("8-8-8", 1024),
    ("10-10-10", 1024),
)
"""Blocks and width; heads of 64."""

PAPER_BATCH = 8
"""Sequences that share a projection of the distances."""


def paper_table() -> list[PaperRow]:
    """The Funnel-Transformer paper's relative FLOPs, which are the column "linear", and what counting makes of them.

    Relative to BERT-base. "none" leaves out all relative terms; in the other two columns segments act in attention.
    """
    baselines = {length: count_flops(_bert(length), length, PAPER_BATCH).layers for length in (128, 512)}
    rows = []
    for blocks, width in PAPER_MODELS:
        for decoder in ("0", "2") if "-" in blocks else ("0",):
            relative = {"linear": linear_flops(funnel_config(blocks, width, decoder))}
            for length, baseline in baselines.items():
                for form in ("none", "shifted", "factorized"):
                    config = funnel_config(blocks, width, decoder, form)
                    relative[f"{length} {form}"] = count_flops(config, length, PAPER_BATCH).layers / baseline
            name = f"{'B' if '-' in blocks else 'L'}{blocks}H{width}"
            rows.append(PaperRow(name if decoder == "0" else f"{name}+D{decoder}", relative))
    return rows


def funnel_config(blocks: str, width: int = 768, decoder_layers: str = "0", form: str = "shifted") -> EncoderConfig:
    """A model of the paper: heads of 64 and relative attention, in one of its two forms or ("none") without it."""
    relative = form != "none"
    return EncoderConfig(
        hidden_size=width,
        num_attention_heads=width // 64,
        blocks=blocks,
        decoder_layers=decoder_layers,
        position="transformer_xl" if relative else "none",
        position_options={"form": form} if relative else None,
        segments="attention" if relative else "embedding",
        query_bias=False,
    )
