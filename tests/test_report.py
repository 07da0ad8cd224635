"""The report: its tree is the run, nothing hostile gets out of its data, and it can be read by keyboard alone."""

import collections
import dataclasses
import itertools
import json
import math
import re
import shutil

import numpy as np
import pytest
from table import TableLM, random_table

import smcdecode as smc
from smcdecode.report.document import contents, document
from smcdecode.report.genealogy import ROOT, tree

V, EOS = 4, 3
p = TableLM(random_table(1, V, floor=0.5), eos=[EOS], name="p")
q = TableLM(random_table(2, V, floor=0.5), eos=[EOS], name="q")
EURO = (b"\xe2\x82", b"\xac", b"x\xff", b".")  # tokens that are parts of characters, and bytes that are none

HOSTILE = (
    "</script><script>document.title = 'pwned'</script>",
    "<!--<script>",
    "<img src=x onerror=\"document.title='pwned'\">",
    "a\0b\x1b[31m",
    "\u202egnirts \u2067desrever",
    "שלום עולם",
    "line\nbreak\u2028and\u2029more\ttabs",
    "\"quotes' & `${document.title = 'pwned'}`",
    "not UTF-8: \ufffd",
    "",
)


def run(target, method, prompt=(0,), max_tokens=10, seed=0):
    return smc.sample(target, list(prompt), method=method, max_tokens=max_tokens, seed=seed, progress=False)


def no_start(text):
    return -math.inf if text.startswith(("ab", "b")) else -float(text.count("c"))


def bytes_only():
    model = TableLM(random_table(3, V, floor=0.5), eos=[EOS], name="<parts>")
    model.vocabulary = dataclasses.replace(model.vocabulary, tokens=EURO)
    return model


RUNS = {
    "reweighting": lambda: run(p**2, smc.SMC(smc.Draft(q, block=2, strictness=0.0), particles=16)),
    "always resampled": lambda: run(p**2, smc.SMC(smc.Draft(q, block=3, strictness=0.5), particles=8, threshold=1.0)),
    "deaths": lambda: run(p * smc.potential(no_start, name="no start"), smc.SMC(particles=12, threshold=0.3)),
    "checked": lambda: run(
        p * smc.Predicate(lambda t: no_start(t) > -9, on="text", name="<b>no start"),
        smc.SMC(smc.Local(check="rejection", rejections=1), particles=12),
    ),
    "parts of characters": lambda: run(bytes_only() ** 2, smc.SMC(particles=8)),
    "one chain": lambda: run(p, smc.Speculative(q, block=2)),
    "chains": lambda: run(p, smc.MultiDraft(q, block=2, chains=3)),
    "all died": lambda: run(p * smc.potential(lambda t: -math.inf, on="final", name="no end"), smc.SMC(particles=4)),
}


@pytest.fixture(scope="module")
def runs():
    return {name: make() for name, make in RUNS.items()}


@pytest.fixture(params=RUNS)
def out(request, runs):
    return runs[request.param]


def way(nodes, node):
    """The nodes from the prompt to one of them."""
    return [node] if node.parent == ROOT else [*way(nodes, nodes[node.parent]), node]


def written(nodes, node):
    return tuple(itertools.chain.from_iterable(tokens for each in way(nodes, node) for tokens in each.tokens))


# ---- the tree is the run


def test_leaves_of_the_tree_are_the_posterior(out):
    nodes = tree(out)
    mass = collections.Counter()
    for node in nodes:
        if node.end == "answer":
            mass[written(nodes, node)] += node.mass
    expected = out.distribution(on="tokens")
    assert mass.keys() == expected.keys()
    assert all(mass[tokens] == pytest.approx(weight, rel=1e-9) for tokens, weight in expected.items())


def test_texts_of_the_tree_are_those_of_the_posterior(out):
    nodes = tree(out)
    texts = dict(zip(out.tokens, out.texts, strict=True))
    for node in nodes:
        if node.end == "answer":
            assert "".join(piece for each in way(nodes, node) for piece in each.pieces) == texts[written(nodes, node)]


def test_widths_of_every_cycle_sum_to_one(out):
    width = np.zeros(len(out.steps))
    for node in tree(out):
        width[node.first : node.last + 1] += node.weight
    np.testing.assert_allclose(width, [float(step.alive > 0) for step in out.steps], rtol=1e-9)


def test_particles_are_counted_once_a_cycle(out):
    count = np.zeros(len(out.steps), dtype=int)
    for node in tree(out):
        count[node.first : node.last + 1] += node.particles
    gone, expected = 0, []  # particles that died in an earlier cycle and were not replaced
    for step in out.steps:
        expected.append(out.N - gone)
        gone = 0 if step.resampled else out.N - min(step.alive, out.N)
    assert count.tolist() == expected


def test_increments_are_what_moves_the_weights(out):
    """Without a resampling a weight moves by its increment over the mean; so the increments' mean is one."""
    for node in tree(out):
        before = [node.share, *node.weight[:-1]]
        for k, (weight, gain) in enumerate(zip(node.weight, node.gain, strict=True)):
            if k == 0 or not out.steps[node.first + k - 1].resampled:
                assert weight == pytest.approx(before[k] * math.exp(gain), rel=1e-9)


def test_the_mass_of_a_node_is_that_of_what_descends_from_it(out):
    nodes = tree(out)
    below = collections.Counter()
    for node in nodes:
        below[node.parent] += node.mass
    assert below[ROOT] == pytest.approx(float(out.alive))
    for i, node in enumerate(nodes):
        assert node.end != "branch" or node.mass == pytest.approx(below[i])


def test_every_death_has_its_place(out):
    nodes = tree(out)
    placed = sorted(d for node in nodes for d in node.deaths)
    assert placed == list(range(len(out.deaths)))
    for node in nodes:
        for d in node.deaths:
            death, after = out.deaths[d], written(nodes, node)
            assert node.first <= death.cycle <= node.last and death.tokens == after[: len(death.tokens)]


def test_runs_cover_what_they_are_here_for(runs):
    ends = {name: {node.end for node in tree(out)} for name, out in runs.items()}
    assert (
        "replaced" in ends["reweighting"] and {"died", "answer"} <= ends["deaths"] and "answer" not in ends["all died"]
    )
    assert runs["checked"].deaths and "€" in "".join(runs["parts of characters"].texts)


def test_a_model_without_a_tokenizer_is_read_as_ids(runs):
    bare = dataclasses.replace(runs["reweighting"], decoded=None, spelling=None)
    nodes = tree(bare)
    leaf = next(node for node in nodes if node.end == "answer")
    text = "".join(piece for each in way(nodes, leaf) for piece in each.pieces)
    assert tuple(map(int, text.split())) == written(nodes, leaf)
    assert contents(bare)["answers"]


# ---- the page


def hostile(base):
    """A run whose texts, names, causes and prompt are all hostile."""
    spelling = dict(enumerate([*(text.encode() for text in HOSTILE[:3]), b""]))
    deaths = (smc_death(HOSTILE[0], HOSTILE[4]),)
    asked = dataclasses.replace(base.asked, target=HOSTILE[0], prompt="\ud800" + HOSTILE[2], method=HOSTILE[1])
    texts = tuple(HOSTILE[i % len(HOSTILE)] for i in range(base.N))
    return dataclasses.replace(base, asked=asked, decoded=texts, spelling=spelling, deaths=deaths)


def smc_death(cause, why):
    from smcdecode.report.record import Obituary

    return Obituary(1, 0, cause, (0,), HOSTILE[3], why)


def embedded(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


def test_what_is_embedded_is_what_the_run_holds(out):
    assert embedded(document(out)) == json.loads(json.dumps(contents(out)))


def test_nothing_hostile_leaves_the_data(runs):
    out = hostile(runs["reweighting"])
    page = document(out)
    assert page.count("<script") == page.count("</script") == 2 and "<img" not in page and "<!--" not in page
    assert not set(page) & set("\0\x1b\u202e\u2028")
    assert {text for text, _, _ in embedded(page)["answers"]} == set(HOSTILE)


def test_the_page_needs_no_network(runs):
    page = document(runs["deaths"])
    assert "default-src 'none'" in page and not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|url\(", page)


def test_a_report_is_a_file(runs, tmp_path):
    for name, out in [*runs.items(), ("hostile", hostile(runs["reweighting"]))]:
        out.to_html(tmp_path / "run.html")
        assert (tmp_path / "run.html").read_text(encoding="utf-8") == document(out), name
    no_cycles = dataclasses.replace(runs["deaths"], steps=())
    assert embedded(document(no_cycles))["nodes"] == []


def test_a_notebook_shows_the_bands(out):
    """Each text that is high enough to be seen has a path, and no text is read as HTML."""
    shown = out._repr_html_()
    assert "<script" not in shown and "to_html" in shown
    assert 0 < shown.count('stroke-width=".5"') <= len(tree(out))
    evil = hostile(out)._repr_html_()
    assert "<script" not in evil and "<img" not in evil


# ---- in a browser


@pytest.fixture(scope="module")
def browser():
    """Headless Chromium, Debian's or any other on the PATH."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no Chromium on the PATH: apt-get install chromium")
    driver = pytest.importorskip("playwright.sync_api", reason="pages are driven by playwright: pip install playwright")
    with driver.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def show(browser, tmp_path):
    """Opens the report of a run; what the page complains about, or asks of the network, fails the test."""
    complaints, pages = [], []

    def open_report(out, scheme="light"):
        out.to_html(tmp_path / "run.html")
        page = browser.new_page(color_scheme=scheme, viewport={"width": 1200, "height": 900})
        pages.append(page)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: complaints.append(dialog.message))
        page.on("request", lambda request: complaints.extend([request.url] * (not request.url.endswith("run.html"))))
        page.goto((tmp_path / "run.html").as_uri())
        return page

    yield open_report
    for page in pages:
        page.close()
    assert not complaints


def rows(page):
    return page.locator("[role=treeitem]")


def selected(page):
    return page.locator("[role=treeitem][aria-selected=true]")


def test_it_renders(out, show):
    page = show(out)
    assert page.inner_text("h1") == out.asked.target
    assert page.locator("#answers .answer").count() == min(12, len(out.distribution()))
    assert rows(page).count() >= 1 and page.locator("#charts svg polyline").count() == 2
    assert out.alive or "particles died" in page.inner_text(".epitaph")
    assert page.inner_text("#trust").startswith("log Ẑ") and str(out.asked.seed) in page.inner_text("#run")


def test_a_run_without_cycles_renders(runs, show):
    page = show(dataclasses.replace(runs["reweighting"], steps=()))
    assert "no cycles" in page.inner_text("#charts") and page.locator("#answers .answer").count() > 0


def test_nodes_open_and_close_by_keyboard(runs, show):
    page = show(runs["always resampled"])
    page.focus("#kind")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.getAttribute('role')") == "treeitem"
    page.keyboard.press("Home")
    top = selected(page)
    assert top.get_attribute("aria-level") == "1" and top.get_attribute("aria-expanded") == "true"
    before = rows(page).count()
    page.keyboard.press("Enter")
    assert selected(page).get_attribute("aria-expanded") == "false" and rows(page).count() < before
    page.keyboard.press("Enter")
    assert rows(page).count() == before
    page.keyboard.press("ArrowRight")
    assert selected(page).get_attribute("aria-level") == "2"
    page.keyboard.press("ArrowLeft")
    assert selected(page).get_attribute("aria-level") == "1"
    page.keyboard.press("End")
    last = selected(page).get_attribute("id")
    page.keyboard.press("ArrowUp")
    assert selected(page).get_attribute("id") != last
    assert page.evaluate("document.activeElement.getAttribute('aria-selected')") == "true"


def test_zoom_and_back_by_keyboard(runs, show):
    page = show(runs["always resampled"])
    bands = page.locator("#charts .band")
    every = bands.count()
    selected(page).focus()
    page.keyboard.press("z")
    assert 0 < bands.count() < every and "All texts" in page.inner_text("#crumbs")
    page.keyboard.press("Escape")
    assert bands.count() == every and page.inner_text("#crumbs") == ""
    width = page.locator("#charts svg").bounding_box()["width"]
    page.click("#wider")
    assert page.locator("#charts svg").bounding_box()["width"] == pytest.approx(2 * width, rel=0.01)


def test_the_selected_text_is_shown_in_full(runs, show):
    out = runs["parts of characters"]
    page = show(out)
    for _ in range(rows(page).count()):
        selected(page).focus()
        page.keyboard.press("ArrowDown")
    page.locator("[role=treeitem]", has_text="answer").first.click()
    shown = page.locator("#reading .block").all_text_contents()
    assert "".join(shown) in out.texts


def test_the_filter_leaves_what_matches(runs, show):
    out = runs["reweighting"]
    page = show(out)
    nodes = tree(out)
    wanted = min((text for text in out.distribution() if len(text) > 3), key=len)
    page.keyboard.press("/")
    page.keyboard.type(wanted)
    shown = page.locator("#answers .answer .text").all_text_contents()
    assert shown and all(wanted in text for text in shown)
    leaves = [node for node in nodes if node.end != "branch"]
    matching = sum(wanted in "".join(piece for n in way(nodes, leaf) for piece in n.pieces) for leaf in leaves)
    assert 0 < matching < len(leaves)
    assert page.inner_text("#found") == f"{matching} of {len(leaves)} lineages"
    assert page.locator("mark").first.inner_text() == wanted
    page.keyboard.press("Escape")
    assert page.inner_text("#found") == f"{len(leaves)} lineages" and page.locator("mark").count() == 0
    page.keyboard.type("nothing has this")
    assert "No lineage" in page.inner_text("#tree") and "No answer" in page.inner_text("#answers")


def test_deaths_are_found_by_their_cause(runs, show):
    out = runs["deaths"]
    page = show(out)
    page.select_option("#kind", "died")
    died = page.locator(".end-died")
    assert died.count() == sum(node.end == "died" for node in tree(out))
    died.first.click()
    assert "no start" in page.inner_text("#reading .death") and page.locator(".cross").count() == died.count()
    page.select_option("#kind", "all")
    page.fill("#filter", "no start")
    assert page.locator(".end-died").count() > 0


def test_hostile_texts_are_only_texts(runs, show):
    out = hostile(runs["reweighting"])
    page = show(out)
    if page.locator(".more button").count():
        page.click(".more button")
    assert page.title() == f"{HOSTILE[0]} · smcdecode"
    shown = page.locator("#answers .answer .text").all_text_contents()
    assert HOSTILE[0] in shown and "a␀b␛[31m" in shown and "(the empty text)" in shown
    assert any("‹202E›" in text for text in shown) and HOSTILE[5] in shown
    assert page.locator("main img, main script").count() == 0


def test_light_and_dark(runs, show):
    grounds = {}
    for scheme in ("light", "dark"):
        page = show(runs["reweighting"], scheme)
        grounds[scheme] = page.evaluate(
            "getComputedStyle(document.body).backgroundColor + getComputedStyle(document.body).color"
        )
        assert len(page.screenshot(full_page=True)) > 20_000
    assert grounds["light"] != grounds["dark"]


def test_a_long_run_of_many_particles_is_drawn(show):
    endless = TableLM(random_table(5, V, floor=0.5), name="endless")
    out = run(endless**1.2, smc.SMC(particles=48), max_tokens=100)
    page = show(out)
    assert len(out.steps) >= 100 and page.locator("#charts .band").count() >= 100 and rows(page).count() > 3
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
