"""A draft in a process of its own, which writes the next blocks while the target verifies the last."""
