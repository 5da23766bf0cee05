"""Scores of tokens and texts, against their definitions."""

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from laplace_lora_ext.predictive.scores import Scores, _by_token, _of_table, _placed
from tests.support.posteriors import normal

# Of three texts the first has two labelled tokens, the second one and the last none.
LABELLED = torch.tensor(
    [[False, True, True], [True, False, False], [False, False, False]]
)
TOKENS = torch.tensor([4, 0, 2])
# So large that tokens differ in how probable they are.
F, *DRAWN = 3 * normal(5, 3, 6)


def score(f: Tensor, drawn: list[Tensor]):
    """Score texts by logits at all of their labelled tokens."""
    return _of_table(_placed(_by_token(f, drawn, TOKENS), LABELLED), LABELLED)


def entropy(p: Tensor) -> Tensor:
    return -(p * p.log()).sum(-1)


def of_tokens(p: Tensor) -> Tensor:
    """Take the probabilities of the three tokens, `(..., 3)`."""
    return p[..., torch.arange(3), TOKENS]


def test_scores_are_what_they_are_defined_as():
    found = score(F, DRAWN)
    of_map, p = F.softmax(-1), torch.stack(DRAWN).softmax(-1)
    total, aleatoric = entropy(p.mean(0)), entropy(p).mean(0)
    expected = Scores(
        log_prob=of_tokens(p.mean(0)).log(),
        map_log_prob=of_tokens(of_map).log(),
        map_entropy=entropy(of_map),
        total=total,
        aleatoric=aleatoric,
        epistemic=total - aleatoric,
    )
    for tokens, sums, (first, second, third) in zip(
        found.tokens, found.sums, expected, strict=True
    ):
        assert_close(tokens[LABELLED], torch.stack([first, second, third]))
        assert not tokens[~LABELLED].any()
        assert_close(sums, torch.stack([first + second, third, 0 * third]))
    # The tokens of a text share a draw, so that they are not independent.
    first, second, third = of_tokens(p).unbind(1)
    products = torch.stack([first * second, third, torch.ones_like(third)])
    assert_close(found.log_prob, products.mean(1).log())


# No draws, and draws that say the same as the model: a constant changes nothing.
@pytest.mark.parametrize("drawn", [[], [F + 1] * 7])
def test_without_draws_that_differ_scores_are_the_models(drawn):
    found = score(F, drawn)
    scores = found.tokens
    assert_close(scores.log_prob, scores.map_log_prob)
    assert_close(scores.total, scores.map_entropy)
    # Rounding leaves nothing below 0.
    assert 0 <= scores.epistemic.min() <= scores.epistemic.max() < 1e-12
    # Tokens are independent.
    assert_close(found.sums.log_prob, found.log_prob)


def test_an_impossible_token_adds_nothing_to_an_entropy_and_a_nan_is_refused():
    f = F.clone()
    f[:, 5] = -math.inf
    found = score(f, [f]).tokens.total
    assert_close(found[LABELLED], entropy(f[:, :5].softmax(-1)))
    f[0, 1] = math.nan
    with pytest.raises(ValueError, match="non-finite"):
        score(F, [f])
