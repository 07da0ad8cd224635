"""Drafting beside the target, through real processes: the law is p for hits, misses and every backup, and the text is
that of the decoder that waits, token for token, wherever its law is the same."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from engines import lm
from models import tiny
from moody import CUT, SLOW, MoodyLM
from stats import assert_frequencies
from table import TableLM, random_table

import smcdecode as smc
from smcdecode.engine.model import Recipe
from smcdecode.engine.remote import drafter as drafter_module
from smcdecode.engine.remote import engine as engine_module
from smcdecode.engine.remote.channel import Broken, Channel
from smcdecode.engine.remote.messages import Answer
from smcdecode.infer.exact import enumerate_target
from smcdecode.sample import Call

V, EOS, CAP, RUNS = 6, 3, 4, 800
PROMPT = (1, 2, 0, 1, 2, 0)  # repeats itself, so that a lookup has something to say
p = TableLM(random_table(1, V, floor=0.3), eos=[EOS], name="p")
q = TableLM(random_table(7, V, floor=0.2), eos=[EOS], name="q")
exact = enumerate_target(p.log_p_next(PROMPT), lambda x: 0.0, vocab_size=V, eos=frozenset([EOS]), max_tokens=CAP)


@pytest.fixture(scope="module")
def beside():
    """One process for all tests of the table models; the last of them kills it."""
    with smc.remote(q, threads=1) as model:
        yield model


def texts(method, *, prompts=((0,), (1, 2), (4,), (5, 0)), max_tokens=24, seed=5, target=p):
    return smc.sample(target, list(prompts), method=method, max_tokens=max_tokens, seed=seed, progress=False)


def same(a, b):
    return [(x.tokens, x.log_w, x.log_z, x.log_p) for x in a] == [(x.tokens, x.log_w, x.log_z, x.log_p) for x in b]


# ---- the same text as the decoders that wait


@pytest.mark.parametrize(("block", "budget"), [(1, 1), (3, 6), (4, 24)])
def test_the_text_is_that_of_speculative_decoding(beside, block, budget):
    waiting = texts(smc.Speculative(q, block))
    ahead = texts(smc.Saguaro(beside, block, budget=budget))
    assert same(ahead, waiting)
    stats = ahead[0].stats
    assert stats.hits + stats.misses > 0 and (stats.hits > 0 or budget == 1)
    assert (stats.drafted, stats.accepted) == (waiting[0].stats.drafted, waiting[0].stats.accepted)


@pytest.mark.parametrize("options", [{"top_k": 3}, {"top_p": 0.7}, {"temperature": 0.0}])
def test_laws_that_travel_as_a_few_numbers_arrive_whole(beside, options):
    assert same(texts(smc.Saguaro(beside, 3, **options)), texts(smc.Speculative(q, 3, **options)))


@pytest.mark.parametrize(
    ("alpha", "strictness", "bridge"), [(1, 0.0, 0), (2, 0.0, 3), (1.5, 0.3, 0), (2, 1.0, 2), (2, "auto", 0)]
)
def test_overlapped_smc_is_smc_token_for_token(beside, alpha, strictness, bridge):
    def run(model, overlap):
        draft = smc.Draft(model, 3, strictness=strictness)
        method = smc.SMC(draft, 4, threshold=0.9, bridge=bridge, overlap=overlap)
        return texts(method, target=p**alpha * smc.potential(lambda x: 0.3 * len(x), on="tokens", name="long"))

    waiting, ahead = run(q, False), run(beside, True)
    assert same(ahead, waiting)
    assert any(step.resampled for out in ahead for step in out.steps)
    assert ahead[0].stats.hits > 0 and ahead[0].stats.misses > 0


def test_likely_ancestors_are_prepared_for(beside, monkeypatch):
    """Replaced particles may find their blocks ready, and they are the blocks that the waiting draft writes."""

    def run():
        method = smc.SMC(smc.Draft(beside, 1, strictness=0.0), 8, threshold=0.6, overlap=True)
        return texts(method, prompts=[(i % V,) for i in range(48)])

    prepared = run()
    monkeypatch.setattr(engine_module, "OVERLAP_ANCESTORS", 0)
    alone = run()
    assert same(prepared, alone)
    assert prepared[0].stats.hits > alone[0].stats.hits


# ---- the law


METHODS = [("redraft", 1.0), ("redraft", 0.5), ("redraft", 0.1), ("lookup", 1.0), ("lookup", 0.1), ("uniform", 0.5)]


def frequencies(method, times=RUNS):
    runs = texts(method, prompts=[PROMPT] * times, max_tokens=CAP, seed=3)
    found = Counter(run.tokens[0] for run in runs)
    assert set(found) <= set(exact.sequences)
    return [found[x] for x in exact.sequences], runs[0].stats


@pytest.mark.parametrize(("backup", "share"), METHODS)
def test_the_joint_law_is_the_targets(beside, backup, share):
    counts, stats = frequencies(smc.Saguaro(beside, 3, budget=4, backup=backup, share=share))
    assert_frequencies(counts, exact.probabilities)
    assert min(stats.hits, stats.misses) > 100


def test_choices_by_measurement_keep_the_law(beside):
    counts, _ = frequencies(smc.Saguaro(beside, 3, budget=4, backup="auto", share="auto"))
    assert_frequencies(counts, exact.probabilities)


def test_a_share_that_is_not_declared_is_found_out(beside, monkeypatch):
    """The negative control: verification is told the draft's own law, not the one with the share in it."""

    def undeclared(words, payload, block, size):
        answer = Answer.of(words, payload, block, size)
        lifted = answer.laws.scatter_add(-1, answer.top, torch.full(answer.top.shape, -np.log(0.1)).float())
        object.__setattr__(answer, "laws", lifted.log_softmax(-1))
        return answer

    class Undeclared(Answer):
        of = staticmethod(undeclared)

    monkeypatch.setattr(drafter_module, "Answer", Undeclared)
    counts, _ = frequencies(smc.Saguaro(beside, 3, budget=4, share=0.1), times=3 * RUNS)
    with pytest.raises(AssertionError, match="diverge"):
        assert_frequencies(counts, exact.probabilities)


# ---- hits


def hit_rate(beside, **options):
    method = smc.Saguaro(beside, 3, **options)
    return texts(method, prompts=[(i % V,) for i in range(16)], max_tokens=24, seed=1)[0].stats.hit_rate


def test_hits_rise_with_the_budget_and_as_the_share_falls(beside):
    few, some, more = (hit_rate(beside, budget=b) for b in (2, 5, 12))
    assert few < some < more
    assert hit_rate(beside, budget=5, share=0.1) > some
    assert hit_rate(beside, budget=4 * V) > 0.99  # every outcome is prepared


# ---- processes for one call, and refusals


def test_a_draft_that_is_here_gets_a_process_for_the_call(beside, monkeypatch):
    started, ended = [], []
    monkeypatch.setattr(engine_module, "remote", lambda source, **options: started.append((source, options)) or beside)
    monkeypatch.setattr(beside, "close", lambda: ended.append(True))
    assert same(texts(smc.Saguaro(q, 2)), texts(smc.Speculative(q, 2)))
    assert (started, ended) == ([(q, {})], [True])
    _, loaded = lm("llama", vocab=V, seed=7)
    with pytest.raises(smc.InvalidOption, match=r"made of an object.*smc\.remote"):
        texts(smc.Saguaro(loaded), target=loaded)
    monkeypatch.setattr(loaded, "recipe", Recipe("folder", {"name": "l"}))
    assert engine_module.start_beside(loaded) is beside and started[-1] == ("folder", {"name": "l"})


def test_what_cannot_be_honoured_is_refused(beside):
    with pytest.raises(smc.InvalidOption, match="process of its own"):
        smc.SMC(smc.Draft(beside))
    with pytest.raises(smc.InvalidOption, match="process of its own"):
        texts(smc.Speculative(beside))
    with pytest.raises(smc.InvalidOption, match="overlap=True needs a draft"):
        smc.SMC(smc.Local(), overlap=True)
    with pytest.raises(smc.UnsupportedTarget, match="masks tokens"):
        texts(smc.SMC(smc.Draft(beside), overlap=True), target=p * smc.Regex("[a-c]*"))
    with pytest.raises(smc.UnsupportedTarget, match="verifies tokens"):
        texts(smc.Saguaro(beside), target=p**2)
    with pytest.raises(smc.InvalidOption, match="how long"):
        smc.SMC(smc.Draft(beside, "auto"), overlap=True)
    for options in ({"budget": 0}, {"backup": "none"}, {"share": 0.0}, {"share": "low"}):
        with pytest.raises(smc.InvalidOption, match=next(iter(options))):
            smc.Saguaro(beside, **options)
    for options in ({"patience": 0}, {"threads": 0}):
        with pytest.raises(smc.InvalidOption, match=next(iter(options))):
            smc.remote(q, **options)
    with pytest.raises(smc.InvalidOption, match="cannot be sent"):
        smc.remote(lambda: None)


# ---- a real model's pages


@pytest.fixture(scope="module")
def transformer():
    """A tiny transformer as a draft, sent as a loaded model; and the same here."""
    module = tiny("llama", vocab=12, seed=7)
    noise = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data += 0.03 * torch.randn(parameter.shape, generator=noise)
    with smc.remote(module, threads=1, name="llama 8") as model:
        yield model, smc.load(module)


def test_greedy_writes_what_autoregression_writes(transformer):
    _, target = lm("llama", vocab=12, seed=7, spread=0.3, ends=False)
    greedy, prompts = target.at(temperature=0), [(i, 3, 4) for i in range(2, 11)]
    expected = texts(smc.Autoregressive(), prompts=prompts, max_tokens=230, target=greedy)
    found = texts(smc.Saguaro(transformer[0], 4, budget=5), prompts=prompts, max_tokens=230, target=greedy)
    assert [run.tokens for run in found] == [run.tokens for run in expected]
    assert sum(len(run.tokens[0]) for run in found) > 2000
    assert found[0].stats.hit_rate > 0.3


def test_branches_share_pages_and_read_what_the_waiting_draft_reads(transformer):
    _, target = lm("gemma3", vocab=12, seed=7, spread=0.3)
    beside, draft = transformer
    options = {"prompts": [(2, 3, 4), (5,) * 40, (7, 8)], "max_tokens": 30, "target": target}
    waiting = texts(smc.Speculative(draft, 3), **options)
    ahead = texts(smc.Saguaro(beside, 3, budget=6), **options)
    assert [run.tokens for run in ahead] == [run.tokens for run in waiting]
    smc_options = {"particles": 4, "threshold": 1.0}
    a = texts(smc.SMC(smc.Draft(draft, 3, strictness=0.3), **smc_options), **options)
    b = texts(smc.SMC(smc.Draft(beside, 3, strictness=0.3), **smc_options, overlap=True), **options)
    assert [run.tokens for run in a] == [run.tokens for run in b]


# ---- a draft that is slow, silent, dead, or cut off


def test_a_draft_that_stops_answering_is_given_up(transformer):
    _, target = lm("llama", vocab=12, seed=7, spread=0.3)
    beside, _ = transformer
    beside.patience = 1.0
    method = smc.Saguaro(beside, 3)
    with pytest.warns(RuntimeWarning, match="decoding goes on"):
        os.kill(beside.pid, signal.SIGSTOP)
        runs = texts(method, prompts=[(2, 3, 4)] * 3, target=target)
    assert all(len(run.tokens[0]) > 0 for run in runs) and not beside.alive


def test_slow_and_cut_off():
    table = random_table(7, V, floor=0.2)
    with smc.remote(MoodyLM(table, [EOS], quick=0.0005), threads=1) as moody:
        slow = texts(smc.Saguaro(moody, 2, budget=4), prompts=[(SLOW,)], max_tokens=4)
        assert same(slow, texts(smc.Speculative(q, 2), prompts=[(SLOW,)], max_tokens=4))
        with pytest.warns(RuntimeWarning, match="cut short"):
            cut = texts(smc.Saguaro(moody, 2, budget=4), prompts=[(CUT,)] * 2, max_tokens=8)
        assert all(run.tokens[0] for run in cut) and not moody.alive


def test_a_draft_killed_midway_leaves_the_law_and_nothing_else(beside):
    before = set(Path("/dev/shm").iterdir())
    calls = iter(range(10**9))
    inner = beside.receive

    def receive():
        if next(calls) == 1:
            os.kill(beside.pid, signal.SIGKILL)
        return inner()

    beside.receive = receive
    with pytest.warns(RuntimeWarning, match="goes on without it") as said:
        counts, stats = frequencies(smc.Saguaro(beside, 1, budget=4))
    assert len(said) == 1 and "is gone" in str(said[0].message) and stats.draft_lost
    assert_frequencies(counts, exact.probabilities)
    assert not beside.alive
    with pytest.raises(ProcessLookupError):
        os.kill(beside.pid, 0)
    assert set(Path("/dev/shm").iterdir()) <= before
    with pytest.raises(smc.DraftProcessError, match="make another"):
        texts(smc.Saguaro(beside))


PARENT = """
import smcdecode as smc
from table import TableLM, random_table

p, q = (TableLM(random_table(seed, 6, floor=0.3), name="t") for seed in (1, 7))
with smc.remote(q, threads=1) as beside:
    print(beside.pid, flush=True)
    while True:
        smc.sample(p, (0,), method=smc.Saguaro(beside, 3, budget=6), max_tokens=200, seed=0, progress=False)
"""


def test_a_parent_killed_midway_leaves_no_orphan():
    before = set(Path("/dev/shm").iterdir())
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, env=environment) as parent:
        draft = Path("/proc") / parent.stdout.readline().decode().strip()
        assert _runs(draft)
        time.sleep(0.2)
        parent.kill()
    deadline = time.monotonic() + 60
    while _runs(draft):
        assert time.monotonic() < deadline, "the draft process outlives its parent"
        time.sleep(0.05)
    assert set(Path("/dev/shm").iterdir()) <= before


def _runs(process):
    """Whether a process is there, and not merely waiting to be counted out."""
    try:
        return process.joinpath("stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


# ---- channels


@pytest.fixture
def ends():
    """Both ends of a channel, in one process."""
    here, there = map(Channel, socket.socketpair())
    yield here, there
    here.close(), there.close()


def test_messages_arrive_in_order(ends):
    here, there = ends
    assert there.coming() is None
    here.send(np.array([1, 2, 3]), torch.arange(4, dtype=torch.uint8))
    here.send(np.array([4]))
    assert there.coming().words.tolist() == [1, 2, 3]
    words, payload = there.receive(5)
    assert (words.tolist(), payload.tolist()) == ([1, 2, 3], [0, 1, 2, 3])
    words, payload = there.receive(5)
    assert (words.tolist(), payload) == ([4], None)


def test_nothing_is_trusted_behind_a_silence(ends):
    here, there = ends
    with pytest.raises(Broken, match="Timed out"):
        here.receive(0.1)
    with pytest.raises(Broken):
        there.send(np.array([1]))
    with pytest.raises(Broken):
        here.receive(5)


@pytest.mark.parametrize("half", [bytes(3), bytes(24)], ids=["it ends early", "it is no message"])
def test_half_a_message_is_noticed(ends, half):
    here, there = ends
    there._end.send(half)
    there._end.shutdown(socket.SHUT_WR)
    with pytest.raises(Broken, match="cut short"):
        here.receive(5)


def test_long_messages_that_cross_both_arrive(ends):
    long = torch.arange(2**22).to(torch.uint8)
    heard = []

    def exchange(end):
        end.send(np.array([1]), long, seconds=20)
        heard.append(end.receive(20).payload.equal(long))

    threads = [threading.Thread(target=exchange, args=(end,)) for end in ends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert heard == [True, True]


# ---- requests that are ended while the draft writes for them


def call(beside, prompts=((0,), (1, 2), (4,))):
    options = {"max_tokens": 40, "stop": (), "seed": 5, "memory": 0.5, "page_size": 1}
    return Call.of(p, list(prompts), method=smc.Saguaro(beside, 3, budget=6), **options)


def test_a_request_that_is_ended_midway_leaves_the_others_their_texts():
    with smc.remote(q, threads=1) as beside:
        prompts = ((0,), (1, 2), (4,))
        expected = texts(smc.Speculative(q, 3), prompts=prompts, max_tokens=40)
        running, found = call(beside, prompts), {}
        for cycle, outcomes in enumerate(running.scheduler.run()):
            found |= {outcome.request.index: tuple(outcome.tokens[0]) for outcome in outcomes}
            if cycle == 1:
                assert running.scheduler.cancel(1)
        assert found == {0: expected[0].tokens[0], 2: expected[2].tokens[0]}


def test_a_run_that_is_given_up_midway_leaves_the_draft_to_the_next():
    with smc.remote(q, threads=1) as beside:
        given_up = call(beside).scheduler.run()
        next(given_up), next(given_up), given_up.close()
        assert same(texts(smc.Saguaro(beside, 3, budget=6)), texts(smc.Speculative(q, 3)))
