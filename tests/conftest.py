"""Tests share few cores, one thread each, so that workers do not wait for one another; and they repeat exactly."""

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
