"""A whole recorded cycle made of the kernels writes what it writes by their definitions."""

import sys
from pathlib import Path

import torch
from cases import DEVICE

import smcdecode as smc
from smcdecode_kernels import ops, triton_kernels

sys.path.append(str(Path(__file__).parents[1]))
from models import tiny

PROMPTS = [[3, 4, 2], [5]]


def answers(plain):
    """Prompts under each kind of method, by the kernels or by their definitions."""
    on = ops._on
    ops._on = (lambda _, f: f) if plain else (lambda _, f: getattr(triton_kernels, f.__name__))
    try:
        modules = [
            tiny(family, vocab=300, seed=s, spread=0.15).to(DEVICE) for s, family in enumerate(("llama", "qwen2"))
        ]
        p, q = (smc.load(m, name=n, attention="torch", graphs=True) for m, n in zip(modules, "pq", strict=True))
        methods = [
            smc.SMC(smc.Draft(q, block=2, strictness=0.0), particles=3, threshold=1.0),
            smc.SMC(smc.Draft(q, block=2, strictness=0.4, top_k=200), particles=2, resampling="stratified"),
        ]
        return [
            out
            for method in methods
            for out in smc.sample(
                p**2, [[3, 4, 2], [5]][: method.particles - 1], method=method, max_tokens=4, seed=3, page_size=2
            )
        ]
    finally:
        ops._on = on


def check_recorded_cycles():
    """The same tokens and evidence."""
    for found, wanted in zip(answers(False), answers(True), strict=True):
        assert found.tokens == wanted.tokens
        torch.testing.assert_close(torch.tensor(found.log_z), torch.tensor(wanted.log_z), rtol=1e-4, atol=1e-4)
