"""The command `laplace-lora`: a demo, and posteriors for adapters that exist."""
