"""Numeric kernels of smcdecode. ``reference`` holds the plain torch definition of each, which is also the CPU path."""
