"""Planning: how fast and how good a pair of models will be, before you decide. Ties measurements to predictions."""
