"""Score translations: BLEU and chrF by sacrebleu, and BLEU by length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import InputError
from ...lab.sheet import Sheet


def score(
    hypotheses: Sequence[str],
    references: Sequence[str],
    lengths_of: Sequence[str],
    *,
    edges: Sequence[int],
    tokenize: str = "13a",
) -> dict[str, Any]:
    """Compute BLEU and chrF of a corpus, and BLEU of groups of lines by length.

    Args:
        hypotheses: translations, detokenized and in their true case.
        references: reference translations, one per hypothesis.
        lengths_of: lines whose words are counted to form the groups, one per hypothesis: the sources or references.
        edges: the most words in each group but the last, ascending.
        tokenize: sacrebleu's tokenization for BLEU.

    Raises:
        InputError: if the numbers of lines differ, or there are none.
    """
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    if not len(hypotheses) == len(references) == len(lengths_of):
        raise InputError(
            "hypotheses",
            f"expected the same number of lines as the references, got {len(hypotheses):,} and {len(references):,}",
        )
    if not references:
        raise InputError("references", "expected lines, got none")
    bleu, chrf = BLEU(tokenize=tokenize), CHRF()
    found, letters = bleu.corpus_score(hypotheses, [references]), chrf.corpus_score(hypotheses, [references])
    words = [len(line.split()) for line in lengths_of]
    parts = []
    for low, high in zip([0, *edges], [*edges, None], strict=True):
        rows = [row for row, count in enumerate(words) if low < count + (low == 0) and (high is None or count <= high)]
        if rows:
            part = BLEU(tokenize=tokenize).corpus_score(
                [hypotheses[row] for row in rows], [[references[row] for row in rows]]
            )
            parts.append({"from": low + 1 if low else 0, "to": high, "lines": len(rows), "bleu": round(part.score, 2)})
    return {
        "lines": len(references),
        "bleu": round(found.score, 2),
        "bleu_precisions": [round(value, 2) for value in found.precisions],
        "brevity_penalty": round(found.bp, 4),
        "length_ratio": round(found.sys_len / max(1, found.ref_len), 4),
        "bleu_signature": str(bleu.get_signature()),
        "chrf": round(letters.score, 2),
        "chrf_signature": str(chrf.get_signature()),
        "bleu_by_words": parts,
    }


def sheet(scores: Mapping[str, Any]) -> Sheet:
    """Return the table of BLEU by length."""
    rows = []
    for part in scores["bleu_by_words"]:
        words = f"{part['from']} and more" if part["to"] is None else f"{part['from'] or 'up'} to {part['to']}"
        rows.append((words, f"{part['lines']:,}", f"{part['bleu']:.1f}"))
    return Sheet.of("BLEU by length", ["words of the source", "lines", "BLEU"], rows)


def sentences(scores: Mapping[str, Any]) -> tuple[str, str]:
    """Return BLEU and chrF with their signatures."""
    ratio = f"lengths {scores['length_ratio']:.3f} of the references'"
    return (
        f"BLEU {scores['bleu']:.2f} ({scores['bleu_signature']}), {ratio}",
        f"chrF {scores['chrf']:.2f} ({scores['chrf_signature']})",
    )
