"""What is never built: d x d matrices, and Jacobians of all parameters."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from laplace_lora_ext.curvature import accumulation, decomposed, kron
from laplace_lora_ext.curvature.kron import KroneckerBlock, StreamingUpdates
from laplace_lora_ext.passes import graph
from tests.support.models import N_CLASSES, first_batch, lora_model, ragged_batches
from tests.support.posteriors import count_forward_passes, fitted

WIDTH = 52
# Sizes of the large factors, and of nothing else.
LARGE = {WIDTH, 2 * WIDTH, 3 * WIDTH}
PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "linear", "matmul", "mv", "dot"}
# Each backward pass goes through the model's layer norms once.
LAYER_NORM_BACKWARD = "native_layer_norm_backward"


class NewTensors(TorchDispatchMode):
    """Notes operations, and shapes of tensors that they make, views left out."""

    def __init__(self, weights: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.shapes: set[torch.Size] = set()
        self.calls: Counter[str] = Counter()
        # Numbers through layer norms, in proportion to the vectors that pass back at
        # once.
        self.backward = 0
        # Shapes of products' operands, the model's weights left out.
        self.operands: set[torch.Size] = set()
        self._weights = _storages(weights)

    @property
    def largest(self) -> int:
        """Count the numbers of the largest tensor."""
        return max(shape.numel() for shape in self.shapes)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.calls[name] += 1
        given = _tensors((args, kwargs))
        if name == LAYER_NORM_BACKWARD:
            self.backward += args[0].numel()
        if name in PRODUCTS:
            for operand in given:
                if not _storages([operand]) & self._weights:
                    self.operands.add(operand.shape)
        for tensor in _tensors(results):
            if not _storages([tensor]) & _storages(given):
                self.shapes.add(tensor.shape)
        return results


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def bare_loop(la, batch: dict[str, Tensor], n_seeds: int = 1) -> NewTensors:
    """Run one forward pass, and some backward passes of one logit each."""
    weights = [block.weight for block in la.blocks]
    with NewTensors() as made, la.model.prepared(weights):
        logits = la.model(batch)
        for seed in torch.eye(la.n_outputs)[:n_seeds]:
            seeds = seed.expand_as(logits)
            torch.autograd.grad(logits, weights, seeds, retain_graph=True)
    return made


# --- how many vectors pass back -------------------------------------------------------


def of_classes(n_classes: int):
    """Fit a posterior of a classifier of so many classes."""
    model = lora_model("bert", n_labels=n_classes)
    return fitted(model=model, batches=ragged_batches(n_classes=n_classes))


@pytest.fixture(scope="module")
def of_forty():
    return of_classes(40)


BATCH = first_batch()


def n_passes(la, call: Callable[..., Any], *args: Any, **keywords: Any) -> float:
    """Count the backward passes of a call."""
    one_pass = bare_loop(la, BATCH)
    with NewTensors() as made:
        call(*args, **keywords)
    return made.backward / one_pass.backward


@pytest.mark.parametrize("n_classes", [2, 5])
def test_a_backward_pass_a_contrast_or_a_class(n_classes):
    la = of_classes(n_classes)
    for link in ("mean_field", "mc"):
        assert n_passes(la, la, BATCH, link_approx=link) == n_classes - 1
        assert n_passes(la, la.predict, BATCH, link) == n_classes - 1
    assert n_passes(la, la.predict_proba, BATCH) == n_classes - 1
    # These read each logit by itself.
    assert n_passes(la, la, BATCH, link_approx="probit") == n_classes
    diagonal = {"link_approx": "mc", "diagonal_output": True}
    assert n_passes(la, la, BATCH, **diagonal) == n_classes
    assert n_passes(la, la.predictive_moments, BATCH) == n_classes


def search(la, data) -> None:
    la.optimize_prior_precision(method="gridsearch", val_loader=data, grid_size=2)


def agree(la, data) -> None:
    la.optimize_prior_precision(method="agreement", train_loader=data)


def test_many_classes_take_a_backward_pass_for_eight_contrasts_at_most(of_forty):
    la = of_forty
    by_default = [
        n_passes(la, la, BATCH, link_approx="mean_field"),
        n_passes(la, la, BATCH, link_approx="mc"),
        n_passes(la, la.predict, BATCH),
        n_passes(la, la.predict_proba, BATCH),
        n_passes(la, la.predictive_statistics, [BATCH]),
        n_passes(la, search, la, [BATCH]),
        n_passes(la, agree, la, [BATCH]),
    ]
    # Each at least one, so that passes were counted at all.
    assert min(by_default) >= 1
    assert max(by_default) <= 8


def test_a_search_by_statistics_takes_no_pass_and_makes_no_matrix_of_classes(of_forty):
    statistics = of_forty.predictive_statistics([BATCH])
    with NewTensors() as made:
        search(of_forty, statistics)
    assert not made.backward
    ends = {tuple(shape[-2:]) for shape in made.shapes}
    assert (40, 40) not in ends
    # Sums by groups: eight contrasts, the most probable class, and all others.
    assert (10, 40) in ends


def test_the_number_of_contrasts_can_be_chosen():
    la = of_classes(40)
    la.n_contrasts = 2
    assert n_passes(la, la, BATCH, link_approx="mean_field") == 2
    # There are no more than a class less.
    la.n_contrasts = 100
    assert n_passes(la, la.predict, BATCH) == 39
    assert n_passes(la, la.predictive_moments, BATCH) == 40


# --- how many passes, and which tensors -----------------------------------------------


@pytest.fixture(params=[1, N_CLASSES - 1])
def seeds_at_once(request, monkeypatch) -> int:
    """Let backward passes take one seed at a time, or all of them at once."""
    # More than a batch of all seeds has.
    monkeypatch.setattr(graph, "_ROWS", 1 if request.param == 1 else 1000)
    return request.param


TEXTS = ragged_batches(batch_size=4)


@pytest.fixture(params=["gradient", "expand"])
def wide(request):
    """Fit a posterior with large factors once, to find out whose rows are whose."""
    model = lora_model("bert", torch.float32, hidden_size=WIDTH)
    return fitted(model=model, batches=TEXTS, rank=4, kfac_approx=request.param)


# Counts of passes and sizes are the same on any machine.


def test_a_fit_takes_few_passes_and_makes_no_large_tensor(
    wide, seeds_at_once, monkeypatch
):
    # As of sums that are larger.
    monkeypatch.setattr(accumulation, "_WAITING", 0)
    forwards = count_forward_passes(wide)
    with NewTensors(wide.model.parameters()) as made:
        wide.fit(TEXTS)
    assert len(forwards) == len(TEXTS)
    n_seeds = N_CLASSES - 1
    assert n_backward_passes(made, wide) == len(TEXTS) * n_seeds / seeds_at_once
    assert_no_product_of_two_large_sides(made)

    of_model = bare_loop(wide, TEXTS[0], n_seeds)
    bytes_of_a_number = 4
    factors = sum(block.nbytes for block in wide.H_facs) // bytes_of_a_number
    # Rows wait until they are as many numbers as the factors, and then stand beside
    # these.
    waiting = factors + seeds_at_once * gradients_of_four(wide)
    # An update goes by a few more directions than it keeps.
    sketches = sum(
        len(block.columns) * (block.width + kron._OVERSAMPLING) for block in wide.H_facs
    )
    largest = max(seeds_at_once * of_model.largest, waiting + factors, sketches)
    assert made.largest <= largest


def test_all_rows_of_a_batch_go_together_where_they_are_few(wide, monkeypatch):
    updated = []
    update = kron._update

    def note(factors, rows):
        updated.append(len(factors))
        update(factors, rows)

    monkeypatch.setattr(kron, "_update", note)
    wide.fit(TEXTS)
    assert sum(updated) == len(TEXTS) * len(wide.blocks)
    # Inputs, output gradients, and those of the last layer, which are fewer rows.
    assert len(updated) <= len(TEXTS) * 3


@pytest.mark.usefixtures("seeds_at_once")
def test_a_prediction_takes_few_passes_and_makes_no_large_tensor(wide, monkeypatch):
    # As of long texts, whose Jacobians don't wait for those of other blocks.
    monkeypatch.setattr(decomposed, "_NUMBERS", 0)
    forwards = count_forward_passes(wide)
    with NewTensors(wide.model.parameters()) as made:
        wide(TEXTS[0], link_approx="probit")
    assert len(forwards) == 1
    assert n_backward_passes(made, wide) <= N_CLASSES
    assert_no_product_of_two_large_sides(made)

    of_model = bare_loop(wide, TEXTS[0], N_CLASSES - 1)
    # Of one class. All of them may stand beside each other.
    largest = max(of_model.largest, gradients_of_four(wide))
    assert made.largest <= N_CLASSES * largest


def n_backward_passes(made: NewTensors, la) -> float:
    """Count passes by the layer norms that each of them goes through."""
    one_pass = bare_loop(la, TEXTS[0])
    return made.calls[LAYER_NORM_BACKWARD] / one_pass.calls[LAYER_NORM_BACKWARD]


def assert_no_product_of_two_large_sides(made: NewTensors) -> None:
    assert made.operands
    for shape in made.operands:
        assert sum(size in LARGE for size in shape) < 2, shape


def gradients_of_four(la) -> int:
    """Count the numbers of four examples' gradients in the largest weight."""
    return 4 * max(block.weight.numel() for block in la.blocks)


def block_of_a_7b_adapter(shape: tuple[int, int]) -> KroneckerBlock:
    """Sum 32 random rows in both factors of a weight."""
    n_outputs, n_inputs = shape
    block = KroneckerBlock.zeros(
        shape,
        small_output=n_outputs == 8,
        rank=10,
        tail=True,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    updates = StreamingUpdates()
    updates.add(block, torch.randn(32, n_inputs), of_outputs=False)
    updates.add(block, torch.randn(32, n_outputs), of_outputs=True)
    block.normalizer = block.normalizer + 1
    return block


def test_the_posterior_of_a_7b_adapter_takes_65_mb_at_most():
    """32 layers, width 4096, r 8, rank 10: sums and eigenvectors together."""
    torch.manual_seed(0)
    shapes = [(8, 4096), (4096, 8)] * 2 * 32
    held = []
    for shape in shapes:
        block = block_of_a_7b_adapter(shape)
        held += _tensors(block.state_dict())
        held += block.decompose().numbers
    # Much less would be a sign that something was not counted.
    assert 60e6 < sum(tensor.nbytes for tensor in held) <= 65e6
