"""Seeds against the Fisher's formula, also for very confident samples; losses and targets."""

import re
import warnings

import pytest
import torch

from laplace_lora_ext.likelihoods import LIKELIHOODS, Classification, Regression
from tests.support.dense import EXACT, softmax_fisher
from tests.support.models import pairs, plain_model, real_targets
from tests.support.posteriors import STRUCTURES, generator, make


def fisher(seeds) -> torch.Tensor:
    scaled = seeds.vectors.double() * seeds.weights.double()[..., None]
    return torch.einsum("sbi,sbj->bij", scaled, scaled)


@pytest.mark.parametrize("n_classes", [2, 3, 10])
@pytest.mark.parametrize("scale", [0, 1, 10, 20])
def test_exact_seeds_keep_float32_accuracy_on_confident_samples(n_classes, scale):
    logits = scale * torch.randn(500, n_classes, generator=torch.Generator().manual_seed(0))
    seeds = Classification().exact_seeds(logits)
    assert seeds.vectors.shape == (n_classes - 1, 500, n_classes)
    expected = softmax_fisher(logits)
    error = (fisher(seeds) - expected).abs().amax((1, 2)) / expected.abs().amax((1, 2))
    assert error.max() < 1e-5  # measured: 2e-6 at scale 10


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_sampled_seeds_are_unbiased(likelihood):
    logits = torch.tensor([[1.0, 0.0, -0.5]])
    estimate = fisher(LIKELIHOODS[likelihood].sampled_seeds(logits, 40_000, generator()))[0]
    expected = (
        softmax_fisher(logits)[0] if likelihood == "classification" else torch.eye(3).double()
    )
    torch.testing.assert_close(estimate, expected, rtol=0, atol=0.03)  # 4 standard errors


@pytest.mark.parametrize("shape", [(4, 2), (4, 1), (4,)])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_regression_loss_is_half_the_sum_of_squares(structure, shape):
    """One output takes targets with and without a column."""
    regressor = plain_model(n_outputs=shape[1] if shape[1:] else 1)
    X, y = pairs()[0][0], torch.randn(shape, generator=generator()).double()
    la = make(regressor, structure, "regression")
    la.fit([(X[:3], y[:3]), (X[3:], y[3:])])
    expected = (regressor(X).detach() - y.view(4, -1)).square().sum() / 2
    torch.testing.assert_close(la.loss, expected, **EXACT)


def changed(values: torch.Tensor, value: float) -> torch.Tensor:
    values = values.clone()
    values.view(-1)[2] = value
    return values


CLASSES, NUMBERS = torch.arange(4) % 3, real_targets(4, 2)
REFUSED = [
    *(("classification", changed(CLASSES, n), rf"0 to 2, not .*{n}") for n in (-1, -100, 3)),
    *(("classification", CLASSES.to(t), str(t)) for t in (torch.float32, torch.bool)),
    *(
        ("classification", torch.zeros(shape).long(), rf"of shape (4,), not {shape}")
        for shape in ((3,), (5,), (4, 1), (4, 3), (2, 2))
    ),
    *(
        ("regression", torch.zeros(shape), f"targets must be (4, 2), not {shape}")
        for shape in ((3, 2), (4,), (4, 1), (4, 2, 1))
    ),
    *(("regression", changed(NUMBERS, n), "non-finite targets") for n in (torch.nan, torch.inf)),
]


@pytest.mark.parametrize(("likelihood", "y", "message"), REFUSED)
def test_targets_that_do_not_fit_are_refused_with_their_batch(likelihood, y, message):
    gaussian = likelihood == "regression"
    la = make(plain_model(n_outputs=2 if gaussian else 3), likelihood=likelihood)
    X, good = pairs()[0][0], NUMBERS if gaussian else CLASSES
    message = message if ".*" in message else re.escape(message)
    with pytest.raises(ValueError, match=f"batch 1: .*{message}"):
        la.fit([(X, good), (X, y)])


def test_one_class_is_refused():
    la = make(plain_model(n_outputs=1))
    with pytest.raises(ValueError, match="at least two outputs"):
        la.fit([(pairs()[0][0], torch.zeros(4, dtype=torch.long))])


def test_probabilities_in_place_of_logits_are_warned_of():
    classification = LIKELIHOODS["classification"]
    logits = torch.tensor([[2.0, -1.0, 0.5], [0.0, 1.0, 0.0]])
    y = torch.tensor([0, 2])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        classification.check_targets(y, logits)
        classification.check_targets(y, logits.log_softmax(-1))
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.warns(UserWarning, match="look like probabilities: return logits"):
            classification.check_targets(y, logits.to(dtype).softmax(-1))


def test_sampled_slopes_of_tokens_are_unbiased():
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0]]).double()
    likelihood = LIKELIHOODS["language_modeling"]
    seeds = likelihood.sampled_seeds(logits.expand(3, 4), 20_000, generator())
    assert seeds.vectors.shape == (20_000, 3, 4)
    columns = seeds.dense()
    assert columns.sum(0).abs().max() / 20_000**0.5 < 0.02
    for token in range(3):
        found = torch.einsum("sv,sw->vw", columns[:, token], columns[:, token])
        torch.testing.assert_close(found, softmax_fisher(logits[0]), rtol=0, atol=0.01)
    across = torch.einsum("sv,sw->vw", columns[:, 0], columns[:, 1])
    assert across.abs().max() < 0.01  # two tokens of a text are drawn independently


def test_tokens_outside_the_vocabulary_are_refused():
    tokens, y = LIKELIHOODS["language_modeling"], torch.tensor([[-100, 3], [-100, 4]])
    assert tokens.check_targets(y, torch.zeros(2, 5)).tolist() == [3, 4]
    with pytest.raises(ValueError, match="tokens from 0 to 3, but range from 3 to 4"):
        tokens.check_targets(y, torch.zeros(2, 4))


@pytest.mark.parametrize(("n", "share", "n_groups"), [(20, 0.2, 4), (11, 0.7, 3), (4, 0.1, 1)])
def test_numbers_are_grouped_by_quantiles(n, share, n_groups):
    y = torch.randn(n, generator=torch.Generator().manual_seed(n))
    groups = Regression().groups(y, share)
    assert groups[y.argsort()].tolist() == [rank * n_groups // n for rank in range(n)]
    assert torch.equal(Regression().groups(y[:, None], share), groups)
    assert torch.equal(Regression().groups(torch.stack([y, 9 * y + 5], 1), share), groups)
