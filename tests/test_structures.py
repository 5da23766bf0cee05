"""The host's structures over LoRA weights."""

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from tests.support.dense import evidence, glm_covariance, jacobians
from tests.support.models import lora_model, pairs, plain_model, ragged_batches
from tests.support.posteriors import (
    fitted,
    make,
    normal,
    plain_regression,
    priors_of_blocks,
    sizes,
    stock,
)

EXACT = {"rtol": 1e-6, "atol": 1e-9}


@pytest.mark.parametrize("structure", ["diag", "kron", "full"])
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_host_structures_equal_the_stock_classes(kind, structure):
    dtype = torch.float64
    close = EXACT
    if structure == "full":
        # The host's full curvature is computed in float32, whatever the model's dtype.
        dtype = torch.float32
        close = {"rtol": 1e-4, "atol": 1e-4}
    model = lora_model(kind, dtype)
    batches = ragged_batches()
    ours = fitted(kind, batches, structure, model=model)
    theirs = stock(model, kind, structure, batches)
    found = figures_of(ours, batches[0])
    expected = figures_of(theirs, batches[0])
    # The host's are of other dtypes in part.
    assert_close(found, expected, check_dtype=False, **close)


def figures_of(la, batch) -> dict[str, Tensor]:
    """Compute what a user sees of a posterior."""
    # Not at the mean, where it is 0.
    elsewhere = la.mean + 1
    return {
        "evidence": la.log_marginal_likelihood(),
        "prediction": la(batch),
        "mean": la.mean,
        "square norm": la.square_norm(elsewhere),
    }


def test_full_is_the_exact_posterior_of_a_regression_with_two_outputs():
    la, X = plain_regression(2, "full")
    prior_precision = priors_of_blocks(la)
    la.prior_precision = prior_precision
    model = la.model.model
    # As `plain_regression` has them.
    y = normal(12, 2, seed=1)
    sigma_noise = torch.tensor(0.5).double()

    Js = jacobians(model, X)
    f_mu = model(X).detach()
    H = torch.einsum("bcp,bcq->pq", Js, Js) / sigma_noise**2
    n_weights = torch.tensor(sizes(la))
    prior = prior_precision.repeat_interleave(n_weights)
    assert_close(la.posterior_precision, H + prior.diag(), **EXACT)

    density = torch.distributions.Normal(f_mu, sigma_noise)
    log_likelihood = density.log_prob(y).sum()
    expected = evidence(H, log_likelihood, la.mean, prior)
    assert_close(la.log_marginal_likelihood(), expected, **EXACT)

    found_mu, found_var = la(X)
    covariance = glm_covariance(Js, H, prior)
    assert_close(found_mu, f_mu, **EXACT)
    assert_close(found_var, covariance, **EXACT)


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
    gridsearch,
]


@pytest.mark.parametrize("use", NEEDS_A_FIT)
def test_a_posterior_that_is_not_fitted_says_so(la, use):
    with pytest.raises(AttributeError, match=r"fit\(\)"):
        use(la, pairs())
    # A search that is refused has chosen nothing.
    assert la.prior_precision.tolist() == [1.0]


class OfKey(nn.Module):
    """Makes logits `(B, C)` of what a batch has under some key."""

    def __init__(self, key: str, n_outputs: int = 3) -> None:
        super().__init__()
        self.key = key
        self.n_outputs = n_outputs
        self.inner = plain_model(n_outputs)

    def forward(self, batch) -> Tensor:
        return self.inner(batch[self.key].flatten(1)).reshape(-1, 3)


def images():
    return OfKey("pixel_values"), {"pixel_values": normal(4, 1, 5, 1)}


def embedded_texts():
    return lora_model("bert"), {"inputs_embeds": normal(4, 7, 12)}


def keys_of_ones_own():
    return OfKey("features"), {"features": normal(4, 5)}


def rows_of_a_reranker():
    """Three rows for each example, which gets a logit of each."""
    return OfKey("input_ids", n_outputs=1), {"input_ids": normal(12, 5)}


@pytest.mark.parametrize(
    "make_case", [images, embedded_texts, keys_of_ones_own, rows_of_a_reranker]
)
def test_kron_needs_nothing_but_labels_to_count_examples(make_case):
    model, inputs = make_case()
    batch = inputs | {"labels": torch.tensor([0, 2, 1, 1])}
    ours = make(model, "kron")
    ours.fit([batch])
    theirs = stock(model, "bert", "kron", [batch], dict_key_x="labels")
    assert_close(figures_of(ours, batch), figures_of(theirs, batch), **EXACT)


def test_a_failed_pass_of_curvlinops_leaves_no_hook():
    model = plain_model()
    second = model.second.lora_A["default"]
    calls = []

    def failing_at_the_second_call(*_: object) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("the user's")

    model.register_forward_hook(failing_at_the_second_call)
    second.register_forward_hook(lambda *_: None)
    la = make(model, "kron")
    with pytest.raises(torch.OutOfMemoryError):
        la.fit(pairs())
    assert len(second._forward_hooks) == 1
    assert not second._forward_pre_hooks
