"""The mathematics: pure functions on small tensors; knows no model, no page and no text."""
