"""Huge pages: contents stay, little else is moved, and what is said to lie in them does."""

import re
import sys
from pathlib import Path

import pytest
import torch

import smcdecode as smc
from smcdecode.engine import fast
from smcdecode.engine.huge import HUGE, gather
from smcdecode.engine.load import checkpoint


def huge(start, size):
    """Bytes in huge pages of the mappings that hold a range, by the kernel's own account."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(span[1], 16) < start + size and start < int(span[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            found += int(line.split()[1]) << 10
    return found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the advice is Linux's")
def test_memory_moves_and_keeps_its_contents():
    x = torch.arange(4 * HUGE // 8)
    moved = gather([(x.data_ptr(), x.nbytes)])
    assert moved in range(0, 4 * HUGE + 1, HUGE)
    assert huge(x.data_ptr(), x.nbytes) >= moved
    assert torch.equal(x, torch.arange(4 * HUGE // 8))


def test_pages_that_hold_little_of_it_are_left_alone():
    x = torch.zeros(4 * HUGE, dtype=torch.uint8)
    start = -(-x.data_ptr() // HUGE) * HUGE
    assert gather([(start, HUGE // 2)]) == 0
    assert gather([(start + HUGE // 2, HUGE)]) == 0


def test_what_cannot_be_moved_is_no_error():
    assert gather([(1 << 46, HUGE)]) == 0  # nothing is mapped there


def test_all_packed_weights_are_offered(monkeypatch):
    offered = []
    monkeypatch.setattr(fast, "gather", offered.extend)
    model, tokenizer = checkpoint("demo")
    smc.load((model, tokenizer))
    assert sum(size for _, size in offered) > 0.9 * sum(x.nbytes for x in model.parameters())
