"""One forward pass, and backward passes that bring what each LoRA weight needs."""
