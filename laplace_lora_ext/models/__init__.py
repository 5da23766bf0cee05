"""All that is known of transformers and PEFT: models, batches, LoRA weights."""
