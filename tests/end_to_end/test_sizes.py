"""What is never built: d x d matrices, Jacobians of all parameters, needless reads."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from laplace_lora_ext import Agreement, GridSearch
from laplace_lora_ext.curvature import accumulation, kron
from laplace_lora_ext.curvature.kron import KroneckerBlock, StreamingUpdates
from laplace_lora_ext.passes import graph, recorder
from tests.support.models import N_CLASSES, lora_model, ragged_batches
from tests.support.new_tensors import NewTensors, tensors_in
from tests.support.posteriors import count_forward_passes, fitted, make

WIDTH = 60
# Sizes of the large factors, and of nothing else.
LARGE = {WIDTH, 2 * WIDTH, 3 * WIDTH}
TEXTS = ragged_batches(batch_size=4)
BATCH = TEXTS[0]


def bare_loop(la, n_seeds: int = 1) -> NewTensors:
    """Run one forward pass, and some backward passes of one logit each."""
    weights = [block.weight for block in la.blocks]
    with NewTensors() as made, la.model.prepared(weights):
        logits = la.model(BATCH)
        for seed in torch.eye(la.n_outputs)[:n_seeds]:
            seeds = seed.expand_as(logits)
            torch.autograd.grad(logits, weights, seeds, retain_graph=True)
    return made


# --- how many vectors pass back -------------------------------------------------------


def n_passes(la, call: Callable[..., Any], *args: Any, **keywords: Any) -> float:
    """Count the backward passes of a call."""
    with NewTensors() as made:
        call(*args, **keywords)
    return made.vectors / bare_loop(la).vectors


def of_classes(n_classes: int):
    """Fit a posterior of a classifier of so many classes."""
    model = lora_model("bert", n_labels=n_classes)
    texts = ragged_batches(batch_size=4, n_classes=n_classes)
    return fitted(model=model, batches=texts)


@pytest.fixture(scope="module")
def of_forty():
    return of_classes(40)


def test_a_backward_pass_a_contrast_or_a_class():
    la = of_classes(5)
    for link in ("mean_field", "mc"):
        assert n_passes(la, la, BATCH, link_approx=link) == 4
        assert n_passes(la, la.predict, BATCH, link) == 4
    # These read each logit by itself.
    assert n_passes(la, la, BATCH, link_approx="probit") == 5
    assert n_passes(la, la, BATCH, link_approx="mc", diagonal_output=True) == 5
    assert n_passes(la, la.predictive_moments, BATCH) == 5


def test_many_classes_take_a_backward_pass_for_eight_contrasts_at_most(of_forty):
    la = of_forty
    by_default = [
        n_passes(la, la, BATCH, link_approx="mean_field"),
        n_passes(la, la, BATCH, link_approx="mc"),
        n_passes(la, la.predict, BATCH),
        n_passes(la, la.predict_proba, BATCH),
        n_passes(la, la.predictive_statistics, [BATCH]),
        n_passes(la, GridSearch(val_loader=[BATCH], grid_size=2), la),
        n_passes(la, Agreement(train_loader=[BATCH]), la),
    ]
    # Each at least one, so that passes were counted at all.
    assert min(by_default) >= 1
    assert max(by_default) <= 8


def test_a_search_by_statistics_takes_no_pass_and_makes_no_matrix_of_classes(of_forty):
    statistics = of_forty.predictive_statistics([BATCH])
    with NewTensors() as made:
        GridSearch(val_loader=statistics, grid_size=2)(of_forty)
    assert not made.vectors
    ends = {tuple(shape[-2:]) for shape in made.shapes}
    assert (40, 40) not in ends
    # Sums by groups: eight contrasts, the most probable class, and all others.
    assert (10, 40) in ends


# --- how many passes, and which tensors: the same on any machine ----------------------


@pytest.fixture(params=["gradient", "expand"])
def wide(request):
    """Fit a posterior with large factors once, to find out whose rows are whose."""
    model = lora_model("bert", torch.float32, hidden_size=WIDTH)
    return fitted(model=model, batches=TEXTS, rank=4, kfac_approx=request.param)


def gradients_of_four(la) -> int:
    """Count the numbers of four examples' gradients in the largest weight."""
    return len(BATCH["labels"]) * max(block.weight.numel() for block in la.blocks)


def assert_no_matrix_of_two_large_sides(made: NewTensors) -> None:
    for shape in made.shapes:
        assert sum(size in LARGE for size in shape) < 2, shape


@pytest.mark.parametrize("at_once", [1, N_CLASSES - 1])
def test_a_fit_takes_few_passes_and_makes_no_large_tensor(wide, at_once, monkeypatch):
    # As many as so many seeds have of a batch's tokens.
    monkeypatch.setattr(graph, "_ROWS", at_once * BATCH["input_ids"].numel())
    # As of sums that are larger.
    monkeypatch.setattr(accumulation, "_WAITING", 0)
    forwards = count_forward_passes(wide)
    with NewTensors() as made:
        wide.fit(TEXTS)
    assert len(forwards) == len(TEXTS)
    of_model = bare_loop(wide, N_CLASSES - 1)
    assert made.passes == len(TEXTS) * of_model.passes / at_once
    assert_no_matrix_of_two_large_sides(made)

    bytes_of_a_number = 4
    factors = sum(block.nbytes for block in wide.H_facs) // bytes_of_a_number
    # Rows wait until they are as many numbers as the factors, and then stand beside
    # these.
    waiting = factors + at_once * gradients_of_four(wide)
    # An update goes by a few more directions than it keeps.
    sketch = sum(
        len(block.columns) * (block.width + kron._OVERSAMPLING) for block in wide.H_facs
    )
    largest = max(at_once * of_model.largest, waiting + factors, sketch)
    assert made.largest <= largest


def test_all_rows_of_a_batch_go_together_where_they_are_few(wide, monkeypatch):
    updated = []
    leading_of = kron._leading_of

    def note(rows, width):
        updated.append(len(rows))
        return leading_of(rows, width)

    monkeypatch.setattr(kron, "_leading_of", note)
    wide.fit(TEXTS)
    assert sum(updated) == len(TEXTS) * len(wide.blocks)
    # Inputs, output gradients, and those of the last layer, which are fewer rows.
    assert len(updated) <= len(TEXTS) * 3


def test_a_prediction_takes_few_passes_and_makes_no_large_tensor(wide, monkeypatch):
    # As of long texts, whose rows don't wait for those of other blocks.
    monkeypatch.setattr(recorder, "_WAITING", 0)
    forwards = count_forward_passes(wide)
    with NewTensors() as made:
        wide(BATCH, link_approx="probit")
    assert len(forwards) == 1
    of_model = bare_loop(wide, N_CLASSES)
    assert made.passes <= of_model.passes
    assert_no_matrix_of_two_large_sides(made)
    # Of one class. All of them may stand beside each other.
    assert made.largest <= N_CLASSES * max(of_model.largest, gradients_of_four(wide))


def test_a_batch_is_read_as_often_whatever_the_number_of_layers():
    counts = []
    # One layer, and all.
    for layers in ([0], None):
        la = make(lora_model("bert"), layers_to_transform=layers)
        # The first pass proves more.
        la.fit(TEXTS)
        with NewTensors() as fitting:
            la.fit(TEXTS)
        with NewTensors() as predicting:
            la(BATCH, link_approx="mean_field")
        with NewTensors() as passing:
            la.predictive_statistics(TEXTS)
        counts.append([each.readings for each in (fitting, predicting, passing)])
    of_one, of_all = counts
    assert of_one == of_all
    # That readings are counted at all.
    assert min(of_one) > 0


def test_the_posterior_of_a_7b_adapter_takes_65_mb_at_most():
    """32 layers, width 4096, r 8, rank 10: sums and eigenvectors together."""
    torch.manual_seed(0)
    n_bytes = 0
    for shape, small_output in (((8, 4096), True), ((4096, 8), False)):
        settings = {"rank": 10, "tail": True, "dtype": torch.float32}
        device = torch.device("cpu")
        block = KroneckerBlock.zeros(shape, small_output, device=device, **settings)
        for n_numbers, of_outputs in zip(shape, (True, False), strict=True):
            StreamingUpdates().add(block, torch.randn(32, n_numbers), of_outputs)
        block.normalizer = block.normalizer + 1
        held = [*tensors_in(block.state_dict()), *block.decompose().numbers]
        # In queries and values of each layer.
        n_bytes += 2 * 32 * sum(tensor.nbytes for tensor in held)
    # Much less would be a sign that something was not counted.
    assert 60e6 < n_bytes <= 65e6
