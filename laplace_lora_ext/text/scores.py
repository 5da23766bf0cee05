"""Scores of texts: log-probabilities and entropies under a mixture over draws of the weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from laplace_lora_ext.models.locks import exclusive
from laplace_lora_ext.models.posterior import Posterior
from laplace_lora_ext.models.weights import Values, called_with
from laplace_lora_ext.predictive.distributions import drawn_weights
from laplace_lora_ext.tuning.method import draw_seed


class Scores(NamedTuple):
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


class TextScores(NamedTuple):
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


@exclusive
@torch.inference_mode(False)
@torch.no_grad()
def score_texts(
    la: Any,
    batch: Mapping[str, Any],
    n_samples: int = 10,
    generator: torch.Generator | None = None,
) -> TextScores:
    """How likely texts are, and how uncertain the model is of each of their tokens.

    Parameters
    ----------
    batch : Mapping
        texts with labels, as for `fit`
    n_samples : int, default=10
        models with weights drawn from the posterior, S, of which `sample_adapters` writes the
        like; 0 scores the trained model itself. A mixture divides them among its members, the first
        ones getting the rest. Scoring takes `1 + S` forward passes, and the memory of a few logits
        `(N, V)` whatever S is
    generator : torch.Generator, optional
        for the draws: with the same state, another batch gets the same draws

    Returns
    -------
    TextScores

    Raises
    ------
    ValueError
        If the batch has no labelled token or does not suit the model, or a logit is not finite.
    RuntimeError
        If the model is not the fitted one.
    """
    return scores_under(la, batch, draws_of(la, n_samples, generator))


@exclusive
@torch.inference_mode(False)
@torch.no_grad()
def draw_logits(
    la: Any,
    batch: Mapping[str, Any],
    n_samples: int = 10,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Logits `(S, N, V)` of S draws at the N labelled tokens, for measures that `score` lacks.

    Parameters are those of `score`. Without draws they are the trained model's, or each member's.
    """
    logits = list(_of_draws(batch, draws_of(la, n_samples, generator)))
    members = getattr(la, "members", [la])
    return torch.stack(logits or [member.tokens(batch)[0] for member in members])


def drawn(la: Posterior, n_samples: int, seed: int) -> Iterator[Values]:
    """LoRA weights of each draw, under any prior precision from the noise of the same seed."""
    la.check_model()
    generator = torch.Generator(la.model.device).manual_seed(seed)
    return (drawn_weights(la, generator) for _ in range(n_samples))


def draws_of(
    la: Any, n_samples: int, generator: torch.Generator | None
) -> Iterator[tuple[Any, Values]]:
    """Draws, each with the posterior that it is from; of a mixture, divided among the members."""
    if n_samples < 0:
        raise ValueError(f"n_samples must be 0 or more, not {n_samples}.")
    members = getattr(la, "members", [la])
    for place, member in enumerate(members):
        own = (n_samples + len(members) - 1 - place) // len(members)
        if own:
            yield from ((member, values) for values in drawn(member, own, draw_seed(generator)))


def scores_under(
    la: Any, batch: Mapping[str, Any], draws: Iterable[tuple[Any, Values]]
) -> TextScores:
    """Scores of texts under given draws."""
    found = [member.tokens(batch) for member in getattr(la, "members", [la])]
    f, tokens = found[0]
    if len(found) > 1:  # logits of the mixture of the trained models
        f = torch.stack([f.log_softmax(-1) for f, _ in found]).logsumexp(0)

    return score(f, _of_draws(batch, draws), tokens, la.model.labelled(batch).to(f.device))


def _of_draws(
    batch: Mapping[str, Any], draws: Iterable[tuple[Any, Values]]
) -> Iterator[torch.Tensor]:
    """Logits `(N, V)` of each draw at the labelled tokens."""
    for member, values in draws:
        with member.model.prepared():
            yield called_with(member.model, member.blocks, values, batch)


def score(
    f: torch.Tensor, drawn: Iterable[torch.Tensor], tokens: torch.Tensor, labelled: torch.Tensor
) -> TextScores:
    """Score texts by the logits of draws, one draw at a time.

    Takes logits `(N, V)` of the trained model at the labelled tokens, one text after the other,
    those of each draw, the labels `(N,)`, and booleans `(B, T)`, N of which are true. Without draws
    the trained model itself is scored. The memory is that of a few draws' logits, however many
    draws there are.
    """
    own_p, map_log_prob, map_entropy = _distribution(f, tokens)
    mixture, entropies, log_probs = torch.zeros_like(f), torch.zeros_like(map_entropy), []
    for logits in drawn:
        p, log_prob, entropy = _distribution(logits, tokens)
        mixture += p
        entropies += entropy
        log_probs.append(log_prob)
    if not log_probs:
        mixture, entropies, log_probs = own_p, map_entropy, [map_log_prob]
    n, of_draws = len(log_probs), torch.stack(log_probs)
    total, aleatoric = torch.special.entr(mixture.div_(n)).sum(-1), entropies / n
    if total.isnan().any() or map_entropy.isnan().any():
        raise ValueError("non-finite logits: check the prior precision and the weights")
    by_token = Scores(
        of_draws.logsumexp(0) - math.log(n),
        map_log_prob,
        map_entropy,
        total,
        aleatoric,
        (total - aleatoric).clamp_min(0),  # only rounding can make it negative
        of_draws.std(0, correction=0),
    )

    def placed(numbers: torch.Tensor) -> torch.Tensor:
        return numbers.new_zeros(labelled.shape).masked_scatter(labelled, numbers)

    placed_scores = Scores._make(map(placed, by_token))
    sums = Scores._make(numbers.sum(1) for numbers in placed_scores)
    n_tokens = labelled.sum(1).clamp_min(1)
    whole = torch.stack([placed(numbers).sum(1) for numbers in of_draws])
    return TextScores(
        placed_scores,
        sums,
        Scores._make(numbers / n_tokens for numbers in sums),
        labelled,
        whole.logsumexp(0) - math.log(n),
    )


def _distribution(
    logits: torch.Tensor, tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Probabilities `(N, V)`, log-probability of the labels and entropy, `(N,)`."""
    log_p = logits.log_softmax(-1)
    p = log_p.exp()
    log_prob = log_p.gather(-1, tokens[:, None]).squeeze(-1)
    return p, log_prob, torch.special.entr(p).sum(-1)
