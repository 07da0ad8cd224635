"""What came out: posteriors, how good they are, and ways to look at them."""
