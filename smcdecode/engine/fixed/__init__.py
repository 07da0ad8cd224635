"""A whole cycle as one function over buffers that stay where they are, so that a GPU records and replays it."""
