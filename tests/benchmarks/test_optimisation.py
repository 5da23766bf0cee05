"""Bayesian optimisation of molecules, at its smallest."""

from dataclasses import dataclass
from itertools import product

import pytest
import torch
from laplace import Laplace
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.exact_ggn import ExactGGN
from benchmarks.experiments.optimisation import RULES, choose_by_evidence
from tests.benchmarks.support import run, write_molecules

# --- the experiment -------------------------------------------------------------------


@pytest.fixture
def molecules(tmp_path, encoder, monkeypatch):
    """A folder of 24 made-up molecules, and a tiny encoder."""
    monkeypatch.setattr(
        "benchmarks.experiments.molecules.encoder_folder",
        lambda: encoder,
    )
    chains = ["C" * (number % 6 + 1) + "N" * (number // 6) for number in range(24)]
    write_molecules(chains, tmp_path)
    return tmp_path


def measure(capsys, molecules, **options):
    """Run the experiment with six known molecules."""
    return run(
        capsys,
        molecules / "results",
        "optimisation --quiet",
        data=molecules,
        train_examples=6,
        steps=4,
        share=0.5,
        cache=molecules / "cache",
        **options,
    )


def test_every_rule_finds_no_worse_molecules_the_more_it_measures(capsys, molecules):
    finished = measure(capsys, molecules, rounds=2, batch=8, seeds=(0, 1))
    rows = finished.figures["rows"]
    found = [(row["seed"], row["name"], row["measured"]) for row in rows]
    assert found == list(product((0, 1), RULES, (14, 22)))
    earlier_rows = rows[::2]
    later_rows = rows[1::2]
    for earlier, later in zip(earlier_rows, later_rows, strict=True):
        assert earlier["regret"] >= later["regret"] >= 0
        # Wavelengths are 5 apart.
        n_letters = later["regret"] / 5
        assert n_letters == pytest.approx(round(n_letters))
    for row in rows:
        assert (row["nll"] is None) == (row["name"] == "random")
    for name in RULES:
        assert name in finished.printed


def test_a_pool_that_is_too_small_is_refused(capsys, molecules):
    with pytest.raises(SystemExit, match="18 molecules to choose from"):
        measure(capsys, molecules, rounds=3, batch=6)


# --- its rival ------------------------------------------------------------------------


@dataclass(frozen=True)
class LinearRegression:
    """Targets with a noise of 0.3, and the linear model that fits them best."""

    inputs: torch.Tensor
    targets: torch.Tensor
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
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(30, 3, generator=generator, dtype=torch.float64)
    noise = 0.3 * torch.randn(30, 1, generator=generator, dtype=torch.float64)
    true_weights = torch.tensor([[1.0], [-2.0], [0.5]]).double()
    targets = inputs @ true_weights + noise
    model = nn.Linear(3, 1, dtype=torch.float64)
    fit = torch.linalg.lstsq(inputs, targets)
    with torch.no_grad():
        model.weight.copy_(fit.solution.T)
        model.bias.zero_()
    return LinearRegression(inputs, targets, model)


def gradients_at(inputs):
    """Differentiate a linear model's output in its weights and its bias."""
    ones = torch.ones_like(inputs[:, :1])
    return torch.cat([inputs, ones], dim=1)


def test_kernels_of_the_exact_ggn_give_the_dense_posterior(linear_regression):
    inputs = linear_regression.inputs
    model = linear_regression.model
    prior_precision = torch.tensor(0.7).double()
    sigma_noise = torch.tensor(0.4).double()
    dense = linear_regression.fitted("full")
    dense.prior_precision = prior_precision
    dense.sigma_noise = sigma_noise

    weight, bias = model.parameters()
    weights = torch.cat([weight.detach().flatten(), bias.detach()])
    la = ExactGGN(
        outputs=model(inputs)[:, 0].detach(),
        gradients=gradients_at(inputs),
        targets=linear_regression.targets[:, 0],
        squared_norm=weights.square().sum(),
        prior_precision=prior_precision,
        sigma_noise=sigma_noise,
    )
    found = la.log_marginal_likelihood(prior_precision, sigma_noise)
    expected = dense.log_marginal_likelihood().detach()
    assert_close(found, expected)

    new = 2 * inputs[:5] + 1
    mean, variance = dense(new)
    prediction = la.predict(mean[:, 0], gradients_at(new))
    assert_close(prediction.epistemic_std[:, 0], variance[:, 0, 0].sqrt())


def test_the_evidence_has_no_slope_where_it_chooses(linear_regression):
    la = linear_regression.fitted("kron")
    choose_by_evidence(la)
    log_precision = torch.as_tensor(la.prior_precision).log().detach().requires_grad_()
    log_noise = torch.as_tensor(la.sigma_noise).log().detach().requires_grad_()
    evidence = la.log_marginal_likelihood(log_precision.exp(), log_noise.exp())
    of_precision, of_noise = torch.autograd.grad(evidence, (log_precision, log_noise))
    # In nats for each power of e: beside the evidence this is little.
    assert abs(of_precision.item()) < 0.5
    assert abs(of_noise.item()) < 0.5
    assert float(la.sigma_noise) == pytest.approx(0.3, rel=0.3)
