"""Bayesian optimisation of molecules, at its smallest."""

from dataclasses import dataclass

import pytest
import torch
from laplace import Laplace
from torch import nn
from torch.testing import assert_close

from benchmarks.exact_ggn import ExactGGN
from benchmarks.experiments.optimisation import RULES, choose_by_evidence
from tests.benchmarks.support import run


@pytest.fixture
def molecules(tmp_path, encoder, monkeypatch):
    """A folder of 24 made-up molecules, and a tiny encoder."""
    monkeypatch.setattr(
        "benchmarks.experiments.molecules.encoder_folder", lambda: encoder
    )
    folder = tmp_path / "molecules"
    folder.mkdir()
    chains = ["C" * (number % 6 + 1) + "N" * (number // 6) for number in range(24)]
    lines = [f"{smiles},{300 + 5 * len(smiles)}" for smiles in chains]
    content = "\n".join(["SMILES,Pi-Pi* Transition Wavelength", *lines])
    (folder / "photoswitches.csv").write_text(content, encoding="utf-8")
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
    assert [(row["seed"], row["name"], row["measured"]) for row in rows] == [
        (seed, name, measured)
        for seed in (0, 1)
        for name in RULES
        for measured in (14, 22)
    ]
    for earlier, later in zip(rows[::2], rows[1::2], strict=True):
        assert earlier["regret"] >= later["regret"] >= 0
        # Wavelengths are 5 apart.
        assert later["regret"] / 5 == pytest.approx(round(later["regret"] / 5))
    for row in rows:
        assert (row["nll"] is None) == (row["name"] == "random")
    for name in RULES:
        assert name in finished.printed


def test_a_pool_that_is_too_small_is_refused(capsys, molecules):
    with pytest.raises(SystemExit, match="18 molecules to choose from"):
        measure(capsys, molecules, rounds=3, batch=6)


@dataclass(frozen=True)
class LinearRegression:
    """Targets with a noise of 0.3, and the linear model that fits them best."""

    inputs: torch.Tensor
    targets: torch.Tensor
    model: nn.Linear

    def fitted(self, hessian_structure):
        """Fit a Laplace approximation of the host's own."""
        la = Laplace(
            self.model, "regression", "all", hessian_structure=hessian_structure
        )
        examples = torch.utils.data.TensorDataset(self.inputs, self.targets)
        la.fit(torch.utils.data.DataLoader(examples, batch_size=10))
        return la


@pytest.fixture
def linear_regression():
    """Thirty examples in float64."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(30, 3, generator=generator, dtype=torch.float64)
    noise = 0.3 * torch.randn(30, 1, generator=generator, dtype=torch.float64)
    targets = inputs @ inputs.new_tensor([[1.0], [-2.0], [0.5]]) + noise
    model = nn.Linear(3, 1, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.linalg.lstsq(inputs, targets).solution.T)
        model.bias.zero_()
    return LinearRegression(inputs, targets, model)


def test_kernels_of_the_exact_ggn_give_the_dense_posterior(linear_regression):
    dense = linear_regression.fitted("full")
    prior, noise = torch.tensor(0.7).double(), torch.tensor(0.4).double()
    dense.prior_precision, dense.sigma_noise = prior, noise
    inputs = linear_regression.inputs
    weight, bias = linear_regression.model.parameters()
    la = ExactGGN(
        outputs=linear_regression.model(inputs)[:, 0].detach(),
        gradients=torch.cat((inputs, torch.ones_like(inputs[:, :1])), 1),
        targets=linear_regression.targets[:, 0],
        squared_norm=weight.detach().square().sum() + bias.detach().square().sum(),
        prior_precision=prior,
        sigma_noise=noise,
    )
    assert_close(
        la.log_marginal_likelihood(prior, noise),
        dense.log_marginal_likelihood().detach(),
    )
    new = 2 * inputs[:5] + 1
    mean, variance = dense(new)
    gradients = torch.cat((new, torch.ones_like(new[:, :1])), 1)
    prediction = la.predict(mean[:, 0], gradients)
    assert_close(prediction.epistemic_std[:, 0], variance[:, 0, 0].sqrt())


def test_the_evidence_has_no_slope_where_it_chooses(linear_regression):
    la = linear_regression.fitted("kron")
    choose_by_evidence(la)
    prior = torch.as_tensor(la.prior_precision).log().detach().requires_grad_()
    noise = torch.as_tensor(la.sigma_noise).log().detach().requires_grad_()
    evidence = la.log_marginal_likelihood(prior.exp(), noise.exp())
    slopes = torch.autograd.grad(evidence, (prior, noise))
    assert max(slope.abs().item() for slope in slopes) < 0.5
    assert float(la.sigma_noise) == pytest.approx(0.3, rel=0.3)
