"""What an encoder costs, before it is paid: floating-point operations, parameters and memory.

Operations are those of matrix products, two for each multiply-add; norms, activations, softmax and dropout, less than
one percent of a usual model, are not counted, as in the Funnel-Transformer paper (Dai et al. 2020, arXiv 2006.03236).
Parameters are counted on the model itself, and what position adds is read off the position method, both built on
torch's "meta" device, where tensors have shapes but no memory; so neither can disagree with the code that runs. The
paper's own way to count relative attention is in :func:`paper_table` alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode
from transformers.activations import ACT2FN

from ..errors import InputError
from ..kernels import DenseBias, FactorPair, OffsetBias, OffsetKeys, OffsetValues, Positions
from ..kernels.call import Call, make_call
from ..kernels.choose import choose
from ..kernels.cpu import blockwise
from ..kernels.problem import GRADIENTS, Problem
from ..kernels.terms import Term
from ..kernels.torch_private import storage_id
from ..models import Encoder, EncoderConfig, parse_blocks
from ..models.encoder import SegmentScores, position_of
from ..models.heads import MaskedLMHead
from ..models.pooling import Tokens
from ..positions import Place, Position, Sum
from ..positions.floater import Floater
from ..positions.transformer_xl import FORMS

META = torch.device("meta")


class Pass(NamedTuple):
    """A layer as it runs once: where the tokens are that attend, and those that they attend to."""

    queries: Positions
    keys: Positions

    @property
    def n_q(self) -> int:
        return self.queries.length

    @property
    def n_k(self) -> int:
        return self.keys.length


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of one forward of the whole batch.

    Args:
        linear: projections and feed-forward networks of the blocks' layers.
        attention: their scores and weighted sums of values.
        position: what their positions add, by whatever method.
        segments: what "attention" segments add to their scores, the tokens' types being given.
        decoder: all of the same in the decoder's layers.
        embeddings: the projection of embeddings that are narrower than the model.
        head: the masked-LM head; an encoder that pools without a decoder has none.
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
    """Numbers that are trained; ``encoder`` is all but the masked-LM head, whose tied embeddings count once.

    An encoder that pools without a decoder has no such head.
    """

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

    Training keeps for the backward: inputs of products, norms and activations, dropout masks (which the CPU keeps
    as numbers, a GPU as bytes) and what attention and the position method keep. What lives for a moment and
    gradients are not counted: in float32 the peak of a forward in training was 1 to 13% above the estimate (23% for an
    activation of several steps, and more where tables of numbers per pair are trained, as in a random Synthesizer), in
    bfloat16 3 to 25%. Inference was within 5% for most methods; for those that need much for a moment (tupe, fire,
    floater, synthesizer, transformer_xl in bfloat16, and below about 90 tokens all with terms) it may be half too low
    or too high. Nor is the memory of attention's tiles counted, which a thread keeps from call to call: up to 6 MiB
    with BERT-base's heads, and some more where oneDNN multiplies (see ``whereformer.kernels.cpu.products``). A batch without
    padding is assumed.

    Args:
        weights: the parameters; training needs them four times with their gradients and Adam's two moments.
        layers: kept by the layers outside of attention's scores.
        scores: kept by attention with a number per query and key, as it is done for short sequences.
        position: kept by the position method and by "attention" segments.
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
                + (f", {_si(parameters.head)} more in the head" if parameters.head else "; no masked-LM head"),
                f"forward     {_si(flops.layers, 'FLOPs')} in the layers, {self.relative:.3f} of the baseline's,"
                f" which is BERT-base by default (by the linear rule {self.linear:.3f})",
                f"            {parts(flops)}",
                f"training    {_si(flops.training, 'FLOPs')} a batch, embeddings"
                + (" and head included" if parameters.head else " included"),
                f"memory      weights {_bytes(memory.weights)}, in training four times that, with gradients and Adam",
                f"            training keeps {_bytes(memory.training)} of activations"
                f" ({parts(memory, 'weights', 'head', 'inference', show=_bytes)})"
                + (f", the head {_bytes(memory.head)}" if parameters.head else ""),
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
    decoder: bool = True,
    baseline: EncoderConfig | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Cost:
    """What an encoder costs.

    Args:
        config: the encoder.
        length: tokens of a sequence.
        batch: sequences.
        predictions: tokens of a sequence that the masked-LM head predicts; all of them if None, none where blocks pool
            and no decoder undoes it.
        decoder: False leaves out a decoder that the config has, as in ``Encoder(config, decoder=False)`` and in a
            classifier of sequences.
        baseline: what ``relative`` compares with, at the same length and batch; BERT-base if None.
        dtype: of parameters and activations.
        device: "cpu" or "cuda", which keep different things for the backward.

    Raises:
        ValueError: for sizes that do not fit, among them a length beyond a position method's range.
    """
    if batch < 1:
        raise InputError("batch", f"expected at least 1, got {batch}")
    config = config if decoder else config.without_decoder()
    if predictions is None:
        predictions = length if config.full_length else 0
    if predictions and not config.full_length:
        raise InputError(
            "predictions", f"blocks that pool need a decoder to predict tokens, got {predictions} without one"
        )
    if not 0 <= predictions <= length:
        raise InputError("predictions", f"expected 0 to length {length}, got {predictions}")
    if device not in ("cpu", "cuda"):
        raise InputError("device", f"expected 'cpu' or 'cuda', got {device!r}")
    trace = _Trace(config, length, batch, dtype, torch.device(device), config.attention_backend)
    flops = _flops(trace, predictions)
    parameters = count_parameters(config)
    return Cost(
        length=length,
        batch=batch,
        lengths=config.block_lengths(length),
        flops=flops,
        parameters=parameters,
        memory=_memory(trace, predictions, parameters),
        relative=flops.layers / count_flops(baseline or _bert(length), length, batch).layers,
        linear=linear_flops(config),
    )


def count_flops(config: EncoderConfig, length: int, batch: int = 1, predictions: int = 0) -> Flops:
    """Operations of a forward; ``predictions`` tokens of every sequence go through the masked-LM head."""
    # They are the same by every backend, and with a device in mind one may not be to be had.
    return _flops(_Trace(config, length, batch, torch.float32, torch.device("cpu"), "auto"), predictions)


def count_parameters(config: EncoderConfig) -> Parameters:
    """Parameters of an :class:`~whereformer.Encoder` and its masked-LM head, exactly: built, but without memory."""

    def size(module: nn.Module) -> int:
        return sum(parameter.numel() for parameter in module.parameters())

    head = 0
    with META:
        encoder = Encoder(config)
        if config.full_length:
            module = MaskedLMHead(config)
            head = size(module) - (module.decoder.weight.numel() if config.tie_word_embeddings else 0)
    embeddings, position = size(encoder.embeddings), size(encoder.position)
    return Parameters(embeddings=embeddings, position=position, layers=size(encoder) - embeddings - position, head=head)


def linear_flops(config: EncoderConfig) -> float:
    """The paper's relative FLOPs: layers by their length and squared width, in units of BERT-base's twelve.

    ``sum_b depth_b / 2 ** b`` plus the decoder's depth, times ``(hidden_size / 768) ** 2 / 12``: right where
    projections and feed-forward networks of the usual proportions are all that costs.
    """
    depth = sum(block.layers * block.repeats / 2**index for index, block in enumerate(parse_blocks(config.blocks)))
    return (depth + _decoder_depth(config)) * (config.hidden_size / 768) ** 2 / 12


def layer_passes(config: EncoderConfig, length: int) -> list[Pass]:
    """Every layer as it runs, the decoder's last if there is one."""
    pooling = config.make_pooling()
    whole = now = Positions(0, 1, length)
    passes: list[Pass] = []
    for index, block in enumerate(parse_blocks(config.blocks)):
        before = now
        if index and pooling.applies_to(now.length):
            pooled = pooling.sequence(Tokens(now)).positions
            assert isinstance(pooled, Positions)
            now = pooled
        passes.append(Pass(now, before if config.pool_query_only else now))
        passes += [Pass(now, now)] * (block.layers * block.repeats - 1)
    return passes + [Pass(whole, whole)] * _decoder_depth(config)


def _decoder_depth(config: EncoderConfig) -> int:
    if config.decoder_layers == "0" or not config.with_decoder:
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
        self.tensors |= {storage_id(tensor): tensor for tensor in tensors}

    def leave_out(self, *tensors: Tensor) -> None:
        self.left_out |= {storage_id(tensor): tensor for tensor in tensors}

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
    """What position and segments add to every pass of a model: their operations, and the bytes kept for a backward;
    and how attention computes it, in training and without gradients.

    Their code runs on the meta device, where torch counts its operations and names all that autograd keeps; what it
    returns to attention costs what the terms say.
    """

    def __init__(
        self, config: EncoderConfig, length: int, batch: int, dtype: torch.dtype, device: torch.device, backend: str
    ) -> None:
        self.config, self.length, self.batch, self.dtype = config, length, batch, dtype
        self.device, self.backend = device, backend
        self.passes = layer_passes(config, length)
        self.flops: list[int] = []
        self.segment_flops: list[int] = []
        self.trained: list[Computed] = []
        self.inferred: list[str] = []
        self.kept_by_pass: list[int] = []
        with META:
            method = position_of(config).to(dtype)
            self.content = method.content
            attended = self.content and config.segments == "attention"
            segments = SegmentScores(config).to(dtype) if attended else None
        kept = _Kept()
        kept.leave_out(*method.parameters(), *([] if segments is None else segments.parameters()))
        with FlopCounterMode(display=False) as counter, torch.enable_grad(), kept.hooks():
            words = self._made(length, config.embedding_size)
            method.embed(words, Positions(0, 1, length))
            kept.leave_out(words)
            self.embed_flops = counter.get_total_flops()
            self.others_kept = 0
            self.trajectory_flops = 0
            shared: dict[Pass, Any] = {}
            for layer, place in enumerate(self.passes):
                before = counter.get_total_flops() + self.trajectory_flops
                kept_before = kept.size()
                if place not in shared:
                    shared[place] = self._shared(method, place)
                at = Place(place.queries, place.keys, layer, shared[place])
                call = self._call(method, segments, at, kept)
                applied = [2 * _applied(term, config, place, batch) for term in call.terms]
                self.segment_flops.append(0 if segments is None else applied.pop())
                after = counter.get_total_flops() + self.trajectory_flops
                self.flops.append(after - before + sum(applied))
                self.kept_by_pass.append(kept.size() - kept_before)
        self.kept = kept.size() + self.others_kept

    def _made(self, *size: int) -> Tensor:
        return torch.empty(self.batch, *size, dtype=self.dtype, device=META, requires_grad=True)

    def _shared(self, method: Position, place: Pass) -> Any:
        """As :meth:`Position.shared`."""
        if isinstance(method, Sum):
            return tuple(self._shared(part, place) for part in method)
        if isinstance(method, Floater):
            vectors, flops, kept = _trajectory(method, max(positions.last for positions in place) + 1)
            self.trajectory_flops += flops
            self.others_kept += kept
            return vectors
        return method.shared(place.queries, place.keys)

    def _call(self, method: Position, segments: SegmentScores | None, place: Place, kept: _Kept) -> Call:
        """Do what an attention layer does up to its call, the segments' term last; note what attention keeps."""
        config = self.config
        assert isinstance(place.queries, Positions)
        assert isinstance(place.keys, Positions)
        n_q, n_k = place.queries.length, place.keys.length

        def heads(n: int) -> Tensor:
            return self._made(n, config.num_attention_heads, config.head_dim).transpose(1, 2)

        hidden, value = self._made(n_q, config.hidden_size), heads(n_k)
        terms = method.terms(hidden, place)
        # The layer keeps its input anyway, and attention one query, key and value; a method may keep what it changed
        # as well.
        kept.leave_out(hidden)
        query, key = None, None
        if self.content:
            given = query, key, value = heads(n_q), heads(n_k), value
            terms += method.query_terms(query, place)
            if segments is not None:
                types = (torch.empty(self.batch, n, dtype=torch.int64, device=META) for n in (n_q, n_k))
                terms += (segments(query, *types),)
            query, key, value = method.rotate(*given, place)
            kept.leave_out(*(old for old, new in zip(given, (query, key, value), strict=True) if old is new))
        call = make_call(
            query,
            key,
            value,
            terms,
            dropout_p=config.attention_probs_dropout_prob,
            query_positions=place.queries,
            key_positions=place.keys,
        )
        self._note(call, kept)
        return call

    def _note(self, call: Call, kept: _Kept) -> None:
        """How attention computes a call, and what it keeps of the call's terms."""
        trained = choose(call, self.backend, self.device)
        if trained == "reference":
            read = [value for term in call.terms for value in vars(term).values() if isinstance(value, Tensor)]
            self.trained.append(Computed(trained))
            self.others_kept += _written_out(call)
        else:
            # The other backends merge terms, and read those.
            problem = Problem.of(call)
            found = (getattr(problem, name) for name in GRADIENTS if name not in ("query", "key", "value"))
            read = [tensor for tensor in found if tensor is not None]
            keeps = blockwise.keeps(problem, self.device) if trained == "blockwise" else ""
            self.trained.append(Computed(trained, keeps))
        kept.add(*read)
        with torch.no_grad():
            self.inferred.append(choose(replace(call, dropout_p=0.0), self.backend, self.device))


class Computed(NamedTuple):
    """How a call is computed: the backend, and what blockwise keeps for the backward (see ``Problem``), else ""."""

    backend: str
    keeps: str = ""


def _written_out(call: Call) -> int:
    """Bytes that the reference keeps for tables over offsets, beside the tables."""
    batch, heads = call.value.shape[:2]
    size = max(4, call.value.element_size())
    kept = 0
    for term in call.terms:
        if isinstance(term, OffsetBias | OffsetKeys | OffsetValues):
            # Which column each pair reads
            kept += call.n_q * call.n_k * torch.int64.itemsize
        if isinstance(term, OffsetKeys | OffsetValues):
            # A number of each query for each offset, and of queries another copy than for content
            width = sum(term.table.shape[1:]) if isinstance(term, OffsetKeys) else term.table.shape[1]
            kept += batch * heads * call.n_q * width * size
            if len(term.table) > 1:
                # To multiply it in batches, torch copies each head's vectors for every item.
                kept += batch * term.table.numel() * size
    return kept


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


def _flops(trace: _Trace, predictions: int) -> Flops:
    config, batch, passes = trace.config, trace.batch, trace.passes
    width, inner = config.hidden_size, config.num_attention_heads * config.head_dim
    encoder = len(passes) - _decoder_depth(config)
    parts = []
    for place, position, segments in zip(passes, trace.flops, trace.segment_flops, strict=True):
        n_q, n_k = place.n_q, place.n_k
        # The projections of queries and of the output are of queries, those of keys and values of keys.
        of_queries, of_keys = (2, 2) if trace.content else (1, 1)
        linear = width * inner * (of_queries * n_q + of_keys * n_k) + 2 * n_q * width * config.intermediate_size
        attention = (2 if trace.content else 1) * n_q * n_k * inner
        parts.append((2 * batch * linear, 2 * batch * attention, position, segments))
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
    """What one way of computing attention keeps."""

    score_bytes: int = 0
    """For every head, query and key."""
    row_numbers: int = 0
    """Numbers for every head and query."""
    widens: bool = False
    """Whether it keeps query, key and value in float32 at least, as which it computes."""


def _attention_kind(by: Computed, drops: bool, dtype: torch.dtype, device: torch.device) -> _Kind:
    """What attention keeps in training that is computed so."""
    wide = max(4, dtype.itemsize)
    match by:
        case Computed("reference"):
            # The weights; with dropout also a mask, and the weights that are left.
            return _Kind(score_bytes=wide + (wide + 1 if drops else 0), widens=True)
        case Computed("fused") if drops and device.type == "cpu":
            # So torch does as well, whose mask is numbers.
            return _Kind(score_bytes=3 * wide)
        case Computed("blockwise", "weights"):
            return _Kind(score_bytes=wide)
        case Computed("blockwise", "nothing"):
            return _Kind()
        case _:
            return _Kind(row_numbers=1)


def _activation_bytes(config: EncoderConfig, dtype: torch.dtype, *, with_output: bool) -> float:
    """Bytes that an activation keeps for each of its numbers, ``with_output`` if what follows keeps that."""
    kept = _Kept()
    given = torch.empty(1024, dtype=dtype, device=META, requires_grad=True)
    with kept.hooks():
        output = ACT2FN[config.hidden_act](given)
    if with_output:
        kept.add(output)
    return kept.size() / given.numel()


def _memory(trace: _Trace, predictions: int, parameters: Parameters) -> Memory:
    config, batch, length = trace.config, trace.batch, trace.length
    heads, width, wide = config.num_attention_heads, config.hidden_size, config.intermediate_size
    narrow, inner = config.embedding_size, heads * config.head_dim
    # Norms and the softmax keep float32 at least.
    size, exact = trace.dtype.itemsize, max(4, trace.dtype.itemsize)
    mask = size if trace.device.type == "cpu" else 1
    hidden_mask = mask if config.hidden_dropout_prob else 0
    drops_between = config.activation_dropout_prob > 0
    # What an activation makes is made again in the backward, unless some of it was dropped.
    per_wide: float = size
    if drops_between:
        per_wide = _activation_bytes(config, trace.dtype, with_output=False) + mask + size
    # An activation needs about as much for a moment as it would keep, and never less than what goes in and comes out.
    wide_copies = max(2.0, _activation_bytes(config, trace.dtype, with_output=True) / size)
    norm = 2 * exact
    layers, scores, inference, words = 0.0, 0, 0.0, size * length * narrow
    drops = config.attention_probs_dropout_prob > 0
    for layer, place in enumerate(trace.passes):
        n_q, n_k = place.n_q, place.n_k
        kind = _attention_kind(trace.trained[layer], drops, trace.dtype, trace.device)
        # What keys are made of, and queries where they are not the same tokens
        inputs = n_k + (n_q if n_q != n_k else 0)
        projected = inner * (n_q + 2 * n_k if trace.content else n_k)
        # Two residual sums with their norms and dropout masks, and what goes into the feed-forward network
        layers += size * (inputs * width + n_q * inner + 3 * n_q * width)
        layers += (exact if kind.widens else size) * projected
        layers += n_q * (2 * hidden_mask * width + 2 * norm + kind.row_numbers * exact * heads + per_wide * wide)
        if config.norm == "pre" and n_q != n_k:
            # Before pooling and after it there are different states to normalise.
            layers += n_k * (size * width + norm)
        scores += heads * n_q * n_k * kind.score_bytes
        # In attention: the words, the input, projections, the output twice, what the last projection makes and what
        # the method needs. In the feed-forward network: the words, the layer's input, the network's own input, with
        # norms before them what that was made of too, and the wide ones.
        attending: float = words + size * (inputs * width + projected + 2 * n_q * inner + n_q * width)
        attending += trace.kept_by_pass[layer] / batch
        if trace.inferred[layer] == "reference":
            attending += 2 * exact * heads * n_q * n_k
        own = 3 if config.norm == "pre" else 2
        feeding = words + size * n_q * (own * width + wide_copies * wide)
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
"""Blocks and width."""

HEAD_DIM = 64
"""Width of a head in all of them."""

PAPER_BATCH = 8
"""Sequences that share a projection of the distances."""


def paper_table() -> list[PaperRow]:
    """The Funnel-Transformer paper's relative FLOPs, which are the column "linear", and what its own code comes to.

    Relative to BERT-base. "none" leaves out all relative terms; in the other two columns segments act in attention.
    """
    baselines = {length: count_flops(_bert(length), length, PAPER_BATCH).layers for length in (128, 512)}
    rows = []
    for blocks, width in PAPER_MODELS:
        for decoder in ("0", "2") if "-" in blocks else ("0",):
            config = funnel_config(blocks, width, decoder, "none")
            relative = {"linear": linear_flops(config)}
            for length, baseline in baselines.items():
                passes = layer_passes(config, length)
                for form in ("none", *FORMS):
                    terms = 0 if form == "none" else sum(_paper_terms(place, width, form) for place in passes)
                    flops = count_flops(config, length, PAPER_BATCH).layers + 2 * terms
                    relative[f"{length} {form}"] = flops / baseline
            name = f"{'B' if '-' in blocks else 'L'}{blocks}H{width}"
            rows.append(PaperRow(name if decoder == "0" else f"{name}+D{decoder}", relative))
    return rows


def _paper_terms(place: Pass, width: int, form: str) -> int:
    """Multiply-adds of relative attention and segments in the code of the paper's authors, for its batch.

    "shifted": every layer projects the sinusoids of all distances, once for the batch, and multiplies them with every
    query. "factorized": queries go through the projection instead and meet the keys' sinusoids twice, each time over
    the whole width. :class:`~whereformer.positions.TransformerXL` needs no more than half of the latter.
    """
    n_q, n_k = place.n_q, place.n_k
    if form == "factorized":
        rotated = PAPER_BATCH * n_q * width // HEAD_DIM * width
        terms = PAPER_BATCH * n_q * width**2 + 2 * rotated * n_k + 2 * rotated
    else:
        distances = place.queries.stride // place.keys.stride * n_q + n_k
        terms = distances * width * (width + PAPER_BATCH * n_q)
    return terms + PAPER_BATCH * 2 * n_q * width


def funnel_config(blocks: str, width: int = 768, decoder_layers: str = "0", form: str = "shifted") -> EncoderConfig:
    """A model of the paper: heads of 64 and relative attention, in one of its two forms or ("none") without it."""
    relative = form != "none"
    return EncoderConfig(
        hidden_size=width,
        num_attention_heads=width // HEAD_DIM,
        blocks=blocks,
        decoder_layers=decoder_layers,
        position="transformer_xl" if relative else "none",
        position_options={"form": form} if relative else None,
        segments="attention" if relative else "embedding",
        query_bias=False,
    )
