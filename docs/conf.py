"""How the documentation is built: ``sphinx-build -W docs site``. Pages are Markdown; notebooks are Python scripts.

A page that no table of contents names is a warning, and ``-W`` makes warnings errors.
"""

import re
from importlib import metadata
from typing import Any

from docutils import nodes
from myst_parser.parsers.sphinx_ import MystParser

project = "smcdecode"
author = "The smcdecode authors"
release = metadata.version("smcdecode")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["conf.py"]
myst_heading_anchors = 3
copybutton_exclude = ".linenos, .gp"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_use_ivar = True
napoleon_use_rtype = False

html_theme = "furo"
html_title = "smcdecode"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#2f5f98", "color-brand-content": "#2f5f98"},
    "dark_css_variables": {"color-brand-primary": "#8ab4e4", "color-brand-content": "#8ab4e4"},
}

CELL = re.compile(r"^# %%(?P<markdown> \[markdown\])?.*\n", re.MULTILINE)


class Notebook(MystParser):
    """A script in percent format: cells begin at ``# %%``, those of text at ``# %% [markdown]``."""

    supported = ("percent",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        """Parse what the script says, as Markdown."""
        super().parse(markdown(inputstring), document)


def markdown(script: str) -> str:
    """A script in percent format as Markdown: text cells lose their ``#``, the others are blocks of code."""
    marks = list(CELL.finditer(script))
    ends = [*(mark.start() for mark in marks[1:]), len(script)]
    cells = [(mark["markdown"], script[mark.end() : end].strip()) for mark, end in zip(marks, ends, strict=True)]
    return "\n\n".join(
        re.sub(r"^# ?", "", body, flags=re.MULTILINE) if text else f"```python\n{body}\n```" for text, body in cells
    )


def setup(app: Any) -> None:
    """Let Sphinx read notebooks."""
    app.add_source_suffix(".py", "percent")
    app.add_source_parser(Notebook)
