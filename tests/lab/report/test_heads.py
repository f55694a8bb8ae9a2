"""Panels of heads, and the looks of series."""

from whereformer.lab.report import figures, heads, page


def test_peaks_of_attention_are_named():
    look = figures.series(1)[0]
    drawn = heads.attention_shares([[[0.1, 0.6, 0.1, 0.1, 0.1], [0.2] * 5]], look, "a", "label")
    assert ">\N{MINUS SIGN}1: 60%<" in drawn
    assert ">even<" in drawn


def test_series_are_never_told_apart_by_hue_alone():
    looks = figures.series(16, plain=3)
    assert looks[3].css == "currentColor"
    assert len({(look.css, look.dash) for look in looks}) == 16


def test_long_names_wrap_and_stay_escaped():
    assert page.breakable("a+b/<c>") == "a+<wbr>b/<wbr>&lt;c&gt;"
