"""How much memory there is, and how many lanes and pages of a run fit in it. Knows bytes, no tensors."""

import dataclasses
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from smcdecode.engine.ranks import ranks_of
from smcdecode.errors import InvalidOption, OutOfPages

__all__ = ["Budget", "bytes_of", "least_bytes", "plan_memory"]


@dataclasses.dataclass(frozen=True)
class Budget:
    """What requests may use together."""

    lanes: int  # requests of one method that run at once
    pages: int
    workspace: int  # bytes of logits and laws
    page_size: int
    max_tokens: int  # of the longest continuation


def available_bytes(device: torch.device) -> int:
    """Free memory of a device. On a CPU: what Linux calls available; elsewhere all physical memory."""
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by torch, to be used again
        return torch.cuda.mem_get_info(device)[0] + held
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    raise InvalidOption("this platform does not tell its free memory: give memory= in bytes")


def bytes_of(memory: float, device: torch.device) -> int:
    """A budget in bytes: ``memory`` itself if above 1, else that fraction of the device's free memory.

    Raises:
        InvalidOption: if it is not a positive number.
    """
    if not (math.isfinite(memory) and memory > 0):
        raise InvalidOption(f"memory must be a fraction in (0, 1] or a number of bytes; got {memory!r}")
    return int(memory) if memory > 1 else int(memory * available_bytes(device))


def least_bytes(target: Any, memory: float) -> int:
    """:func:`bytes_of` the device of a target's model; of several ranks, whose devices are of one kind, the least."""
    model, ranks = target.as_target().model, ranks_of(target)
    if ranks is None:
        return bytes_of(memory, model.layout.device)
    return min(ranks.everywhere(bytes_of, memory, torch.device(model.layout.device.type)))


def plan_memory(
    memory: int, needs: Sequence[int], page_bytes: int, lane_bytes: int, *, page_size: int, max_tokens: int
) -> Budget:
    """As many lanes as fit, and pages for them.

    Args:
        memory: bytes in all.
        needs: most pages each request can ever hold.
        page_bytes: bytes of one page in all stores.
        lane_bytes: bytes of logits and laws a running lane needs besides its pages.
        page_size: tokens a page.
        max_tokens: of the longest continuation.

    Raises:
        OutOfPages: when the request with the largest need does not fit alone.
    """
    largest = max(needs)
    if largest * page_bytes + lane_bytes > memory:
        raise OutOfPages(
            f"one prompt may need {largest} pages of {page_bytes:,} bytes and {lane_bytes:,} bytes of logits, "
            f"{largest * page_bytes + lane_bytes:,} bytes in all, but memory= allows {memory:,}: "
            "raise memory=, or lower max_tokens=, particles= or block=, or shorten the prompt"
        )
    lanes = min(len(needs), memory // (min(needs) * page_bytes + lane_bytes))
    lanes = max(1, min(lanes, (memory - largest * page_bytes) // lane_bytes))
    concurrent = sum(sorted(needs)[-lanes:])
    pages = min(concurrent, (memory - lanes * lane_bytes) // page_bytes)
    return Budget(lanes, pages, lanes * lane_bytes, page_size, max_tokens)
