"""What decisions need: probabilities or numbers, and how much more data would help."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from laplace_lora_ext.likelihoods import IGNORED, TOKENS
from laplace_lora_ext.messages import check_name
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.running import exclusive
from laplace_lora_ext.predictive.amortized import Amortizable, amortized_moments
from laplace_lora_ext.predictive.data_sets import Sample, over_data_set, over_loader
from laplace_lora_ext.predictive.distributions import moments_for
from laplace_lora_ext.predictive.links import (
    DEFAULT_LINK,
    own_links,
    shared_noise,
    softmax_samples,
)
from laplace_lora_ext.predictive.moments import (
    AnyMoments,
    DifferenceMoments,
    parts_for,
    semidefinite,
)
from laplace_lora_ext.predictive.numbers import NumberPrediction
from laplace_lora_ext.processes.shards import Columns, Share, check_in_order, stacked

# And of moments, most of which are tuples.
_BATCHES = (Mapping, Tensor, np.ndarray, tuple, DifferenceMoments)


class Prediction(NamedTuple):
    """Predictions for B examples and C classes, with entropies in nats.

    Of K labels for each example, all of these are `(B, K)`: the probability of each
    label, whether it is above one half, and what the draws say of it.

    Attributes
    ----------
    probabilities : torch.Tensor
        `(B, C)`; of tokens `(B, T, C)`, nan at padding, and all else `(B, T)`, with the
        label -100 there
    labels : torch.Tensor
        `(B,)`, the most probable class
    total_entropy : torch.Tensor
        `(B,)`, entropy of the probabilities averaged over draws of the posterior
    aleatoric_entropy : torch.Tensor
        `(B,)`, mean entropy of the draws: doubt that all draws share
    epistemic_entropy : torch.Tensor
        `(B,)`, the difference: mutual information of label and weights, the doubt that
        more training data would reduce; 0 where the posterior has no variance
    label_variance : torch.Tensor
        `(B,)`, how much the probability of `labels` varies over the draws

    References
    ----------
    Depeweg et al., "Decomposition of uncertainty in Bayesian deep learning for
    efficient and risk-sensitive learning", ICML 2018.
    """

    probabilities: Tensor
    labels: Tensor
    total_entropy: Tensor
    aleatoric_entropy: Tensor
    epistemic_entropy: Tensor
    label_variance: Tensor

    @classmethod
    def of_draws(
        cls,
        probabilities: Tensor,
        drawn: Tensor,
    ) -> Prediction:
        """Sum up draws, beside the probabilities of a link.

        Parameters
        ----------
        probabilities : torch.Tensor
            `(..., C)`
        drawn : torch.Tensor
            `(S, ..., C)`, probabilities of each draw
        """
        labels = probabilities.argmax(-1)
        total = torch.special.entr(drawn.mean(0)).sum(-1)
        aleatoric = torch.special.entr(drawn).sum(-1).mean(0)
        chosen = labels[None, ..., None]
        of_label = drawn.take_along_dim(chosen, dim=-1).squeeze(-1)
        # Entropy is concave, so only rounding can make the difference negative.
        epistemic = (total - aleatoric).clamp_min(0)
        variance = of_label.var(0, correction=0)
        # Between draws that are all the same there is nothing but rounding.
        vary = (drawn != drawn[:1]).any(-1).any(0)
        epistemic, variance = epistemic * vary, variance * vary
        return cls(probabilities, labels, total, aleatoric, epistemic, variance)


@exclusive
def predict(
    members: Sequence[Amortizable],
    x: Any,
    link_approx: str = DEFAULT_LINK,
    n_samples: int = 1000,
    generator: torch.Generator | None = None,
    *,
    pred_type: str = "glm",
    collate_fn: Callable[[Any], Any] | None = None,
    batch_size: int = 32,
    progress_bar: bool = False,
) -> Prediction | NumberPrediction:
    """Predict class probabilities or numbers, and what else a decision needs.

    Predictions are the mean of the members', which are alike in what they predict.
    Other parameters, result and errors are those of `LoRALaplace.predict`.
    """
    first = members[0]

    def examples(evaluate: Callable[[Any], Columns]) -> Columns:
        """Evaluate a function of inputs on a batch, a loader or a data set."""
        join = _padded if first.likelihood == TOKENS else stacked
        return _over_examples(
            first.model,
            x,
            evaluate,
            collate_fn,
            batch_size,
            progress_bar,
            Sample(join=join),
        )

    if first.predicted_likelihood.is_gaussian:
        of_numbers = partial(predict_numbers, members, pred_type=pred_type)
        return NumberPrediction(*examples(of_numbers))
    links = own_links(n_samples, generator)
    check_name("link_approx", link_approx, links)
    link = links[link_approx]
    state = None if generator is None else generator.get_state()

    def classes(batch: Any) -> Prediction:
        batch = first.model.unlabelled(batch)
        if generator is not None and state is not None:
            generator.set_state(state)  # the same draws for every batch
        by_link, draws = [], []
        for moments in _moments_of_members(members, batch, link_approx, pred_type):
            with torch.autocast(first.model.device.type, enabled=False):
                by_link.append(link(moments).exp())
                f_mu, f_var = moments
                noise = shared_noise(f_mu, n_samples, generator)
                draws.append(softmax_samples(f_mu, f_var, noise).exp())
        # A mixture's probabilities are the mean of its members', and its draws are all
        # theirs.
        probabilities = torch.stack(by_link).mean(0)
        prediction = Prediction.of_draws(probabilities, torch.cat(draws))
        shown = first.predicted_likelihood.shown(probabilities)
        rows = prediction._replace(probabilities=shown)
        return Prediction(*(first.model.in_places(column, batch) for column in rows))

    return Prediction(*examples(classes))


@exclusive
def predict_numbers(
    members: Sequence[Amortizable], x: Any, pred_type: str = "glm"
) -> NumberPrediction:
    """Predict numbers of a batch, by one posterior or a mixture of several."""
    # Numbers have no link: "probit" stands for one that reads all moments.
    moments = _moments_of_members(members, x, "probit", pred_type)
    return NumberPrediction.of(list(moments), [_noise(member) for member in members])


def _over_examples(
    model: LogitsModel,
    x: Any,
    evaluate: Callable[[Any], Columns],
    collate_fn: Callable[[Any], Any] | None,
    batch_size: int,
    progress_bar: bool,
    sample: Sample,
) -> Columns:
    """Evaluate a function of inputs on a batch, a loader's batches or a data set."""

    def of_batch(batch: Any) -> Columns:
        return evaluate(model.inputs(batch))

    if collate_fn is None and isinstance(x, _BATCHES):
        return evaluate(x)
    if _is_data_set(x) or collate_fn is not None:
        return over_data_set(
            x,
            of_batch,
            collate_fn=collate_fn,
            batch_size=batch_size,
            description="[Predictions]",
            progress_bar=progress_bar,
            sample=sample,
        )
    # Dealt examples come back in the data's order.
    is_dealt = Share(x).is_dealt
    if not is_dealt:
        check_in_order(x)
    return over_loader(
        x,
        of_batch,
        description="[Predictions]",
        progress_bar=progress_bar,
        alone=not is_dealt,  # a rank's own batches are no other rank's business
        sample=sample,
    )


def _padded(parts: Sequence[Columns]) -> Columns:
    """Join batches' columns `(B, T, ...)`, shorter texts padded by nan or -100."""
    length = max(part[0].shape[1] for part in parts)
    alike: list[Columns] = []
    for part in parts:
        columns = []
        for column in part:
            n_examples, n_tokens, *others = column.shape
            shape = (n_examples, length - n_tokens, *others)
            empty = torch.nan if column.is_floating_point() else IGNORED
            padding = column.new_full(shape, empty)
            columns.append(torch.cat([column, padding], dim=1))
        alike.append(tuple(columns))
    return stacked(alike)


def _noise(member: Amortizable) -> Tensor | float:
    """Return the standard deviation of the noise of what a posterior predicts."""
    if member.predicted_likelihood is not member.trained_likelihood:
        return 0.0  # rewards are read off preferences: nobody measures them
    return member.sigma_noise


def _is_data_set(x: Any) -> bool:
    """Tell a data set from a loader; a list is one of batches."""
    is_indexed = hasattr(x, "__getitem__") and hasattr(x, "__len__")
    return is_indexed and not isinstance(x, list)


@exclusive
def predict_proba(
    members: Sequence[Amortizable],
    x: Any,
    link_approx: str = DEFAULT_LINK,
    *,
    pred_type: str = "glm",
    collate_fn: Callable[[Any], Any] | None = None,
    batch_size: int = 32,
    progress_bar: bool = False,
) -> np.ndarray:
    """Predict class probabilities `(B, C)`, the same in every call.

    For scikit-learn's tools.

    Other parameters and errors are those of `LoRALaplace.predict_proba`.
    """
    first = members[0]
    if first.predicted_likelihood.is_gaussian:
        raise ValueError(
            f"{first.likelihood} predicts numbers, which have no probabilities: use "
            "la.predict(x)."
        )
    # Draws serve entropies too, which nobody asks for here: without "mc", one is
    # enough.
    n_samples = 1000 if link_approx == "mc" else 1
    prediction = predict(
        members,
        x,
        link_approx,
        n_samples=n_samples,
        generator=torch.Generator(),
        pred_type=pred_type,
        collate_fn=collate_fn,
        batch_size=batch_size,
        progress_bar=progress_bar,
    )
    assert isinstance(prediction, Prediction)
    return prediction.probabilities.detach().cpu().numpy()


def _moments_of_members(
    members: Sequence[Amortizable],
    x: Any,
    link_approx: str,
    pred_type: str,
) -> Iterator[AnyMoments]:
    """Compute the moments of each member, as a link needs them."""
    check_name("pred_type", pred_type, ["glm", "amortized"])
    for member, part in zip(members, parts_for(members, x), strict=True):
        if pred_type == "amortized":
            part = amortized_moments(member, part)
            # Whose density needs a covariance.
            if member.predicted_likelihood.is_gaussian:
                part = part._replace(f_var=semidefinite(part.f_var))
        yield moments_for(member, part, link_approx)
