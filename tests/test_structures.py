"""The host's structures over LoRA weights."""

import laplace.curvature as host_backends
import pytest
import torch

from tests.support.dense import evidence, jacobians
from tests.support.models import (
    lora_model,
    pairs,
    plain_model,
    ragged_batches,
)
from tests.support.posteriors import (
    fitted,
    generator,
    make,
    plain_regression,
    sizes,
    stock,
)

EXACT = {"rtol": 1e-6, "atol": 1e-9}


@pytest.mark.parametrize("structure", ["diag", "kron", "full"])
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_host_structures_equal_the_stock_classes(kind, structure):
    model = lora_model(
        kind,
        torch.float32 if structure == "full" else torch.float64,
    )
    batches = ragged_batches()
    ours = fitted(kind, batches, structure, model=model)
    theirs = stock(model, kind, structure, batches)
    # The host's full curvature is computed in float32, whatever the model's dtype.
    close = {"rtol": 1e-4, "atol": 1e-4} if structure == "full" else EXACT
    for mine, stocks in [
        (
            ours.log_marginal_likelihood(),
            theirs.log_marginal_likelihood(),
        ),
        (ours(batches[0]), theirs(batches[0])),
        (ours.mean, theirs.mean),
        (
            ours.square_norm(ours.mean + 1).double(),
            theirs.square_norm(theirs.mean + 1).double(),
        ),
    ]:
        torch.testing.assert_close(mine, stocks.to(mine), **close)


def test_full_is_the_exact_posterior_of_a_regression_with_two_outputs():
    la, X = plain_regression(2, "full")
    la.prior_precision = prior = torch.linspace(
        0.5, 2.0, len(la.blocks), dtype=torch.float64
    )
    model = la.model.model
    # As `plain_regression` has them.
    y = torch.randn(12, 2, generator=generator(1)).double()
    Js = jacobians(model, X)
    f_mu = model(X).detach()
    H = torch.einsum("bcp,bcq->pq", Js, Js) / 0.5**2
    diagonal = prior.repeat_interleave(torch.tensor(sizes(la)))
    noise = torch.distributions.Normal(f_mu, torch.tensor(0.5, dtype=torch.float64))
    expected = evidence(H, noise.log_prob(y).sum(), la.mean, diagonal)
    torch.testing.assert_close(la.posterior_precision, H + diagonal.diag(), **EXACT)
    torch.testing.assert_close(la.log_marginal_likelihood(), expected, **EXACT)
    found_mu, found_var = la(X)
    torch.testing.assert_close(found_mu, f_mu, **EXACT)
    covariance = Js @ torch.linalg.inv(H + diagonal.diag()) @ Js.mT
    torch.testing.assert_close(found_var, covariance, **EXACT)


def predictions(la, data):
    la(data[0][0])


def sampled_networks(la, data):
    la(data[0][0], pred_type="nn", link_approx="mc")


def moments(la, data):
    la.predictive_moments(data[0][0])


def logits(la, data):
    la.functional_samples(data[0][0])


def evidence_of_data(la, data):
    la.log_marginal_likelihood()


def weights(la, data):
    la.sample(2)


def density(la, data):
    la.log_prob(torch.zeros(la.n_params))


def state(la, data):
    la.state_dict()


def marglik(la, data):
    la.optimize_prior_precision()


def agreement(la, data):
    la.optimize_prior_precision(method="agreement", train_loader=data)


def gridsearch(la, data):
    la.optimize_prior_precision(method="gridsearch", val_loader=data)


NEEDS_A_FIT = [
    predictions,
    sampled_networks,
    moments,
    logits,
    evidence_of_data,
    weights,
    density,
    state,
    marglik,
    agreement,
    gridsearch,
]


@pytest.mark.parametrize("use", NEEDS_A_FIT)
def test_a_posterior_that_is_not_fitted_says_so(la, use):
    with pytest.raises(AttributeError, match=r"fit\(\)"):
        use(la, pairs())
    assert la.prior_precision.tolist() == [1.0]


BACKENDS = {
    "kron": [
        "AsdlEF",
        "AsdlGGN",
        "CurvlinopsEF",
        "CurvlinopsGGN",
    ],
    "diag": [
        "AsdlEF",
        "AsdlGGN",
        "CurvlinopsGGN",
    ],
    "full": [
        "AsdlEF",
        "AsdlGGN",
        "AsdlHessian",
        "CurvlinopsEF",
        "CurvlinopsGGN",
        "CurvlinopsHessian",
    ],
}


@pytest.mark.parametrize("structure", BACKENDS)
def test_backends_of_the_host_work(structure):
    for name in BACKENDS[structure]:
        # A Hessian may be indefinite; this much of a prior precision makes it definite
        # here.
        backend = getattr(host_backends, name)
        la = make(
            plain_model(),
            structure,
            backend=backend,
            prior_precision=1e4,
        )
        la.fit(pairs(2))
        assert torch.isfinite(la(pairs()[0][0])).all()
    with pytest.raises((ValueError, NotImplementedError)):
        make(
            plain_model(),
            structure,
            backend=host_backends.BackPackGGN,
        ).fit(pairs(2))
