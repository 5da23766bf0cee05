"""The prior precision that the linearised model's evidence chooses."""

import math

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.support.models import ragged_batches
from tests.support.posteriors import (
    PRIORS,
    STRUCTURES,
    count_forward_passes,
    fitted,
    linearized,
    plain_regression,
    posterior_and_dense,
)

METHOD = "linearized_marglik"


def hyperprior(prior_precision, scalar, pooling):
    """Logarithm of gamma densities of mode `scalar` in the prior precision's logarithm, over it."""
    if pooling == 0:
        return 0.0
    gamma = torch.distributions.Gamma(pooling / 2, pooling / 2 / scalar)
    density = gamma.log_prob(prior_precision) + prior_precision.log()
    return (density - gamma.log_prob(scalar) - scalar.log()).sum()


@pytest.mark.parametrize(
    ("structure", "pooling"), [("scalar", 3.0), ("layerwise", 0.0), ("layerwise", 3.0)]
)
def test_the_chosen_prior_precision_is_a_maximum_of_the_dense_evidence(structure, pooling):
    la, dense = posterior_and_dense("bert")
    model = linearized(la, ragged_batches())
    la.optimize_prior_precision(method=METHOD, train_loader=model, tolerance=1e-5)
    scalar, strength = la.prior_precision.double(), pooling if structure == "layerwise" else 0.0

    def objective(prior_precision):
        evidence = dense.evidence(prior_precision)
        return evidence + hyperprior(prior_precision, scalar, strength)

    start = 0.5 if structure == "scalar" else torch.full((len(la.blocks),), 0.5)
    history = la.optimize_prior_precision(
        method=METHOD,
        prior_structure=structure,
        init_prior_prec=start,
        train_loader=model,
        tolerance=1e-5,
        pooling=pooling,
    )
    chosen = la.prior_precision
    assert chosen.shape == history.prior_precision[-1].shape
    assert len(chosen) == (1 if structure == "scalar" else len(la.blocks))
    best = objective(chosen.double())
    assert best > objective(torch.as_tensor(start).double()) + 0.01
    for block in range(len(chosen)):
        for factor in (0.8, 1.25):
            other = chosen.double().clone()
            other[block] *= factor
            assert objective(other) < best + 1e-3
    assert history.objective[-1] == pytest.approx(best.item(), abs=1e-2)
    # A block that the evidence has no use for ends with a prior precision that holds it at MAP.
    for pred_type, link in (("glm", "probit"), ("nn", "mc")):
        output = la(ragged_batches()[0], pred_type=pred_type, link_approx=link, n_samples=2)
        assert torch.isfinite(output).all()


@pytest.mark.parametrize("structure", STRUCTURES)
def test_every_structure_chooses_the_same(structure):
    la = fitted(structure=structure, rank=10)
    la.optimize_prior_precision(method=METHOD, train_loader=ragged_batches())
    reference = fitted(rank=10)
    reference.optimize_prior_precision(method=METHOD, train_loader=ragged_batches())
    torch.testing.assert_close(la.prior_precision, reference.prior_precision)


def test_one_pass_over_the_training_data_and_a_seed():
    la = fitted(dtype=torch.float32)
    calls = count_forward_passes(la)
    chosen = []
    for seed in (0, 0, 1):
        calls.clear()
        model = linearized(la, ragged_batches(), n_features=80, seed=seed)
        for structure in PRIORS:
            la.optimize_prior_precision(
                method=METHOD, prior_structure=structure, train_loader=model, n_steps=3, tolerance=0
            )
        assert len(calls) == len(ragged_batches())
        chosen.append(la.prior_precision)
    assert torch.equal(chosen[0], chosen[1])
    assert not torch.equal(chosen[0], chosen[2])


@pytest.mark.parametrize("pooling", [0.0, 3.0])
def test_a_block_that_the_logits_do_not_depend_on_has_the_prior_precision_of_all(pooling):
    la = fitted()
    for block in la.blocks:
        if "lora_B" in block.name:
            block.weight.data.zero_()  # no gradient reaches lora_A
    la.fit(ragged_batches())
    model = linearized(la, ragged_batches())
    options = {"method": METHOD, "train_loader": model, "n_steps": 3, "tolerance": 0}
    la.optimize_prior_precision(**options)
    scalar = la.prior_precision
    history = la.optimize_prior_precision(prior_structure="layerwise", pooling=pooling, **options)
    assert torch.isfinite(history.objective).all()
    silent = torch.tensor(["lora_A" in block.name for block in la.blocks])
    expected = scalar if pooling else torch.ones(1).double()  # where the search starts
    # The mode is found from where it was: a second search ends elsewhere in the fourth digit.
    assert torch.allclose(la.prior_precision[silent], expected, rtol=1e-3)


def test_pooling_leads_from_a_prior_precision_of_each_block_to_one_of_all():
    la = fitted()
    model = linearized(la, ragged_batches())
    options = {"method": METHOD, "train_loader": model, "tolerance": 1e-5}
    la.optimize_prior_precision(**options)
    scalar = la.prior_precision
    spreads = []
    for pooling in (0.0, 0.1, 3.0, 1e4):
        la.optimize_prior_precision(prior_structure="layerwise", pooling=pooling, **options)
        spreads.append((la.prior_precision / scalar).log().abs().max().item())
    assert spreads == sorted(spreads, reverse=True)
    assert spreads[-1] < 1e-3 < spreads[-2]


def test_what_does_not_fit_is_refused_and_nothing_changes():
    foreign = ragged_batches(seed=9)
    la, other = fitted(), fitted(batches=foreign)
    la.prior_precision = 3.0
    for options, message in (
        ({}, "pass train_loader"),
        ({"train_loader": ragged_batches()[:1]}, "training data of this fit"),
        ({"train_loader": foreign}, "training data of this fit"),
        ({"train_loader": linearized(other, foreign)}, "training data of this fit"),
        ({"train_loader": []}, "no data"),
        ({"train_loader": ragged_batches(), "init_prior_prec": -1.0}, "above 0"),
        ({"train_loader": ragged_batches(), "pooling": -1.0}, "pooling"),
        ({"train_loader": ragged_batches(), "pooling": math.nan}, "pooling"),
    ):
        with pytest.raises(ValueError, match=message):
            la.optimize_prior_precision(method=METHOD, **options)
        assert la.prior_precision.tolist() == [3.0]
    model = linearized(la, ragged_batches())
    la.n_data += 1
    with pytest.raises(ValueError, match=r"fitted on 9 examples.*these are 8"):
        la.optimize_prior_precision(method=METHOD, train_loader=model)
    la.n_data -= 1
    bad = ragged_batches()
    bad[1]["labels"][0] = 99
    with pytest.raises(ValueError, match="batch 1"):
        la.optimize_prior_precision(method=METHOD, train_loader=bad)
    diag = fitted(structure="diag")
    with pytest.raises(ValueError, match="scalar"):
        diag.optimize_prior_precision(
            method=METHOD, prior_structure="diag", train_loader=ragged_batches()
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_chooses_what_single_precision_finds_as_good(dtype):
    """The maximum is flat: prior precisions a quarter apart have nearly the same evidence."""
    single, half = (fitted("gpt2", dtype=each, rank=10) for each in (torch.float32, dtype))
    for la in (single, half):
        la.optimize_prior_precision(method=METHOD, train_loader=ragged_batches())
    model = single.linearize(ragged_batches())
    best, found, doubled = (
        model.evidence(point.double(), float(single._H_factor)).log_marginal_likelihood
        for point in (single.prior_precision, half.prior_precision, 2 * single.prior_precision)
    )
    assert best - found <= 1.5e-3  # nats; measured: 7e-4 with bfloat16
    assert best - doubled > 4e-3


def test_pairs_of_a_loader_do():
    la, X = plain_regression()
    loader = DataLoader(TensorDataset(X, X[:, :2]), batch_size=5)
    la.fit(loader)
    history = la.optimize_prior_precision(method=METHOD, train_loader=loader)
    assert history.objective[-1] >= history.objective[0]


@pytest.mark.parametrize("method", ["linearized_marglik", "linearized_loo"])
def test_a_model_linearised_with_another_prior_mean_is_refused(method):
    la = fitted()
    model = la.linearize(ragged_batches())
    la.prior_mean = 0.5
    with pytest.raises(ValueError, match=r"another prior_mean: call linearize again"):
        la.optimize_prior_precision(method=method, train_loader=model)
    model = la.linearize(ragged_batches())
    la.prior_mean = torch.tensor([0.5])
    la.optimize_prior_precision(method=method, train_loader=model, n_steps=2)
