"""Jobs from files to files on one engine: equal to single calls, resumed after anything, faults named and alone."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from multiprocessing.forkserver import _forkserver
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from job_potentials import calm, moody
from jobs import answers, checkpoint, jsonl, prompts

import smcdecode as smc
from smcdecode import cli
from smcdecode.engine.group import Group
from smcdecode.integrations.batch import shards as shards_module
from smcdecode.integrations.batch.answering import Parts, Room, here
from smcdecode.integrations.batch.columns import COLUMNS
from smcdecode.integrations.batch.limit import Overdue, limit
from smcdecode.integrations.batch.rows import rows_of, seed_of
from smcdecode.integrations.batch.shards import Shards
from smcdecode.integrations.server.limits import Limits
from smcdecode.integrations.server.sandbox import Sandbox

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("p"))


@pytest.fixture(scope="module")
def p(folder):
    return smc.load(folder)


def command(folder, source, out, *more):
    return [
        "batch", "--target", str(folder), "--input", str(source), "--output", str(out), "--particles", "3",
        "--max-tokens", "6", "--seed", "5", *more,
    ]  # fmt: skip


def run(*arguments):
    return cli.main(command(*arguments))


def rows(given, **defaults):
    return rows_of(((f"row {i}", row) for i, row in enumerate(given)), seed=5, defaults={"max_tokens": 6, **defaults})


def served(p, given, *potentials, room=None, **defaults):
    room = room or Room(max_tokens=12, lanes=4, memory=1 << 26, potential_seconds=0.4)
    build = lambda: Parts(p, smc.SMC(particles=3), potentials)  # noqa: E731
    return {answer["id"]: answer for answer in here(build, room, rows(given, **defaults))}


def test_answers_are_those_of_single_calls_and_come_once(folder, p, tmp_path, capsys):
    given = prompts(10)
    given[3]["seed"] = 77
    given[4] |= {"max_tokens": 2}
    given[5] = {"id": "p5", "messages": [{"role": "user", "content": "ab"}], "smc": {"particles": 2, "alpha": 2.0}}
    assert (
        run(
            folder,
            jsonl(tmp_path / "in.jsonl", given),
            tmp_path / "out",
            "--potential",
            f"{HERE}/job_potentials.py:calm",
        )
        == 0
    )
    assert "10 answered" in capsys.readouterr().err
    found = answers(tmp_path / "out")
    assert set(found) == {row["id"] for row in given}
    for row in given:
        answer, smcs = found[row["id"]], row.get("smc", {})
        expected = smc.sample(
            p ** smcs.get("alpha", 1.0) * calm, row.get("prompt") or row["messages"],
            method=smc.SMC(particles=smcs.get("particles", 3)), max_tokens=row.get("max_tokens", 6),
            seed=row.get("seed", seed_of(5, row["id"])),
        )  # fmt: skip
        assert answer["texts"] == expected.texts and answer["weights"] == expected.weights.tolist()
        assert answer["text"] == expected.text and answer["log_z"] == expected.log_z and answer["error"] is None
        assert set(answer) == set(COLUMNS)


def test_neither_order_nor_company_matters(p):
    given = prompts(9)
    together, apart = served(p, given), served(p, given[:2]) | served(p, given[:1:-1])
    assert together == apart
    assert len({answer["seed"] for answer in together.values()}) == 9
    other = served(p, [{**row, "id": row["id"] + "'"} for row in given])
    assert [a["seed"] for a in other.values()] != [a["seed"] for a in together.values()]


def test_parquet_in_and_out_says_the_same(folder, tmp_path):
    given = prompts(7)
    pq.write_table(pa.Table.from_pylist(given), tmp_path / "in.parquet")
    assert run(folder, jsonl(tmp_path / "in.jsonl", given), tmp_path / "lines") == 0
    assert run(folder, tmp_path / "in.parquet", tmp_path / "columns", "--format", "parquet") == 0
    table = pq.read_table(tmp_path / "columns" / "part-00000.parquet")
    assert {row["id"]: row for row in table.to_pylist()} == answers(tmp_path / "lines")
    assert not list((tmp_path / "columns").glob("*.jsonl"))


def test_a_row_says_everything_that_a_request_can(p, tmp_path):
    whole = {"smc": {"regex": "[abc]+"}, "stop": ["cc"]}
    given = [
        {"id": "a", "prompt": "ab", **whole},
        {"id": "b", "prompt": [2, 3], "max_tokens": 1, "smc": None},
        {"id": "c", "body": json.dumps({"prompt": "ab", **whole}), "prompt": None, "seed": seed_of(5, "a")},
        {"id": "d", "prompt": "ab", "smc": {"regex": "[("}},
        {"id": "e", "prompt": "ab" * 200},
        {"id": "f", "prompt": "", "temperature": 0.5},
    ]
    found = served(p, given)
    assert set(found["a"]["texts"][0]) <= set("abc") and found["a"]["texts"] == found["c"]["texts"]
    assert found["b"]["completion_tokens"] == 1
    assert [name for name, row in found.items() if row["error"]] == ["d", "e", "f"]
    assert "[(" in found["d"]["error"] and "positions" in found["e"]["error"] and "empty" in found["f"]["error"]


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ('{"prompt": "a"}\n{"prompt"', "in.jsonl:2 is no JSON"),
        ('{"prompt": "a", "promt": "b"}', "in.jsonl:1: promt: Extra inputs"),
        ('{"id": "x", "prompt": "a"}\n{"id": "x", "prompt": "b"}', "in.jsonl:2: another row has the id 'x'"),
        ('{"prompt": "a", "n": 2}', "a row cannot say 'n'"),
        ('{"prompt": ["a", "b"]}', "a row has one prompt"),
        ('{"prompt": "a", "messages": []}', "either a prompt or messages"),
        ('{"id": 1.5, "prompt": "a"}', "a row's id is a string"),
        ('{"prompt": "a", "body": "[]"}', "JSON text of an object"),
        ('{"prompt": "a", "temperature": -1}', "temperature"),
        ("[1]", "in.jsonl:1 is no JSON object"),
        ("", "no rows"),
    ],
)
def test_input_that_cannot_be_read_is_refused_before_anything_runs(folder, tmp_path, capsys, lines, reason):
    (tmp_path / "in.jsonl").write_text(lines)
    assert run(folder, tmp_path / "in.jsonl", tmp_path / "out") == cli.FAILED
    assert reason in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_files_of_other_kinds_and_damaged_ones_are_named(folder, tmp_path, capsys):
    (tmp_path / "in.parquet").write_bytes(b"PAR1 and then nothing")
    for name, reason in (("in.parquet", "no Parquet file"), ("in.csv", ".parquet files"), ("no.jsonl", "No such file")):
        assert run(folder, tmp_path / name, tmp_path / "out") == cli.FAILED
        err = capsys.readouterr().err
        assert name in err and reason in err


def test_potentials_that_fail_end_their_own_prompts_only(p):
    """One raises, one computes for ever, one sleeps for ever; nobody else's answer is another for it."""
    given = prompts(8) + [{"id": name, "prompt": name} for name in ("ba", "ca", "da")]
    start = time.monotonic()
    found = served(p, given, moody)
    assert time.monotonic() - start < 30
    assert "potential 'moody' raised RuntimeError: a bad day; it was given" in found["ba"]["error"]
    assert all("'moody' did not return within 0.4 s" in found[name]["error"] for name in ("ca", "da"))
    assert all(found[name].get("text") is None for name in ("ba", "ca", "da"))
    well = served(p, given[:8], calm)
    assert {name: found[name] for name in well} == well


def test_a_potential_with_masks_is_watched_too(p):
    given = prompts(4)
    plain = {row["id"]: smc.sample(p * smc.Regex("[abc]+"), row["prompt"], method=smc.SMC(particles=3), max_tokens=6,
                                   seed=seed_of(5, row["id"])) for row in given}  # fmt: skip
    found = served(p, given, smc.Regex("[abc]+"))
    assert {name: answer["texts"] for name, answer in found.items()} == {n: out.texts for n, out in plain.items()}
    broken = smc.Regex("[abc]+")
    broken.mask = lambda states: 1 / 0
    assert all("'mask'" in a["error"] or "ZeroDivisionError" in a["error"] for a in served(p, given, broken).values())


def test_code_that_hears_no_signal_ends_with_its_process():
    """And leaves the thread that it hung in on stderr."""
    code = """
import importlib.util, signal, sys, time
spec = importlib.util.spec_from_file_location("limit", sys.argv[1])
limit = importlib.util.module_from_spec(spec)
spec.loader.exec_module(limit)
limit.GRACE = 0.2
def deaf():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    time.sleep(1e6)
with limit.limit(0.1):
    deaf()
"""
    place = str(Path(smc.__file__).parent / "integrations" / "batch" / "limit.py")
    ended = subprocess.run([sys.executable, "-c", code, place], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and "Timeout" in ended.stderr and "in deaf" in ended.stderr


def test_a_limit_leaves_other_alarms_as_they_were():
    rung = []
    before = signal.signal(signal.SIGALRM, lambda *_: rung.append(1))
    old = signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(Overdue), limit(0.05):
            while True:
                pass
        assert signal.getitimer(signal.ITIMER_REAL)[0] <= 0.25
        time.sleep(0.35)
        assert rung == [1]
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *old)


def test_prompts_that_do_not_fit_are_named_and_others_go_on(p):
    given = prompts(4)
    given[1] |= {"smc": {"particles": 10_000}}
    found = served(p, given)
    assert [name for name, answer in found.items() if answer["error"]] == ["p1"]
    assert "pages" in found["p1"]["error"]


def test_what_the_engine_fails_at_is_found_out_one_by_one(p, monkeypatch):
    """Memory that runs out while prompts run together: each runs by itself, and one that is too much is named."""
    given, cycle = prompts(8), Group.cycle

    def tight(group):
        at = {request.prompt.tokens for request in group.requests}
        if len(at) > 2 or p_tokens("bf") in at:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return cycle(group)

    def p_tokens(text):
        return tuple(p.tokenizer(text)["input_ids"])

    well = served(p, given)
    monkeypatch.setattr(Group, "cycle", tight)
    found = served(p, given)
    assert found.pop("p1") == {"id": "p1", "error": "OutOfMemoryError: CUDA out of memory"}
    del well["p1"]
    assert found == well


def test_an_engine_that_is_broken_is_not_blamed_on_prompts(p, monkeypatch):
    def broken(group):
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(Group, "cycle", broken)
    with pytest.raises(RuntimeError, match="illegal") as caught:
        served(p, prompts(3))
    assert caught.value.__notes__ == ["at the prompt 'p0'"]


def test_a_driver_killed_is_resumed_by_the_same_command(folder, tmp_path, capsys):
    """Killed by signal 9 after some answers: they stay, the rest is run, and all is as if nothing had happened."""
    source, out = jsonl(tmp_path / "in.jsonl", prompts(16)), tmp_path / "out"
    slow = command(folder, source, out, "--lanes", "2", "--potential", f"{HERE}/job_potentials.py:slow")
    driver = subprocess.Popen([sys.executable, "-m", "smcdecode", *slow], stderr=subprocess.DEVNULL)
    part = out / "part-00000.jsonl"
    wait(lambda: part.exists() and part.read_bytes().count(b"\n") >= 3)
    driver.kill()
    driver.wait()
    kept = part.read_bytes()
    assert 3 <= kept.count(b"\n") < 16
    assert cli.main(slow) == 0
    assert "answered before" in capsys.readouterr().err
    assert part.read_bytes() == kept[: kept.rindex(b"\n") + 1]
    calm = f"{HERE}/job_potentials.py:calm"  # the same numbers, sooner
    assert cli.main(command(folder, source, tmp_path / "whole", "--potential", calm)) == 0
    assert answers(out) == answers(tmp_path / "whole")
    assert cli.main(slow) == 0  # nothing is left to do, so no model is loaded


def wait(condition, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_full_disk_stops_the_job_and_loses_nothing(folder, tmp_path, capsys):
    source, out = jsonl(tmp_path / "in.jsonl", prompts(12)), tmp_path / "out"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2500, hard))
    try:
        assert run(folder, source, out) == cli.FAILED
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    err = capsys.readouterr().err
    assert "cannot write to" in err and "same command again" in err
    first = answers(out)
    assert 0 < len(first) < 12
    assert run(folder, source, out) == 0
    assert run(folder, source, tmp_path / "whole") == 0
    assert answers(out) == answers(tmp_path / "whole") and first.items() <= answers(out).items()


@pytest.fixture
def finished(folder, tmp_path):
    """A job that is done: its input, its folder, its answers."""
    source, out = jsonl(tmp_path / "in.jsonl", prompts(8)), tmp_path / "out"
    assert run(folder, source, out) == 0
    return source, out, answers(out)


def test_a_torn_line_is_cut_off_and_its_prompt_run_again(folder, finished, capsys):
    source, out, whole = finished
    part = out / "part-00000.jsonl"
    part.write_bytes(part.read_bytes()[:-20])
    assert run(folder, source, out) == 0
    assert "was not written to its end" in capsys.readouterr().err
    assert answers(out) == whole and len(list(out.glob("part-*"))) == 2


def test_damaged_lines_are_put_aside_and_their_prompts_run_again(folder, finished, capsys):
    source, out, whole = finished
    part = out / "part-00000.jsonl"
    lines = part.read_bytes().splitlines(keepends=True)
    lines[2] = b"\x00" * len(lines[2])
    part.write_bytes(b"".join(lines))
    assert run(folder, source, out) == 0
    assert "damaged" in capsys.readouterr().err and (out / "part-00000.jsonl.damaged").exists()
    assert answers(out) == whole


def test_damaged_columns_are_put_aside_and_their_prompts_run_again(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(shards_module, "SHARD", 3)
    source, out = jsonl(tmp_path / "in.jsonl", prompts(8)), tmp_path / "out"
    assert run(folder, source, out, "--format", "parquet") == 0
    whole = columns(out)
    first = out / "part-00000.parquet"
    first.write_bytes(first.read_bytes()[:-9])
    (out / "part-00001.jsonl").write_text("lines that became columns")
    assert run(folder, source, out, "--format", "parquet") == 0
    assert "part-00000.parquet is damaged" in capsys.readouterr().err
    assert columns(out) == whole and not list(out.glob("*.jsonl"))


def columns(out):
    held = [row for part in sorted(out.glob("*.parquet")) for row in pq.read_table(part).to_pylist()]
    assert len({row["id"] for row in held}) == len(held) == 8
    return {row["id"]: row for row in held}


def test_another_job_or_another_process_is_refused(folder, finished, tmp_path, capsys):
    source, out, whole = finished
    assert run(folder, source, out, "--alpha", "2") == cli.FAILED
    assert "answers of another job: defaults was" in capsys.readouterr().err
    assert run(folder, jsonl(tmp_path / "other.jsonl", prompts(9)), out) == cli.FAILED
    assert "input was" in capsys.readouterr().err
    held = Shards(tmp_path / "held", {}, "jsonl")
    with pytest.raises(smc.InvalidOption, match="another process"):
        Shards(tmp_path / "held", {}, "jsonl")
    held.close()
    assert answers(out) == whole


def test_a_damaged_checkpoint_is_named_before_anything_is_written(tmp_path, capsys):
    broken = checkpoint(tmp_path / "p", shard=5000)
    shard = sorted(broken.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    out = tmp_path / "out"
    assert run(broken, jsonl(tmp_path / "in.jsonl", prompts(3)), out) == cli.FAILED
    assert shard.name in capsys.readouterr().err and not list(out.glob("part-*"))


def test_extras_are_named_where_they_are_missing(folder, tmp_path, capsys, monkeypatch):
    source = jsonl(tmp_path / "in.jsonl", prompts(1))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert run(folder, source, tmp_path / "out", "--format", "parquet") == cli.FAILED
    assert "install smcdecode[batch]" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "ray", None)
    assert run(folder, source, tmp_path / "out", "--ray") == cli.FAILED
    assert "install smcdecode[ray]" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "smcdecode.integrations.batch.command", None)
    assert run(folder, source, tmp_path / "out") == cli.FAILED
    assert "install smcdecode[batch]" in capsys.readouterr().err


def test_a_process_that_judges_for_ever_ends_with_its_engine(p):
    """What it is a fork of ends with the engine's process, and takes it along, whatever it does."""
    sandbox = Sandbox(Limits(judging=60.0))
    sandbox.warm()
    judge = sandbox.constraint("regex", "(a+)+b").process
    judge._pipe.send("a" * 40)  # about as many steps as there are nanoseconds in 10 minutes
    place = Path(f"/proc/{judge._process.pid}")
    assert place.exists()
    os.kill(_forkserver._forkserver_pid, signal.SIGKILL)
    wait(lambda: not place.exists(), 20)
