"""Bayesian optimisation of molecules, at its smallest."""

import pytest
import torch
import transformers
from laplace import Laplace
from torch import nn

from benchmarks.experiments.optimisation import RULES, choose_by_evidence
from tests.benchmarks.support import run


@pytest.fixture
def molecules(tmp_path, tiny_models, monkeypatch):
    """A folder of 24 made-up molecules, and a tiny encoder."""
    encoder = tmp_path / "encoder"
    # Without the saved head.
    for part in (transformers.AutoModel, transformers.AutoTokenizer):
        part.from_pretrained(tiny_models[False]).save_pretrained(encoder)
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


def test_the_evidence_has_no_slope_where_it_chooses():
    torch.manual_seed(0)
    inputs = torch.randn(30, 3)
    targets = inputs @ torch.tensor([[1.0], [-2.0], [0.5]]) + 0.3 * torch.randn(30, 1)
    model = nn.Linear(3, 1)
    with torch.no_grad():
        weight = torch.linalg.lstsq(inputs, targets).solution.T
        model.weight.copy_(weight)
        model.bias.zero_()
    la = Laplace(model, "regression", "all", hessian_structure="kron")
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(inputs, targets), batch_size=10
    )
    la.fit(loader)
    choose_by_evidence(la)
    prior = torch.as_tensor(la.prior_precision).log().detach().requires_grad_()
    noise = torch.as_tensor(la.sigma_noise).log().detach().requires_grad_()
    evidence = la.log_marginal_likelihood(prior.exp(), noise.exp())
    slopes = torch.autograd.grad(evidence, (prior, noise))
    assert max(slope.abs().item() for slope in slopes) < 0.5
    assert float(la.sigma_noise) == pytest.approx(0.3, rel=0.3)
