"""Predictions from one forward pass, against exact ones."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from laplace_lora_ext import from_pretrained
from laplace_lora_ext.predictive.amortized import changes_of_logits
from laplace_lora_ext.predictive.functions import Functions
from tests.support.models import (
    lora_model,
    plain_model,
    ragged_batches,
    with_lora,
)
from tests.support.posteriors import (
    STRUCTURES,
    count_forward_passes,
    fitted,
    generator,
    make,
    plain_regression,
    some_precision,
)
from tests.support.snapshots import Snapshot, half_trained
from tests.support.texts import fitted_text

LINKS = ["mean_field", "probit", "mc", "bridge"]
AMORTIZED = {"pred_type": "amortized"}


# --- against exact predictions --------------------------------------------------------


class Exponential(nn.Module):
    """Has logits' variances proportional to exp(2 x_0), the layer's input."""

    def __init__(self, n_outputs: int = 3) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)
        self.head = nn.Linear(9, n_outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        constant = self.layer(torch.ones_like(x))
        z = x[:, :1].exp() * constant
        return self.head(torch.cat([x, z], dim=1))


def inputs(
    n: int,
    seed: int,
    spread: float = 1.0,
) -> torch.Tensor:
    """Numbers between minus and plus the spread."""
    uniform = torch.rand(n, 5, generator=generator(seed)).double()
    return spread * (2 * uniform - 1)


def exponential(
    structure: str = "lowrank_kron",
    likelihood: str = "classification",
    **keywords,
):
    """A posterior that has learnt its variances."""
    model = with_lora(Exponential(), "layer")
    la = make(model, structure, likelihood, **keywords)
    y = torch.arange(40) % 3
    if likelihood == "regression":
        y = nn.functional.one_hot(y).double()
    la.fit([(inputs(40, seed=1), y)])
    la.amortize([inputs(40, seed=2), inputs(40, seed=3)])
    return la


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("link", LINKS)
def test_variances_that_are_linear_in_the_features_predict_exactly(structure, link):
    la = exponential(structure)
    # Within what it has learnt from, beyond which variances are cut off.
    X = inputs(20, seed=4, spread=0.9)
    assert la.learnt_variance.r_squared > 1 - 1e-8
    found = la(X, link_approx=link, generator=generator(), **AMORTIZED)
    moments = la.predictive_moments(X)
    exact = la(moments, link_approx=link, generator=generator())
    assert_close(found, exact, rtol=1e-5, atol=1e-5)
    of_map = la.model(X).softmax(-1)
    assert (exact - of_map).abs().max() > 0.01
    if link == "bridge":  # which decisions do not take
        return
    decision = la.predict(X, link, generator=generator(), **AMORTIZED)
    expected = la.predict(X, link, generator=generator())
    for one, other in zip(decision, expected, strict=True):
        assert_close(one, other, rtol=1e-3, atol=1e-5)
    proba = torch.from_numpy(la.predict_proba(X, link, **AMORTIZED))
    expected = torch.from_numpy(la.predict_proba(X, link))
    assert_close(proba, expected, rtol=1e-5, atol=1e-5)


def test_regression_has_a_mean_and_a_covariance():
    la = exponential(likelihood="regression", sigma_noise=0.7)
    X = inputs(20, seed=4, spread=0.9)
    for found, exact in zip(la(X, **AMORTIZED), la(X), strict=True):
        assert_close(found, exact, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="no covariance between examples"):
        la(X, joint=True, **AMORTIZED)


@pytest.mark.parametrize("n_outputs", [1, 2])
def test_far_from_the_data_covariances_stay_positive(n_outputs):
    la, X = plain_regression(n_outputs)
    la.amortize([X])
    _, f_var = la(3 * X, **AMORTIZED)
    assert torch.linalg.eigvalsh(f_var).min() > -1e-12
    assert (f_var.diagonal(dim1=1, dim2=2) > 0).all()


def test_variances_that_fit_no_covariance_give_the_nearest_one():
    la, X = plain_regression()
    la.amortize([X])
    # Of outputs with a variance of 1 each, no difference has more than 4.
    logs = torch.tensor([1.0, 1.0, 10.0]).double().log()
    la.learnt_variance = replace(
        la.learnt_variance,
        weights=torch.zeros_like(la.learnt_variance.weights),
        offset=logs,
        lowest=logs,
        highest=logs,
    )
    _, f_var = la(X, **AMORTIZED)
    # Of [[1, -4], [-4, 1]].
    nearest = torch.tensor([[2.5, -2.5], [-2.5, 2.5]]).double()
    assert_close(f_var, nearest.expand_as(f_var))


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_a_prediction_is_one_forward_pass(kind, monkeypatch):
    la = fitted(kind)
    batches = ragged_batches()
    la.amortize(batches)
    batch = batches[0]
    la(batch, **AMORTIZED)

    def no_backward_pass(*_, **__):
        pytest.fail("a backward pass")

    monkeypatch.setattr(torch.autograd, "grad", no_backward_pass)
    passes = count_forward_passes(la)
    for link in (*LINKS, "bridge_norm"):
        probs = la(batch, link_approx=link, **AMORTIZED)
        assert_close(probs.sum(1), torch.ones(3).double())
        assert not probs.requires_grad
    la.predict(batch, **AMORTIZED)
    la.predict_proba(batch, **AMORTIZED)
    assert len(passes) == len(LINKS) + 3


# --- many outputs ---------------------------------------------------------------------


def test_changes_of_logits_are_those_of_the_linearised_model():
    la = fitted()
    batch = ragged_batches()[0]
    drawn = la.sample(4, generator())
    found = changes_of_logits(la, batch, drawn)
    expected = (
        Functions(la, drawn).linearised(batch) - la.predictive_moments(batch).f_mu
    )
    assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_many_outputs_learn_from_draws(monkeypatch):
    """In 17 forward passes, and no backward pass, whatever the number of classes."""
    n_outputs = 18
    la = make(with_lora(Exponential(n_outputs), "layer"), prior_precision=20.0)
    la.fit([(inputs(40, seed=1), torch.arange(40) % n_outputs)])
    batches = [inputs(4, seed=seed) for seed in range(100)]
    X = inputs(20, seed=1000, spread=0.9)
    exact = la(X, link_approx="mean_field", n_contrasts=n_outputs)

    def no_backward_pass(*_, **__):
        pytest.fail("a backward pass")

    monkeypatch.setattr(torch.autograd, "grad", no_backward_pass)
    passes = count_forward_passes(la)
    learnt = la.amortize(batches, None)
    assert len(passes) == 17 * len(batches)
    assert learnt.r_squared > 0.8
    found = la(X, link_approx="mean_field", **AMORTIZED)
    of_map = la.model(X).softmax(-1)
    assert (found - exact).abs().mean() < 0.2 * (of_map - exact).abs().mean()
    again = la.amortize(batches, None)
    assert torch.equal(again.weights, learnt.weights)


# --- what it learns from --------------------------------------------------------------


def test_what_it_learns_from_and_that_copies_are_seeded():
    la = fitted()
    batches = ragged_batches()
    before = torch.get_rng_state()
    assert la.amortize(batches, None).n_examples == 8
    one = la.amortize(batches)
    same = la.amortize(batches)
    other = la.amortize(batches, generator=generator(1))
    for learnt in (one, same, other):
        assert learnt.n_examples == 16  # a copy of each text
    assert torch.equal(one.offset, same.offset)
    assert not torch.equal(one.offset, other.offset)
    assert torch.equal(torch.get_rng_state(), before)


def test_texts_without_labels_are_learnt_from_like_others():
    la = fitted()
    batches = ragged_batches()
    more = ragged_batches(seed=7)
    unlabelled = [
        {key: value for key, value in batch.items() if key != "labels"}
        for batch in more
    ]
    found = la.amortize(batches, unlabelled)
    both = la.amortize([*batches, *more], None)
    assert_close(found.weights.abs(), both.weights.abs())
    assert la.learnt_variance is both


def test_numbers_have_no_swapped_copies():
    la, X = plain_regression()
    assert la.amortize([X]).n_examples == 12


def changes_of_the_prior(la):
    """Attributes and values that another posterior would have."""
    return [
        ("prior_precision", 2 * la.prior_precision),
        ("prior_precision", some_precision(la, "layerwise")),
        ("temperature", 2.0),
    ]


def test_it_belongs_to_a_fit_and_a_prior():
    la = fitted()
    batches = ragged_batches()
    batch = batches[0]
    with pytest.raises(
        ValueError,
        match=r"No variance is learnt for this fit: call la\.amortize",
    ):
        la(batch, **AMORTIZED)
    la.amortize(batches)
    expected = la(batch, **AMORTIZED)
    for name, value in changes_of_the_prior(la):
        before = getattr(la, name)
        setattr(la, name, value)
        for predict in (la, la.predict, la.predict_proba):
            with pytest.raises(ValueError, match="The prior has changed since"):
                predict(batch, **AMORTIZED)
        setattr(la, name, before)
        assert torch.equal(la(batch, **AMORTIZED), expected)
    la.fit(batches)
    with pytest.raises(ValueError, match="No variance is learnt"):
        la.predict(batch, **AMORTIZED)


# --- what is refused ------------------------------------------------------------------

PACKED = {
    "input_ids": torch.ones(1, 4).long(),
    "position_ids": torch.tensor([[0, 1, 0, 1]]),
}


def no_data(la, batches):
    la.amortize([])


def packed_texts(la, batches):
    la.amortize([batches[0], PACKED], None)


def an_unknown_name(la, batches):
    la.amortize(batches, "shuffled")


def packed_texts_to_predict(la, batches):
    la(PACKED, **AMORTIZED)


def moments_to_predict(la, batches):
    la(la.predictive_moments(batches[0]), **AMORTIZED)


def a_decision_in_the_weights(la, batches):
    la.predict(batches[0], pred_type="nn")


def a_posterior_that_is_not_fitted(la, batches):
    make(plain_model()).amortize([inputs(4, seed=1)])


def a_language_model(la, batches):
    fitted_text().amortize(batches)


def rewards(la, batches):
    model = lora_model("bert", n_labels=1)
    make(model, likelihood="reward_modeling").amortize(batches)


REFUSED = [
    (no_data, "The loader has no data"),
    (packed_texts, "batch 1: Several texts are packed"),
    (an_unknown_name, 'must be "swapped", data or None'),
    (packed_texts_to_predict, "Several texts are packed"),
    (moments_to_predict, "Moments hold no inputs"),
    (a_decision_in_the_weights, 'neither "glm" nor "amortized"'),
    (a_posterior_that_is_not_fitted, "fit"),
    (a_language_model, "not language_modeling"),
    (rewards, "not reward_modeling"),
]


def test_what_is_refused_leaves_the_model_and_what_was_learnt():
    model = half_trained(lora_model("bert"))
    la = fitted(model=model)
    batches = ragged_batches()
    before = Snapshot(model)
    learnt = la.amortize(batches)
    la.predict_proba(batches, **AMORTIZED)
    before.assert_equal(model)
    for use, message in REFUSED:
        with pytest.raises(
            (ValueError, AttributeError, NotImplementedError),
            match=message,
        ):
            use(la, batches)
        assert la.learnt_variance is learnt
        before.assert_equal(model, random_state=False)


def test_weights_that_have_changed_are_refused():
    la = fitted()
    batches = ragged_batches()
    la.amortize(batches)
    with torch.no_grad():
        la.blocks[0].weight.mul_(2)
    with pytest.raises(RuntimeError, match="weights"):
        la(batches[0], **AMORTIZED)
    with pytest.raises(RuntimeError, match="weights"):
        la.amortize(batches)


# --- files ----------------------------------------------------------------------------


def test_it_is_saved_with_the_posterior(tmp_path):
    la = fitted()
    batches = ragged_batches()
    la.amortize(batches)
    expected = la(batches[0], **AMORTIZED)
    restored = make(la.model.model, backend_kwargs={"rank": 3})
    restored.load_state_dict(la.state_dict())
    la.save_pretrained(tmp_path)
    read = from_pretrained(lora_model("bert"), tmp_path)
    for loaded in (restored, read):
        assert_close(loaded(batches[0], **AMORTIZED), expected)
        assert loaded.learnt_variance.r_squared == la.learnt_variance.r_squared


def test_a_state_without_learnt_variances_removes_them():
    la = fitted()
    batches = ragged_batches()
    la.amortize(batches)
    state = fitted().state_dict()
    assert state["learnt_variance"] is None
    la.load_state_dict(state)
    with pytest.raises(ValueError, match="No variance is learnt"):
        la(batches[0], **AMORTIZED)
