"""How Sphinx builds the documentation: `make docs`."""

from typing import Any

from dtensor_sample import __version__

project = "dtensor_sample"
author = "the authors of dtensor_sample"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = [".md"]
myst_heading_anchors = 3

default_role = "py:obj"  # `name` in a docstring links to what it names, if that is public
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"dtensor_sample {version}"

NEVER_CONSTRUCTED = {
    f"dtensor_sample.{name}"
    for name in (
        "BatchedParams",
        "Drafter",
        "SamplerOutput",
        "ShardPlan",
        "explain.Estimate",
        "explain.Explanation",
    )
}
"""Users are handed these: arguments of their constructors would only be in the way."""


def hide_signature(app: Any, what: str, name: str, *rest: Any) -> tuple[str, str] | None:
    """Nothing in place of the signature of a class that users do not construct."""
    return ("", "") if what == "class" and name in NEVER_CONSTRUCTED else None


def keep_colons(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Begin a field's text with nothing, lest napoleon take all before a colon for a type."""
    if what in ("attribute", "property"):
        lines.insert(0, "\\ ")


def setup(app: Any) -> None:
    """Connect both, the second before napoleon."""
    app.connect("autodoc-process-signature", hide_signature)
    app.connect("autodoc-process-docstring", keep_colons, priority=400)
