"""How Sphinx makes the site: `make docs`."""

import sys
import tomllib
from pathlib import Path

_ROOT = Path(__file__).parent.parent
_PROJECT = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

project = "oncely"
author = "the oncely maintainers"
release = _PROJECT["version"]
project_copyright = author

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx_copybutton",
    "sphinx_design",
    # Of this folder's `_extensions`.
    "api_pages",
    "command_pages",
]
# A page is found by its heading, too: `page.md#a-heading`.
myst_heading_anchors = 4
myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist"]
# Docstrings have code in single backticks.
default_role = "code"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
# On the right of a page: `Ledger.claim`, and not where it is defined.
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"oncely {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_search_scorer = str(Path(__file__).parent / "_static" / "scorer.js")
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
html_permalinks_icon = "#"
# Examples without their prompts and output, as they are typed.
copybutton_exclude = ".linenos, .gp, .go"
