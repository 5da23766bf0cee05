"""The host's curvature interface: how many passes, which curvature, which settings."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot
from torch.testing import assert_close

from laplace_lora_ext import from_pretrained
from laplace_lora_ext.curvature.backend import (
    PAPER_SETTINGS,
    LowRankKronEF,
    LowRankKronGGN,
    LowRankKronInterface,
)
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
    lora_model,
    plain_model,
    ragged_batches,
    real_targets,
    sequences,
)
from tests.support.posteriors import fitted, make
from tests.support.ranks import assert_alike, on_ranks, strided_loader
from tests.support.texts import text_batches


def first_positions() -> Tensor:
    """Make inputs of four examples without positions, `(4, 5)`."""
    X, _ = sequences()
    return X[:, 0]


def test_regression_has_the_curvature_of_the_squared_error():
    regressor = plain_model(n_outputs=2)
    X = first_positions()
    y = real_targets()
    la = make(regressor, likelihood="regression")
    la.fit([(X, y)])
    found = la.H.to_matrix()
    Js = jacobians(regressor, X)
    # The squared error has the same curvature wherever the outputs are.
    of_example = torch.eye(2).double()
    of_outputs = of_example.expand(len(X), 2, 2)
    expected = gradient_curvature(regressor, Js, of_outputs)
    assert_close(found, expected, **EXACT)


# --- one example ----------------------------------------------------------------------


def one_example() -> dict[str, Tensor]:
    """Make a text of one token."""
    (batch,) = ragged_batches(
        lengths=[1],
        padded_to=1,
        n_classes=2,
    )
    return batch


def assert_blocks_equal(
    model: nn.Module,
    found: Tensor,
    expected: Tensor,
) -> None:
    """Compare the blocks of LoRA weights; what lies beside the diagonal is left out."""
    start = 0
    for _, layer in lora_layers(model):
        end = start + layer.weight.numel()
        block = (slice(start, end), slice(start, end))
        assert_close(found[block], expected[block], **EXACT)
        start = end


# A rank-one block vec(G) vec(G)ᵀ of a rank-one G is a Kronecker product: lora_A, lora_B
# at a single position. With two classes the Fisher has rank one, so that "gradient" is
# exact for one example of one token.


@pytest.fixture
def of_two_classes():
    model = lora_model("bert", n_labels=2)
    return model.eval()


def curvature_of_one(
    model: nn.Module,
    backend: type[LowRankKronInterface],
) -> Tensor:
    """Fit a posterior to the one example, at a rank that no factor reaches."""
    la = fitted(
        batches=[one_example()],
        model=model,
        backend=backend,
        rank=100,
    )
    return la.H.to_matrix()


def test_the_fisher_of_one_example_is_exact(of_two_classes):
    inputs = unpadded(one_example(), 0)
    J = jacobian(of_two_classes, inputs)
    logits = logits_of(of_two_classes, inputs)
    H = softmax_fisher(logits.detach())
    found = curvature_of_one(of_two_classes, LowRankKronGGN)
    assert_blocks_equal(of_two_classes, found, J.T @ H @ J)


def test_the_empirical_fisher_of_one_example_is_exact(of_two_classes):
    batch = one_example()
    inputs = unpadded(batch, 0)
    J = jacobian(of_two_classes, inputs)
    logits = logits_of(of_two_classes, inputs)
    p = logits.detach().softmax(-1)
    (label,) = one_hot(batch["labels"], 2)
    gradient = (p - label) @ J
    expected = torch.outer(gradient, gradient)
    found = curvature_of_one(of_two_classes, LowRankKronEF)
    assert_blocks_equal(of_two_classes, found, expected)


# --- drawn labels, or signs -----------------------------------------------------------


@pytest.fixture(params=["lowrank_kron", "diag", "full"])
def structure(request: pytest.FixtureRequest) -> str:
    """A structure whose curvature is this package's own."""
    return request.param


@pytest.fixture(params=["labels", "signs"])
def draws(request: pytest.FixtureRequest) -> str:
    """What is drawn."""
    return request.param


def posterior(
    structure: str,
    **settings: Any,
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


def curvature_of(la: Any) -> Tensor:
    la.fit(ragged_batches())
    if isinstance(la.H, Tensor):
        return la.H
    return la.H.to_matrix()


def drawn_curvature(
    structure: str,
    draws: str,
    seed: int,
    state_of_torch: int = 0,
) -> Tensor:
    """Fit by a draw for each text, in a state of torch's own generator."""
    la = posterior(
        structure,
        stochastic=True,
        num_samples=1,
        draws=draws,
        seed=seed,
    )
    torch.manual_seed(state_of_torch)
    before = torch.get_rng_state()
    found = curvature_of(la)
    assert torch.equal(torch.get_rng_state(), before)
    return found


def test_monte_carlo_fisher_follows_its_own_seed_alone(structure, draws):
    first = drawn_curvature(structure, draws, seed=0)
    same = drawn_curvature(structure, draws, seed=0, state_of_torch=7)
    other = drawn_curvature(structure, draws, seed=1)
    assert torch.equal(same, first)
    assert not torch.equal(other, first)


def test_monte_carlo_fisher_approaches_the_exact_one(structure, draws):
    exact = curvature_of(posterior(structure))
    errors = []
    for num_samples in (1, 64):
        la = posterior(
            structure,
            stochastic=True,
            num_samples=num_samples,
            draws=draws,
        )
        error = curvature_of(la) - exact
        errors.append(error.norm())
    of_one, of_many = errors
    # 1 / √64 of it in the mean.
    assert of_many < of_one / 3


class Many(NamedTuple):
    """A model with many outputs, of which a fit draws labels by default."""

    likelihood: str
    model: nn.Module
    batches: list[Any]


@pytest.fixture(params=["classification", "language_modeling"])
def many(request: pytest.FixtureRequest) -> Many:
    if request.param == "language_modeling":
        return Many(request.param, lora_model("gpt2"), text_batches())
    model = lora_model("bert", n_labels=20)
    return Many(request.param, model, ragged_batches(n_classes=20))


def one_by_one(batches: list[Any]) -> list[Any]:
    """Divide batches into one of each text."""
    return [
        {key: value[row : row + 1] for key, value in batch.items()}
        for batch in batches
        for row in range(len(batch["labels"]))
    ]


def test_drawn_labels_are_the_same_whatever_the_batch(many):
    # As many columns as there are: what a rank leaves out depends on the batches.
    of_all, of_each = (
        make(many.model, likelihood=many.likelihood, backend_kwargs={"rank": 200})
        for _ in range(2)
    )
    of_all.fit(many.batches)
    of_each.fit(one_by_one(many.batches))
    assert_close(of_each.H.to_matrix(), of_all.H.to_matrix(), rtol=1e-8, atol=1e-10)


def test_drawn_labels_of_a_fit_in_parts_are_those_of_one_fit(many, tmp_path):
    likelihood, model, batches = many
    state = torch.get_rng_state()
    at_once = make(model, likelihood=likelihood)
    at_once.fit(batches)
    in_parts = make(model, likelihood=likelihood)
    # What is drawn depends on how many examples came before, which files tell.
    for batch in batches:
        in_parts.fit([batch], override=False)
        in_parts.save_pretrained(tmp_path)
        in_parts = from_pretrained(model, tmp_path)
    assert torch.equal(torch.get_rng_state(), state)
    found = in_parts.H.blocks
    expected = at_once.H.blocks
    for block, other in zip(found, expected, strict=True):
        assert torch.equal(block.small.values, other.small.values)
        assert torch.equal(block.large.vectors, other.large.vectors)


def drawn_labels(
    first: int = 0,
    seed: int = 0,
) -> Tensor:
    """Draw labels of thirty examples, from a certain one on."""
    model = plain_model(20)
    backend = LowRankKronGGN(model, "classification", seed=seed)
    backend.examples = first + torch.arange(30)
    logits = torch.zeros(30, 20)
    # Any labels: those of the data are not asked for.
    labels = torch.zeros(30).long()
    seeds = backend.seeds(logits, labels)
    return seeds.vectors


def test_each_batch_and_each_seed_draw_labels_of_their_own():
    first = drawn_labels()
    again = drawn_labels()
    of_second_batch = drawn_labels(first=30)
    of_another_seed = drawn_labels(seed=1)
    assert torch.equal(again, first)
    assert not torch.equal(of_second_batch, first)
    assert not torch.equal(of_another_seed, first)


def drawn_by_all(_: int, draws: str) -> Tensor:
    """Fit to the texts of all processes, by one draw for each."""
    settings = {"stochastic": True, "draws": draws, "rank": 100}
    la = make(lora_model("bert"), backend_kwargs=settings)
    la.fit(strided_loader())
    return la.H.to_matrix()


def test_ranks_draw_as_one_process_does(draws):
    of_ranks = on_ranks(drawn_by_all, 3, draws)
    assert_alike(of_ranks, drawn_by_all(0, draws), rtol=1e-7, atol=1e-10)


def n_seeds(
    n_classes: int,
    likelihood: str = "classification",
    **settings: Any,
) -> int:
    """Count the backward passes of a batch."""
    model = plain_model(n_classes)
    backend = LowRankKronGGN(model, likelihood, **settings)
    logits = torch.zeros(3, n_classes)
    labels = torch.zeros(3).long()
    seeds = backend.seeds(logits, labels)
    return len(seeds.vectors)


def test_a_fit_takes_two_backward_passes_at_most():
    assert n_seeds(2) == 1
    assert n_seeds(3) == 2
    assert n_seeds(4) == 2
    assert n_seeds(20) == 2


def test_as_many_passes_are_taken_as_are_asked_for():
    assert n_seeds(4, num_samples=3) == 3
    assert n_seeds(20, num_samples=5) == 5
    assert n_seeds(20, stochastic=True, num_samples=1) == 1


@pytest.mark.parametrize("n_classes", [3, 4, 20])
def test_every_column_has_a_pass_if_the_user_says_so(n_classes):
    assert n_seeds(n_classes, stochastic=False) == n_classes - 1


@pytest.mark.parametrize("n_outputs", [1, 19])
def test_a_regression_takes_a_pass_for_each_output(n_outputs):
    assert n_seeds(n_outputs, "regression") == n_outputs
    assert n_seeds(n_outputs, "regression", stochastic=True) == min(2, n_outputs)


def test_labels_are_drawn_where_that_takes_fewer_passes():
    assert n_seeds(9, draws="labels") == 9 - 1
    assert n_seeds(10, draws="labels") == 8
    assert n_seeds(10, **PAPER_SETTINGS) == 8
    assert n_seeds(3, draws="labels", stochastic=True) == 8


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kfac_approx": "kfac"}, r"'kfac'.*expand.*gradient"),
        ({"rank": -3}, "rank must not be negative, but is -3"),
        ({"seed": -1}, "seed must not be negative, but is -1"),
        ({"draws": "sign"}, "'signs', 'labels'.*not 'sign'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        make(plain_model(), backend_kwargs=settings)


def flat_gradient(
    loss: Tensor,
    weights: Sequence[Tensor],
) -> Tensor:
    """Differentiate a loss in all weights, `(parameters,)`."""
    gradients = torch.autograd.grad(loss, weights)
    flat = [of_weight.flatten() for of_weight in gradients]
    return torch.cat(flat)


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_gradients_are_those_of_each_examples_loss(likelihood):
    model = plain_model(n_outputs=2)
    X = first_positions()
    y = torch.tensor([0, 1, 1, 0])
    if likelihood == "regression":
        y = real_targets()
    la = make(model, likelihood=likelihood)
    loss_of = la.backend.lossfunc
    found, loss = la.backend.gradients(X, y)
    expected_loss = loss_of(model(X), y)
    assert_close(loss, expected_loss, **EXACT)
    weights = [block.weight for block in la.blocks]
    for weight in weights:
        weight.requires_grad_()
    for row, gradient in enumerate(found):
        only = slice(row, row + 1)
        of_example = loss_of(model(X[only]), y[only])
        expected = flat_gradient(of_example, weights)
        assert_close(gradient, expected, **EXACT)
