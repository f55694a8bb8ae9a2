"""Replaces position embeddings by TISA kernels, fitted layer by layer to the embeddings' effect on attention.

Position embeddings are added to the input and mixed with the words, and every head of every layer uses them as it was
trained to. In scores over text, offsets explain part of that effect, as a curve for each head. The curve is fitted to
log weights, which are scores minus a number for each row. The same model without position embeddings has such a curve
too, because nearby words are similar. So a layer's kernels are fitted to the difference: the original curve minus the
curve without position embeddings, where the layers below already have their kernels. Layers are fitted from the first
to the last, so that each can correct for errors of the kernels below it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whereformer.analysis.fit import TisaFit, fit_tisa
from whereformer.analysis.toeplitz import diagonal_sums
from whereformer.errors import InputError
from whereformer.models import Encoder
from whereformer.positions.tisa import Tisa

MIN_WEIGHT = 1e-30
"""Smaller attention weights count as this one, because their logarithms are only rounding error."""


def fit_curves(sums: Tensor, count: int) -> Tensor:
    """Return the f of the least-squares model ``matrix_ij = f(j - i) + r_i``, whose mean is 0, (..., 2 n - 1).

    Args:
        sums: (..., 2 n - 1), the sums over all matrices, by offset, of entries minus their row's mean.
        count: the number of matrices.
    """
    n = (sums.shape[-1] + 1) // 2
    offset, index = torch.arange(1 - n, n), torch.arange(n).unsqueeze(-1)
    rows = ((offset >= -index) & (offset < n - index)).double()  # which offsets a row has
    normal = torch.diag(rows.sum(0)) - rows.T @ rows / n  # with the rows' numbers eliminated
    # Constants are in the null space of the normal matrix, and never part of the right-hand side.
    normal += 1 / len(normal)
    return torch.linalg.solve(normal, sums.flatten(0, -2).T).T.view_as(sums) / count


@torch.no_grad()
def offset_curves(encoder: Encoder, windows: Tensor, batch_size: int = 16, only: int | None = None) -> Tensor:
    """Return the curve over offsets that best explains each head's scores over text, up to a constant: (layers, heads,
    2 n - 1) float64.

    Args:
        encoder: an encoder that does not pool.
        windows: (rows, n) token ids, without padding.
        batch_size: the number of rows at a time.
        only: the single layer to read; the curves of the others are then 0. None: all layers.
    """
    n = windows.shape[1]
    sums = torch.zeros(
        encoder.config.num_hidden_layers, encoder.config.num_attention_heads, 2 * n - 1, dtype=torch.float64
    )
    for rows in windows.split(batch_size):
        for layer, weights in enumerate(encoder(rows.to(encoder.device), output_attentions=True).attentions):
            if only in (None, layer):
                logs = weights.clamp(min=MIN_WEIGHT).log()
                sums[layer] += diagonal_sums(logs - logs.mean(-1, keepdim=True)).sum(0).cpu()
    return fit_curves(sums, len(windows))


@torch.no_grad()
def distill_positions(teacher: Encoder, student: Encoder, windows: Tensor, batch_size: int = 16) -> TisaFit:
    """Fit, in place, the kernels of ``student``: a model like ``teacher``, with tisa instead of its position method.

    Args:
        teacher: a model with any position method; only its attention weights are read.
        student: a model with ``position="tisa"`` and separate kernels in every layer.
        windows: (rows, n) token ids of text, without padding.
        batch_size: the number of rows at a time.

    Returns:
        The fits, (layers, heads, num_kernels), to curves over offsets.

    Raises:
        ValueError: if the student has a different position method, or a different number of layers.
    """
    position = student.position
    if not isinstance(position, Tisa) or position.shares_curve:
        raise InputError("student", "expected position 'tisa' with kernels in every layer, got another method")
    if len(student.passes) != len(teacher.passes):
        raise InputError("student", f"expected the teacher's {len(teacher.passes)} layers, got {len(student.passes)}")
    position.amplitude.zero_()
    teacher_curves = offset_curves(teacher, windows, batch_size)
    fits = []
    for layer in range(len(student.passes)):
        missing = teacher_curves[layer] - offset_curves(student, windows, batch_size, only=layer)[layer]
        fit = fit_tisa(missing, position.amplitude.shape[-1], constant=True)
        for name in ("amplitude", "sharpness", "center"):
            getattr(position, name)[layer] = getattr(fit, name)
        fits.append(fit)
    return TisaFit(*(torch.stack(parts) for parts in zip(*(vars(fit).values() for fit in fits), strict=True)))
