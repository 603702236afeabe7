"""How Sphinx makes the site: `make docs`."""

import importlib
import tomllib
from pathlib import Path

_ROOT = Path(__file__).parent.parent
_PROJECT = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]

project = "oncely"
author = "the oncely maintainers"
release = _PROJECT["version"]
project_copyright = author

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx_copybutton",
    "sphinx_design",
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

html_theme = "furo"
html_title = f"oncely {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
html_permalinks_icon = "#"
# Examples without their prompts, as they are typed.
copybutton_exclude = ".linenos, .gp, .go"


def _public_names() -> dict[str, str]:
    """Where a class is defined, and under which name users know it."""
    names = {}
    for package in ("oncely", "oncely.http", "oncely.middleware", "oncely.spark"):
        module = importlib.import_module(package)
        for name in module.__all__:
            value = getattr(module, name)
            names[f"{getattr(value, '__module__', '')}.{name}"] = f"{package}.{name}"
    return names


def _link_public_name(app, env, node, content):  # type: ignore[no-untyped-def]
    """Annotations name a class by its module; its page has it under its public name."""
    public = _PUBLIC.get(node.get("reftarget", ""))
    if public is None:
        return None
    return env.get_domain("py").resolve_xref(
        env, node["refdoc"], app.builder, "obj", public, node, content
    )


_PUBLIC = _public_names()


def setup(app):  # type: ignore[no-untyped-def]
    """Called by Sphinx."""
    app.connect("missing-reference", _link_public_name)
