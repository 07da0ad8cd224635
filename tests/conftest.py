"""Tests share few cores, one thread each, so that workers do not wait for one another; and they repeat exactly."""

import gc

import pytest
import torch
from hypothesis import settings

import smcdecode as smc

torch.set_num_threads(1)
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


def pytest_collection_finish():
    """What was imported stays: the garbage collector need not look at it again with every test."""
    gc.freeze()


@pytest.fixture(scope="session")
def demo_model():
    """The demo model, one for all tests of a worker."""
    try:
        return smc.load("demo")
    except smc.UnsupportedModel as error:
        pytest.skip(f"needs the demo model: {error}")
