"""Seeds: what is back-propagated from the logits.

The outer products of the gradients then add up to the Fisher information of a likelihood.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import one_hot


class Seeds(NamedTuple):
    """The Fisher at the logits of sample b is `Σ_s (w_sb v_sb) (w_sb v_sb)ᵀ`.

    The vectors have entries of order one, so that none of them underflows in a half-precision
    backward pass; the weights, which may be tiny for a confident sample, scale the gradients
    afterwards.

    Attributes
    ----------
    vectors : torch.Tensor
        `(S, B, C)`, v
    weights : torch.Tensor
        `(S, B)`, w
    """

    vectors: torch.Tensor
    weights: torch.Tensor


def exact_seeds(logits: torch.Tensor, likelihood: str) -> Seeds:
    """Seeds of the exact (type-2) Fisher: C - 1 a sample for classification, C for regression.

    For softmax, `H = diag(p) - p pᵀ = diag(q) (I - q qᵀ) diag(q)` with `q = √p`, and the
    projection `I - q qᵀ` is spanned by C - 1 columns of the Householder reflection that maps q
    onto the coordinate axis of the most probable class m. Column j of the factor has the weight
    q_j and the vector `v_j = 1 - p_j / (1 + q_m)`, `v_i = -p_i / (1 + q_m)`, `v_m = -q_m`:
    no subtraction cancels, however confident the sample is.

    Parameters
    ----------
    logits : torch.Tensor
        `(B, C)`
    likelihood : {"classification", "regression"}

    Returns
    -------
    Seeds
    """
    n_samples, n_outputs = logits.shape
    identity = torch.eye(n_outputs, device=logits.device, dtype=logits.dtype)
    if likelihood == "regression":
        vectors = identity[:, None].expand(n_outputs, n_samples, n_outputs)
        return Seeds(vectors, logits.new_ones(n_outputs, n_samples))
    log_p = logits.log_softmax(-1)
    p, q = log_p.exp(), (log_p / 2).exp()
    top = q.argmax(-1, keepdim=True)
    q_top = q.gather(-1, top)
    is_top = one_hot(top.squeeze(-1), n_outputs).bool()
    shared = torch.where(is_top, -q_top, -p / (1 + q_top))
    # All classes but the most probable, for each sample in increasing order.
    others = (~is_top).nonzero()[:, 1].reshape(n_samples, n_outputs - 1)
    vectors = shared[:, None] + identity[others]
    return Seeds(vectors.transpose(0, 1), q.gather(-1, others).T)


def sampled_seeds(logits: torch.Tensor, likelihood: str, num_samples: int) -> Seeds:
    """Seeds of a Monte-Carlo Fisher: gradients of the loss at labels drawn from the model.

    Parameters
    ----------
    logits : torch.Tensor
        `(B, C)`
    likelihood : {"classification", "regression"}
    num_samples : int
        labels a sample, from torch's global random state

    Returns
    -------
    Seeds
    """
    if likelihood == "regression":
        vectors = torch.randn(num_samples, *logits.shape, device=logits.device, dtype=logits.dtype)
        weights = logits.new_ones(num_samples, len(logits))
    else:
        y = torch.distributions.Categorical(logits=logits).sample((num_samples,))
        vectors, weights = _classification_gradients(logits, y)
    return Seeds(vectors, weights / num_samples**0.5)


def empirical_seeds(logits: torch.Tensor, likelihood: str, y: torch.Tensor) -> Seeds:
    """Seeds of the empirical Fisher: gradients of the loss at the labels, one a sample.

    Parameters
    ----------
    logits : torch.Tensor
        `(B, C)`
    likelihood : {"classification", "regression"}
    y : torch.Tensor
        `(B,)` class indices, or `(B, C)` targets

    Returns
    -------
    Seeds
    """
    if likelihood == "regression":
        return Seeds((logits - y)[None], logits.new_ones(1, len(logits)))
    return Seeds(*_classification_gradients(logits, y[None]))


def _classification_gradients(
    logits: torch.Tensor, y: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`p - onehot(y)` for `(S, B)` labels, as a vector of order one and a weight.

    The largest entry is that of the label, `-(1 - p_y)`. Both it and its ratio to the other
    entries are computed without cancellation, from the log-probabilities of the other classes.
    """
    log_p = logits.log_softmax(-1)
    is_label = one_hot(y, logits.shape[-1]).bool()
    others = log_p.expand(is_label.shape).masked_fill(is_label, -torch.inf)
    return others.softmax(-1) - is_label.to(logits.dtype), others.logsumexp(-1).exp()
