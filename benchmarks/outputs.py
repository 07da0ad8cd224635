"""How many texts of positive weight satisfy their constraint, by ``re``, ``jsonschema`` and Lark; it must be all.

    python benchmarks/outputs.py [--seeds 6] [--particles 4] [--threads 1]

Every constraint of tests/output_tasks.py × proposal × seed. A generation is a particle's finished text; dead ones are
counted by themselves.
"""

import argparse
import sys
import time
from pathlib import Path

import torch

import smcdecode as smc

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from output_tasks import Task, tasks


def main() -> None:
    """Print a line a constraint and proposal, and the sum."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--particles", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    p = smc.load("demo")
    proposals = {
        "Local": smc.Local(),
        "reject": smc.Local(check="rejection"),
        "Draft": smc.Draft(p, block=3, temperature=1.2, strictness=0.3),
    }
    finished = good = dead = 0
    start = time.perf_counter()
    for task in tasks():
        for name, proposal in proposals.items():
            counts = run(p * task.psi, task, smc.SMC(proposal, options.particles), options.seeds)
            print(f"{task.name:10} {name:6} {counts[0]:4} finished {counts[1]:4} good {counts[2]:4} dead", flush=True)
            finished, good, dead = finished + counts[0], good + counts[1], dead + counts[2]
    share = f"{good / finished:.1%}" if finished else "none"
    print(f"{good} of {finished} finished texts good ({share}), {dead} dead, {time.perf_counter() - start:.0f} s")
    sys.exit(good != finished)


def run(target: smc.Target, task: Task, method: smc.SMC, seeds: int) -> tuple[int, int, int]:
    """Texts of positive weight, those of them that are good, and particles of weight zero at the end."""
    finished = good = dead = 0
    for seed in range(seeds):
        out = smc.sample(target, task.prompt, method=method, max_tokens=task.max_tokens, seed=seed, progress=False)
        texts = [text for text, weight in zip(out.texts, out.weights, strict=True) if weight > 0]
        bad = [text for text in texts if not task.good(text)]
        for text in bad:
            print(f"  BAD {task.name} seed {seed}: {text!r}")
        finished, good, dead = finished + len(texts), good + len(texts) - len(bad), dead + out.N - len(texts)
    return finished, good, dead


if __name__ == "__main__":
    main()
