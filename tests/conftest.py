"""Tests share few cores: one thread each, so that workers do not wait for one another."""

import torch

torch.set_num_threads(1)
