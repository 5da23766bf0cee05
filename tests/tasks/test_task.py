"""Seeds against Fishers' formulas, losses and targets."""

import warnings
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from laplace_lora_ext.tasks import TASKS
from laplace_lora_ext.tasks.classification import Classification
from laplace_lora_ext.tasks.regression import Regression
from laplace_lora_ext.tasks.task import Draws, Seeds
from tests.support.cases import Bernoullis, Gaussian, Softmax
from tests.support.dense import EXACT, bernoulli_fisher, softmax_fisher
from tests.support.posteriors import normal
from tests.support.tasks import LABELS

MULTI_LABEL = "multi_label_classification"
TOKENS = "token_classification"


# --- seeds ----------------------------------------------------------------------------


def fisher(seeds) -> Tensor:
    """Sum the seeds' outer products, each with its weight, in float64."""
    columns = Seeds(seeds.vectors.double(), seeds.weights.double()).dense()
    return torch.einsum("sbc,sbk->bck", columns, columns)


LOGITS = torch.tensor([[1.0, 0.0, -0.5]])


# At a scale of 30, 1 - p is 0 in float32.
@pytest.mark.parametrize("scale", [1, 30])
@pytest.mark.parametrize("likelihood", ["classification", MULTI_LABEL])
def test_seeds_keep_float32_accuracy(likelihood, scale):
    task = TASKS[likelihood]
    logits = scale * LOGITS
    f = logits.double()
    if likelihood == MULTI_LABEL:
        expected, p = bernoulli_fisher(logits), f.sigmoid()
        # Near the probabilities at a scale of 1.
        numbers = torch.tensor([[[0.73, 0.51, 0.37]]] * 2)
        target = (numbers[0] < p).long()
    else:
        expected, p = softmax_fisher(logits), f.softmax(-1)
        numbers, target = torch.ones(2, 1).double(), torch.tensor([[0, 0, 1]])
    assert_close(fisher(task.exact_seeds(logits)), expected, rtol=1e-5, atol=1e-30)
    chosen: Any = SimpleNamespace(uniform=lambda *shape: numbers)
    # Each is divided by the root of their number, so that squares have the mean.
    both = task.label_seeds(logits, 2, chosen).dense()
    assert_close(both.double().sum(0) / 2**0.5, p - target, rtol=1e-5, atol=1e-7)


def test_sampled_slopes_of_tokens_are_unbiased():
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0]).double()
    n_draws = 20_000
    of_one_text = Draws(0, torch.zeros(3).long())
    seeds = TASKS[TOKENS].label_seeds(logits.expand(3, 4), n_draws, of_one_text)
    assert seeds.weights.shape == (n_draws, 1)  # of a text, whose tokens share a pass
    # Each is divided by the root of their number, so that squares have the mean.
    columns = seeds.dense().flatten(1)
    # Two tokens of a text are drawn independently.
    expected = torch.block_diag(*softmax_fisher(logits.expand(3, 4)))
    assert_close(columns.T @ columns, expected, rtol=0, atol=0.01)
    assert (columns.sum(0) / n_draws**0.5).abs().max() < 0.02


FOUR_LOGITS = torch.tensor(
    [
        [1.0, 0.0, -0.5, 0.5],
        # So sure that a drawn label would hardly ever see what the others weigh.
        [0.0, 12.0, -2.0, -3.0],
        # So sure that nothing is left.
        [-1e4, -1e4, 1e4, -1e4],
        # Any of several may be the most probable one.
        [0.0, 0.0, 0.0, 0.0],
    ],
    dtype=torch.float64,
)


def alike(pattern: tuple[float, ...], n_draws: int, n_columns: int) -> Tensor:
    """Give the same signs to all rows and sums."""
    signs = torch.tensor(pattern).to(FOUR_LOGITS)
    return signs.expand(n_draws, len(FOUR_LOGITS), n_columns)


def fishers_by_signs(likelihood: str, n_sums: int) -> list[Tensor]:
    """Compute Fishers `(N, C, C)` by each pattern of signs."""
    fishers = []
    for pattern in product([-1.0, 1.0], repeat=4):
        draws: Any = SimpleNamespace(signs=partial(alike, pattern))
        seeds = TASKS[likelihood].sign_seeds(FOUR_LOGITS, n_sums, draws)
        # Nothing underflows in half precision.
        largest = seeds.vectors.abs().amax((1, 2))
        assert_close(largest, torch.ones_like(largest))
        fishers.append(fisher(seeds))
    return fishers


# Each with the number of its Fisher's columns; of a token none are exact.
@pytest.mark.parametrize(
    ("likelihood", "target", "n_columns"),
    [
        ("classification", Softmax(), 3),
        ("regression", Gaussian(), 4),
        (MULTI_LABEL, Bernoullis(), 4),
        (TOKENS, Softmax(), None),
    ],
)
def test_signs_average_the_exact_fisher_and_as_many_as_columns_are_exact(
    likelihood, target, n_columns
):
    expected = target.fisher(FOUR_LOGITS)
    by_two = fishers_by_signs(likelihood, 2)
    assert_close(torch.stack(by_two).mean(0), expected, **EXACT)
    seeds = TASKS[likelihood].sign_seeds(FOUR_LOGITS, 9, Draws(0, torch.arange(4)))
    if n_columns is None:
        assert seeds.weights.shape == (9, 1)  # a pass serves all tokens of a text
        return
    for found in fishers_by_signs(likelihood, n_columns):
        assert_close(found, expected, **EXACT)
    assert len(seeds.vectors) == n_columns
    one_less = fishers_by_signs(likelihood, n_columns - 1)
    assert not torch.allclose(one_less[0], expected)


def test_the_largest_columns_are_in_different_sums():
    logits = torch.tensor([[0.0, 9.0, -40.0, 1.0, -40.0]]).double()
    seeds = Classification().sign_seeds(logits, 2, Draws(0, torch.arange(1)))
    # The two others are next to nothing.
    assert_close(fisher(seeds), softmax_fisher(logits), rtol=1e-6, atol=1e-8)
    # Of labels, the least sure vary the most.
    by_size = TASKS[MULTI_LABEL].columns_by_size(torch.tensor([[3.0, 0.0, -1.0]]))
    assert by_size.tolist() == [[1, 2, 0]]
    # They are dealt to and fro: here in their own order.
    alike = Regression().sign_seeds(torch.zeros(1, 5), 2, Draws(0, torch.arange(1)))
    dealt = alike.vectors[:, 0] != 0
    assert dealt.tolist() == [[1, 0, 0, 1, 1], [0, 1, 1, 0, 0]]


def test_each_example_and_each_seed_has_numbers_of_its_own():
    def drawn(*examples: int, seed: int = 0) -> Tensor:
        return Draws(seed, torch.tensor(examples)).uniform(2, 3)

    of_all = drawn(7, 7, 8, 9)
    assert of_all.shape == (2, 4, 3)
    # Rows of one example follow each other.
    assert torch.equal(torch.cat([drawn(7, 7), drawn(8, 9)], dim=1), of_all)
    assert len(of_all.unique()) == of_all.numel()
    assert not (drawn(7, 7, 8, 9, seed=1) == of_all).any()
    assert 0 <= of_all.min() < of_all.max() < 1


# --- targets --------------------------------------------------------------------------


def changed(values: Tensor, value: float) -> Tensor:
    """Copy targets, with another one in the third place."""
    copied = values.clone()
    copied.view(-1)[2] = value
    return copied


CLASSES = torch.arange(4) % 3
NUMBERS = normal(4, 2, seed=2)


@pytest.mark.parametrize(
    ("likelihood", "y", "message"),
    [
        ("classification", changed(CLASSES, -1), "0 to 2, but range from -1"),
        ("classification", changed(CLASSES, 3), "0 to 2, but range from 0 to 3"),
        ("classification", CLASSES.float(), "float32"),
        ("classification", CLASSES.bool(), "bool"),
        ("classification", LABELS, '"multi_label_classification"'),
        ("regression", CLASSES, '"classification"'),
        ("regression", torch.zeros(3, 2), "targets must be"),
        ("regression", changed(NUMBERS, torch.inf), "non-finite"),
        (TOKENS, torch.tensor([[-100, 3]]), "from 0 to 2, but range from 3 to 3"),
    ],
)
def test_targets_that_do_not_fit_are_refused(likelihood, y, message):
    logits = torch.zeros(4, 2 if likelihood == "regression" else 3)
    with pytest.raises(ValueError, match=message):
        TASKS[likelihood].check_targets(y, logits)


def test_one_class_is_refused():
    with pytest.raises(ValueError, match="at least two"):
        Classification().check_targets(torch.zeros(4).long(), torch.zeros(4, 1))


def test_one_output_takes_targets_without_a_column():
    task = TASKS["regression"]
    y, f = normal(4), normal(4, 1)
    loss = task.loss(f, task.check_targets(y, f))
    assert_close(loss, (f - y[:, None]).square().sum() / 2, **EXACT)


# With sums of 1, as probabilities have.
TWO_LOGITS = torch.tensor([[2.0, -1.0, 0.0], [0.0, 1.0, 0.0]])
TWO_CLASSES = torch.tensor([0, 2])


@pytest.mark.parametrize("logits", [TWO_LOGITS, 2 * TWO_LOGITS.abs()])
def test_logits_are_not_taken_for_probabilities(logits):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Classification().check_targets(TWO_CLASSES, logits)


# In bfloat16 probabilities don't add up to 1 exactly.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_probabilities_in_place_of_logits_are_warned_of(dtype):
    probabilities = TWO_LOGITS.to(dtype).softmax(-1).float()
    with pytest.warns(UserWarning, match="look like probabilities"):
        Classification().check_targets(TWO_CLASSES, probabilities)
