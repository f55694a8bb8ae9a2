"""BLEU and chrF are sacrebleu's; the parts are those of the lengths asked for."""

import pytest
import sacrebleu

from whereformer.errors import InputError
from whereformer.studies.translate.scoring import score

REFERENCES = ["the cat sat on the mat .", "a dog", "one two three four five six seven eight nine ten", "Grüße, Welt!"]
HYPOTHESES = ["the cat sat on a mat .", "a dog", "one two three four five six seven nine ten", "Grüße Welt!"]


def test_scores_are_sacrebleus_with_their_signatures():
    found = score(HYPOTHESES, REFERENCES, REFERENCES, edges=[4])
    assert found["bleu"] == pytest.approx(sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES]).score, abs=0.005)
    assert found["chrf"] == pytest.approx(sacrebleu.corpus_chrf(HYPOTHESES, [REFERENCES]).score, abs=0.005)
    assert found["bleu_signature"].startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.")
    assert found["chrf_signature"].startswith("nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:2.")
    assert score(REFERENCES, REFERENCES, REFERENCES, edges=[4])["bleu"] == 100
    characters = score(HYPOTHESES, REFERENCES, REFERENCES, edges=[4], tokenize="char")
    assert "tok:char" in characters["bleu_signature"]
    assert characters["bleu"] != found["bleu"]


def test_parts_hold_every_line_once_by_the_words_of_its_source():
    sources = ["", "a b c", "a b c d", "a  b c d e"]
    parts = score(HYPOTHESES, REFERENCES, sources, edges=[3, 4, 9])["bleu_by_words"]
    assert [(part["from"], part["to"], part["lines"]) for part in parts] == [(0, 3, 2), (4, 4, 1), (5, 9, 1)]
    assert parts[0]["bleu"] == pytest.approx(sacrebleu.corpus_bleu(HYPOTHESES[:2], [REFERENCES[:2]]).score, abs=0.005)
    (whole,) = score(HYPOTHESES, REFERENCES, ["x"] * 4, edges=[1])["bleu_by_words"]
    assert (whole["to"], whole["lines"]) == (1, 4)
    (longer,) = score(HYPOTHESES, REFERENCES, ["x y"] * 4, edges=[1])["bleu_by_words"]
    assert (longer["from"], longer["to"]) == (2, None)


def test_lines_that_do_not_belong_together():
    with pytest.raises(InputError, match="expected the same number of lines as the references, got 3 and 4"):
        score(HYPOTHESES[:3], REFERENCES, REFERENCES, edges=[4])
    with pytest.raises(InputError, match="references: expected lines, got none"):
        score([], [], [], edges=[4])


def test_empty_translations_are_scored():
    assert score([""] * 4, REFERENCES, REFERENCES, edges=[4])["bleu"] == 0
