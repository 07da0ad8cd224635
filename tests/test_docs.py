"""Documents that nobody runs are wrong: every Python snippet of README.md and docs/, and every example, is run here.

The snippets of one document share a namespace, in order. One that cannot run says why, in a comment right above it:
``<!-- no-run: reason -->``.
"""

import functools
import re
import runpy
from pathlib import Path
from unittest import mock

import pytest

import smcdecode as smc
from smcdecode.infer.resampling import SCHEMES

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SNIPPET = re.compile(
    r"^(?:<!-- no-run: *(?P<reason>.*?) *-->\n+)?```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)

load_once = functools.cache(smc.load)


@pytest.fixture
def demo(monkeypatch):
    """One demo model for all documents; what they register is forgotten after each."""
    try:
        load_once("demo")
    except smc.UnsupportedModel as error:
        pytest.skip(f"documents run on the demo model: {error}")
    monkeypatch.setattr(smc, "load", load_once)
    with mock.patch.dict(SCHEMES):
        yield


def snippets(page):
    """(line number, reason not to run or None, code) of each Python snippet."""
    text = page.read_text(encoding="utf-8")
    for found in SNIPPET.finditer(text):
        yield text[: found.start("code")].count("\n"), found["reason"], found["code"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_snippets_run(page, demo):
    namespace = {"__name__": page.stem}
    for line, reason, code in snippets(page):
        if reason is None:
            exec(compile("\n" * line + code, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_snippet_is_lost(page):
    """Every fence that claims to be Python is found, and one that is not run has a reason."""
    text = page.read_text(encoding="utf-8")
    found = list(snippets(page))
    assert len(found) == len(re.findall(r"^\s*```\s*(?:python|py)\b", text, re.MULTILINE | re.IGNORECASE))
    assert all(reason is None or len(reason) > 10 for _, reason, _ in found)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_examples_run(example, demo):
    runpy.run_path(str(example), run_name="__main__")


def test_there_are_examples():
    wanted = {"plain", "power", "reward", "custom_potential", "text_to_sql", "extraction", "rhyme_or_length"}
    assert wanted <= {example.stem for example in EXAMPLES}


def test_links_between_documents_lead_somewhere():
    for page in PAGES:
        prose = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", prose):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
