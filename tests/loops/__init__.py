"""Loops of others: bodies, iterators and threads that are not written the way the README writes them."""
