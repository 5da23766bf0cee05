"""What a model was trained to predict: the base of all tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from laplace_lora_ext.models.logits_model import LogitsModel

ClassCounts = Counter[tuple[int, int]]
"""How many labels there are, by what they are labels of (a column of the targets), and
by their class.
"""


Outputs = Callable[[Any, Tensor | None], Tensor]
"""Computes what is back-propagated from, `(N, C)`: of a batch, or of one of its
examples, whose rows `(N,)` booleans mark. A `LogitsModel` is one."""


@dataclass(frozen=True)
class Draws:
    """Draws numbers for rows of logits, by a generator of each example's own.

    Attributes
    ----------
    seed : int
    examples : torch.Tensor
        `(N,)`, the number that each row's example has in the whole data. The rows of an
        example, such as a text's tokens, follow each other
    """

    seed: int
    examples: Tensor

    def uniform(self, n_draws: int, *shape: int) -> Tensor:
        """Draw numbers from 0 to 1, `(S, N, *shape)`."""
        examples, n_rows = self.examples.unique_consecutive(return_counts=True)
        by_row: list[Tensor] = []
        for example, n_own in zip(examples.tolist(), n_rows.tolist(), strict=True):
            generator = np.random.default_rng([self.seed, example])
            numbers = generator.random((n_own, n_draws, *shape))
            by_row.append(torch.from_numpy(numbers))
        return torch.cat(by_row).transpose(0, 1)

    def signs(self, n_draws: int, *shape: int) -> Tensor:
        """Draw -1 or 1, each as often, `(S, N, *shape)`."""
        return 2 * self.uniform(n_draws, *shape).round() - 1


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


def scaled_seeds(columns: Tensor, over: tuple[int, ...] = (2,)) -> Seeds:
    """Scale columns `(S, B, C)` to a largest entry of 1 over some dimensions."""
    # Where a sample is certain, nothing is divided by 0.
    smallest = torch.finfo(columns.dtype).tiny
    weights = columns.abs().amax(over, keepdim=True).clamp_min(smallest)
    return Seeds(columns / weights, weights[..., 0])


class Task:
    """What a model was trained to predict, with all that depends on it.

    Logits are `(N, C)`, one row for each example unless `owners` says otherwise.

    Attributes
    ----------
    name : str
        the likelihood's
    name_for_host : str
        of the host's likelihood by which it predicts
    adapter : type of LogitsModel
        makes logits of the model's output
    has_noise : bool
        whether outputs are means of numbers with Gaussian noise, `sigma_noise`, rather
        than logits of classes
    sees_differences : bool
        whether nothing but differences of an example's logits counts
    has_tokens : bool
        whether examples are texts, with logits for each of their labelled tokens
    writes : bool
        whether these are the words of a vocabulary
    structures : tuple of str
        the values of `hessian_structure` that it works with
    backend_defaults : mapping
        options of a curvature, where the user names no others
    """

    name: str
    name_for_host = "classification"
    adapter: type[LogitsModel] = LogitsModel
    has_noise = False
    sees_differences = False
    has_tokens = False
    writes = False
    structures: tuple[str, ...] = ("lowrank_kron", "kron", "diag", "full")
    backend_defaults: Mapping[str, Any] = {}

    # --- predictions ------------------------------------------------------------------

    @property
    def predicted(self) -> Task:
        """Return the task whose predictions these are: of most tasks, itself."""
        return self

    def class_logits(self, logits: Tensor) -> Tensor:
        """Make logits whose softmax over the last dimension gives probabilities."""
        return logits

    def class_covariance(self, f_var: Tensor) -> Tensor:
        """Make covariances of `class_logits` of those `(..., C, C)` of logits."""
        return f_var

    def shown(self, probabilities: Tensor) -> Tensor:
        """Take what a user reads of the probabilities of classes."""
        return probabilities

    # --- the Fisher -------------------------------------------------------------------

    def times_root(self, logits: Tensor, z: Tensor) -> Tensor:
        """Multiply vectors `(..., B, C)` by a root S of each Fisher, `H = S Sᵀ`."""
        raise NotImplementedError

    def columns_by_size(self, logits: Tensor) -> Tensor:
        """List the columns of the root, `(B, K)`, from the largest one on."""
        raise NotImplementedError

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
        return scaled_seeds(self.times_root(logits, z))

    def label_seeds(self, logits: Tensor, num_samples: int, draws: Draws) -> Seeds:
        """Compute slopes of the loss at targets that are drawn from the model."""
        raise NotImplementedError("Numbers have no labels to draw: leave out draws.")

    def outputs(
        self, model: LogitsModel, y: Tensor, numbers: Callable[[], Tensor]
    ) -> Outputs:
        """Choose what the passes of a batch with labels end in: the logits.

        `numbers` draws numbers `(S, N)` that choose among the labels of N tokens.
        """
        return model

    def seeds_and_loss(
        self, outputs: Tensor, y: Tensor, seeds: Callable[[Tensor], Seeds]
    ) -> tuple[Seeds, Tensor]:
        """Choose what to back-propagate for the Fisher, and sum the loss, `()`.

        `seeds` takes logits. Labels that don't fit are refused.
        """
        targets = self.check_targets(y, outputs)
        return seeds(outputs), self.loss(outputs, targets)

    # --- targets ----------------------------------------------------------------------

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Sum the negative log-likelihood over samples, up to a constant."""
        return self.nll(self.class_logits(logits).log_softmax(-1), y).sum()

    def nll(self, log_p: Tensor, y: Tensor) -> Tensor:
        """Compute each example's negative log-likelihood, `(B,)`, in nats.

        Given log-probabilities `(B, C)`, of labels `(B, C, 2)`.
        """
        raise NotImplementedError

    def groups(self, y: Tensor) -> Tensor:
        """Number the class of each target, `(N,)`; each gives a share to hold out."""
        raise NotImplementedError

    def class_counts(self, y: Tensor) -> ClassCounts:
        """Count the classes of targets: what a guess knows that reads no example."""
        return ClassCounts()

    def check_targets(self, y: Tensor, logits: Tensor) -> Tensor:
        """Check targets, and bring them into the losses' form, on the logits' device.

        A `ValueError` if their shape, type or range is wrong; a warning if the logits
        look like probabilities.
        """
        raise NotImplementedError

    # --- refused ----------------------------------------------------------------------

    def check_linearised(self) -> None:
        """Refuse predictions of the linearised model where outputs are too many."""
        if self.writes:
            raise NotImplementedError(
                "Moments of logits would need Jacobians of the whole vocabulary at "
                "every token: use la.score(batch), or la.draw_logits(batch)."
            )

    def check_classes(self) -> None:
        """Refuse probabilities where no classes are predicted."""
        if self.predicted.has_noise:
            raise ValueError(
                f"{self.name} predicts numbers, which have no probabilities: use "
                "la.predict(x)."
            )
