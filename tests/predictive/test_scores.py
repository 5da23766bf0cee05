"""Scores of tokens and texts, against their definitions."""

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from laplace_lora_ext.predictive.scores import (
    Scores,
    TextScores,
    _by_token,
    _of_table,
    _placed,
)
from tests.support.posteriors import normal

# Of three texts the first has two labelled tokens, the second one and the last none.
LABELLED = torch.tensor(
    [[False, True, True], [True, False, False], [False, False, False]]
)
TOKENS = torch.tensor([4, 0, 2])


def logits_of(n: int) -> Tensor:
    """Draw logits of `n` models for the tokens, `(n, 3, 6)`."""
    # So large that tokens differ in how probable they are.
    return 3 * normal(n, 3, 6)


def score(f: Tensor, drawn: list[Tensor], tokens: Tensor, labelled: Tensor):
    """Score texts by logits at all of their labelled tokens."""
    return _of_table(_placed(_by_token(f, drawn, tokens), labelled), labelled)


def entropy(p: Tensor) -> Tensor:
    information = -p.log()
    return (p * information).sum(-1)


def of_tokens(p: Tensor) -> Tensor:
    """Take the probabilities of the three tokens, `(..., 3)`."""
    places = torch.arange(3)
    return p[..., places, TOKENS]


@pytest.fixture
def f() -> Tensor:
    """The logits of the model itself."""
    return logits_of(1)[0]


@pytest.fixture
def found() -> TextScores:
    """Scores under four draws."""
    f, *drawn = logits_of(5)
    return score(f, drawn, TOKENS, LABELLED)


@pytest.fixture
def p_of_draws() -> Tensor:
    """Probabilities under the four draws, `(4, 3, 6)`."""
    _, *drawn = logits_of(5)
    return torch.stack(drawn).softmax(-1)


@pytest.fixture
def expected(p_of_draws: Tensor) -> Scores:
    """The same of tokens, by their definitions."""
    f, *_ = logits_of(5)
    p_of_map = f.softmax(-1)
    of_label_by_map = of_tokens(p_of_map)
    mixture = p_of_draws.mean(0)
    total = entropy(mixture)
    aleatoric = entropy(p_of_draws).mean(0)
    of_label = of_tokens(p_of_draws)
    mean_of_label = of_label.mean(0)
    return Scores(
        log_prob=mean_of_label.log(),
        map_log_prob=of_label_by_map.log(),
        map_entropy=entropy(p_of_map),
        total=total,
        aleatoric=aleatoric,
        epistemic=total - aleatoric,
    )


@pytest.mark.parametrize("name", Scores._fields)
def test_scores_are_what_they_are_defined_as(name, found, expected):
    of_tokens = getattr(found.tokens, name)
    assert_close(of_tokens[LABELLED], getattr(expected, name))
    assert of_tokens[~LABELLED].count_nonzero() == 0
    first, second, third = getattr(expected, name)
    sums = torch.stack([first + second, third, torch.zeros_like(third)])
    assert_close(getattr(found.sums, name), sums)


def test_a_texts_probability_is_the_mean_of_products(found, p_of_draws):
    first, second, third = of_tokens(p_of_draws).unbind(1)
    # The tokens of a text share a draw, so that they are not independent.
    of_first_text = (first * second).mean()
    of_second_text = third.mean()
    without_tokens = torch.ones_like(of_second_text)
    probabilities = [of_first_text, of_second_text, without_tokens]
    expected = torch.stack(probabilities).log()
    assert_close(found.log_prob, expected)


@pytest.fixture(params=["no draws", "two draws"])
def without_doubt(request: pytest.FixtureRequest, f: Tensor) -> TextScores:
    """Scores under draws that say the same as the model, or none."""
    drawn = []
    if request.param == "two draws":
        # A constant does not change what logits say.
        drawn = [f, f + 1]
    return score(f, drawn, TOKENS, LABELLED)


def test_without_draws_that_differ_scores_are_the_models(without_doubt):
    scores = without_doubt.tokens
    assert_close(scores.log_prob, scores.map_log_prob)
    assert_close(scores.total, scores.map_entropy)
    nothing = torch.zeros_like(scores.epistemic)
    assert_close(scores.epistemic, nothing, rtol=0, atol=1e-12)
    # Tokens are independent.
    assert_close(without_doubt.sums.log_prob[0], without_doubt.log_prob[0])


def test_an_impossible_token_adds_nothing_to_an_entropy(f):
    impossible = 5
    f[:, impossible] = -math.inf
    scores = score(f, [f], TOKENS, LABELLED)
    found = scores.tokens.total[LABELLED]
    of_others = f[:, :impossible]
    p = of_others.softmax(-1)
    assert_close(found, entropy(p))


def test_a_logit_that_is_not_a_number_is_refused(f):
    f[0, 1] = math.nan
    with pytest.raises(ValueError, match="non-finite"):
        score(f, [f], TOKENS, LABELLED)
