"""Trains again: on some examples, with the user's trainer, in an adapter of its own."""
