"""The training set as a model that is linear in the LoRA weights, from one pass."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import tqdm
from torch.utils.data import DataLoader

from laplace_lora_ext.curvature.backend import check_targets
from laplace_lora_ext.curvature.passes import visit_jacobians
from laplace_lora_ext.curvature.sketch import Sketch
from laplace_lora_ext.errors import naming
from laplace_lora_ext.linearized_model import LinearizedModel
from laplace_lora_ext.lora_layers import Block
from laplace_lora_ext.precision import without_autocast
from laplace_lora_ext.predictive import LoRAPredictive


class LoRALinearization(LoRAPredictive):
    """Linearisation of the model around its trained LoRA weights."""

    @without_autocast
    def linearize(
        self,
        train_loader: DataLoader | Iterable[Any],
        n_features: int = 4096,
        generator: torch.Generator | None = None,
        progress_bar: bool = False,
    ) -> LinearizedModel:
        """One pass over the training set, for "linearized_marglik" and "linearized_loo".

        Parameters
        ----------
        train_loader : DataLoader or iterable
            the data of the fit
        n_features : int, default=4096
            about how many random features stand for the Jacobian of an output: N examples with C
            outputs take `4 N C n_features` bytes of main memory. As many as there are LoRA
            weights are exact
        generator : torch.Generator, optional
            of the random features
        progress_bar : bool, default=False

        Returns
        -------
        LinearizedModel

        Raises
        ------
        ValueError
            If the loader has no data or not those of the fit, labels don't fit, or a number is
            not finite; the message names the batch.
        """
        if n_features < 1:
            raise ValueError(f"n_features must be at least 1, not {n_features}.")
        parts = (self.mean - self.prior_mean).split(self._sizes)
        distances = [
            _small_side_first(block, part.reshape(block.weight.shape))
            for block, part in zip(self.blocks, parts, strict=True)
        ]
        shapes = [(len(distance), distance.shape[1]) for distance in distances]
        sketch = Sketch(shapes, n_features, self._device, self._dtype, generator)
        results = []
        batches = tqdm.tqdm(train_loader, desc="[Linearizing]", disable=not progress_bar)
        for index, batch in enumerate(batches):
            with naming(f"batch {index}"):
                results.append(self._linearized_batch(batch, sketch, distances))
        if not results:
            raise ValueError("The training loader has no data.")
        f_mu, features, moved, targets = (torch.cat(part) for part in zip(*results, strict=True))
        model = LinearizedModel(
            f_mu, features, sketch.feature_block, f_mu - moved, targets, self._training_likelihood
        )
        self._check_same_data(model)
        return model

    def _check_same_data(self, model: LinearizedModel) -> None:
        loss = float(self.loss)
        # The same texts in other batches differ a little, in half precision above all.
        if len(model) == self.n_data and abs(model.loss - loss) <= 0.1 * (model.loss + loss):
            return
        raise ValueError(
            f"The posterior was fitted on {self.n_data} examples with a loss of {loss:.4g}; these "
            f"are {len(model)} with {model.loss:.4g}: pass the training data of this fit."
        )

    def _linearized_batch(
        self, batch: Any, sketch: Sketch, distances: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits, features, what the weights' distance from the prior mean adds, and targets."""
        X, y = self.model.split(batch)
        features = [torch.empty(0)] * len(self.blocks)
        moved = torch.zeros((), device=self._device, dtype=self._dtype)

        def visit(index: int, jacobian: torch.Tensor) -> None:
            nonlocal moved
            jacobian = _small_side_first(self.blocks[index], jacobian).to(moved)
            moved = moved + (jacobian * distances[index]).sum((-2, -1))
            features[index] = sketch(index, jacobian).cpu()

        f_mu = visit_jacobians(self.model, self.blocks, X, visit)
        y = check_targets(y, f_mu, self._training_likelihood)
        return f_mu.to(moved).cpu(), torch.cat(features, dim=2), moved.cpu(), y.cpu()


def _small_side_first(block: Block, weights: torch.Tensor) -> torch.Tensor:
    """`(..., m, n)` as `(..., r, d)`."""
    return weights if block.small_output else weights.mT
