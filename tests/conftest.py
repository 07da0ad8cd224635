"""Tests share few cores, one thread each, so that workers do not wait for one another; and they repeat exactly."""

import gc

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


def pytest_collection_finish():
    """What was imported stays: the garbage collector need not look at it again with every test."""
    gc.freeze()
