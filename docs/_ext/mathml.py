"""Formulas as MathML, which browsers draw by themselves: pages need no script, no font and no network."""

import latex2mathml.converter
from docutils import nodes


def _inline(translator, node):
    translator.body.append(latex2mathml.converter.convert(node.astext()))
    raise nodes.SkipNode


def _block(translator, node):
    formula = latex2mathml.converter.convert(node.astext(), display="block")
    translator.body.append(f'<div class="formula">{formula}</div>')
    raise nodes.SkipNode


def setup(app):
    app.add_html_math_renderer("mathml", inline_renderers=(_inline, None), block_renderers=(_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
