"""Scores of tokens and texts, against their definitions."""

import math

import pytest
import torch
from torch.testing import assert_close

from laplace_lora_ext.text.scores import Scores, score

LABELLED = torch.tensor(
    [
        [False, True, True],
        [True, False, False],
        [False, False, False],
    ]
)
TOKENS = torch.tensor([4, 0, 2])


def some_logits(n_draws=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(n_draws + 1, 3, 6, generator=generator).double()


def entropy(p):
    return -(p * p.log()).sum(-1)


def test_scores_are_what_they_are_defined_as():
    f, *drawn = some_logits()
    found = score(f, drawn, TOKENS, LABELLED)
    p = torch.stack(drawn).softmax(-1)
    places = torch.arange(len(TOKENS))
    of_label = p[:, places, TOKENS]
    mixture = p.mean(0)
    expected = Scores(
        log_prob=of_label.mean(0).log(),
        map_log_prob=f.log_softmax(-1)[places, TOKENS],
        map_entropy=entropy(f.softmax(-1)),
        total=entropy(mixture),
        aleatoric=entropy(p).mean(0),
        epistemic=entropy(mixture) - entropy(p).mean(0),
        log_prob_sd=of_label.log().std(0, correction=0),
    )
    # Of the three texts the first has two tokens, the second one and the last none.
    n_tokens = torch.tensor([2, 1, 1])
    nothing = torch.zeros(()).double()
    for name, numbers in expected._asdict().items():
        of_tokens = getattr(found.tokens, name)
        assert_close(of_tokens[LABELLED], numbers)
        assert (of_tokens[~LABELLED] == 0).all()
        sums = torch.stack([numbers[:2].sum(), numbers[2], nothing])
        assert_close(getattr(found.sums, name), sums)
        assert_close(getattr(found.means, name), sums / n_tokens)
    first = of_label[:, :2].prod(1).mean()
    second = of_label[:, 2].mean()
    assert_close(found.log_prob[0], first.log())
    assert_close(found.log_prob[1], second.log())
    assert found.log_prob[2] == 0


def test_without_draws_that_differ_nothing_is_epistemic():
    f = some_logits()[0]
    for drawn in ([], [f, f + 1]):
        found = score(f, drawn, TOKENS, LABELLED)
        assert_close(found.tokens.log_prob, found.tokens.map_log_prob)
        assert_close(found.tokens.total, found.tokens.map_entropy)
        assert found.tokens.epistemic.abs().max() < 1e-12
        assert found.tokens.log_prob_sd.abs().max() < 1e-12
        assert found.sums.log_prob[0].item() == pytest.approx(found.log_prob[0].item())


def test_an_impossible_token_adds_nothing_and_one_that_is_not_a_number_is_refused():
    f = some_logits()[0]
    f[:, 5] = -math.inf
    found = score(f, [f], TOKENS, LABELLED)
    assert_close(
        found.tokens.total[LABELLED],
        entropy(f[:, :5].softmax(-1)).clamp_min(0),
    )
    f[0, 1] = math.nan
    with pytest.raises(ValueError, match="non-finite"):
        score(f, [f], TOKENS, LABELLED)
