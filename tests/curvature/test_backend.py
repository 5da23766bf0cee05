"""The host's curvature interface: how many passes, which curvature, which settings."""

import pytest
import torch
from torch.testing import assert_close

from laplace_lora_ext import from_pretrained
from laplace_lora_ext.curvature.backend import LowRankKronEF, LowRankKronGGN
from tests.support.dense import (
    EXACT,
    gradient_curvature,
    jacobian,
    jacobians,
    logits_of,
    lora_layers,
    softmax_fisher,
    unpadded,
)
from tests.support.models import (
    TwoLinear,
    lora_model,
    plain_model,
    ragged_batches,
    real_targets,
    sequences,
    with_lora,
)
from tests.support.posteriors import fitted, make
from tests.support.ranks import on_ranks
from tests.support.texts import text_batches


def first_positions() -> torch.Tensor:
    """Make inputs of four examples without positions, `(4, 5)`."""
    X, _ = sequences()
    return X[:, 0]


def test_regression_has_the_curvature_of_the_squared_error():
    regressor = plain_model(n_outputs=2)
    X = first_positions()
    la = make(regressor, likelihood="regression")
    la.fit([(X, real_targets())])
    Js = jacobians(regressor, X)
    # The squared error has the same curvature wherever the outputs are.
    of_outputs = torch.eye(2).double().expand(len(X), 2, 2)
    H = gradient_curvature(regressor, Js, of_outputs)
    assert_close(la.H.to_matrix(), H, **EXACT)


@pytest.mark.parametrize("backend", [LowRankKronGGN, LowRankKronEF])
def test_the_exact_fisher_and_the_empirical_fisher_of_one_example(backend):
    """At T = 1 and one datum "gradient" is exact for a rank-one Fisher."""
    model = lora_model("bert", n_labels=2).eval()
    (batch,) = ragged_batches(lengths=[1], padded_to=1, n_classes=2)
    inputs = unpadded(batch, 0)
    J = jacobian(model, inputs)
    logits = logits_of(model, inputs).detach()
    if backend is LowRankKronGGN:
        dense = J.T @ softmax_fisher(logits) @ J
    else:
        label = torch.eye(2).double()[batch["labels"][0]]
        gradient = (logits.softmax(-1) - label) @ J
        dense = torch.outer(gradient, gradient)
    la = fitted(batches=[batch], model=model, backend=backend, rank=100)
    found = la.H.to_matrix()
    # A rank-one block vec(G) vec(G)ᵀ of a rank-one G is a Kronecker product: lora_A,
    # lora_B at a single position. Blocks beside the diagonal are left out.
    start = 0
    for _, layer in lora_layers(model):
        part = slice(start, start + layer.weight.numel())
        assert_close(found[part, part], dense[part, part], **EXACT)
        start = part.stop


# --- drawn labels ---------------------------------------------------------------------


def posterior(
    structure: str,
    **settings,
):
    """Make a posterior with settings of its backend, at full rank."""
    if structure == "lowrank_kron":
        settings["rank"] = 100
    return make(
        lora_model("bert"),
        structure,
        backend=LowRankKronGGN,
        backend_kwargs=settings,
    )


def curvature_of(la) -> torch.Tensor:
    la.fit(ragged_batches())
    return la.H if isinstance(la.H, torch.Tensor) else la.H.to_matrix()


structures = pytest.mark.parametrize("structure", ["lowrank_kron", "diag", "full"])


@structures
def test_monte_carlo_fisher_follows_its_own_seed_alone(structure):
    def sampled(seed, state_of_torch=0):
        la = posterior(structure, stochastic=True, num_samples=2, seed=seed)
        torch.manual_seed(state_of_torch)
        before = torch.get_rng_state()
        found = curvature_of(la)
        assert torch.equal(torch.get_rng_state(), before)
        return found

    first = sampled(seed=0)
    assert torch.equal(sampled(seed=0, state_of_torch=7), first)
    assert not torch.equal(sampled(seed=1), first)


@structures
def test_monte_carlo_fisher_approaches_the_exact_one(structure):
    exact = curvature_of(posterior(structure))

    def error(num_samples):
        la = posterior(structure, stochastic=True, num_samples=num_samples)
        return (curvature_of(la) - exact).norm() / exact.norm()

    assert error(64) < error(1) / 3  # 1 / √64 of it in the mean


@pytest.mark.parametrize("likelihood", ["classification", "language_modeling"])
def test_drawn_labels_of_a_fit_in_parts_are_those_of_one_fit(likelihood, tmp_path):
    if likelihood == "language_modeling":
        model = lora_model("gpt2")
        batches = text_batches()
    else:
        model = lora_model("bert", n_labels=20)
        batches = ragged_batches(n_classes=20)
    state = torch.get_rng_state()
    at_once = make(model, likelihood=likelihood)
    at_once.fit(batches)
    in_parts = make(model, likelihood=likelihood)
    for batch in batches:
        in_parts.fit([batch], override=False)
        in_parts.save_pretrained(tmp_path)
        in_parts = from_pretrained(model, tmp_path)
    assert torch.equal(torch.get_rng_state(), state)
    for one, other in zip(in_parts.H.blocks, at_once.H.blocks, strict=True):
        assert torch.equal(one.small.values, other.small.values)
        assert torch.equal(one.large.vectors, other.large.vectors)


def test_each_batch_each_rank_and_each_seed_draw_labels_of_their_own():
    def drawn(n_before=0, seed=0):
        backend = LowRankKronGGN(plain_model(20), "classification", seed=seed)
        backend.n_before = n_before
        logits = torch.zeros(30, 20)
        labels = torch.zeros(30).long()
        return backend.seeds(logits, labels).vectors

    of_first_rank, of_second_rank = on_ranks(lambda rank: drawn(), 2)
    assert torch.equal(of_first_rank, drawn())
    assert not torch.equal(of_second_rank, drawn())
    assert not torch.equal(drawn(n_before=30), drawn())
    assert not torch.equal(drawn(seed=1), drawn())


@pytest.mark.parametrize("n_classes", [19, 20])
def test_labels_of_many_classes_are_drawn_unless_the_user_decides(n_classes):
    def n_seeds(likelihood="classification", **settings):
        backend = LowRankKronGGN(plain_model(n_classes), likelihood, **settings)
        logits = torch.zeros(3, n_classes)
        labels = torch.zeros(3).long()
        return len(backend.seeds(logits, labels).vectors)

    # From 20 classes on, that is.
    has_many_classes = n_classes == 20
    assert n_seeds() == (8 if has_many_classes else 18)
    assert n_seeds(num_samples=3) == (3 if has_many_classes else 18)
    assert n_seeds(stochastic=False) == n_classes - 1
    assert n_seeds(stochastic=True) == 1
    assert n_seeds(stochastic=True, num_samples=4) == 4
    assert n_seeds("regression") == n_classes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kfac_approx": "kfac"}, r"'kfac'.*expand.*gradient"),
        ({"rank": -3}, "rank must not be negative, but is -3"),
        ({"seed": -1}, "seed must not be negative, but is -1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        make(plain_model(), backend_kwargs=settings)


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_gradients_are_those_of_each_examples_loss(likelihood):
    model = with_lora(TwoLinear(n_outputs=2), "first", "second")
    X = first_positions()
    labels = torch.tensor([0, 1, 1, 0])
    y = real_targets() if likelihood == "regression" else labels
    la = make(model, likelihood=likelihood)
    backend = la.backend
    weights = [block.weight.requires_grad_() for block in la.blocks]
    found, loss = backend.gradients(X, y)
    for row, gradient in enumerate(found):
        example = slice(row, row + 1)
        of_example = backend.lossfunc(model(X[example]), y[example])
        gradients = torch.autograd.grad(of_example, weights)
        expected = torch.cat([of_weight.flatten() for of_weight in gradients])
        assert_close(gradient, expected, **EXACT)
    of_all = backend.lossfunc(model(X), y)
    assert_close(loss, of_all, **EXACT)
