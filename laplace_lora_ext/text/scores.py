"""Scores of texts: log-probabilities and entropies under drawn weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol, TypeGuard

import torch
from torch import Tensor

from laplace_lora_ext.likelihoods import Likelihood
from laplace_lora_ext.models.running import exclusive
from laplace_lora_ext.models.tokens_model import TokensModel
from laplace_lora_ext.models.vocabulary import Part, Remembered
from laplace_lora_ext.models.weights import Values, called_with
from laplace_lora_ext.passes.graph import check_logits
from laplace_lora_ext.predictive.distributions import Drawable, drawn_weights
from laplace_lora_ext.tuning.method import draw_seed


class Scores(NamedTuple):
    """Holds scores in nats of each token, or their sums or means over each text.

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

    log_prob: Tensor
    map_log_prob: Tensor
    map_entropy: Tensor
    total: Tensor
    aleatoric: Tensor
    epistemic: Tensor
    log_prob_sd: Tensor


class TextScores(NamedTuple):
    """Holds the scores of B texts.

    Attributes
    ----------
    tokens : Scores
        `(B, T)`, where `labels` has them; 0 where there is no label
    sums : Scores
        `(B,)`, over each text's labelled tokens; 0 for a text without any
    means : Scores
        `(B,)`, over the same tokens
    labelled : torch.Tensor
        `(B, T)` booleans
    log_prob : torch.Tensor
        `(B,)`, log-probability of all of a text's labels together under the mixture
        over draws. A draw is one model for the whole text, so this is not the sum over
        tokens
    """

    tokens: Scores
    sums: Scores
    means: Scores
    labelled: Tensor
    log_prob: Tensor


class Writer(Drawable, Protocol):
    """A posterior of a model that writes."""

    trained_likelihood: Likelihood

    @property
    def model(self) -> TokensModel: ...


def _writes(member: Drawable) -> TypeGuard[Writer]:
    return isinstance(member.model, TokensModel)


def writers_of(members: Sequence[Drawable]) -> list[Writer]:
    """Take posteriors of models that write; a `ValueError` for any other."""
    writers = [member for member in members if _writes(member)]
    if len(writers) < len(members):
        raise ValueError(
            'Texts are scored and written with the likelihood "language_modeling" '
            "alone: of classes, use la.predict(batch)."
        )
    return writers


def _tokens_of(
    member: Writer,
    batch: Any,
    f: Tensor,
    part: Part | None = None,
) -> Tensor:
    """Find the tokens `(N,)` that a batch's logits `(N, V)` predict.

    The batch may be a part of one.
    """
    check_logits(f)
    return member.trained_likelihood.check_targets(member.model.targets(batch, part), f)


@exclusive
@torch.inference_mode(False)
@torch.no_grad()
def score_texts(
    members: Sequence[Drawable],
    batch: Mapping[str, Any],
    n_samples: int = 10,
    generator: torch.Generator | None = None,
) -> TextScores:
    """Score how likely texts are, and how uncertain each of their tokens is.

    Members share the draws. Other parameters, result and errors are those of
    `LowRankKronLoRALaplace.score`.
    """
    writers = writers_of(members)
    return scores_under(writers, batch, draws_of(writers, n_samples, generator))


@exclusive
@torch.inference_mode(False)
@torch.no_grad()
def draw_logits(
    members: Sequence[Drawable],
    batch: Mapping[str, Any],
    n_samples: int = 10,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Compute logits `(S, N, V)` of S draws at the N labelled tokens.

    For measures of one's own.

    Without draws they are those of each member's trained model.
    """
    writers = writers_of(members)
    for writer in writers:
        writer.check_model()
    draws = list(draws_of(writers, n_samples, generator))
    if not draws:
        draws = [trained(writer) for writer in writers]
    return torch.stack([draw.logits(batch) for draw in draws])


class Draw(NamedTuple):
    """A posterior with drawn weights for its own: one model that reads texts."""

    posterior: Writer
    weights: Values

    def logits(self, batch: Mapping[str, Any], part: Part | None = None) -> Tensor:
        """Compute logits `(N, V)` at the labelled tokens, or at a part of them."""
        model = self.posterior.model
        with model.prepared():
            return called_with(
                model, self.posterior.blocks, self.weights, batch, part=part
            )


class Reader:
    """One model and one batch, read a part at a time.

    Where there are several parts, only the first one runs the layers before the output
    layer.
    """

    def __init__(
        self, draw: Draw, batch: Mapping[str, Any], parts: Sequence[Part]
    ) -> None:
        self._draw = draw
        self._batch = batch
        transformer = draw.posterior.model.transformer
        self._remembered = Remembered(transformer) if len(parts) > 1 else None

    def logits(self, part: Part) -> Tensor:
        """Compute logits `(N, V)` at the labelled tokens of a part."""
        remembered = self._remembered
        with nullcontext() if remembered is None else remembered.running():
            return self._draw.logits(self._batch, part)


def trained(posterior: Writer) -> Draw:
    """Take the trained model itself, as if its weights had been drawn."""
    weights: Values = []
    for block in posterior.blocks:
        weights.append(block.matrix(block.weight.detach()))
    return Draw(posterior, weights)


def drawn(
    la: Drawable,
    n_samples: int,
    seed: int,
) -> Iterator[Values]:
    """Draw LoRA weights, under any prior precision from the noise of the same seed."""
    la.check_model()
    generator = torch.Generator(la.model.device).manual_seed(seed)
    return (drawn_weights(la, generator) for _ in range(n_samples))


def draws_of(
    members: Sequence[Writer],
    n_samples: int,
    generator: torch.Generator | None,
) -> Iterator[Draw]:
    """Draw models, divided among the members, the first ones getting the rest."""
    if n_samples < 0:
        raise ValueError(f"n_samples must be 0 or more, not {n_samples}.")
    n_each, rest = divmod(n_samples, len(members))
    for place, member in enumerate(members):
        n_own = n_each + 1 if place < rest else n_each
        # A seed that nothing uses would move the generator.
        if n_own > 0:
            seed = draw_seed(generator)
            for weights in drawn(member, n_own, seed):
                yield Draw(member, weights)


def scores_under(
    members: Sequence[Writer],
    batch: Mapping[str, Any],
    draws: Iterable[Draw],
) -> TextScores:
    """Score texts under given draws, a few texts or a part of one at a time."""
    for member in members:
        member.check_model()
    batches = members[0].model.by_texts(batch)
    if len(batches) > 1:
        draws = list(draws)  # all batches are read with them
    return _of_batches([_of_batch(members, part, draws) for part in batches])


def _of_batch(
    members: Sequence[Writer],
    batch: Mapping[str, Any],
    draws: Iterable[Draw],
) -> TextScores:
    """Score the texts of a batch, a part of their tokens at a time."""
    first = members[0]
    parts = first.model.parts(batch)
    of_trained = [Reader(trained(member), batch, parts) for member in members]
    of_draws: Iterable[Reader] = (Reader(draw, batch, parts) for draw in draws)
    if len(parts) > 1:
        of_draws = list(of_draws)  # every part reads with all of them
    scores: list[TokenScores] = []
    for part in parts:
        f = of_trained[0].logits(part)
        tokens = _tokens_of(first, batch, f, part)
        if len(members) > 1:
            # Logits of the mixture of the trained models, but for a constant.
            others = [reader.logits(part) for reader in of_trained[1:]]
            log_p = [logits.log_softmax(-1) for logits in (f, *others)]
            f = torch.stack(log_p).logsumexp(0)
        drawn_logits = (reader.logits(part) for reader in of_draws)
        labelled = first.model.labelled(batch, part).to(f.device)
        scores.append(score_tokens(f, drawn_logits, tokens, labelled))
    return of_texts(scores)


class TokenScores(NamedTuple):
    """Holds what is known of N labelled tokens of texts, or of a part of them."""

    by_token: Scores  # (N,)
    by_draw: Tensor  # (S, N), log-probabilities of the labels under each draw
    labelled: Tensor  # (B, T) booleans, where the tokens are

    def placed(self) -> Scores:
        """Put the scores where the tokens are in the texts, `(B, T)`."""
        return Scores._make(
            _placed(numbers, self.labelled) for numbers in self.by_token
        )

    def whole(self) -> Tensor:
        """Compute the log-probability `(S, B)` of each text under each draw.

        A draw is one model of the whole text, so its tokens' probabilities are
        multiplied first.
        """
        return torch.stack(
            [_placed(of_draw, self.labelled).sum(1) for of_draw in self.by_draw]
        )


def score(
    f: Tensor,
    drawn: Iterable[Tensor],
    tokens: Tensor,
    labelled: Tensor,
) -> TextScores:
    """Score texts by all of their logits, as `score_tokens` does."""
    return of_texts([score_tokens(f, drawn, tokens, labelled)])


def score_tokens(
    f: Tensor,
    drawn: Iterable[Tensor],
    tokens: Tensor,
    labelled: Tensor,
) -> TokenScores:
    """Score tokens by the logits of draws, one draw at a time.

    Takes logits `(N, V)` of the trained model at the labelled tokens, one text after
    the other, those of each draw, the labels `(N,)`, and booleans `(B, T)`, N of which
    are true. Without draws the trained model itself is scored. The memory is that of a
    few draws' logits, however many draws there are.
    """
    of_map = _predicted(f, tokens)
    n_draws = 0
    p_sum = torch.zeros_like(f)
    entropy_sum = torch.zeros_like(of_map.entropy)
    log_probs = []
    for logits in drawn:
        of_draw = _predicted(logits, tokens)
        n_draws += 1
        p_sum += of_draw.p
        entropy_sum += of_draw.entropy
        log_probs.append(of_draw.log_prob)
    if n_draws == 0:
        # The trained model is the only one.
        n_draws = 1
        p_sum = of_map.p
        entropy_sum = of_map.entropy
        log_probs = [of_map.log_prob]
    # In place: `(N, V)` is the largest of all tensors here.
    p_mean = p_sum.div_(n_draws)
    total = torch.special.entr(p_mean).sum(-1)
    aleatoric = entropy_sum / n_draws
    if total.isnan().any() or of_map.entropy.isnan().any():
        raise ValueError("non-finite logits: check the prior precision and the weights")
    by_draw = torch.stack(log_probs)
    by_token = Scores(
        log_prob=by_draw.logsumexp(0) - math.log(n_draws),
        map_log_prob=of_map.log_prob,
        map_entropy=of_map.entropy,
        total=total,
        aleatoric=aleatoric,
        # Only rounding can make it negative.
        epistemic=(total - aleatoric).clamp_min(0),
        log_prob_sd=by_draw.std(0, correction=0),
    )
    return TokenScores(by_token, by_draw, labelled)


def of_texts(parts: Sequence[TokenScores]) -> TextScores:
    """Join scores of parts that share no token into those of texts."""
    tokens = parts[0].placed()
    whole = parts[0].whole()
    labelled = parts[0].labelled
    for part in parts[1:]:
        pairs = zip(tokens, part.placed(), strict=True)
        tokens = Scores._make(mine + its for mine, its in pairs)
        whole = whole + part.whole()
        labelled = labelled | part.labelled
    sums = Scores._make(numbers.sum(1) for numbers in tokens)
    # A text without a label has a mean of 0.
    n_tokens = labelled.sum(1).clamp_min(1)
    return TextScores(
        tokens=tokens,
        sums=sums,
        means=Scores._make(numbers / n_tokens for numbers in sums),
        labelled=labelled,
        log_prob=whole.logsumexp(0) - math.log(len(whole)),
    )


def _of_batches(batches: Sequence[TextScores]) -> TextScores:
    """Join the scores of batches, whose texts are equally long with their padding."""
    return TextScores(
        tokens=_joined([scores.tokens for scores in batches]),
        sums=_joined([scores.sums for scores in batches]),
        means=_joined([scores.means for scores in batches]),
        labelled=torch.cat([scores.labelled for scores in batches]),
        log_prob=torch.cat([scores.log_prob for scores in batches]),
    )


def _joined(batches: Sequence[Scores]) -> Scores:
    by_number = zip(*batches, strict=True)
    return Scores._make(torch.cat(of_batches) for of_batches in by_number)


def _placed(
    numbers: Tensor,
    labelled: Tensor,
) -> Tensor:
    """Put N labelled tokens' numbers in their places `(B, T)`, among zeros."""
    return numbers.new_zeros(labelled.shape).masked_scatter(labelled, numbers)


class _Predicted(NamedTuple):
    """Holds what one model predicts at N labelled tokens."""

    p: Tensor  # (N, V), probabilities
    log_prob: Tensor  # (N,), of the labels
    entropy: Tensor  # (N,)


def _predicted(
    logits: Tensor,
    tokens: Tensor,
) -> _Predicted:
    """Compute probabilities `(N, V)`, and what they say of the labels `(N,)`."""
    log_p = logits.log_softmax(-1)
    p = log_p.exp()
    log_prob = log_p.gather(-1, tokens[:, None]).squeeze(-1)
    return _Predicted(p, log_prob, torch.special.entr(p).sum(-1))
