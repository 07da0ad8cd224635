"""A model split over two processes, by torchrun and gloo: the answers of one process, on both; and how it ends."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import ranks_job
import torch
from filelock import FileLock
from models import tiny
from test_load import tokenizer

import smcdecode as smc
from smcdecode.engine.ranks import Ranks
from smcdecode.engine.remote import process
from smcdecode.engine.shards import check_heads

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="ranks talk by gloo")

HERE = Path(__file__).parent


def prepare(folder):
    """The checkpoints that the ranks load."""
    for i, family in enumerate([*ranks_job.DRAFTS, "gpt2"]):
        tiny(family, seed=i, spread=0.2).save_pretrained(folder / family)
    for draft in ("draft", "bare"):
        tiny("llama", seed=9, spread=0.2).save_pretrained(folder / draft)
    for family in ("llama", "draft"):
        tokenizer(16).save_pretrained(folder / family)
    (folder / "in.jsonl").write_text("\n".join(json.dumps({"id": str(i), "prompt": f"w{i}"}) for i in (2, 3, 4)))
    heads = tiny("llama").config
    heads.num_key_value_heads = 1
    heads.save_pretrained(folder / "heads")


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Checkpoints, what both ranks wrote down of them, by part and rank, and torchrun's exit code.

    Run once, whichever of pytest's workers comes first.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "ranks"
    with FileLock(f"{folder}.lock"):
        if not (folder / "code").exists():
            folder.mkdir()
            prepare(folder)
            done = launched(folder)
            assert (folder / "loss0.json").exists(), done.stderr
            (folder / "code").write_text(str(done.returncode))
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*[01].json")}
    return folder, found, int((folder / "code").read_text())


def launched(folder):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--monitor-interval", "5"]
    return subprocess.run(
        [sys.executable, *launcher, str(HERE / "ranks_job.py"), str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(HERE.parent), *sys.path])},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def both(job, part):
    _, found, _ = job
    return found[f"{part}0"], found[f"{part}1"]


@pytest.fixture(scope="module")
def whole(job):
    """The same models in this process."""
    folder, _, _ = job
    return {f: tuple(ranks_job.load(folder, name) for name in (f, q)) for f, q in ranks_job.DRAFTS.items()}


@pytest.mark.parametrize("family", ranks_job.DRAFTS)
def test_two_processes_give_the_answers_of_one(job, whole, family):
    first, second = (found[family] for found in both(job, "equality"))
    assert first["runs"] == second["runs"], "the ranks have the same answers, weights and statistics to the last bit"
    p, q = whole[family]
    slip = max(abs(a - b) for a, b in zip(first["log_p"], ranks_job.log_p(p), strict=True))  # of one log-probability
    assert 0 < slip < 1e-4, "the sums are added up in another order"
    allowed = 2 * ranks_job.ALPHA * ranks_job.TOKENS * slip  # a token's p^α and the sum that it is divided by
    for name, expected in ranks_job.runs(p, q):
        for one, two in zip(expected, first["runs"][name], strict=True):
            one, two = smc.Posterior.from_json(one), smc.Posterior.from_json(two)
            assert one.tokens == two.tokens, name
            assert one.log_z == pytest.approx(two.log_z, abs=allowed)
            assert one.log_w == pytest.approx(two.log_w, abs=allowed)


def test_each_rank_holds_its_part(job, whole):
    for found in both(job, "equality"):
        for family, held in found.items():
            p, _ = whole[family]
            assert 2 * held["here"] < 1.1 * held["whole"]  # norms are everywhere
            assert held["whole"] == p.parameters
            assert [2 * heads for heads in held["heads"]] == [layer.kv_heads for layer in p.layout.layers]
            assert held["stores"] == 0, "stores of calls that are over are let go"
    assert "rank 1 of 2" in both(job, "equality")[1]["llama"]["repr"]


def test_drafts_may_be_split_too(job, whole):
    p, q = whole["llama"]
    first, second = both(job, "drafts")
    assert first == second
    for name, draft in (("split", q), ("skip", smc.LayerSkip(p, layers=1))):
        assert first[name] == json.loads(json.dumps(ranks_job.drafted(p, draft)))


def test_a_draft_beside_the_ranks_is_started_once(monkeypatch):
    """Rank 0 starts a process, the others take its word for what it holds."""
    started, told = [], []

    def start(*given):
        started.append(given)
        return line, {"name": "q", "vocabulary": p.vocabulary, "context": None, "layout": p.layout}

    p, (here, there) = smc.load(tiny("llama")), socket.socketpair()
    there.close()
    line = process._Line(subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1), process.Channel(here))
    monkeypatch.setattr(process, "_start", start)
    monkeypatch.setattr(
        process, "joined", lambda: mock.Mock(together=lambda work, terms: told.append(work()) or told[0])
    )
    with smc.remote("q", parallel=True) as first:
        monkeypatch.setattr(process, "joined", lambda: mock.Mock(together=lambda work, terms: told[0]))
        other = smc.remote("q", parallel=True)
        assert len(started) == 1 and first.alive and not other.alive
        assert "process of rank 0" in repr(other) and smc.Saguaro(other, block=3).as_smc() is not None
        other.close()
        assert first.alive
    assert not first.alive and line.process.poll() is not None


def test_streams_chains_and_seeds_are_the_same_everywhere(job, whole):
    first, second = both(job, "other_calls")
    assert first == second
    p, q = whole["llama"]
    method = smc.SMC(smc.Draft(q, block=2), particles=3)
    pieces = smc.stream(p, [2, 3], on="tokens", method=method, max_tokens=8, seed=3)
    assert first["pieces"] == [list(piece) for piece in pieces]
    assert first["nested"].startswith("InvalidOption: a stream of a model on several ranks is open")


def test_ranks_that_ask_for_different_things_are_refused_and_go_on(job, whole):
    first, second = both(job, "refusals")
    assert "seed is 0 on rank 0 and 1 on rank 1" in first["seeds"]
    assert "seed is 1 on rank 1 and 0 on rank 0" in second["seeds"]
    assert "prompts is" in first["prompts"] and "target is 'llama' on rank 0 and 'llama ** 2'" in first["targets"]
    assert all(first[name].startswith("InvalidOption") for name in ("seeds", "prompts", "targets"))
    p, _ = whole["llama"]
    expected = smc.sample(p, [2], seed=1, max_tokens=4, progress=False).tokens
    assert first["after"] == second["after"] == [list(tokens) for tokens in expected]


def test_errors_of_a_run_are_raised_on_every_rank_and_potentials_asked_on_one(job):
    first, second = both(job, "refusals")
    assert first["potential"] == second["potential"]
    assert first["potential"].startswith("PotentialError: potential 'touchy' raised ValueError: enough")
    assert (first["heard"], second["heard"]) == (4, 0)
    assert first["long"] and second["long"], "messages of any length arrive"
    assert first["empty"].startswith("PromptError") and second["empty"].startswith("PromptError")


def test_what_cannot_be_split_is_refused_with_the_reason(job):
    for found in both(job, "refusals"):
        assert found["heads"].startswith("UnsupportedModel: heads has 1 heads of keys")
        assert found["plan"].startswith("UnsupportedModel: transformers knows no way to split gpt2")
        assert found["device"].startswith("InvalidOption") and "leave device= out" in found["device"]
        assert found["twice"].startswith("InvalidOption: the model is split over processes already")
        assert found["outside"].startswith("InvalidOption: llama is split over 2 ranks")


def test_numbers_of_ranks_that_would_do_are_named():
    config = tiny("llama").config
    config.num_attention_heads = config.num_key_value_heads = 12
    check_heads(config, 4, "twelve")
    with pytest.raises(smc.UnsupportedModel, match=r"12 attention heads, .* start 1, 2, 3, 4, 6 or 12"):
        check_heads(config, 8, "twelve")


def test_without_torchrun_there_is_nothing_to_split_over(job):
    folder, _, _ = job
    with pytest.raises(smc.InvalidOption, match="torchrun --nproc-per-node"):
        smc.load(folder / "llama", parallel=True)


def test_the_command_line_speaks_on_rank_0(job, whole):
    first, second = both(job, "command_line")
    assert (first["code"], second["code"], first["bad"], second["bad"]) == (0, 0, 2, 2)
    p, q = whole["llama"]
    expected = smc.sample(p, "w2", method=smc.SMC(smc.Draft(q, 4), 3), max_tokens=6, seed=1, progress=False)
    assert first["out"] == 2 * (expected.text + "\n") and "ESS" in first["err"]
    assert "more than the 256 positions" in first["err"]
    assert second["out"] == "" and "smcdecode:" not in second["err"] and "ESS" not in second["err"]


def test_a_job_of_many_prompts_runs_on_both_ranks_and_is_written_by_one(job, whole):
    folder, _, _ = job
    first, second = both(job, "batching")
    assert first["codes"] == second["codes"] == [0, 2]
    assert "3 answered" in first["err"] and "--ray gives each engine a whole one" in first["err"]
    assert "answered" not in second["err"]
    p, q = whole["llama"]
    texts = [path.read_text(encoding="utf-8") for path in (folder / "answers").glob("*.jsonl")]
    rows = [json.loads(row) for text in texts for row in text.splitlines()]
    assert {row["id"] for row in rows} == {"2", "3", "4"}
    method = smc.SMC(smc.Draft(q, 2), 2)
    for row in rows:
        posterior = smc.sample(p, f"w{row['id']}", method=method, max_tokens=6, seed=row["seed"], progress=False)
        assert row["texts"] == posterior.texts


def test_a_pass_that_fails_leaves_the_ranks_apart():
    ranks = object.__new__(Ranks)
    ranks.rank, ranks.wire = 0, mock.Mock(broken=None)
    with pytest.raises(MemoryError), ranks.passing():
        raise MemoryError
    assert "rank 0 failed in a pass" in ranks.wire.broken


def test_a_server_over_two_ranks_answers_and_stops(job, whole):
    first, second = both(job, "serving")
    assert first["code"] == second["code"] == 0
    p, q = whole["llama"]
    expected = smc.sample(p, "w2", method=smc.SMC(smc.Draft(q, 2), 2), max_tokens=6, seed=1, progress=False)
    assert first["answer"]["text"] == first["scored"]["text"] == expected.text
    assert first["refused"] == 400 and first["scored"]["logprobs"]["token_logprobs"]


def test_a_rank_that_is_killed_ends_the_others(job):
    folder, found, code = job
    loss = found["loss0"]
    assert loss["during"].startswith("RankError") and "gone" in loss["during"] and loss["seconds"] < 30
    assert loss["after"].startswith("RankError") and "start all again" in loss["after"]
    assert "loss1" not in found and code != 0
    assert "RankError" in found["refusals0"]["late"] and "0.3 s" in found["refusals0"]["late"]
    left = [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(folder).encode() in _read(path)]
    assert not left


def _read(path):
    try:
        return path.read_bytes()
    except OSError:  # it ended meanwhile
        return b""
