"""Documents that nobody runs are wrong: snippets and commands of README.md and docs/, notebooks and examples run here.

The snippets of one document share a namespace, in order. One that cannot run says why, in a comment right above it:
``<!-- no-run: reason -->``. The site is built too, and a warning fails.
"""

import functools
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from unittest import mock

import pytest
import yaml

import smcdecode as smc
from smcdecode import cli
from smcdecode.infer.resampling import SCHEMES

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.py"))
SNIPPET = re.compile(
    r"^(?:<!-- no-run: *(?P<reason>.*?) *-->\n+)?```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)

COMMANDS = re.compile(r"^(?P<no_run><!-- no-run:.*-->\n+)?```bash\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)

load_once = functools.cache(smc.load)


@pytest.fixture
def demo(demo_model, monkeypatch):
    """One demo model for all documents; what they register is forgotten after each."""

    def load(source, **options):
        return demo_model if source == "demo" and not options else load_once(source, **options)

    monkeypatch.setattr(smc, "load", load)
    monkeypatch.setattr(cli, "load", load)
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


def commands(page):
    """The command lines of a page, without comments, as lists of words."""
    for found in COMMANDS.finditer(page.read_text(encoding="utf-8")):
        if not found["no_run"]:
            lines = found["code"].replace("\\\n", " ").splitlines()
            yield from filter(None, (shlex.split(line, comments=True) for line in lines))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_run(page, demo, capsys):
    """Those of the command line do what they say; scripts are there to be run."""
    for program, *arguments in commands(page):
        if program == "smcdecode":
            assert cli.main(arguments) == 0, capsys.readouterr().err
        elif program.startswith("scripts/"):
            assert os.access(ROOT / program, os.X_OK), f"{page.name} tells to run {program}"


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_notebooks_run(notebook, demo):
    assert notebook.read_text(encoding="utf-8").startswith("# %% [markdown]\n# # ")
    runpy.run_path(str(notebook), run_name="__main__")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_examples_run(example, demo):
    runpy.run_path(str(example), run_name="__main__")


def test_there_are_examples():
    wanted = {"plain", "power", "reward", "custom_potential", "text_to_sql", "extraction", "rhyme_or_length"}
    assert wanted <= {example.stem for example in EXAMPLES}
    assert len(NOTEBOOKS) >= 3


def test_links_between_documents_lead_somewhere():
    for page in PAGES:
        prose = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", prose):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_site_builds_without_a_warning(tmp_path):
    """Every page has its place in a table of contents, every link leads somewhere, every docstring can be read."""
    pytest.importorskip("sphinx", reason="the site is built with the extra docs")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "docs", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    for page in (ROOT / "docs").rglob("*.md"):
        assert (tmp_path / page.relative_to(ROOT / "docs").with_suffix(".html")).exists()
    reference = (tmp_path / "api.html").read_text(encoding="utf-8")
    assert [name for name in smc.__all__ if f">{name}<" not in reference] == [], "docs/api.md lists every public name"


def test_the_citation_is_complete():
    """What the format demands is there, and the version is the package's."""
    held = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert held["cff-version"] == "1.2.0" and held["message"] and held["title"] and held["authors"][0]["name"]
    assert (held["version"], held["license"]) == (project["version"], project["license"])
    assert f"will be {held['version']}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
