"""One class for each example: softmax and cross-entropy."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import nll_loss, one_hot

from laplace_lora_ext.messages import warn
from laplace_lora_ext.tasks.task import ClassCounts, Draws, Seeds, Task, scaled_seeds

_DRAWN_AT_ONCE = 64  # rows of logits, of which draws take several copies in float64


class Classification(Task):
    """One of C classes. Logits are `(B, C)`, targets `(B,)` class indices."""

    name = "classification"
    sees_differences = True

    def times_root(self, logits: Tensor, z: Tensor) -> Tensor:
        """Multiply vectors by a root with C - 1 columns; one entry is ignored.

        `H = diag(p) - p pᵀ = diag(q) (I - q qᵀ) diag(q)` with `q = √p`, and the
        projection `I - q qᵀ` is spanned by C - 1 columns of the Householder reflection
        that maps q onto the coordinate axis of the most probable class m. With `t = Σ_j
        q_j z_j` over all other classes, `(S z)_i = q_i z_i - p_i t / (1 + q_m)` and
        `(S z)_m = -q_m t`. No subtraction cancels digits, however confident the sample
        is.
        """
        log_p = logits.log_softmax(-1)
        q = (log_p / 2).exp()
        is_top = _is_top(logits)
        q_top = q[is_top][:, None]
        of_others = (q * z).masked_fill(is_top, 0)
        total = of_others.sum(-1, keepdim=True)
        of_others = of_others - log_p.exp() * total / (1 + q_top)
        return torch.where(is_top, -q_top * total, of_others)

    def columns_by_size(self, logits: Tensor) -> Tensor:
        """List all classes but the most probable one, which has no column."""
        top_first = logits.masked_fill(_is_top(logits), torch.inf)
        return top_first.argsort(dim=-1, descending=True, stable=True)[:, 1:]

    def label_seeds(self, logits: Tensor, num_samples: int, draws: Draws) -> Seeds:
        y = drawn_labels(logits, draws.uniform(num_samples))
        return scaled_seeds(_slopes(logits, y) / num_samples**0.5)

    def nll(self, log_p: Tensor, y: Tensor) -> Tensor:
        return nll_loss(log_p, y, reduction="none")

    def groups(self, y: Tensor) -> Tensor:
        return y.long()

    def class_counts(self, y: Tensor) -> ClassCounts:
        return ClassCounts((0, label) for label in y.tolist())

    def check_targets(self, y: Tensor, logits: Tensor) -> Tensor:
        n_outputs = logits.shape[-1]
        if n_outputs < 2:
            raise ValueError(
                "classification needs at least two outputs, and the model has one, "
                "whose sigmoid is a probability: use the likelihood "
                '"multi_label_classification", or "regression" for numbers'
            )
        are_indices = not y.is_floating_point() and y.dtype != torch.bool
        if y.shape != logits.shape[:1] or not are_indices:
            raise ValueError(
                f"labels must be class indices of shape {tuple(logits.shape[:1])}, not "
                f"{tuple(y.shape)} of {y.dtype}: several labels for each example are "
                'for the likelihood "multi_label_classification", numbers for '
                '"regression"; of one-hot labels, pass labels.argmax(-1)'
            )
        check_labels(y, n_outputs)
        if _look_like_probabilities(logits):
            warn(
                "The model's outputs look like probabilities: return logits, and leave "
                "the softmax to the likelihood."
            )
        return y.to(logits.device).long()


CLASSIFICATION = Classification()


def check_labels(labels: Tensor, n_outputs: int) -> None:
    """Refuse labels `(N,)` that are no classes of a model with so many outputs."""
    if labels.min() < 0 or labels.max() >= n_outputs:
        raise ValueError(
            f"labels must be from 0 to {n_outputs - 1}, but range from {labels.min()} "
            f"to {labels.max()}"
        )


def drawn_labels(logits: Tensor, numbers: Tensor) -> Tensor:
    """Draw `(S, N)` labels of logits `(N, V)`, each by one of the numbers `(S, N)`."""
    labels: list[Tensor] = []
    by_row = numbers.T.contiguous().to(logits.device)
    for some, of_some in zip(
        logits.split(_DRAWN_AT_ONCE), by_row.split(_DRAWN_AT_ONCE), strict=True
    ):
        # In float64: other sums would lose the improbable words.
        cumulative = some.softmax(-1).cumsum(-1, dtype=torch.float64)
        heights = of_some * cumulative[:, -1:]
        labels.append(torch.searchsorted(cumulative, heights, right=True))
    last = logits.shape[-1] - 1
    return torch.cat(labels).clamp_max(last).T


def _is_top(logits: Tensor) -> Tensor:
    """Mark each sample's most probable class, `(B, C)`: one of those that are alike."""
    return one_hot(logits.argmax(-1), logits.shape[-1]).bool()


def _slopes(logits: Tensor, y: Tensor) -> Tensor:
    """Compute `p - onehot(y)` for `(S, B)` labels.

    The label has the largest entry, `-(1 - p_y)`. As a sum of the other classes'
    probabilities, it cancels no digits.
    """
    is_label = one_hot(y, logits.shape[-1]).bool()
    of_others = logits.softmax(-1).expand(is_label.shape).masked_fill(is_label, 0)
    return torch.where(is_label, -of_others.sum(-1, keepdim=True), of_others)


def _look_like_probabilities(logits: Tensor) -> bool:
    if not len(logits) or (logits < 0).any():
        return False
    totals = logits.sum(-1)
    # Up to rounding in half precision.
    return torch.allclose(totals, torch.ones_like(totals), rtol=0.0, atol=0.016)
