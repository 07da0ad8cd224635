"""Other people's interfaces, on top of the library; nothing of it imports them."""
