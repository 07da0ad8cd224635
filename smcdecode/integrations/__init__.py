"""Other people's interfaces, on top of sample() and stream()."""
