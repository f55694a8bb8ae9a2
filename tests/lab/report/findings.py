"""Made-up findings of an analysis."""

import torch

from whereformer.analysis.findings import HeadFindings, ModelFindings, TableFindings
from whereformer.analysis.fit import TisaFit

KINDS = ("previous token", "next token", "local window", "global", "position-blind")


def part_of(matrix):
    """Means of diagonals, along them."""
    n = len(matrix)
    offsets = torch.arange(n) - torch.arange(n)[:, None] + n - 1
    counts = torch.bincount(offsets.flatten(), minlength=2 * n - 1)
    means = torch.bincount(offsets.flatten(), matrix.flatten(), minlength=2 * n - 1) / counts
    return means[offsets], means


def share_of(matrix, part):
    variance = matrix.var(correction=0)
    return 1.0 if variance == 0 else float(1 - (matrix - part).square().mean() / variance)


def table_of(n=64, width=8, noise=0.3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    angles = torch.arange(n, dtype=torch.float64)[:, None] * torch.linspace(0.02, 1.0, width // 2, dtype=torch.float64)
    embeddings = torch.cat([angles.sin(), angles.cos()], -1)
    embeddings += noise * torch.randn(embeddings.shape, generator=generator, dtype=torch.float64)
    gram = embeddings @ embeddings.T
    part, _ = part_of(gram)
    return TableFindings(gram, part, share_of(gram, part), width)


def fits_of(curve, offsets, kind):
    """Not the best fits, but kernels that look like one."""
    centers = {"previous token": -1.0, "next token": 1.0}
    fits = []
    for size in range(1, 6):
        amplitude = torch.linspace(2.0, 0.2, size, dtype=torch.float64)
        center = torch.full((size,), centers.get(kind, 0.0), dtype=torch.float64) + torch.arange(size) / 2
        sharpness = torch.linspace(1.0, 0.05, size, dtype=torch.float64)
        constant = curve.mean()
        explained = torch.tensor(1 - 0.5 / size**2, dtype=torch.float64)
        fits.append(TisaFit(amplitude, sharpness, center, constant, explained))
    return tuple(fits)


def head_of(layer, head, n=64, *, scores=True, noise=0.3):
    kind = KINDS[(3 * layer + head) % len(KINDS)]
    generator = torch.Generator().manual_seed(100 * layer + head)
    offsets = torch.arange(-n + 1, n, dtype=torch.float64)
    curve = {
        "previous token": 3 * torch.exp(-((offsets + 1) ** 2)),
        "next token": 3 * torch.exp(-((offsets - 1) ** 2)),
        "local window": 2 * torch.exp(-((offsets / 6) ** 2)) - 0.5,
        "global": 0.6 * torch.cos(offsets / n * 3),
        "position-blind": 0 * offsets,
    }[kind]
    matrix = None
    if scores:
        index = torch.arange(n) - torch.arange(n)[:, None] + n - 1
        rows = torch.linspace(0.6, 1.4, n, dtype=torch.float64)[:, None]
        matrix = curve[index] * rows + noise * torch.randn(n, n, generator=generator, dtype=torch.float64) + 5.0
        part, curve = part_of(matrix)
        toeplitzness = share_of(matrix, part)
    return HeadFindings(
        layer, head, offsets, curve, toeplitzness if scores else 1.0, matrix, fits_of(curve, offsets, kind)
    )


def model_of(
    name="tiny-bert",
    *,
    n=64,
    layers=2,
    heads=3,
    table=True,
    scores=True,
    noise=0.3,
    position="learned",
    head_layers=None,
):
    findings = tuple(
        head_of(layer, head, n, scores=scores, noise=noise)
        for layer in range(layers if head_layers is None else head_layers)
        for head in range(heads)
    )
    return ModelFindings(
        name=name,
        position=position,
        length=n,
        num_layers=layers,
        table=table_of(n, noise=noise) if table else None,
        heads=findings,
        tokens=("the", "cat", "<sat>", "'down'")[:n],
    )
