"""Bayesian optimisation of molecules, at its smallest."""

from dataclasses import dataclass
from itertools import product

import pytest
import torch
from laplace import Laplace
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.exact_ggn import ExactGGN
from benchmarks.experiments.optimisation import RULES, choose_by_evidence
from tests.benchmarks.support import rows_by, run, write_molecules
from tests.support.posteriors import normal

# --- the experiment -------------------------------------------------------------------


@pytest.fixture
def molecules(tmp_path, encoder, monkeypatch):
    """A folder of 24 made-up molecules, and a tiny encoder."""
    monkeypatch.setattr(
        "benchmarks.experiments.molecules.encoder_folder",
        lambda: encoder,
    )
    chains = []
    for n_nitrogen in range(4):
        for n_carbon in range(1, 7):
            chain = n_carbon * "C" + n_nitrogen * "N"
            chains.append(chain)
    write_molecules(chains, tmp_path)
    return tmp_path


@pytest.fixture
def measure(molecules):
    """Runs the experiment with six known molecules."""

    def run_with(**options):
        return run(
            molecules / "results",
            "optimisation --quiet",
            data=molecules,
            train_examples=6,
            steps=4,
            share=0.5,
            cache=molecules / "cache",
            **options,
        )

    return run_with


def test_every_rule_finds_no_worse_molecules_the_more_it_measures(measure):
    seeds = (0, 1)
    finished = measure(
        rounds=2,
        batch=8,
        seeds=seeds,
    )
    rows = rows_by(finished.rows, "seed", "name", "measured")
    in_order = product(seeds, RULES, (14, 22))
    assert list(rows) == list(in_order)
    for seed, name in product(seeds, RULES):
        earlier = rows[seed, name, 14]["regret"]
        later = rows[seed, name, 22]["regret"]
        assert earlier >= later >= 0
        # Wavelengths are 5 apart.
        n_letters = later / 5
        assert n_letters == pytest.approx(round(n_letters))
    for row in finished.rows:
        # Chance needs no model, and all others are measured.
        has_model = row["name"] != "random"
        assert (row["nll"] is not None) == has_model
    for name in RULES:
        assert name in finished.printed


def test_a_pool_that_is_too_small_is_refused(measure):
    with pytest.raises(SystemExit, match="18 molecules to choose from"):
        measure(rounds=3, batch=6)


# --- its rival ------------------------------------------------------------------------


@dataclass(frozen=True)
class LinearRegression:
    """Targets with a noise of 0.3, and the linear model that fits them best."""

    inputs: Tensor
    targets: Tensor
    model: nn.Linear

    def fitted(self, hessian_structure):
        """Fit a Laplace approximation of the host's own."""
        la = Laplace(
            self.model,
            "regression",
            "all",
            hessian_structure=hessian_structure,
        )
        examples = TensorDataset(self.inputs, self.targets)
        la.fit(DataLoader(examples, batch_size=10))
        return la


@pytest.fixture
def linear_regression():
    """Thirty examples in float64."""
    # The noise is what the evidence has to find.
    inputs = normal(30, 3, seed=0)
    noise = 0.3 * normal(30, 1, seed=1)
    true_weights = torch.tensor([1.0, -2.0, 0.5]).double()
    targets = inputs @ true_weights[:, None] + noise
    model = nn.Linear(3, 1, dtype=torch.float64)
    fit = torch.linalg.lstsq(inputs, targets)
    nn.init.zeros_(model.bias)
    with torch.no_grad():
        model.weight.copy_(fit.solution.T)
    return LinearRegression(inputs, targets, model)


def gradients_at(inputs):
    """Differentiate a linear model's output in its weights and its bias."""
    ones = torch.ones_like(inputs[:, :1])
    return torch.cat([inputs, ones], dim=1)


PRIOR_PRECISION = torch.tensor(0.7).double()
SIGMA_NOISE = torch.tensor(0.4).double()


@pytest.fixture
def dense(linear_regression):
    """The host's posterior with a dense curvature."""
    la = linear_regression.fitted("full")
    la.prior_precision = PRIOR_PRECISION
    la.sigma_noise = SIGMA_NOISE
    return la


@pytest.fixture
def by_kernels(linear_regression):
    """The same posterior by kernels of the gradients."""
    # At the least squares' weights, where the model is fitted best.
    inputs = linear_regression.inputs
    model = linear_regression.model
    outputs = model(inputs).detach()
    weights = parameters_to_vector(model.parameters()).detach()
    return ExactGGN(
        outputs=outputs[:, 0],
        gradients=gradients_at(inputs),
        targets=linear_regression.targets[:, 0],
        squared_norm=weights.square().sum(),
        prior_precision=PRIOR_PRECISION,
        sigma_noise=SIGMA_NOISE,
    )


def test_kernels_of_the_exact_ggn_give_the_dense_evidence(by_kernels, dense):
    found = by_kernels.log_marginal_likelihood(PRIOR_PRECISION, SIGMA_NOISE)
    expected = dense.log_marginal_likelihood()
    assert_close(found, expected.detach())


def test_kernels_of_the_exact_ggn_give_the_dense_variance(
    by_kernels,
    dense,
    linear_regression,
):
    new = 2 * linear_regression.inputs[:5] + 1
    mean, variance = dense(new)
    found = by_kernels.predict(mean[:, 0], gradients_at(new))
    expected = variance[:, 0].sqrt()
    assert_close(found.epistemic_std, expected)


def learnable(value) -> Tensor:
    """Copy a number to be differentiated by."""
    return torch.as_tensor(value).detach().clone().requires_grad_()


def test_the_evidence_has_no_slope_where_it_chooses(linear_regression):
    la = linear_regression.fitted("kron")
    choose_by_evidence(la)
    precision = learnable(la.prior_precision)
    noise = learnable(la.sigma_noise)
    evidence = la.log_marginal_likelihood(precision, noise)
    slopes = torch.autograd.grad(evidence, (precision, noise))
    # In nats for each power of e: beside the evidence this is little.
    for value, slope in zip((precision, noise), slopes, strict=True):
        of_logarithm = value * slope
        assert abs(of_logarithm.item()) < 0.5
    assert noise.item() == pytest.approx(0.3, rel=0.3)
