"""What is never built: d x d matrices, and Jacobians of all parameters."""

from collections import Counter

import laplace
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from laplace_lora_ext.curvature.block import KroneckerBlock
from laplace_lora_ext.curvature.factors import StreamingUpdates
from laplace_lora_ext.curvature.matrix import LowRankKron
from laplace_lora_ext.passes import graph
from tests.support.models import N_CLASSES, lora_model, ragged_batches
from tests.support.posteriors import count_forward_passes, fitted

WIDTH = 52
LARGE = {WIDTH, 2 * WIDTH, 3 * WIDTH}  # sizes of the large factors, and of nothing else
PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "linear", "matmul", "mv", "dot"}


class NewTensors(TorchDispatchMode):
    """Notes operations, and shapes of tensors that they make, views left out."""

    def __init__(self, weights=()) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()
        self.calls: Counter[str] = Counter()
        # Numbers through layer norms, in proportion to the vectors that pass back at
        # once.
        self.backward = 0
        # Shapes of products' operands, the model's weights left out.
        self.operands: set[tuple[int, ...]] = set()
        self._weights = {_storage(weight) for weight in weights}

    @property
    def largest(self) -> int:
        return max(torch.Size(shape).numel() for shape in self.shapes)

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
        if name == "native_layer_norm_backward":
            self.backward += args[0].numel()
        if name in PRODUCTS:
            for operand in _tensors(args):
                if _storage(operand) not in self._weights:
                    self.operands.add(tuple(operand.shape))
        of_inputs = {_storage(tensor) for tensor in _tensors((args, kwargs))}
        for tensor in _tensors(results):
            is_view = _storage(tensor) in of_inputs
            if not is_view:
                self.shapes.add(tuple(tensor.shape))
        return results


def _tensors(tree) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def bare_loop(la, batch, seeds):
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


@pytest.mark.parametrize("n_classes", [2, 3, 5])
def test_links_of_differences_take_a_backward_pass_a_contrast(n_classes):
    la = fitted(
        model=lora_model("bert", n_labels=n_classes),
        batches=ragged_batches(n_classes=n_classes),
    )
    batch = ragged_batches()[0]
    one_seed = torch.eye(n_classes)[:1]
    of_one_pass = bare_loop(la, batch, one_seed).backward

    def n_passes(predict, *args, **keywords) -> float:
        with NewTensors() as made:
            predict(*args, **keywords)
        return made.backward / of_one_pass

    n_contrasts = n_classes - 1
    for link in ("mean_field", "mc"):
        assert n_passes(la, batch, link_approx=link) == n_contrasts
        assert n_passes(la.predict, batch, link) == n_contrasts
    assert n_passes(la.predict_proba, batch) == n_contrasts
    # These read each logit by itself.
    assert n_passes(la, batch, link_approx="probit") == n_classes
    assert n_passes(la, batch, link_approx="mc", diagonal_output=True) == n_classes
    assert n_passes(la.predictive_moments, batch) == n_classes


def test_many_classes_take_a_backward_pass_for_eight_contrasts_at_most():
    n_classes = 40
    la = fitted(
        model=lora_model("bert", n_labels=n_classes),
        batches=ragged_batches(n_classes=n_classes),
    )
    batch = ragged_batches()[0]
    of_one_pass = bare_loop(la, batch, torch.eye(n_classes)[:1]).backward
    statistics = la.predictive_statistics([batch])

    def n_passes(run) -> float:
        with NewTensors() as made:
            run()
        return made.backward / of_one_pass

    def search(**options):
        la.optimize_prior_precision(method="gridsearch", grid_size=2, **options)

    for within in (
        lambda: la(batch, link_approx="mean_field"),
        lambda: la(batch, link_approx="mc"),
        lambda: la.predict(batch),
        lambda: la.predict_proba(batch),
        lambda: la.predictive_statistics([batch]),
        lambda: search(val_loader=[batch]),
        lambda: la.optimize_prior_precision(method="agreement", train_loader=[batch]),
    ):
        assert 1 <= n_passes(within) <= 8
    assert n_passes(lambda: search(val_loader=statistics)) == 0
    assert n_passes(lambda: la(batch, link_approx="mean_field", n_contrasts=2)) == 2
    assert n_passes(lambda: la.predict(batch, n_contrasts=100)) == n_classes - 1
    assert n_passes(lambda: la.predictive_moments(batch)) == n_classes


@pytest.fixture(params=[1, N_CLASSES - 1])
def seeds_at_once(request, monkeypatch) -> int:
    """Let backward passes take one seed at a time, or all of them at once."""
    monkeypatch.setattr(graph, "_ROWS", 1 if request.param == 1 else 1000)
    return request.param


@pytest.fixture(params=["gradient", "expand"])
def wide(request):
    """Make a posterior with large factors, and texts to fit it to.

    It has been fitted once, when it finds out whose rows are whose.
    """
    la = laplace.Laplace(
        lora_model("bert", torch.float32, hidden_size=WIDTH),
        "classification",
        "lora",
        "lowrank_kron",
        backend_kwargs={"rank": 4, "kfac_approx": request.param},
    )
    batches = ragged_batches(batch_size=4)
    la.fit(batches)
    return la, batches


def test_a_fit_takes_few_passes_and_makes_no_large_tensor(wide, seeds_at_once):
    """Counts of passes and sizes are the same on any machine."""
    la, batches = wide
    forwards = count_forward_passes(la)
    with NewTensors(la.model.parameters()) as made:
        la.fit(batches)
    assert len(forwards) == len(batches)
    n_seeds = N_CLASSES - 1
    assert (
        n_backward_passes(made, la, batches) == len(batches) * n_seeds / seeds_at_once
    )
    assert_no_product_of_two_large_sides(made)

    seeds = torch.eye(N_CLASSES)[:n_seeds]
    largest_of_model = bare_loop(la, batches[0], seeds).largest
    factors = la.backend.zeros().nbytes // 4
    # Rows wait until they are as many numbers as the factors, and then stand beside
    # these.
    waiting = factors + seeds_at_once * gradients_of_four(la)
    assert made.largest <= max(seeds_at_once * largest_of_model, waiting + factors)


@pytest.mark.usefixtures("seeds_at_once")
def test_a_prediction_takes_few_passes_and_makes_no_large_tensor(wide):
    la, batches = wide
    forwards = count_forward_passes(la)
    with NewTensors(la.model.parameters()) as made:
        la(batches[0], link_approx="probit")
    assert len(forwards) == 1
    assert n_backward_passes(made, la, batches) <= N_CLASSES
    assert_no_product_of_two_large_sides(made)

    seeds = torch.eye(N_CLASSES)[: N_CLASSES - 1]
    largest_of_model = bare_loop(la, batches[0], seeds).largest
    largest = max(largest_of_model, gradients_of_four(la))
    assert made.largest <= N_CLASSES * largest


def n_backward_passes(made: NewTensors, la, batches) -> float:
    """Count passes by the layer norms that each of them goes through."""
    one = bare_loop(
        la,
        batches[0],
        torch.eye(N_CLASSES)[:1],
    )
    kind = "native_layer_norm_backward"
    return made.calls[kind] / one.calls[kind]


def assert_no_product_of_two_large_sides(made: NewTensors) -> None:
    assert made.operands
    for shape in made.operands:
        assert sum(size in LARGE for size in shape) < 2, shape


def gradients_of_four(la) -> int:
    """Count the numbers of four examples' gradients in the largest weight."""
    return 4 * max(block.weight.numel() for block in la.blocks)


def test_the_posterior_of_a_7b_adapter_takes_65_mb_at_most():
    """32 layers, width 4096, r 8, rank 10: sums and eigenvectors together."""
    torch.manual_seed(0)
    blocks = []
    for shape in [(8, 4096), (4096, 8)] * 64:
        n_outputs, n_inputs = shape
        block = KroneckerBlock.zeros(
            shape,
            small_output=n_outputs == 8,
            rank=10,
            tail=True,
            device=torch.device("cpu"),
            dtype=torch.float32,
        )
        rows = torch.randn(32, n_inputs)
        StreamingUpdates().add(block.input_factor, rows)
        rows = torch.randn(32, n_outputs)
        StreamingUpdates().add(block.output_factor, rows)
        block.normalizer += 1
        blocks.append(block)
    sums = LowRankKron(blocks)
    posterior = sums.decompose()
    held = [*tree_leaves(sums.state_dict())]
    for block in posterior.blocks:
        held += [*block.small, *block.large]
    total = sum(tensor.nbytes for tensor in held if isinstance(tensor, torch.Tensor))
    assert 60e6 < total <= 65e6
