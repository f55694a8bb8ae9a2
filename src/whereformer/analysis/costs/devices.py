"""What a training step costs on many devices: memory, traffic and time, on paper.

Three ways are counted. DDP gives every device the whole model and its own sequences. FSDP shares out weights, gradients
and optimizer states. Context parallelism (ring attention) shares out each sequence. In a ring, keys and values travel
from device to device. Tables of positions do not: positions are affine, so a device computes the terms of a block of
keys from the block's start.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...errors import InputError
from ...models import EncoderConfig, parse_blocks
from .total import Cost

STATES = 4
"""Weights, gradients and Adam's two moments: the tensors of the size of the weights that training keeps."""
START = 16
"""Bytes that tell a device where a block of keys begins: a start and a stride of 8 bytes each."""


@dataclass(frozen=True)
class Hardware:
    """The devices and their links. The defaults are those of H200s in machines of eight, from its data sheet.

    Args:
        name: for people to read.
        flops: operations per second at the peak of the dtype that training uses (dense bfloat16).
        efficiency: the share of the peak that training reaches.
        memory: bytes of a device.
        link: bytes per second that a device sends to its neighbor within a machine (NVLink).
        network: bytes per second between two machines, all of its adapters together.
        per_machine: devices in a machine.
        latency: seconds that a message takes at least.
        overlap: whether communication goes on during the backward pass.
    """

    name: str = "H200"
    flops: float = 989e12
    efficiency: float = 0.4
    memory: float = 141e9
    link: float = 450e9
    network: float = 400e9
    per_machine: int = 8
    latency: float = 1e-5
    overlap: bool = True

    def bandwidth(self, devices: int) -> float:
        """Return the bytes per second of the slowest link in a ring of all devices."""
        return self.link if devices <= self.per_machine else min(self.link, self.network)


@dataclass(frozen=True)
class Way:
    """A training step on several devices in one way; bytes and seconds are those of each device.

    Args:
        name: the way.
        memory: bytes that a device keeps.
        traffic: bytes that a device sends.
        compute: seconds of arithmetic.
        communication: seconds of sending, if nothing else goes on.
        seconds: seconds of the step.
        tokens: tokens that all devices together read in the step.
    """

    name: str
    memory: float
    traffic: float
    compute: float
    communication: float
    seconds: float
    tokens: int

    @property
    def share(self) -> float:
        """The share of the step in which a device computes."""
        return self.compute / self.seconds


def ways(cost: Cost, config: EncoderConfig, devices: int, hardware: Hardware | None = None) -> list[Way]:
    """Count a step of DDP, FSDP and, if every device gets a token of each sequence, context parallelism.

    Args:
        cost: the cost of a batch on one device. DDP and FSDP give each device a batch of this size; context parallelism
            divides the sequences of one such batch.
        config: the encoder.
        devices: the number of devices.
        hardware: the devices; H200s by default.

    Raises:
        ValueError: if the number of devices is out of range.
    """
    if not 1 <= devices <= 2**20:
        raise InputError("devices", f"expected 1 to {2**20}, got {devices}")
    used = hardware or Hardware()
    weights = cost.memory.weights
    kept = cost.memory.training + cost.memory.head
    compute = cost.flops.training / (used.flops * used.efficiency)
    others = (devices - 1) / devices
    tokens = cost.batch * cost.length
    passes = config.num_hidden_layers

    def way(name: str, memory: float, traffic: float, messages: float, seconds: float, read: int, hidden: float) -> Way:
        """``hidden`` is the share of the arithmetic during which the traffic may go on."""
        sending = (traffic / used.bandwidth(devices) + messages * used.latency) if devices > 1 else 0.0
        beside = hidden * seconds if used.overlap else 0.0
        return Way(name, memory, traffic, seconds, sending, seconds + max(0.0, sending - beside), read)

    # A ring sends all data but a device's own part once to add it up, and once to tell the result.
    reduced = 2 * others * weights
    hops = 2 * math.ceil(math.log2(devices)) if devices > 1 else 0
    # Keys and values travel once in the forward; in the backward they travel again, with their gradients.
    inner = config.num_attention_heads * config.head_dim
    number = weights / max(1, cost.parameters.total)
    ring = 6 * others * cost.batch * sum(_lengths(cost, config)) * inner * number + passes * (devices - 1) * START
    found = [
        way("DDP", STATES * weights + kept, reduced, hops, compute, devices * tokens, 2 / 3),
        way(
            "FSDP",
            # A layer's weights are there as a whole while it runs.
            STATES * weights / devices + (weights / passes if devices > 1 else 0) + kept,
            # Weights are gathered for the forward and again for the backward, and gradients are added up.
            3 * others * weights,
            3 * passes * hops / 2,
            compute,
            devices * tokens,
            1.0,
        ),
        way(
            "context",
            STATES * weights + kept / devices,
            reduced + ring,
            hops + 3 * passes * (devices - 1),
            compute / devices,
            tokens,
            2 / 3,
        ),
    ]
    return found if devices <= cost.length else found[:-1]


def _lengths(cost: Cost, config: EncoderConfig) -> list[int]:
    """Return the number of keys in each layer's pass. Blocks after the first read shorter sequences."""
    blocks = zip(parse_blocks(config.blocks), cost.lengths, strict=True)
    found = [length for block, length in blocks for _ in range(block.layers * block.repeats)]
    return found + [cost.length] * (config.num_hidden_layers - len(found))


def describe(cost: Cost, config: EncoderConfig, devices: int, hardware: Hardware | None = None) -> str:
    """Return the ways as lines for people to read, with the numbers of the hardware that they assume."""
    used = hardware or Hardware()
    lines = [
        f"{devices} x {used.name}: {used.efficiency:.0%} of {used.flops / 1e12:,.0f} TFLOP/s, "
        f"{used.bandwidth(devices) / 1e9:,.0f} GB/s between neighbors, {used.latency * 1e6:g} us a message, "
        f"{used.memory / 1e9:,.0f} GB"
    ]
    for way in ways(cost, config, devices, used):
        full = "" if way.memory <= used.memory else " (too much)"
        lines.append(
            f"  {way.name:<8}{way.memory / 1e9:8.2f} GB{full}, sends {way.traffic / 1e9:.2f} GB a step, "
            f"{1e3 * way.seconds:.2f} ms ({way.share:.0%} arithmetic), {way.tokens / way.seconds / 1e6:,.2f}M tokens/s"
        )
    # In float32, a number for each head and offset
    saved = 4 * config.num_attention_heads * (2 * cost.length - 1)
    lines.append(
        "  DDP and FSDP: a batch on each device. context: one batch for all; a block of keys travels with its start, "
        f"{START} bytes, not with a table of offsets, which would be {saved / 1e3:,.0f} kB"
    )
    return "\n".join(lines)
