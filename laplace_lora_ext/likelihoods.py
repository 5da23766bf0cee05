"""The likelihoods: what to back-propagate from the logits, the loss, and checks of targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import torch
from torch.nn.functional import cross_entropy, nll_loss, one_hot

from laplace_lora_ext.messages import warn

_ROUNDING = 1e-2  # of probabilities in half precision

IGNORED = -100
"""transformers' label for a token that does not count."""


class Seeds(NamedTuple):
    """Vectors to back-propagate: sample b has the Fisher `Σ_s (w_sb v_sb) (w_sb v_sb)ᵀ`.

    The vectors have entries of order one, so that none underflows in a half-precision backward
    pass. The weights, which can be tiny for a confident sample, scale the gradients afterwards.

    Attributes
    ----------
    vectors : torch.Tensor
        `(S, B, C)`, v
    weights : torch.Tensor
        `(S, B)`, w, or `(S, 1)` for all samples
    """

    vectors: torch.Tensor
    weights: torch.Tensor

    def dense(self) -> torch.Tensor:
        """The columns `w v` themselves, `(S, B, C)`."""
        return self.vectors * self.weights[..., None]


class Classification:
    """Softmax and cross-entropy. Logits are `(B, C)`, targets `(B,)` class indices.

    Attributes
    ----------
    name : str
        the host's
    is_gaussian : bool
        whether predictions are mean and covariance of the outputs, rather than probabilities
    """

    name = "classification"
    is_gaussian = False

    def exact_seeds(self, logits: torch.Tensor) -> Seeds:
        """Seeds of the exact (type-2) Fisher, C - 1 for each sample.

        `H = diag(p) - p pᵀ = diag(q) (I - q qᵀ) diag(q)` with `q = √p`, and the projection
        `I - q qᵀ` is spanned by C - 1 columns of the Householder reflection that maps q onto the
        coordinate axis of the most probable class m. Column j of the factor has the weight q_j and
        the vector `v_j = 1 - p_j / (1 + q_m)`, `v_i = -p_i / (1 + q_m)`, `v_m = -q_m`. No
        subtraction cancels digits, however confident the sample is.
        """
        n_samples, n_outputs = logits.shape
        log_p = logits.log_softmax(-1)
        p, q = log_p.exp(), (log_p / 2).exp()
        top = q.argmax(-1, keepdim=True)
        q_top = q.gather(-1, top)
        is_top = one_hot(top.squeeze(-1), n_outputs).bool()
        shared = torch.where(is_top, -q_top, -p / (1 + q_top))
        # All classes but the most probable, for each sample in increasing order.
        others = (~is_top).nonzero()[:, 1].reshape(n_samples, n_outputs - 1)
        vectors = shared[:, None] + torch.eye(n_outputs).to(logits)[others]
        return Seeds(vectors.transpose(0, 1), q.gather(-1, others).T)

    def sampled_seeds(
        self, logits: torch.Tensor, num_samples: int, generator: torch.Generator
    ) -> Seeds:
        """Slopes of the loss at targets that are drawn from the model."""
        y = _drawn(logits.softmax(-1).expand(num_samples, -1, -1), generator)
        vectors, weights = _gradients_at(logits, y)
        return Seeds(vectors, weights / num_samples**0.5)

    def empirical_seeds(self, logits: torch.Tensor, y: torch.Tensor) -> Seeds:
        """Slopes of the loss at the targets, one for each sample."""
        return _gradients_at(logits, y[None])

    def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Negative log-likelihood, summed over samples, up to a constant."""
        return cross_entropy(logits, y, reduction="sum")

    def nll(
        self, predicted: Sequence[torch.Tensor], y: torch.Tensor, sigma_noise: torch.Tensor
    ) -> torch.Tensor:
        """Negative log-density of each target, `(B,)`, in nats.

        What is predicted are log-probabilities `(B, C)`, or of numbers means `(B, C)` and
        covariances `(B, C, C)` or variances `(B, C)`.
        """
        return nll_loss(predicted[0], y, reduction="none")

    def groups(self, y: torch.Tensor, share: float) -> torch.Tensor:
        """`(N,)` whole numbers, alike for targets of which a share is to be held out."""
        return y.long()

    def as_targets(self, y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Targets in the shape and type that the losses take, unchecked."""
        return y.long()

    def check_targets(self, y: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Targets as the losses take them, on the logits' device.

        A `ValueError` if their shape, type or range is wrong; a warning if the logits look like
        probabilities.
        """
        n_outputs = logits.shape[-1]
        if n_outputs < 2:
            raise ValueError(
                "classification needs at least two outputs, and the model has one: wrap it in a "
                "module that returns torch.stack([torch.zeros_like(f), f], -1).flatten(0, 1) for "
                "its logits f, whose softmax is the sigmoid of f"
            )
        if y.shape != logits.shape[:1] or y.is_floating_point() or y.dtype == torch.bool:
            of_shape = f"labels must be class indices of shape {tuple(logits.shape[:1])}"
            found = f"{of_shape}, not {tuple(y.shape)} of {y.dtype}"
            if y.shape == logits.shape and ((y == 0) | (y == 1)).all():
                refuse_multi_label(f"{found}: these look like multi-label ones")
            raise ValueError(found)
        if len(y) and (y.min() < 0 or y.max() >= n_outputs):
            raise ValueError(f"labels must be from 0 to {n_outputs - 1}, not {y.unique().tolist()}")
        if len(y) and (logits >= 0).all() and (logits.sum(-1) - 1).abs().max() < _ROUNDING:
            warn(
                "The model's outputs look like probabilities: return logits, and leave the softmax "
                "to the likelihood."
            )
        return self.as_targets(y.to(logits.device), logits.dtype)


class Regression:
    """Gaussian noise of variance 1, which the posterior scales by `sigma_noise`.

    It has the methods of `Classification`. Outputs and targets are `(B, C)`; targets of a single
    output may be `(B,)`.
    """

    name = "regression"
    is_gaussian = True

    def exact_seeds(self, logits: torch.Tensor) -> Seeds:
        n_samples, n_outputs = logits.shape
        identity = torch.eye(n_outputs).to(logits)
        vectors = identity[:, None].expand(n_outputs, n_samples, n_outputs)
        return Seeds(vectors, logits.new_ones(n_outputs, n_samples))

    def sampled_seeds(
        self, logits: torch.Tensor, num_samples: int, generator: torch.Generator
    ) -> Seeds:
        vectors = torch.randn(
            (num_samples, *logits.shape),
            generator=generator,
            device=logits.device,
            dtype=logits.dtype,
        )
        return Seeds(vectors, logits.new_ones(num_samples, len(logits)) / num_samples**0.5)

    def empirical_seeds(self, logits: torch.Tensor, y: torch.Tensor) -> Seeds:
        return Seeds((logits - y)[None], logits.new_ones(1, len(logits)))

    def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (logits - y).square().sum() / 2

    def nll(
        self, predicted: Sequence[torch.Tensor], y: torch.Tensor, sigma_noise: torch.Tensor
    ) -> torch.Tensor:
        """As of classes; a `torch.linalg.LinAlgError` if rounding has left no covariance."""
        f_mu, f_var = predicted
        f_var = torch.diag_embed(f_var) if f_var.ndim == f_mu.ndim else f_var
        V = f_var + sigma_noise.to(f_var).square() * torch.eye(f_mu.shape[1]).to(f_var)
        density = torch.distributions.MultivariateNormal(f_mu, V, validate_args=False)
        return -density.log_prob(y.to(f_mu))

    def groups(self, y: torch.Tensor, share: float) -> torch.Tensor:
        """Quantiles, as many as leave one of their targets and hold out another.

        Of several outputs, the mean rank counts.
        """
        ranks = y.reshape(len(y), -1).argsort(dim=0, stable=True).argsort(dim=0)
        rank = ranks.double().mean(1).argsort(stable=True).argsort()
        n_quantiles = max(1, int(len(y) * min(share, 1 - share)))
        return rank * n_quantiles // len(y)

    def as_targets(self, y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return (y[:, None] if y.ndim == 1 else y).to(dtype)

    def check_targets(self, y: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        targets = self.as_targets(y.to(logits.device), logits.dtype)
        if targets.shape != logits.shape:
            raise ValueError(f"targets must be {tuple(logits.shape)}, not {tuple(y.shape)}")
        if not torch.isfinite(targets).all():
            raise ValueError("non-finite targets: leave such examples out")
        return targets


class LanguageModeling(Classification):
    """Softmax over a vocabulary and cross-entropy, at every labelled token of a text.

    Logits are `(N, V)`, for the labelled tokens of a batch, one text after the other. Targets are
    `(B, T)` tokens, `IGNORED` wherever there is no label. To the host this is a classification.
    """

    def exact_seeds(self, logits: torch.Tensor) -> Seeds:
        raise NotImplementedError(
            f"The exact Fisher would take {logits.shape[-1] - 1} backward passes a token: keep "
            "stochastic=True, and raise num_samples for less noise."
        )

    def sampled_seeds(
        self, logits: torch.Tensor, num_samples: int, generator: torch.Generator
    ) -> Seeds:
        """Slopes of the loss at tokens drawn from the model, each given the text's own past.

        The slope in a token's logits averages 0 and is independent of every other token's. So the
        gradient G of a text's whole loss has `E[G Gᵀ] = Σ_t E[G_t G_tᵀ]`, the sum of its tokens'
        exact Fishers, for the price of one backward pass.
        """
        vectors = logits.softmax(-1).repeat(num_samples, 1, 1)
        _subtract_one_at(vectors, _drawn(vectors, generator))
        return Seeds(vectors, logits.new_full((num_samples, 1), num_samples**-0.5))

    def empirical_seeds(self, logits: torch.Tensor, y: torch.Tensor) -> Seeds:
        vectors = logits.softmax(-1)[None]
        _subtract_one_at(vectors, y[None])
        return Seeds(vectors, logits.new_ones(1, 1))

    def as_targets(self, y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return y[y != IGNORED].long()

    def check_targets(self, y: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """The labelled tokens, `(N,)`, on the logits' device; all must be of the vocabulary."""
        tokens = self.as_targets(y.to(logits.device), logits.dtype)
        vocabulary = logits.shape[-1]
        if tokens.min() < 0 or tokens.max() >= vocabulary:
            raise ValueError(
                f"labels must be {IGNORED} or tokens from 0 to {vocabulary - 1}, but range from "
                f"{tokens.min()} to {tokens.max()}"
            )
        return tokens


Likelihood = Classification | Regression

LIKELIHOODS: dict[str, Likelihood] = {
    "classification": Classification(),
    "regression": Regression(),
    "language_modeling": LanguageModeling(),
}


def refuse_multi_label(found: str) -> NoReturn:
    """Refuse several labels for each example, and say how a posterior of them is had.

    What was `found` begins the message of the `ValueError`.
    """
    raise ValueError(
        f"{found}. Several labels for each example have no likelihood of their own yet, and a "
        "softmax over them would be wrong. Each is a classification into two classes: wrap the "
        "model in a module that returns torch.stack([torch.zeros_like(f), f], -1).flatten(0, 1) "
        "for its logits f, and pass batches (X, labels.long().flatten()) to the likelihood "
        '"classification". (If each example has one label, pass labels.argmax(-1), and set '
        'config.problem_type to "single_label_classification".)'
    )


def _drawn(probabilities: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """`(S, N)` labels of `(S, N, V)` probabilities.

    One label a row: several at once would add up probabilities, and lose the improbable words.
    """
    y = torch.multinomial(probabilities.flatten(0, 1), 1, generator=generator)
    return y.reshape(probabilities.shape[:2])


def _subtract_one_at(vectors: torch.Tensor, y: torch.Tensor) -> None:
    """`vectors - onehot(y)` in place, of `(S, N, V)` vectors and `(S, N)` labels."""
    labels = y[..., None]
    vectors.scatter_add_(-1, labels, -torch.ones_like(labels, dtype=vectors.dtype))


def _gradients_at(logits: torch.Tensor, y: torch.Tensor) -> Seeds:
    """`p - onehot(y)` for `(S, B)` labels, as a vector of order one and a weight.

    The label has the largest entry, `-(1 - p_y)`. Computing it and its ratio to the other entries
    from the log-probabilities of the other classes avoids cancellation.
    """
    log_p = logits.log_softmax(-1)
    is_label = one_hot(y, logits.shape[-1]).bool()
    others = log_p.expand(is_label.shape).masked_fill(is_label, -torch.inf)
    return Seeds(others.softmax(-1) - is_label.to(logits.dtype), others.logsumexp(-1).exp())
