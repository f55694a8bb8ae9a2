"""The site: Sphinx with MyST (Markdown) pages and the furo theme. See docs/README.md."""

import os
import sys
from pathlib import Path

import whereformer

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "whereformer"
author = "The whereformer authors"
release = version = whereformer.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "docstrings",
    "formulas",
    "methods",
    "links",
    "excerpts",
    "files",
    "attached",
]
exclude_patterns = ["_build", "README.md"]

html_theme = "furo"
# Where the sites of all versions are, on the site that is hosted; one that is opened from disk has no others.
if "SITE_URL" in os.environ:
    html_theme_options = {"announcement": f'Version {version}. <a href="{os.environ["SITE_URL"]}">All versions</a>'}
html_title = "whereformer"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
html_show_sourcelink = False
html_math_renderer = "svg"

myst_enable_extensions = ["attrs_block", "attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

# Types and shapes are in the signatures.
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
# Signatures that a decorator wrote have no source to read defaults from.
autodoc_preserve_defaults = False
autodoc_use_legacy_class_based = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
add_module_names = False
python_use_unqualified_type_names = True
maximum_signature_line_length = 88

# A role that refers to nothing is an error. Types of other libraries are exempt, because their pages are not included.
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(?!whereformer\b).*"),
    # Types in signatures that are not public.
    ("py:class", r"whereformer\.(models\.\w+|kernels\.(terms|call))\.\w+"),
]
copybutton_exclude = ".linenos, .gp"
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True
