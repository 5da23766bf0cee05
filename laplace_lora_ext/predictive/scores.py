"""Scores of texts: log-probabilities and entropies under drawn weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from laplace_lora_ext.models.running import exclusive, normal_tensors
from laplace_lora_ext.models.weights import Values, replace_weights
from laplace_lora_ext.passes.graph import check_logits
from laplace_lora_ext.predictive.moments import draw_seed
from laplace_lora_ext.predictive.posterior import Posterior, drawn_weights
from laplace_lora_ext.tasks.language import LastStates, Span, TokensModel

# A posterior, and weights for its model: drawn, or the trained ones.
_Draw = tuple[Posterior, Values]


class Scores(NamedTuple):
    """Holds scores in nats of each token, or their sums over each text.

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
    """

    log_prob: Tensor
    map_log_prob: Tensor
    map_entropy: Tensor
    total: Tensor
    aleatoric: Tensor
    epistemic: Tensor


class TextScores(NamedTuple):
    """Holds the scores of B texts.

    Attributes
    ----------
    tokens : Scores
        `(B, T)`, where `labels` has them; 0 where there is no label
    sums : Scores
        `(B,)`, over each text's labelled tokens; 0 for a text without any
    labelled : torch.Tensor
        `(B, T)` booleans
    log_prob : torch.Tensor
        `(B,)`, log-probability of all of a text's labels together under the mixture
        over draws. A draw is one model for the whole text, so this is not the sum over
        tokens
    """

    tokens: Scores
    sums: Scores
    labelled: Tensor
    log_prob: Tensor


@exclusive
@normal_tensors
def score_texts(
    members: Sequence[Posterior],
    batch: Mapping[str, Any],
    n_samples: int,
    generator: torch.Generator | None,
) -> TextScores:
    """Score how likely texts are, and how uncertain each of their tokens is.

    Members share the draws. Other parameters, result and errors are those of
    `Predictor.score`.
    """
    model, *_ = [_checked_model(member) for member in members]
    parts = model.parts(batch)
    of_trained = [_reader(_trained(member), batch, parts) for member in members]
    draws = _draws_of(members, n_samples, generator)
    of_draws = (_reader(draw, batch, parts) for draw in draws)
    if len(parts) > 1:
        of_draws = list(of_draws)  # every part reads with all of them
    tables: list[Tensor] = []
    for part in parts:
        # Logits of the mixture of the trained models, but for a constant.
        log_p = (logits(part).log_softmax(-1) for logits in of_trained)
        f = reduce(torch.logaddexp, log_p)
        check_logits(f)
        tokens = members[0].task.check_targets(model.targets(batch, part), f)
        by_token = _by_token(f, (logits(part) for logits in of_draws), tokens)
        tables.append(_placed(by_token, model.labelled(batch, part)))
    # No two parts share a token.
    table = torch.stack(tables).sum(0)
    return _of_table(table, model.labelled(batch).to(table.device))


@exclusive
@normal_tensors
def draw_logits(
    members: Sequence[Posterior],
    batch: Mapping[str, Any],
    n_samples: int,
    generator: torch.Generator | None,
) -> Tensor:
    """Compute logits `(S, N, V)` of S draws at the N labelled tokens.

    Without draws they are those of each member's trained model.
    """
    for member in members:
        _checked_model(member)
    draws = [*_draws_of(members, n_samples, generator)] or map(_trained, members)
    return torch.stack([_reader(draw, batch)(None) for draw in draws])


def _checked_model(member: Posterior) -> TokensModel:
    """Return a posterior's model, if it is the fitted one, and of texts."""
    if not isinstance(member.model, TokensModel):
        raise ValueError(
            'Texts are scored with the likelihood "language_modeling" alone: of '
            "classes, use la.predict(batch)."
        )
    member.check_model()
    return member.model


def _trained(member: Posterior) -> _Draw:
    """Return the trained weights in the form of a draw."""
    weights = [block.matrix(block.weight.detach()) for block in member.blocks]
    return member, weights


def _draws_of(
    members: Sequence[Posterior], n_samples: int, generator: torch.Generator | None
) -> Iterator[_Draw]:
    """Draw models, divided among the members, the first ones getting the rest."""
    for place, member in enumerate(members):
        n_own = len(range(place, n_samples, len(members)))
        # Under any prior precision from the same noise.
        noise = torch.Generator(member.model.device).manual_seed(draw_seed(generator))
        for weights in drawn_weights(member, n_own, noise):
            yield member, weights


def _reader(
    draw: _Draw, batch: Mapping[str, Any], parts: Sequence[Span] = ()
) -> Callable[[Span | None], Tensor]:
    """Return a function that computes logits `(N, V)` at labels, or at a part of them.

    Of several parts, only the first one runs the layers before the output layer.
    """
    member, weights = draw
    model = member.model
    assert isinstance(model, TokensModel)
    states = LastStates(model.transformer) if len(parts) > 1 else None

    def logits(part: Span | None) -> Tensor:
        with model.forward_passes(), replace_weights(member.blocks, weights):
            return model(batch, part=part, states=states)

    return logits


def _by_token(f: Tensor, drawn: Iterable[Tensor], tokens: Tensor) -> Tensor:
    """Make a table `(N, columns)`: `Scores`, then the log-probability by each draw.

    The memory is that of a few draws' logits, however many draws there are.
    """
    p_of_map, map_log_prob, map_entropy = _predicted(f, tokens)
    p_sum = torch.zeros_like(f)
    entropies: list[Tensor] = []
    log_probs: list[Tensor] = []
    for logits in drawn:
        p, log_prob, entropy = _predicted(logits, tokens)
        p_sum += p
        entropies.append(entropy)
        log_probs.append(log_prob)
    if not log_probs:  # the trained model is the only one
        p_sum, entropies, log_probs = p_of_map, [map_entropy], [map_log_prob]
    # In place: `(N, V)` is the largest of all tensors here.
    total = torch.special.entr(p_sum.div_(len(log_probs))).sum(-1)
    aleatoric = torch.stack(entropies).mean(0)
    if total.isnan().any():
        raise ValueError("non-finite logits: check the prior precision and the weights")
    by_draw = torch.stack(log_probs)
    scores = Scores(
        log_prob=by_draw.logsumexp(0) - math.log(len(by_draw)),
        map_log_prob=map_log_prob,
        map_entropy=map_entropy,
        total=total,
        aleatoric=aleatoric,
        # Only rounding can make it negative.
        epistemic=(total - aleatoric).clamp_min(0),
    )
    return torch.stack([*scores, *by_draw], dim=1)


def _placed(table: Tensor, labelled: Tensor) -> Tensor:
    """Put the rows of N labelled tokens in their places `(B, T)`, among zeros."""
    placed = table.new_zeros(*labelled.shape, table.shape[1])
    placed[labelled.to(table.device)] = table
    return placed


def _of_table(table: Tensor, labelled: Tensor) -> TextScores:
    """Make scores of a table `(B, T, columns)` of labelled tokens."""
    n_scores = len(Scores._fields)
    sums = table.sum(1)
    # A draw is one model of the whole text, so its tokens' probabilities are multiplied
    # first.
    by_draw = sums[:, n_scores:]
    return TextScores(
        tokens=Scores._make(table[..., :n_scores].unbind(-1)),
        sums=Scores._make(sums[:, :n_scores].unbind(-1)),
        labelled=labelled,
        log_prob=by_draw.logsumexp(1) - math.log(by_draw.shape[1]),
    )


def _predicted(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute probabilities `(N, V)`, labels' log-probabilities, and entropies."""
    log_p = logits.log_softmax(-1)
    p = log_p.exp()
    log_prob = log_p.gather(-1, tokens[:, None]).squeeze(-1)
    return p, log_prob, torch.special.entr(p).sum(-1)
