"""Running it: models, pages and batches. Knows no potential by name."""
