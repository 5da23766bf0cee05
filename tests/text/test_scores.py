"""Scores of tokens and texts, against their definitions."""

import math

import pytest
import torch
from torch.testing import assert_close

from laplace_lora_ext.text.scores import Scores, TextScores, score

# Of three texts the first has two labelled tokens, the second one and the last none.
LABELLED = torch.tensor(
    [
        [False, True, True],
        [True, False, False],
        [False, False, False],
    ]
)
TOKENS = torch.tensor([4, 0, 2])
N_TOKENS = torch.tensor([2, 1, 1])  # the last text's sum is 0, and so is its mean


def logits_of(n: int) -> torch.Tensor:
    """Draw logits of `n` models for the tokens, `(n, 3, 6)`."""
    generator = torch.Generator().manual_seed(0)
    return 3 * torch.randn(n, 3, 6, generator=generator).double()


def entropy(p: torch.Tensor) -> torch.Tensor:
    return -(p * p.log()).sum(-1)


@pytest.fixture
def found() -> TextScores:
    """Scores under four draws."""
    f, *drawn = logits_of(5)
    return score(f, drawn, TOKENS, LABELLED)


@pytest.fixture
def expected() -> Scores:
    """The same of tokens, by their definitions."""
    f, *drawn = logits_of(5)
    p_of_map = f.softmax(-1)
    p = torch.stack(drawn).softmax(-1)
    mixture = p.mean(0)
    of_label = p[:, range(3), TOKENS]
    aleatoric = entropy(p).mean(0)
    return Scores(
        log_prob=of_label.mean(0).log(),
        map_log_prob=p_of_map[range(3), TOKENS].log(),
        map_entropy=entropy(p_of_map),
        total=entropy(mixture),
        aleatoric=aleatoric,
        epistemic=entropy(mixture) - aleatoric,
        log_prob_sd=of_label.log().std(0, correction=0),
    )


@pytest.mark.parametrize("name", Scores._fields)
def test_scores_of_tokens_are_what_they_are_defined_as(name, found, expected):
    of_tokens = getattr(found.tokens, name)
    assert_close(of_tokens[LABELLED], getattr(expected, name))
    assert (of_tokens[~LABELLED] == 0).all()


@pytest.mark.parametrize("name", Scores._fields)
def test_scores_of_texts_are_sums_and_means_over_their_tokens(name, found, expected):
    first, second, third = getattr(expected, name)
    sums = torch.stack([first + second, third, torch.zeros_like(third)])
    assert_close(getattr(found.sums, name), sums)
    assert_close(getattr(found.means, name), sums / N_TOKENS)


def test_a_texts_probability_is_the_mean_of_products(found):
    _, *drawn = logits_of(5)
    p = torch.stack(drawn).softmax(-1)
    first, second, third = p[:, range(3), TOKENS].unbind(1)
    # The tokens of a text share a draw, so that they are not independent.
    of_first_text = (first * second).mean()
    of_second_text = third.mean()
    assert_close(found.log_prob[0], of_first_text.log())
    assert_close(found.log_prob[1], of_second_text.log())
    assert found.log_prob[2] == 0


@pytest.mark.parametrize("n_draws", [0, 2])
def test_without_draws_that_differ_nothing_is_epistemic(n_draws):
    (f,) = logits_of(1)
    # A constant does not change what logits say.
    drawn = [f, f + 1][:n_draws]
    found = score(f, drawn, TOKENS, LABELLED)
    assert_close(found.tokens.log_prob, found.tokens.map_log_prob)
    assert_close(found.tokens.total, found.tokens.map_entropy)
    assert found.tokens.epistemic.abs().max() < 1e-12
    assert found.tokens.log_prob_sd.abs().max() < 1e-12
    of_first_text = found.log_prob[0].item()
    assert found.sums.log_prob[0].item() == pytest.approx(of_first_text)


def test_an_impossible_token_adds_nothing_to_an_entropy():
    (f,) = logits_of(1)
    f[:, 5] = -math.inf
    found = score(f, [f], TOKENS, LABELLED)
    p_of_others = f[:, :5].softmax(-1)
    assert_close(found.tokens.total[LABELLED], entropy(p_of_others))


def test_a_logit_that_is_not_a_number_is_refused():
    (f,) = logits_of(1)
    f[0, 1] = math.nan
    with pytest.raises(ValueError, match="non-finite"):
        score(f, [f], TOKENS, LABELLED)
