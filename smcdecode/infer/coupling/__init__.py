"""Couplings of n drafted tokens with one target token: knows laws p and q of one position, no model and no chain."""
