"""Training on new data without forgetting those of a posterior."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import TrainerCallback

from laplace_lora_ext.messages import check_positive
from laplace_lora_ext.models.weights import Block


class Penalising(Protocol):
    """A posterior that penalises weights for being improbable."""

    blocks: list[Block]

    def penalty(self, weight: float = 1.0) -> Tensor: ...


class Remember(TrainerCallback):
    """Makes a trainer's model remember the data that posteriors were fitted to.

    To the loss of the new data comes the posteriors' `penalty`: with it, training finds
    the mode of the posterior of all data, as far as the old data's is a Gaussian
    (Kirkpatrick et al., "Overcoming catastrophic forgetting in neural networks", PNAS
    2017; Ritter, Botev & Barber, "Online structured Laplace approximations for
    overcoming catastrophic forgetting", NeurIPS 2018). Its gradient is added before
    each step of the optimizer, after gradients were clipped; so the loss that the
    trainer logs is that of the new data alone.

        trainer.add_callback(Remember(la))

    It has been tried on few tasks, and is for old data that can't be kept: where some
    can, training on these again (replay) is the better choice.

    Parameters
    ----------
    *posteriors : LoRALaplace
        around earlier values of the adapter that is trained; their penalties add up
    weight : float, default=1
        of the penalties; 1 counts each old example as much as each new one
    n_data : int, optional
        new examples, of which the trainer's loss is the mean; by default as many as its
        data set has

    Raises
    ------
    ValueError
        Without a posterior, for a weight that is not positive, and before the training
        if its data have no length or it is one in float16, whose gradients are scaled.
    """

    def __init__(
        self,
        *posteriors: Penalising,
        weight: float = 1.0,
        n_data: int | None = None,
    ) -> None:
        if not posteriors:
            raise ValueError("Nothing to remember: pass a fitted posterior.")
        check_positive("weight", weight)
        self._posteriors = posteriors
        self._weight = weight
        self._asked = n_data
        self._n_data = n_data

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        **kwargs: Any,
    ) -> None:
        """Count the new examples; refuse what can't be penalised."""
        if args.fp16:
            raise ValueError(
                "Gradients in float16 are scaled: train in bfloat16 or float32."
            )
        data_set = kwargs["train_dataloader"].dataset
        if self._asked is None:
            if not isinstance(data_set, Sized):
                raise ValueError("The training data have no length: pass n_data=.")
            self._n_data = len(data_set)

    def on_pre_optimizer_step(
        self,
        args: Any,
        state: Any,
        control: Any,
        **kwargs: Any,
    ) -> None:
        """Add the penalties' gradient to the loss's, a mean over new examples."""
        assert self._n_data is not None  # since training has begun
        for la in self._posteriors:
            of_blocks = {id(block.weight): block.weight for block in la.blocks}
            weights = [weight for weight in of_blocks.values() if weight.requires_grad]
            penalty = la.penalty(self._weight / self._n_data)
            gradients = torch.autograd.grad(penalty, weights)
            for weight, gradient in zip(weights, gradients, strict=True):
                if weight.grad is None:
                    weight.grad = gradient.to(weight)
                else:
                    weight.grad += gradient
