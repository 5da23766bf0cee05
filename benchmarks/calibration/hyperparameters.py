"""How a model is fine-tuned."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Hyperparameters:
    """How a model is fine-tuned; the defaults are the paper's (its appendix "Hyperparameters").

    The optimizer is AdamW without weight decay, its learning rate falls linearly to zero.

    Attributes
    ----------
    model : str
        Name of the pretrained model on the hub, or its folder.
    target_modules : tuple of str
        Layers with LoRA weights.
    batch_size : int
        Examples a training step.
    maximum_length : int
        Number of tokens to which a text is cut.
    rank, alpha, dropout : int, int, float
        LoRA's settings.
    learning_rate : float
        The first, or that after the warm-up.
    steps : int
        Training steps.
    checkpoints : int
        Checkpoints along the training, at equal distances.
    warmup_steps : int
        Steps in which the learning rate rises.
    """

    model: str
    target_modules: tuple[str, ...]
    batch_size: int
    maximum_length: int
    rank: int = 8
    alpha: int = 16
    dropout: float = 0.1
    learning_rate: float = 5e-5
    steps: int = 10_000
    checkpoints: int = 10
    warmup_steps: int = 0

    @property
    def checkpoint_steps(self) -> list[int]:
        """Steps after which a checkpoint is kept, the last step among them."""
        count = min(self.checkpoints, self.steps)
        return [self.steps * number // count for number in range(1, count + 1)]
