"""Jobs on a real Ray cluster of this machine: equal to one engine's answers, whatever is killed meanwhile."""

import collections
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from jobs import answers, checkpoint, jsonl, prompts

import smcdecode as smc
from smcdecode import cli
from smcdecode.integrations.batch.answering import Room, here
from smcdecode.integrations.batch.checkpoints import Checkpoints
from smcdecode.integrations.batch.rows import Row
from smcdecode.integrations.ray import pool as pool_module
from smcdecode.integrations.ray.answers import Answers
from smcdecode.integrations.ray.pool import pool

ray = pytest.importorskip("ray", reason="the tests of many machines need the extra ray")
cloudpickle = pytest.importorskip("ray.cloudpickle")

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
SMALL = {"num_cpus": 1, "object_store_memory": 80 << 20}
Named = collections.namedtuple("Named", "id")


@pytest.fixture(scope="module")
def nodes():
    """Two nodes, and this process as a driver; the second node is to be lost."""
    from ray.cluster_utils import Cluster as Nodes

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")  # at Ray's own 15, other tests would hardly let an engine start
        nodes = Nodes(initialize_head=True, head_node_args={**SMALL, "include_dashboard": False})
        try:
            nodes.second = nodes.add_node(**SMALL)
            ray.init(nodes.address, log_to_driver=False)
            yield nodes
        finally:
            ray.shutdown()
            nodes.shutdown()


def workers(*nodes):
    """Process ids of the engines that run on some nodes."""
    raylets = {held.process.pid for node in nodes for held in node.all_processes.get("raylet", ())}
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((place / "stat").read_text().rsplit(")", 1)[1].split()[1])
            name = (place / "cmdline").read_bytes()
        except (OSError, IndexError):
            continue
        if parent in raylets and name.startswith(b"ray::Worker"):
            found.append(int(place.name))
    return found


def wait(condition, seconds=300):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


# ---- engines that are quick to make, so that the pool's ways with faults can be seen many times


class Stub:
    """An engine whose answer is a row's id; some rows are its end."""

    def __init__(self, build, room, cluster):
        self.build = build

    def start(self):
        return self.build()

    def answers(self, rows):
        for row in rows:
            if row.id.startswith("fatal"):
                os._exit(3)
            if row.id.startswith("raises"):
                raise RuntimeError("an illegal memory access")
            if row.id.startswith("once") and not Path(row.id.removeprefix("once")).exists():
                Path(row.id.removeprefix("once")).touch()
                os._exit(3)
            yield {"id": row.id, "text": "ok"}


def stubs(monkeypatch, ids, build=lambda: None):
    """The pool's answers; nothing that is sent to an engine makes it import the library."""
    monkeypatch.setattr(pool_module, "Worker", Stub)
    room, cluster = SimpleNamespace(lanes=4), SimpleNamespace(engines=2, cpus=1, gpus=0)
    return list(pool(build, room, cluster, [Named(name) for name in ids]))


def test_a_prompt_that_engines_are_lost_over_is_named_and_no_other(nodes, monkeypatch, tmp_path):
    ids = [f"p{i}" for i in range(30)]
    ids[3], ids[17], ids[20] = "fatal", "raises", f"once{tmp_path / 'crumb'}"
    found = stubs(monkeypatch, ids)
    assert sorted(answer["id"] for answer in found) == sorted(ids)
    wrong = {answer["id"]: answer["error"] for answer in found if "error" in answer}
    assert set(wrong) == {"fatal", "raises"}
    assert "2 engines were lost over this prompt alone" in wrong["fatal"]
    assert "RuntimeError: an illegal memory access" in wrong["raises"]
    wait(lambda: not workers(nodes.head_node, nodes.second), 20)


def test_engines_that_cannot_begin_end_the_job(nodes, monkeypatch):
    def missing():
        raise smc.UnsupportedModel("model-00002.safetensors is damaged")

    with pytest.raises(smc.UnsupportedModel, match="damaged"):
        stubs(monkeypatch, ["a"], missing)
    with pytest.raises(smc.SMCDecodeError, match="3 engines ended before they began"):
        stubs(monkeypatch, ["a"], lambda: os._exit(1))


# ---- real ones


def command(folder, source, out, *more):
    return [
        "batch", "--target", str(folder), "--input", str(source), "--output", str(out), "--particles", "3",
        "--max-tokens", "6", "--lanes", "2", "--potential", f"{Path(__file__).parent}/job_potentials.py:slow", *more,
    ]  # fmt: skip


def lines(out):
    return sum(part.read_bytes().count(b"\n") for part in out.glob("part-*"))


def test_answers_are_one_engine_s_whatever_is_killed_meanwhile(nodes, tmp_path):
    """The driver by signal 9; then, in what goes on from there, an engine, and a node."""
    folder, source, out = checkpoint(tmp_path / "p"), jsonl(tmp_path / "in.jsonl", prompts(30)), tmp_path / "out"
    job = command(folder, source, out, "--ray", nodes.address)
    driver = subprocess.Popen([sys.executable, "-m", "smcdecode", *job], stderr=subprocess.DEVNULL)
    wait(lambda: lines(out) >= 2)
    driver.kill()
    driver.wait()
    wait(lambda: not workers(nodes.head_node, nodes.second), 30)  # no orphan
    kept = lines(out)
    assert 2 <= kept < 24

    def attack():
        wait(lambda: lines(out) > kept)
        os.kill(wait(lambda: workers(nodes.head_node))[0], signal.SIGKILL)
        wait(lambda: workers(nodes.second))
        nodes.remove_node(nodes.second, allow_graceful=False)

    attacker = threading.Thread(target=attack)
    attacker.start()
    assert cli.main([*job, "--engines", "2"]) == 0
    attacker.join()
    wait(lambda: sum(node["Alive"] for node in ray.nodes()) == 1)
    wait(lambda: not workers(nodes.head_node), 30)
    alone = command(folder, source, tmp_path / "alone")
    assert cli.main([word.replace(":slow", ":calm") for word in alone]) == 0  # the same numbers, sooner
    assert answers(out) == answers(tmp_path / "alone")


@pytest.mark.filterwarnings("ignore")  # of Ray Data's own
def test_a_dataset_is_mapped_by_engines(nodes, tmp_path):
    """Cut as it may be; and a row that cannot be answered is a row that says why."""
    folder, given = checkpoint(tmp_path / "p"), [*prompts(5), {"id": "none", "prompt": None}]
    logging.getLogger("ray.data._internal.usage").setLevel(logging.ERROR)  # a thread of it outlives this test
    ray.data.DataContext.get_current().enable_progress_bars = False
    build, room = Checkpoints(str(folder), particles=3), Room(max_tokens=6, memory=1 << 26)
    options = {"room": room, "seed": 4, "defaults": {"max_tokens": 6}}
    mapped = ray.data.from_items(given, override_num_blocks=3).map_batches(
        Answers, fn_constructor_args=(build,), fn_constructor_kwargs=options, batch_format="pyarrow", batch_size=2,
        concurrency=1, num_cpus=1,
    )  # fmt: skip
    found = {row["id"]: row for row in mapped.take_all()}
    assert len(found) == 6 and "either a prompt or messages" in found.pop("none")["error"]
    rows = [Row.of(row, seed=4, defaults=options["defaults"]) for row in given[:5]]
    assert found == {answer["id"]: answer for answer in here(build, room, rows)}
