"""The model that is linear in the LoRA weights: its data, its mode, and what it predicts."""
