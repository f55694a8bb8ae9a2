"""Position embeddings as TISA's kernels: what each head's attention over text owes to them, fitted layer by layer.

Position embeddings are added to the input, mixed with the words, and every head of every layer makes of them what it
was trained to. In scores over text the offset alone explains some of that, a curve for each head
(:class:`~whereformer.analysis.measured.OffsetStatistics`). The same model without position embeddings has such a curve
too, since near words are alike. So a layer's kernels are fitted to the difference: what was there, less what is there
without, where the layers before already have their kernels. Layers are done in that order, so that each can make up for
what the kernels below it miss.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import InputError
from ..models import Encoder
from ..positions.tisa import Tisa
from .fit import TisaFit, fit_tisa
from .measured import OffsetStatistics


@torch.no_grad()
def offset_curves(encoder: Encoder, windows: Tensor, batch_size: int = 16, only: int | None = None) -> Tensor:
    """What the offset alone adds to each head's scores over text, up to a constant, (layers, heads, 2 n - 1) float64.

    Args:
        encoder: one that does not pool.
        windows: (rows, n) token ids, all of them real.
        batch_size: rows at a time.
        only: a layer; the others' curves are then NaN.
    """
    statistics = OffsetStatistics(
        encoder.config.num_hidden_layers, encoder.config.num_attention_heads, windows.shape[1]
    )
    for rows in windows.split(batch_size):
        for layer, weights in enumerate(encoder(rows.to(encoder.device), output_attentions=True).attentions):
            if only in (None, layer):
                statistics.add(layer, weights)
    return statistics.curves()


@torch.no_grad()
def distill_positions(
    teacher: Encoder,
    student: Encoder,
    windows: Tensor,
    batch_size: int = 16,
    on_layer: Callable[[int], object] = lambda layer: None,
) -> TisaFit:
    """Fit the kernels of ``student``, a model like ``teacher`` but with tisa in place of its positions; in place.

    Args:
        teacher: a model that knows positions in any way; only its attention weights are looked at.
        student: with ``position="tisa"`` and kernels of its own in every layer.
        windows: (rows, n) token ids of text, all of them real.
        batch_size: rows at a time.
        on_layer: is told every layer that is done.

    Returns:
        The fits, (layers, heads, num_kernels), to curves over offsets.

    Raises:
        ValueError: if the student's position method is another, or its layers are not the teacher's.
    """
    position = student.position
    if not isinstance(position, Tisa) or position.share_layers:
        raise InputError("student", "expected position 'tisa' with kernels in every layer, got another method")
    if len(student.passes) != len(teacher.passes):
        raise InputError("student", f"expected the teacher's {len(teacher.passes)} layers, got {len(student.passes)}")
    position.amplitude.zero_()
    wanted = offset_curves(teacher, windows, batch_size)
    fits = []
    for layer in range(len(student.passes)):
        missing = wanted[layer] - offset_curves(student, windows, batch_size, only=layer)[layer]
        fit = fit_tisa(missing, position.amplitude.shape[-1], constant=True)
        for name in ("amplitude", "sharpness", "center"):
            getattr(position, name)[layer] = getattr(fit, name)
        fits.append(fit)
        on_layer(layer)
    return TisaFit(*(torch.stack(parts) for parts in zip(*(vars(fit).values() for fit in fits), strict=True)))
