"""One forward pass through a model, and backward passes that bring what each LoRA weight needs."""

from laplace_lora_ext.passes.derivatives import jacobians, visit_jacobians
from laplace_lora_ext.passes.recording import Directions, Recording, Rows, every_output, record

__all__ = [
    "Directions",
    "Recording",
    "Rows",
    "every_output",
    "jacobians",
    "record",
    "visit_jacobians",
]
