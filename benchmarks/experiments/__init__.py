"""Experiments over tasks and methods: one module per command."""
