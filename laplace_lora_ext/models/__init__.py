"""All that is known of transformers and PEFT: a batch in, logits out, and the LoRA
weights.
"""
