"""One forward pass through a model, and backward passes that bring what each LoRA
weight needs.
"""
