"""What is asked for: frozen values that name a target, a proposal and a method. No tensor moves, no file is read."""
