"""Modes by Newton's method, against what a mode satisfies."""

import pytest
import torch

from laplace_lora_ext.likelihoods import LIKELIHOODS
from laplace_lora_ext.linearized import features as features_module
from laplace_lora_ext.linearized.features import Features
from laplace_lora_ext.linearized.mode import ModeFinder, whitener


def problem(n=60, C=3, F=20, spread=1.0, likelihood="classification"):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator).double()  # noqa: E731
    roots = 0.5 * draw(n, C, C)
    y = draw(n, C).argmax(-1) if likelihood == "classification" else draw(n, C)
    return spread * draw(n, C, F), draw(n, C), y, roots @ roots.mT


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize("spread", [0.1, 1.0, 30.0])
def test_the_gradient_vanishes_in_a_mode(likelihood, spread):
    Phi, offset, y, own = problem(spread=spread, likelihood=likelihood)
    find = ModeFinder(Features(Phi), offset, y, LIKELIHOODS[likelihood])
    for exponent in (0.0, 1.0, -2.0, 0.5):  # each from the mode before
        deviation, scale = torch.full((20,), 10.0**exponent).double(), 0.7
        mode = find(deviation, own, scale)
        slope = scale * LIKELIHOODS[likelihood].slope(mode.f_mu, y)
        # In a mode each part of the weights is its prior covariance times the loss's slopes.
        v = -deviation * torch.einsum("ncf,nc->f", Phi, slope)
        added = -(own @ slope[..., None])[..., 0]
        assert (mode.coordinates - v).square().sum() / 2 <= mode.error + 1e-12  # a gradient
        assert 0 <= mode.error < 1e-4
        f = offset + Phi @ (deviation * mode.coordinates) + added
        torch.testing.assert_close(mode.f_mu, f, rtol=1e-4, atol=1e-4)
        energy = (mode.coordinates.square().sum() - (slope * added).sum()) / 2
        assert mode.energy.item() == pytest.approx(energy.item(), rel=1e-4)
        assert mode.loss == LIKELIHOODS[likelihood].loss(mode.f_mu, y)


def test_a_mode_in_parts_is_that_of_the_whole(monkeypatch):
    Phi, offset, y, own = problem()
    modes = []
    for rows in (1000, 27):  # all examples, and 9 of 60
        monkeypatch.setattr(features_module, "_ROWS", rows)
        find = ModeFinder(Features(Phi), offset, y, LIKELIHOODS["classification"])
        modes.append(find(torch.ones(20).double(), own, 0.7))
    torch.testing.assert_close(modes[0].f_mu, modes[1].f_mu, rtol=0, atol=1e-5)
    torch.testing.assert_close(modes[0].coordinates, modes[1].coordinates, rtol=0, atol=1e-5)


def test_a_start_from_far_away_ends_in_the_same_mode():
    Phi, offset, y, own = problem(spread=3.0)
    near, far = (ModeFinder(Features(Phi), offset, y, LIKELIHOODS["classification"]) for _ in "12")
    far._weights = 1e3 * torch.ones(20).double()
    deviation = torch.ones(20).double()
    found, expected = far(deviation, own, 1.0).f_mu, near(deviation, own, 1.0).f_mu
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_a_preconditioner_of_another_problem_is_replaced():
    Phi, offset, y, own = problem(spread=3.0)
    good, misled = (
        ModeFinder(Features(Phi), offset, y, LIKELIHOODS["classification"]) for _ in "12"
    )
    deviation = torch.ones(20).double()
    root, _ = whitener(LIKELIHOODS["classification"], offset, own, 1.0)
    features = torch.randn(60, 3, 20).double() * torch.logspace(-4, 4, 20)
    foreign = Features(features).gram(root.__getitem__)
    misled.precondition(foreign)
    found, expected = misled(deviation, own, 1.0).f_mu, good(deviation, own, 1.0).f_mu
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert misled._gram is not foreign


def test_the_next_mode_takes_few_products(monkeypatch):
    Phi, offset, y, own = problem(n=200)
    features = Features(Phi)
    find = ModeFinder(features, offset, y, LIKELIHOODS["classification"])
    find(torch.ones(20).double(), own, 1.0)
    calls = {"gram": 0, "normal_product": 0}
    for name in calls:
        inner = getattr(features, name)

        def counting(*arguments, name=name, inner=inner):
            calls[name] += 1
            return inner(*arguments)

        monkeypatch.setattr(features, name, counting)
    find(torch.full((20,), 0.8).double(), own, 1.0)
    assert calls["gram"] == 0
    assert calls["normal_product"] < 40


def test_the_whitener_is_what_own_parts_leave_of_the_curvature():
    _, f_mu, _, own = problem()
    root, half_logdet = whitener(LIKELIHOODS["classification"], f_mu, own, 0.7)
    p = f_mu.softmax(-1)
    H = 0.7 * (torch.diag_embed(p) - p[:, :, None] * p[:, None, :])
    I_HK = torch.eye(3).double() + H @ own
    torch.testing.assert_close(root.mT @ root, torch.linalg.solve(I_HK, H))
    torch.testing.assert_close(2 * half_logdet, torch.linalg.det(I_HK).log().sum())


def test_features_that_are_all_0_leave_the_logits_alone():
    Phi, offset, y, own = problem()
    features = Features(torch.zeros_like(Phi))
    find = ModeFinder(features, offset, y, LIKELIHOODS["classification"])
    for _ in range(2):
        mode = find(torch.ones(20).double(), torch.zeros_like(own), 1.0)
        torch.testing.assert_close(mode.f_mu, offset)
        assert mode.error == 0
