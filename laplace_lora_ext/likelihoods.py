"""Likelihoods: what each back-propagates from logits, its loss, and its targets."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    logsigmoid,
    nll_loss,
    one_hot,
)

from laplace_lora_ext.draws import Draws
from laplace_lora_ext.messages import warn

_ROUNDING = 1e-2  # of probabilities in half precision
_MANY = 16  # numbers that are all from 0 to 1 are hardly logits
_DRAWN_AT_ONCE = 64  # rows of logits, of which draws take several copies in float64

IGNORED = -100
"""transformers' label for a token that does not count."""

ClassCounts = Counter[tuple[int, int]]
"""How many labels there are, by what they are labels of (a column of the targets), and
by their class.
"""


class Seeds(NamedTuple):
    """Vectors to back-propagate, and their weights.

    Sample b has the Fisher `Σ_s (w_sb v_sb) (w_sb v_sb)ᵀ`.

    The vectors have entries of order one, so that none underflows in a half-precision
    backward pass. The weights, which can be tiny for a confident sample, scale the
    gradients afterwards.

    Attributes
    ----------
    vectors : torch.Tensor
        `(S, B, C)`, v
    weights : torch.Tensor
        `(S, B)`, w, or `(S, 1)` for all samples: those of a text are then
        back-propagated together
    """

    vectors: Tensor
    weights: Tensor

    def dense(self) -> Tensor:
        """Multiply to the columns `w v` themselves, `(S, B, C)`."""
        return self.vectors * self.weights[..., None]


class _AsItIs:
    """Predicts a number for each class or output, as the logits stand."""

    def class_logits(self, logits: Tensor) -> Tensor:
        """Make logits whose softmax over the last dimension gives probabilities."""
        return logits

    def class_covariance(self, f_var: Tensor) -> Tensor:
        """Make covariances of `class_logits` of those `(..., C, C)` of logits."""
        return f_var

    def shown(self, probabilities: Tensor) -> Tensor:
        """Take what a user reads of the probabilities of classes."""
        return probabilities

    def owners(self, y: Tensor) -> Tensor:
        """Number the example `(N,)` of each row of logits, given targets."""
        return torch.arange(len(y))

    def times_root(self, logits: Tensor, z: Tensor) -> Tensor:
        """Multiply vectors `(..., B, C)` by a root S of each Fisher, `H = S Sᵀ`."""
        raise NotImplementedError

    def columns_by_size(self, logits: Tensor) -> Tensor:
        """List the columns of the root, `(B, K)`, from the largest one on."""
        raise NotImplementedError

    def n_passes(self, logits: Tensor) -> float:
        """Count the backward passes that the exact Fisher takes."""
        return self.columns_by_size(logits).shape[1]

    def exact_seeds(self, logits: Tensor) -> Seeds:
        """Compute seeds of the exact (type-2) Fisher: the columns of its root."""
        _, n_outputs = logits.shape
        return self._sums_of_columns(logits, n_outputs, torch.ones_like(logits))

    def sign_seeds(self, logits: Tensor, num_samples: int, draws: Draws) -> Seeds:
        """Compute sums of the root's columns with random signs, each in one of them.

        With signs z, `E[S z zᵀ Sᵀ] = S Sᵀ = H`. A sum sees all of its columns, where a
        drawn label hardly ever sees those of a confident sample. As many sums as there
        are columns are exact.
        """
        (signs,) = draws.signs(1, logits.shape[-1])
        return self._sums_of_columns(logits, num_samples, signs.to(logits))

    def _sums_of_columns(self, logits: Tensor, n_sums: int, signs: Tensor) -> Seeds:
        """Divide the root's columns, with signs `(B, C)`, among so many sums.

        Two columns of one sum are what makes it differ from the exact Fisher. So the
        largest ones go into different sums, dealt to and fro.
        """
        columns = self.columns_by_size(logits)
        n_samples, n_columns = columns.shape
        n_sums = min(n_sums, n_columns)
        turns = torch.arange(n_columns, device=logits.device) % (2 * n_sums)
        sums = turns.minimum(2 * n_sums - 1 - turns)
        samples = torch.arange(n_samples, device=logits.device)[:, None]
        z = logits.new_zeros(n_sums, *logits.shape)
        z[sums, samples, columns] = signs.gather(1, columns)
        return _scaled(self.times_root(logits, z))


class Classification(_AsItIs):
    """Softmax and cross-entropy. Logits are `(B, C)`, targets `(B,)` class indices.

    Attributes
    ----------
    name : str
        the host's
    is_gaussian : bool
        whether predictions are mean and covariance of the outputs, rather than
        probabilities
    sees_differences : bool
        whether nothing but differences of an example's logits counts
    has_host_links : bool
        whether the host's own links and samples are right
    """

    name = "classification"
    is_gaussian = False
    sees_differences = True
    has_host_links = True

    def times_root(self, logits: Tensor, z: Tensor) -> Tensor:
        """Multiply vectors by a root with C - 1 columns; entry m of each is ignored.

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
        """Compute slopes of the loss at targets that are drawn from the model."""
        y = _drawn(logits, draws.uniform(num_samples))
        vectors, weights = _gradients_at(logits, y)
        return Seeds(vectors, weights / num_samples**0.5)

    def empirical_seeds(
        self,
        logits: Tensor,
        y: Tensor,
    ) -> Seeds:
        """Compute slopes of the loss at the targets, one for each sample."""
        return _gradients_at(logits, y[None])

    def loss(
        self,
        logits: Tensor,
        y: Tensor,
    ) -> Tensor:
        """Sum the negative log-likelihood over samples, up to a constant."""
        return cross_entropy(logits, y, reduction="sum")

    def nll(
        self,
        predicted: Sequence[Tensor],
        y: Tensor,
        sigma_noise: Tensor,
    ) -> Tensor:
        """Compute the negative log-density of each target, `(B,)`, in nats.

        What is predicted are log-probabilities `(B, C)`, of labels `(B, C, 2)`, or of
        numbers means `(B, C)` and covariances `(B, C, C)` or variances `(B, C)`.
        """
        return nll_loss(predicted[0], y, reduction="none")

    def groups(
        self,
        y: Tensor,
        share: float,
    ) -> Tensor:
        """Number the group of each target, `(N,)`; each gives a share to hold out."""
        return y.long()

    def class_counts(self, y: Tensor) -> ClassCounts:
        """Count the classes of targets: what a guess knows that reads no example."""
        return _counts_of_column(0, y.long())

    def as_targets(
        self,
        y: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        """Bring targets into the shape and type that the losses take, unchecked."""
        return y.long()

    def check_targets(
        self,
        y: Tensor,
        logits: Tensor,
    ) -> Tensor:
        """Check targets, and bring them into the losses' form, on the logits' device.

        A `ValueError` if their shape, type or range is wrong; a warning if the logits
        look like probabilities.
        """
        n_outputs = logits.shape[-1]
        if n_outputs < 2:
            raise ValueError(
                "classification needs at least two outputs, and the model has one, "
                f'whose sigmoid is a probability: use the likelihood "{MULTI_LABEL}", '
                'or "regression" for numbers'
            )
        are_indices = not y.is_floating_point() and y.dtype != torch.bool
        if y.shape != logits.shape[:1] or not are_indices:
            of_shape = (
                f"labels must be class indices of shape {tuple(logits.shape[:1])}"
            )
            found = f"{of_shape}, not {tuple(y.shape)} of {y.dtype}"
            are_zero_or_one = (y == 0) | (y == 1)
            if y.shape == logits.shape and are_zero_or_one.all():
                raise ValueError(
                    f"{found}: several labels for each example are for the likelihood "
                    f'"{MULTI_LABEL}"; if each has one of them, pass labels.argmax(-1)'
                )
            if y.is_floating_point():
                found += ': numbers are for the likelihood "regression"'
            raise ValueError(found)
        is_no_class = (y < 0) | (y >= n_outputs)
        if is_no_class.any():
            raise ValueError(
                f"labels must be from 0 to {n_outputs - 1}, not {y.unique().tolist()}"
            )
        if _look_like_probabilities(logits):
            _warn_of_probabilities("softmax")
        return self.as_targets(y.to(logits.device), logits.dtype)


class Regression(_AsItIs):
    """Gaussian noise of variance 1, which the posterior scales by `sigma_noise`.

    It has the methods of `Classification`. Outputs and targets are `(B, C)`; targets of
    a single output may be `(B,)`.
    """

    name = "regression"
    is_gaussian = True
    sees_differences = False
    has_host_links = True

    def times_root(self, logits: Tensor, z: Tensor) -> Tensor:
        return z

    def columns_by_size(self, logits: Tensor) -> Tensor:
        _, n_outputs = logits.shape
        alike = torch.arange(n_outputs, device=logits.device)
        return alike.expand(logits.shape)

    def label_seeds(self, logits: Tensor, num_samples: int, draws: Draws) -> Seeds:
        vectors = draws.normal(num_samples, logits.shape[-1]).to(logits)
        weights = logits.new_ones(num_samples, len(logits))
        return Seeds(vectors, weights / num_samples**0.5)

    def empirical_seeds(
        self,
        logits: Tensor,
        y: Tensor,
    ) -> Seeds:
        return Seeds((logits - y)[None], logits.new_ones(1, len(logits)))

    def loss(
        self,
        logits: Tensor,
        y: Tensor,
    ) -> Tensor:
        return (logits - y).square().sum() / 2

    def nll(
        self,
        predicted: Sequence[Tensor],
        y: Tensor,
        sigma_noise: Tensor,
    ) -> Tensor:
        """Compute negative log-densities of targets.

        A `torch.linalg.LinAlgError` if rounding left no covariance.
        """
        f_mu, f_var = predicted
        if f_var.ndim == f_mu.ndim:
            f_var = torch.diag_embed(f_var)
        identity = torch.eye(f_mu.shape[-1]).to(f_var)
        of_targets = f_var + sigma_noise.to(f_var).square() * identity
        return -gaussian_log_density(f_mu, of_targets, y.to(f_mu))

    def groups(
        self,
        y: Tensor,
        share: float,
    ) -> Tensor:
        """Number targets by quantiles, each with some to keep and some to hold out.

        Of several outputs, the mean rank counts.
        """
        ranks = _ranks(y.reshape(len(y), -1))
        rank = _ranks(ranks.double().mean(1))
        n_of_the_fewer = int(len(y) * min(share, 1 - share))
        n_quantiles = max(1, n_of_the_fewer)
        return rank * n_quantiles // len(y)

    def class_counts(self, y: Tensor) -> ClassCounts:
        return ClassCounts()

    def as_targets(
        self,
        y: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        if y.ndim == 1:
            y = y[:, None]
        return y.to(dtype)

    def check_targets(
        self,
        y: Tensor,
        logits: Tensor,
    ) -> Tensor:
        targets = self.as_targets(y.to(logits.device), logits.dtype)
        if targets.shape != logits.shape:
            found = f"targets must be {tuple(logits.shape)}, not {tuple(y.shape)}"
            are_classes = y.ndim == 1 and not y.is_floating_point()
            if are_classes:
                found += ': class indices are for the likelihood "classification"'
            raise ValueError(found)
        if not torch.isfinite(targets).all():
            raise ValueError("non-finite targets: leave such examples out")
        return targets


class Preferences(Classification):
    """Tells which of two texts is preferred, as reward models learn it."""

    def class_counts(self, y: Tensor) -> ClassCounts:
        """Count half a pair for each order: which comes first means nothing."""
        half = len(y) / 2
        return ClassCounts({(0, 0): half, (0, 1): half})


class MultiLabel(Classification):
    """A sigmoid and binary cross-entropy for each of K labels: independent Bernoullis.

    Logits are `(B, K)`, targets numbers 0 and 1 of the same shape; of a single label
    they may be `(B,)`. Each label is a classification into two classes, "not" and
    "yes", with the logits 0 and f. To the host this is a classification.
    """

    sees_differences = False
    has_host_links = False

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
        return logits.abs().argsort(
            dim=-1, stable=True
        )  # by p (1 - p), the largest first

    def label_seeds(self, logits: Tensor, num_samples: int, draws: Draws) -> Seeds:
        """Compute slopes of the loss at drawn targets, of all labels at once.

        The slope in a label's logit averages 0 and is independent of every other
        label's.
        """
        numbers = draws.uniform(num_samples, logits.shape[-1]).to(logits)
        y = (numbers < logits.sigmoid()).to(logits)
        vectors, weights = self._slopes(logits, y)
        return Seeds(vectors, weights / num_samples**0.5)

    def empirical_seeds(
        self,
        logits: Tensor,
        y: Tensor,
    ) -> Seeds:
        return self._slopes(logits, y[None])

    def _slopes(
        self,
        logits: Tensor,
        y: Tensor,
    ) -> Seeds:
        """Compute `p - y` for `(S, B, K)` targets."""
        # 1 - p cancels where p is near 1: the sigmoid of -f does not.
        of_not = logits.sigmoid()
        of_yes = -(-logits).sigmoid()
        return _scaled(torch.where(y > 0, of_yes, of_not))

    def loss(
        self,
        logits: Tensor,
        y: Tensor,
    ) -> Tensor:
        return binary_cross_entropy_with_logits(logits, y, reduction="sum")

    def nll(
        self,
        predicted: Sequence[Tensor],
        y: Tensor,
        sigma_noise: Tensor,
    ) -> Tensor:
        """Sum an example's losses, given log-probabilities `(B, K, 2)`."""
        (log_p,) = predicted
        labels = y.long()[..., None]
        of_labels = log_p.gather(-1, labels)[..., 0]
        return -of_labels.sum(-1)

    def groups(
        self,
        y: Tensor,
        share: float,
    ) -> Tensor:
        """Number examples by their rarest label, to divide them evenly.

        Those without any label are a group, too.
        """
        has = self.as_targets(y, torch.float64) > 0
        n_labels = has.shape[1]
        counts = has.sum(0).expand_as(has)
        # Labels that an example lacks count as more frequent than any can be.
        of_own = counts.masked_fill(~has, len(y) + 1)
        return torch.where(has.any(1), of_own.argmin(1), n_labels)

    def class_counts(self, y: Tensor) -> ClassCounts:
        """Count "not" and "yes" of each label by itself."""
        counts = ClassCounts()
        labels = self.as_targets(y, torch.float64).long()
        for column, of_label in enumerate(labels.T):
            counts += _counts_of_column(column, of_label)
        return counts

    def as_targets(
        self,
        y: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        if y.ndim == 1:
            y = y[:, None]
        return y.to(dtype)

    def check_targets(
        self,
        y: Tensor,
        logits: Tensor,
    ) -> Tensor:
        """Return targets `(B, K)`, which must be 0 or 1, on the logits' device.

        A warning if the logits look like probabilities.
        """
        targets = self.as_targets(y.to(logits.device), logits.dtype)
        if targets.shape != logits.shape:
            found = (
                f"labels must be {tuple(logits.shape)}, 0 or 1 each, not "
                f"{tuple(y.shape)}"
            )
            are_classes = y.ndim == 1 and not y.is_floating_point()
            if are_classes:
                found += ': class indices are for the likelihood "classification"'
            raise ValueError(found)
        are_zero_or_one = (targets == 0) | (targets == 1)
        if not are_zero_or_one.all():
            low, high = targets.aminmax()
            raise ValueError(
                f"labels must be 0 or 1, but range from {low:.4g} to {high:.4g}: "
                'classes are for the likelihood "classification", and numbers for '
                '"regression"'
            )
        are_probabilities = (logits >= 0) & (logits <= 1)
        if logits.numel() >= _MANY and are_probabilities.all():
            _warn_of_probabilities("sigmoid")
        return targets


class TokenClassification(Classification):
    """Softmax and cross-entropy at every labelled token of a text.

    Logits are `(N, C)`, for the labelled tokens of a batch, one text after the other.
    Targets are `(B, T)` classes, `IGNORED` wherever there is no label. To the host this
    is a classification.

    """

    def n_passes(self, logits: Tensor) -> float:
        """Say that they are many: each token of a text has passes of its own."""
        return math.inf

    def label_seeds(self, logits: Tensor, num_samples: int, draws: Draws) -> Seeds:
        """Compute slopes of the loss at drawn labels, given the text itself.

        The slope in a token's logits averages 0 and is independent of every other
        token's. So the gradient G of a text's whole loss has `E[G Gᵀ] = Σ_t E[G_t
        G_tᵀ]`, the sum of its tokens' exact Fishers, for the price of one backward
        pass.
        """
        y = _drawn(logits, draws.uniform(num_samples))
        vectors = logits.softmax(-1) - one_hot(y, logits.shape[-1])
        weights = logits.new_full((num_samples, 1), num_samples**-0.5)
        return Seeds(vectors, weights)

    def sign_seeds(self, logits: Tensor, num_samples: int, draws: Draws) -> Seeds:
        """Compute sums of all columns of a text's tokens, with random signs.

        The signs of two tokens are independent. So the gradient G of a text's whole
        loss has `E[G Gᵀ] = Σ_t E[G_t G_tᵀ]`, as with drawn labels. What two tokens add
        to it has the largest part of the noise, and is independent in every sum.
        """
        signs = draws.signs(num_samples, logits.shape[-1]).to(logits)
        vectors, weights = _scaled(self.times_root(logits, signs), over=(1, 2))
        return Seeds(vectors, weights / num_samples**0.5)

    def groups(
        self,
        y: Tensor,
        share: float,
    ) -> Tensor:
        """Make one group of all texts, which have many labels each."""
        return torch.zeros(len(y), dtype=torch.long)

    def owners(self, y: Tensor) -> Tensor:
        return (y != IGNORED).nonzero()[:, 0]

    def class_counts(self, y: Tensor) -> ClassCounts:
        """Count the classes of all labelled tokens, wherever they are."""
        return super().class_counts(y[y != IGNORED])

    def as_targets(
        self,
        y: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        return y[y != IGNORED].long()

    def check_targets(
        self,
        y: Tensor,
        logits: Tensor,
    ) -> Tensor:
        """Return checked labels `(N,)` of labelled tokens, on the logits' device."""
        labels = self.as_targets(y.to(logits.device), logits.dtype)
        _check_labels_of_tokens(labels, logits.shape[-1])
        return labels


class LanguageModeling(TokenClassification):
    """Predicts the next token of a text, at every position that counts."""

    def class_counts(self, y: Tensor) -> ClassCounts:
        """Count nothing: the words of a few texts are too few to guess by."""
        return ClassCounts()


class LabelsOfTokens(NamedTuple):
    """Labels of N tokens: those of the data, and S others that a model draws for each.

    Attributes
    ----------
    own : torch.Tensor
        `(N,)`, those of the data
    numbers : torch.Tensor
        `(S, N)`, from 0 to 1, which choose among a model's labels: whichever tokens are
        looked at together, the same labels are drawn
    """

    own: Tensor
    numbers: Tensor

    def of(self, rows: Tensor) -> LabelsOfTokens:
        """Select the labels of some tokens, `(N,)` booleans or an index."""
        return LabelsOfTokens(self.own[rows], self.numbers[:, rows])

    def under(self, logits: Tensor) -> Tensor:
        """Return the labels `(N, 1 + S)`, their own first, given logits `(N, V)`."""
        own = self.own.to(logits.device)
        _check_labels_of_tokens(own, logits.shape[-1])
        if not len(self.numbers):
            return own[:, None]
        drawn = _drawn(logits.detach(), self.numbers)
        return torch.cat([own[None], drawn]).T


Likelihood = Classification | Regression

MULTI_LABEL = "multi_label_classification"

TOKENS = "token_classification"

LIKELIHOODS: dict[str, Likelihood] = {
    "classification": Classification(),
    "regression": Regression(),
    "reward_modeling": Preferences(),
    MULTI_LABEL: MultiLabel(),
    TOKENS: TokenClassification(),
    "language_modeling": LanguageModeling(),
}


def gaussian_log_density(mean: Tensor, covariance: Tensor, y: Tensor) -> Tensor:
    """Compute the log-density `(...)` of targets `(..., C)`, in nats.

    A `torch.linalg.LinAlgError` if a matrix `(..., C, C)` is no covariance.
    """
    density = torch.distributions.MultivariateNormal(
        mean, covariance, validate_args=False
    )
    return density.log_prob(y)


def _counts_of_column(column: int, labels: Tensor) -> ClassCounts:
    """Count the classes `(N,)` of one column of targets."""
    return ClassCounts((column, label) for label in labels.tolist())


def _warn_of_probabilities(link: str) -> None:
    warn(
        "The model's outputs look like probabilities: return logits, and leave the "
        f"{link} to the likelihood."
    )


def _scaled(columns: Tensor, over: tuple[int, ...] = (2,)) -> Seeds:
    """Scale columns `(S, B, C)` to a largest entry of 1 over some dimensions."""
    # Where a sample is certain, nothing is divided by 0.
    smallest = torch.finfo(columns.dtype).tiny
    weights = columns.abs().amax(over, keepdim=True).clamp_min(smallest)
    return Seeds(columns / weights, weights[..., 0])


def _is_top(logits: Tensor) -> Tensor:
    """Mark each sample's most probable class, `(B, C)`: one of those that are alike."""
    return one_hot(logits.argmax(-1), logits.shape[-1]).bool()


def _drawn(
    logits: Tensor,
    numbers: Tensor,
) -> Tensor:
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


def _check_labels_of_tokens(labels: Tensor, n_outputs: int) -> None:
    """Refuse labels that are no classes of a model with so many outputs."""
    if n_outputs < 2:
        raise ValueError(
            "labels of tokens need at least two classes, and the model has one "
            "output: return [0, f] for a single logit f"
        )
    if labels.min() < 0 or labels.max() >= n_outputs:
        raise ValueError(
            f"labels must be {IGNORED} or from 0 to {n_outputs - 1}, but range "
            f"from {labels.min()} to {labels.max()}"
        )


def _gradients_at(
    logits: Tensor,
    y: Tensor,
) -> Seeds:
    """Compute `p - onehot(y)` for `(S, B)` labels, as vectors and weights.

    A vector's entries are of order one, however small the slope.

    The label has the largest entry, `-(1 - p_y)`. Computing it and its ratio to the
    other entries from the log-probabilities of the other classes avoids cancellation.
    """
    log_p = logits.log_softmax(-1)
    is_label = one_hot(y, logits.shape[-1]).bool()
    others = log_p.expand(is_label.shape).masked_fill(is_label, -torch.inf)
    vectors = others.softmax(-1) - is_label.to(logits.dtype)
    p_of_others = others.logsumexp(-1).exp()  # 1 - p_y
    return Seeds(vectors, p_of_others)


def _look_like_probabilities(logits: Tensor) -> bool:
    if not len(logits) or (logits < 0).any():
        return False
    deviations = (logits.sum(-1) - 1).abs()
    return bool(deviations.max() < _ROUNDING)


def _ranks(y: Tensor) -> Tensor:
    """Rank each of `(N, ...)` numbers among those of its column, from 0."""
    return y.argsort(dim=0, stable=True).argsort(dim=0)
