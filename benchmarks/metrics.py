"""Measures of class probabilities (texts, classes), and what tells shifted texts."""

from collections.abc import Mapping
from typing import Any

import torch
from scipy.stats import mannwhitneyu
from sklearn.covariance import LedoitWolf
from torch import Tensor

from laplace_lora_ext import Prediction
from laplace_lora_ext.metrics import quality

ACCURACY = 0.95  # that a queue promises of what it decides alone

# (texts,) by their names; the higher, the more doubtful.
Signs = Mapping[str, Tensor]


def signs_of(probabilities: Tensor) -> dict[str, Tensor]:
    """Compute what class probabilities say of how doubtful each text is."""
    return {
        "entropy": entropies(probabilities),
        "maximum": -probabilities.max(-1).values,
    }


def quality_with_aurc(probabilities: Tensor, labels: Tensor) -> dict[str, float]:
    """Measure quality, and the area under risk and coverage.

    Texts are ordered by their largest probability.
    """
    predicted = probabilities.argmax(-1)
    sign = signs_of(probabilities)["maximum"]
    figures = quality(probabilities, labels)
    figures["aurc"] = aurc(sign, wrong=predicted != labels)
    return figures


def queue(probabilities: Tensor, labels: Tensor) -> dict[str, float | None]:
    """Divide texts as a queue does, by their own probabilities.

    The share at the promise is what is decided alone; the gap is its realised accuracy
    less the promise, None where it is empty. The share at the realised accuracy is what
    could be decided alone if the labels were known.
    """
    divided = Prediction.of_draws(probabilities, probabilities[None]).review(ACCURACY)
    is_right = (divided.labels == labels).double()
    surest_first = is_right[divided.order.flip(0)]
    n_texts = torch.arange(1, len(labels) + 1)
    is_enough = surest_first.cumsum(0) / n_texts >= ACCURACY
    gap = None
    if divided.decided.any():
        gap = is_right[divided.decided].mean().item() - divided.promise
    return {
        "share_at_promise": divided.share,
        "gap": gap,
        "share_at_realised": (is_enough * n_texts).max().item() / len(labels),
    }


def shift_detection(test: Signs, shifted: Signs) -> dict[str, Any]:
    """Compute mean entropies in nats, and each sign's AUROC for shifted texts."""
    detected = {}
    for name, of_test in test.items():
        signs = torch.cat([of_test, shifted[name]])
        is_shifted = torch.arange(len(signs)) >= len(of_test)
        detected[name] = auroc(signs, is_shifted)
    return {
        "test_entropy": test["entropy"].mean().item(),
        "shifted_entropy": shifted["entropy"].mean().item(),
        "shift_auroc": detected["entropy"],
        "auroc": detected,
    }


def auroc(sign: Tensor, wrong: Tensor) -> float | None:
    """Compute how many pairs of a wrong and a right text a sign orders rightly."""
    n_wrong = int(wrong.sum())
    n_right = len(sign) - n_wrong
    if n_wrong == 0 or n_right == 0:
        return None
    # Mann and Whitney's U counts the pairs in the right order, ties as halves.
    of_wrong = sign[wrong].double()
    of_right = sign[~wrong].double()
    n_ordered = mannwhitneyu(of_wrong, of_right).statistic
    return float(n_ordered) / (n_wrong * n_right)


def aurc(sign: Tensor, wrong: Tensor) -> float:
    """Compute the mean share of wrong texts over all coverages.

    A coverage keeps the texts that are least doubtful.
    """
    # Equal signs keep the texts' order, so that figures can be repeated.
    order = sign.argsort(stable=True)
    n_wrong = wrong[order].double().cumsum(0)
    n_kept = torch.arange(1, len(sign) + 1)
    risks = n_wrong / n_kept
    return risks.mean().item()


def distances(training: Tensor, labels: Tensor, states: Tensor) -> Tensor:
    """Compute squared distances (texts,) from the nearest class.

    The covariance is that of all classes: a few texts of each could tell no other. It
    is shrunk as Ledoit and Wolf do: there may be fewer texts than numbers in a state.

    References
    ----------
    Lee et al., "A simple unified framework for detecting out-of-distribution samples
    and adversarial attacks", NeurIPS 2018.
    """
    # Some classes may have no training text, where few are asked for.
    classes = labels.unique()
    of_classes = [training[labels == each] for each in classes]
    means = torch.stack([of_class.mean(0) for of_class in of_classes])
    places = torch.searchsorted(classes, labels)
    apart = training - means[places]
    # Centred by the means of their classes already.
    covariance = LedoitWolf(assume_centered=True).fit(apart.numpy())
    precision = torch.from_numpy(covariance.precision_)
    squares = []
    for mean in means:
        of_texts = states - mean
        products = of_texts @ precision
        squares.append((products * of_texts).sum(-1))
    # A foreign text is far from all of them.
    return torch.stack(squares).amin(0)


def entropies(probabilities: Tensor) -> Tensor:
    """Compute the entropy (texts,) of each text's probabilities, in nats."""
    # `entr` has the limit where a probability is 0, whose logarithm is no number.
    terms = torch.special.entr(probabilities.double())
    return terms.sum(-1)
