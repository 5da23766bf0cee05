"""What is never built: d x d matrices, and Jacobians of all parameters."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import laplace
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from laplace_lora_ext.curvature import roots
from laplace_lora_ext.curvature.block import KroneckerBlock
from laplace_lora_ext.curvature.factors import StreamingUpdates
from laplace_lora_ext.curvature.matrix import LowRankKron
from laplace_lora_ext.passes import graph
from tests.support.models import (
    N_CLASSES,
    first_batch,
    lora_model,
    ragged_batches,
)
from tests.support.posteriors import count_forward_passes, fitted

Batch = dict[str, Tensor]

WIDTH = 52
# Sizes of the large factors, and of nothing else.
LARGE = {
    WIDTH,
    2 * WIDTH,
    3 * WIDTH,
}
PRODUCTS = {
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "linear",
    "matmul",
    "mv",
    "dot",
}
# Each backward pass goes through the model's layer norms once.
LAYER_NORM_BACKWARD = "native_layer_norm_backward"


class NewTensors(TorchDispatchMode):
    """Notes operations, and shapes of tensors that they make, views left out."""

    def __init__(
        self,
        weights: Iterable[Tensor] = (),
    ) -> None:
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

    def __torch_dispatch__(
        self,
        func,
        types,
        args=(),
        kwargs=None,
    ):
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        self.calls[name] += 1
        given = _tensors(args) + _tensors(kwargs)
        if name == LAYER_NORM_BACKWARD:
            slopes = args[0]
            self.backward += slopes.numel()
        if name in PRODUCTS:
            for operand in given:
                is_weight = _storage(operand) in self._weights
                if not is_weight:
                    self.operands.add(operand.shape)
        of_given = _storages(given)
        for tensor in _tensors(results):
            is_view = _storage(tensor) in of_given
            if not is_view:
                self.shapes.add(tensor.shape)
        return results


def _tensors(tree: Any) -> list[Tensor]:
    tensors = []
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
    return tensors


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    return {_storage(tensor) for tensor in tensors}


def one_hot_seeds(
    n: int,
    n_classes: int = N_CLASSES,
) -> Tensor:
    """Make the first seeds `(n, n_classes)` of backward passes, one logit each."""
    return torch.eye(n_classes)[:n]


def bare_loop(
    la,
    batch: Batch,
    seeds: Tensor,
) -> NewTensors:
    """Run one forward pass, and as many backward passes as there are seeds."""
    weights = [block.weight for block in la.blocks]
    with NewTensors() as made, la.model.prepared(weights):
        logits = la.model(batch)
        for seed in seeds:
            torch.autograd.grad(
                logits,
                weights,
                seed.expand_as(logits),
                retain_graph=True,
            )
    return made


# --- how many vectors pass back -------------------------------------------------------


def of_classes(n_classes: int):
    """Fit a posterior of a classifier of so many classes."""
    model = lora_model("bert", n_labels=n_classes)
    batches = ragged_batches(n_classes=n_classes)
    return fitted(model=model, batches=batches)


def passes_counter(
    la,
    batch: Batch,
) -> Callable[..., float]:
    """Make a function that counts the backward passes of a call."""
    seed = one_hot_seeds(1, la.n_outputs)
    one_pass = bare_loop(la, batch, seed)

    def n_passes(
        call: Callable[..., Any],
        *args: Any,
        **keywords: Any,
    ) -> float:
        with NewTensors() as made:
            call(*args, **keywords)
        return made.backward / one_pass.backward

    return n_passes


@pytest.mark.parametrize("n_classes", [2, 3, 5])
def test_links_of_differences_take_a_backward_pass_a_contrast(n_classes):
    la = of_classes(n_classes)
    batch = first_batch()
    n_passes = passes_counter(la, batch)
    n_contrasts = n_classes - 1
    for link in ("mean_field", "mc"):
        of_call = n_passes(la, batch, link_approx=link)
        assert of_call == n_contrasts
        of_predict = n_passes(la.predict, batch, link)
        assert of_predict == n_contrasts
    of_predict_proba = n_passes(la.predict_proba, batch)
    assert of_predict_proba == n_contrasts


@pytest.mark.parametrize("n_classes", [2, 3, 5])
def test_what_reads_each_logit_by_itself_takes_a_backward_pass_a_class(n_classes):
    la = of_classes(n_classes)
    batch = first_batch()
    n_passes = passes_counter(la, batch)
    of_probit = n_passes(la, batch, link_approx="probit")
    assert of_probit == n_classes
    of_diagonal = n_passes(
        la,
        batch,
        link_approx="mc",
        diagonal_output=True,
    )
    assert of_diagonal == n_classes
    of_moments = n_passes(la.predictive_moments, batch)
    assert of_moments == n_classes


def search(la, data) -> None:
    la.optimize_prior_precision(
        method="gridsearch",
        val_loader=data,
        grid_size=2,
    )


def agree(la, data) -> None:
    la.optimize_prior_precision(method="agreement", train_loader=data)


def test_many_classes_take_a_backward_pass_for_eight_contrasts_at_most():
    la = of_classes(40)
    batch = first_batch()
    n_passes = passes_counter(la, batch)
    # Each at least one, so that passes were counted at all.
    by_default = [
        n_passes(la, batch, link_approx="mean_field"),
        n_passes(la, batch, link_approx="mc"),
        n_passes(la.predict, batch),
        n_passes(la.predict_proba, batch),
        n_passes(la.predictive_statistics, [batch]),
        n_passes(search, la, [batch]),
        n_passes(agree, la, [batch]),
    ]
    assert min(by_default) >= 1
    assert max(by_default) <= 8


def test_a_search_by_statistics_takes_no_backward_pass():
    la = of_classes(40)
    batch = first_batch()
    statistics = la.predictive_statistics([batch])
    n_passes = passes_counter(la, batch)
    assert n_passes(search, la, statistics) == 0


def test_a_search_by_contrasts_makes_no_matrix_of_all_classes():
    n_classes = 40
    la = of_classes(n_classes)
    statistics = la.predictive_statistics([first_batch()])
    with NewTensors() as made:
        search(la, statistics)
    of_classes_by_classes = (n_classes, n_classes)
    ends = {tuple(shape[-2:]) for shape in made.shapes}
    assert of_classes_by_classes not in ends
    # Sums by groups: eight contrasts, the most probable class, and all others.
    assert (10, n_classes) in ends


def test_the_number_of_contrasts_can_be_chosen():
    n_classes = 40
    la = of_classes(n_classes)
    batch = first_batch()
    n_passes = passes_counter(la, batch)
    la.n_contrasts = 2
    of_two = n_passes(la, batch, link_approx="mean_field")
    assert of_two == 2
    # There are no more than a class less.
    la.n_contrasts = 100
    of_too_many = n_passes(la.predict, batch)
    assert of_too_many == n_classes - 1
    of_moments = n_passes(la.predictive_moments, batch)
    assert of_moments == n_classes


# --- how many passes, and which tensors -----------------------------------------------


@pytest.fixture(params=[1, N_CLASSES - 1])
def seeds_at_once(request, monkeypatch) -> int:
    """Let backward passes take one seed at a time, or all of them at once."""
    # More than a batch of all seeds has.
    most_rows = 1 if request.param == 1 else 1000
    monkeypatch.setattr(graph, "_ROWS", most_rows)
    return request.param


def texts() -> list[Batch]:
    return ragged_batches(batch_size=4)


@pytest.fixture(params=["gradient", "expand"])
def wide(request):
    """Fit a posterior with large factors once, to find out whose rows are whose."""
    model = lora_model("bert", torch.float32, hidden_size=WIDTH)
    settings = {
        "rank": 4,
        "kfac_approx": request.param,
    }
    la = laplace.Laplace(
        model,
        "classification",
        subset_of_weights="lora",
        hessian_structure="lowrank_kron",
        backend_kwargs=settings,
    )
    la.fit(texts())
    return la


def test_a_fit_takes_few_passes_and_makes_no_large_tensor(wide, seeds_at_once):
    """Counts of passes and sizes are the same on any machine."""
    batches = texts()
    weights = wide.model.parameters()
    forwards = count_forward_passes(wide)
    with NewTensors(weights) as made:
        wide.fit(batches)
    assert len(forwards) == len(batches)
    n_seeds = N_CLASSES - 1
    of_each_batch = n_seeds / seeds_at_once
    n_passes = n_backward_passes(made, wide)
    assert n_passes == len(batches) * of_each_batch
    assert_no_product_of_two_large_sides(made)

    seeds = one_hot_seeds(n_seeds)
    of_model = bare_loop(wide, batches[0], seeds)
    bytes_of_a_number = 4
    sums = wide.backend.zeros()
    factors = sums.nbytes // bytes_of_a_number
    # Rows wait until they are as many numbers as the factors, and then stand beside
    # these.
    waiting = factors + seeds_at_once * gradients_of_four(wide)
    of_passes = seeds_at_once * of_model.largest
    of_sums = waiting + factors
    assert made.largest <= max(of_passes, of_sums)


@pytest.mark.usefixtures("seeds_at_once")
def test_a_prediction_takes_few_passes_and_makes_no_large_tensor(wide, monkeypatch):
    # As of long texts, whose Jacobians don't wait for those of other blocks.
    monkeypatch.setattr(roots, "_NUMBERS", 0)
    batch, *_ = texts()
    weights = wide.model.parameters()
    forwards = count_forward_passes(wide)
    with NewTensors(weights) as made:
        wide(batch, link_approx="probit")
    assert len(forwards) == 1
    n_passes = n_backward_passes(made, wide)
    assert n_passes <= N_CLASSES
    assert_no_product_of_two_large_sides(made)

    seeds = one_hot_seeds(N_CLASSES - 1)
    of_model = bare_loop(wide, batch, seeds)
    of_gradients = gradients_of_four(wide)
    # Of one class. All of them may stand beside each other.
    largest = max(of_model.largest, of_gradients)
    assert made.largest <= N_CLASSES * largest


def n_backward_passes(
    made: NewTensors,
    la,
) -> float:
    """Count passes by the layer norms that each of them goes through."""
    batch, *_ = texts()
    seed = one_hot_seeds(1)
    one_pass = bare_loop(la, batch, seed)
    of_one_pass = one_pass.calls[LAYER_NORM_BACKWARD]
    return made.calls[LAYER_NORM_BACKWARD] / of_one_pass


def assert_no_product_of_two_large_sides(made: NewTensors) -> None:
    assert made.operands
    for shape in made.operands:
        n_large_sides = sum(size in LARGE for size in shape)
        assert n_large_sides < 2, shape


def gradients_of_four(la) -> int:
    """Count the numbers of four examples' gradients in the largest weight."""
    sizes = [block.weight.numel() for block in la.blocks]
    return 4 * max(sizes)


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
    rows_of_inputs = torch.randn(32, n_inputs)
    rows_of_outputs = torch.randn(32, n_outputs)
    updates = StreamingUpdates()
    updates.add(block.input_factor, rows_of_inputs)
    updates.add(block.output_factor, rows_of_outputs)
    block.normalizer += 1
    return block


def test_the_posterior_of_a_7b_adapter_takes_65_mb_at_most():
    """32 layers, width 4096, r 8, rank 10: sums and eigenvectors together."""
    torch.manual_seed(0)
    A = (8, 4096)
    B = (4096, 8)
    n_projections = 2
    n_layers = 32
    shapes = [A, B] * n_projections * n_layers
    blocks = [block_of_a_7b_adapter(shape) for shape in shapes]
    sums = LowRankKron(blocks)
    held = _tensors(sums.state_dict())
    decomposed = sums.decompose()
    for block in decomposed.blocks:
        held += _tensors([*block.small])
        held += _tensors([*block.large])
    sizes = [tensor.nbytes for tensor in held]
    # Much less would be a sign that something was not counted.
    assert 60e6 < sum(sizes) <= 65e6
