"""Several labels for each example: a sigmoid for each, and binary cross-entropy."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from laplace_lora_ext.tasks.regression import REGRESSION, in_columns
from laplace_lora_ext.tasks.task import ClassCounts, Draws, Seeds, Task, scaled_seeds


class MultiLabel(Task):
    """K independent Bernoullis, or a single logit of two classes.

    Logits are `(B, K)`, targets numbers 0 and 1 of the same shape; of a single label
    they may be `(B,)`. Each label is a classification into two classes, "not" and
    "yes", with the logits 0 and f. To the host this is a classification.
    """

    name = "multi_label_classification"
    # The host's Kronecker factors know softmax and squares alone.
    structures = ("lowrank_kron", "diag", "full")

    def class_logits(self, logits: Tensor) -> Tensor:
        return torch.stack([torch.zeros_like(logits), logits], dim=-1)

    def class_covariance(self, f_var: Tensor) -> Tensor:
        """Keep each label's own variance, `(B, K, 2, 2)`: "not" has none."""
        variances = f_var.diagonal(dim1=-2, dim2=-1)
        return torch.diag_embed(self.class_logits(variances))

    def shown(self, probabilities: Tensor) -> Tensor:
        """Take the probability of "yes", `(B, K)`."""
        return probabilities[..., 1]

    def times_root(self, logits: Tensor, z: Tensor) -> Tensor:
        """Multiply vectors by the root of `diag(p (1 - p))`."""
        # No subtraction cancels digits.
        log_variances = logsigmoid(logits) + logsigmoid(-logits)
        return z * (log_variances / 2).exp()

    def columns_by_size(self, logits: Tensor) -> Tensor:
        by_variance = logits.abs()  # p (1 - p) falls with it
        return by_variance.argsort(dim=-1, stable=True)

    def label_seeds(self, logits: Tensor, num_samples: int, draws: Draws) -> Seeds:
        """Compute slopes of the loss at drawn targets, of all labels at once.

        The slope in a label's logit averages 0 and is independent of every other
        label's.
        """
        numbers = draws.uniform(num_samples, logits.shape[-1]).to(logits)
        y = (numbers < logits.sigmoid()).to(logits)
        # 1 - p cancels where p is near 1: the sigmoid of -f does not.
        slopes = torch.where(y > 0, -(-logits).sigmoid(), logits.sigmoid())
        return scaled_seeds(slopes / num_samples**0.5)

    def nll(self, log_p: Tensor, y: Tensor) -> Tensor:
        """Sum an example's losses, given log-probabilities `(B, K, 2)`."""
        labels = y.long()[..., None]
        of_labels = log_p.gather(-1, labels)[..., 0]
        return -of_labels.sum(-1)

    def groups(self, y: Tensor) -> Tensor:
        """Number examples by their first label; those without any are a group, too."""
        labels = in_columns(y).double()
        return pad(labels, (0, 1), value=0.5).argmax(1)

    def class_counts(self, y: Tensor) -> ClassCounts:
        """Count "not" and "yes" of each label by itself."""
        rows = in_columns(y).long().tolist()
        return ClassCounts(item for row in rows for item in enumerate(row))

    def check_targets(self, y: Tensor, logits: Tensor) -> Tensor:
        targets = REGRESSION.check_targets(y, logits)
        are_zero_or_one = (targets == 0) | (targets == 1)
        if not are_zero_or_one.all():
            low, high = targets.aminmax()
            raise ValueError(
                f"labels must be 0 or 1, but range from {low:.4g} to {high:.4g}: "
                'classes are for the likelihood "classification", and numbers for '
                '"regression"'
            )
        return targets


MULTI_LABEL = MultiLabel()
