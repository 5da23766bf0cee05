"""Scores texts: log-probabilities and entropies under a mixture over draws."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True)
class Scores:
    """Scores in nats of each token, or their sums or means over each text.

    Attributes
    ----------
    log_prob : torch.Tensor
        the label's log-probability under the posterior predictive
    map_log_prob : torch.Tensor
        the label's log-probability under the trained model itself
    map_entropy : torch.Tensor
        entropy of the trained model's distribution
    total : torch.Tensor
        entropy of the posterior predictive
    aleatoric : torch.Tensor
        mean entropy of the draws
    epistemic : torch.Tensor
        total less aleatoric: the information that a token would give about the weights
    log_prob_sd : torch.Tensor
        standard deviation of the label's log-probability over the draws
    """

    log_prob: torch.Tensor
    map_log_prob: torch.Tensor
    map_entropy: torch.Tensor
    total: torch.Tensor
    aleatoric: torch.Tensor
    epistemic: torch.Tensor
    log_prob_sd: torch.Tensor


@dataclass(frozen=True)
class TextScores:
    """Scores of B texts.

    Attributes
    ----------
    tokens : Scores
        `(B, T)`, where `labels` has them; 0 where there is no label
    sums, means : Scores
        `(B,)`, over each text's labelled tokens; 0 for a text without any
    labelled : torch.Tensor
        `(B, T)` booleans
    log_prob : torch.Tensor
        `(B,)`, log-probability of all of a text's labels together under the mixture over draws.
        A draw is one model for the whole text, so this is not the sum over tokens
    """

    tokens: Scores
    sums: Scores
    means: Scores
    labelled: torch.Tensor
    log_prob: torch.Tensor


def score(
    f: torch.Tensor, drawn: Iterable[torch.Tensor], tokens: torch.Tensor, labelled: torch.Tensor
) -> TextScores:
    """Score texts by the logits of draws, one draw at a time.

    The memory is that of a few draws' logits, however many draws there are.

    Parameters
    ----------
    f : torch.Tensor
        `(N, V)` logits of the trained model at the labelled tokens, one text after the other
    drawn : iterable of torch.Tensor
        logits of each draw; without any, the trained model itself is scored
    tokens : torch.Tensor
        `(N,)` the labels
    labelled : torch.Tensor
        `(B, T)` booleans, N of which are true

    Raises
    ------
    ValueError
        If a logit is not a number.
    """
    _, map_log_prob, map_entropy = _distribution(f, tokens)
    mixture, entropies = torch.zeros_like(f), torch.zeros_like(map_entropy)
    log_probs = []
    for logits in drawn:
        p, log_prob, entropy = _distribution(logits, tokens)
        mixture += p
        entropies += entropy
        log_probs.append(log_prob)
    if log_probs:
        of_draws = torch.stack(log_probs)
        n = len(of_draws)
        total, aleatoric = _entropy(mixture.div_(n)), entropies / n
    else:
        of_draws, n = map_log_prob[None], 1
        total = aleatoric = map_entropy
    by_token = Scores(
        of_draws.logsumexp(0) - math.log(n),
        map_log_prob,
        map_entropy,
        total,
        aleatoric,
        (total - aleatoric).clamp_min(0),  # only rounding can make it negative
        of_draws.std(0, correction=0),
    )
    if by_token.total.isnan().any() or by_token.map_entropy.isnan().any():
        raise ValueError("non-finite logits: check the prior precision and the weights")
    return _arranged(by_token, of_draws, labelled)


def _arranged(by_token: Scores, of_draws: torch.Tensor, labelled: torch.Tensor) -> TextScores:
    """From `(N,)` scores and `(S, N)` log-probabilities of the draws."""
    count = labelled.sum(1).clamp_min(1)

    def placed(numbers: torch.Tensor) -> torch.Tensor:
        result = numbers.new_zeros(labelled.shape)
        result[labelled] = numbers
        return result

    tokens = _each(by_token, placed)
    whole = torch.stack([placed(numbers).sum(1) for numbers in of_draws])
    return TextScores(
        tokens,
        _each(tokens, lambda numbers: numbers.sum(1)),
        _each(tokens, lambda numbers: numbers.sum(1) / count),
        labelled,
        whole.logsumexp(0) - math.log(len(whole)),
    )


def _each(scores: Scores, function: Callable[[torch.Tensor], torch.Tensor]) -> Scores:
    return Scores(*(function(getattr(scores, field.name)) for field in fields(Scores)))


def _distribution(
    logits: torch.Tensor, tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Probabilities `(N, V)`, log-probability of the labels and entropy, `(N,)`.

    Written with few passes over the vocabulary, which take time next to a small model.
    """
    p = logits.softmax(-1)
    highest, place = p.max(-1, keepdim=True)
    normalizer = logits.gather(-1, place) - highest.log()  # the logarithm of the sum
    log_prob = logits.gather(-1, tokens[:, None]) - normalizer
    # A logit of -inf has probability 0, and adds nothing.
    finite = logits.clamp_min(torch.finfo(logits.dtype).min)
    mean = torch.linalg.vecdot(p, finite)
    return p, log_prob.squeeze(-1), normalizer.squeeze(-1) - mean


def _entropy(p: torch.Tensor) -> torch.Tensor:
    return -torch.xlogy(p, p).sum(-1)
