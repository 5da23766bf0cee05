"""What is never built: a d x d matrix of a large factor, and a Jacobian of all parameters."""

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
from tests.support.posteriors import fitted

WIDTH = 52
LARGE = {WIDTH, 2 * WIDTH, 3 * WIDTH}  # sizes of the large factors, and of nothing else
PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "linear", "matmul", "mv", "dot"}


class NewTensors(TorchDispatchMode):
    """Operations, and shapes of all tensors that they make, views of their inputs left out."""

    def __init__(self, weights=()) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()
        self.calls: Counter[str] = Counter()
        # Numbers through layer norms, in proportion to the vectors that pass back at once.
        self.backward = 0
        # Shapes of products' operands, the model's weights left out.
        self.operands: set[tuple[int, ...]] = set()
        self._weights = {_storage(weight) for weight in weights}

    @property
    def largest(self) -> int:
        return max(torch.Size(shape).numel() for shape in self.shapes)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
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
    """Run one forward and as many backward passes as there are seeds, and nothing else."""
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
        model=lora_model("bert", n_labels=n_classes), batches=ragged_batches(n_classes=n_classes)
    )
    batch = ragged_batches()[0]

    def n_passes(predict) -> float:
        with NewTensors() as made:
            predict()
        return made.backward / one

    one = bare_loop(
        la,
        batch,
        torch.eye(n_classes)[:1],
    ).backward
    for link in ("mean_field", "mc"):
        assert n_passes(lambda link=link: la(batch, link_approx=link)) == n_classes - 1
        assert n_passes(lambda link=link: la.predict(batch, link)) == n_classes - 1
    assert n_passes(lambda: la.predict_proba(batch)) == n_classes - 1
    for predict in (
        lambda: la(batch, link_approx="probit"),
        lambda: la(batch, link_approx="mc", diagonal_output=True),
        lambda: la.predictive_moments(batch),
    ):
        assert n_passes(predict) == n_classes


@pytest.mark.parametrize("seeds_at_once", [1, N_CLASSES - 1])
@pytest.mark.parametrize("kfac_approx", ["gradient", "expand"])
def test_passes_products_and_the_largest_tensor(kfac_approx, seeds_at_once, monkeypatch):
    """A guard against slips: counts of passes and sizes, which are the same on any machine."""
    monkeypatch.setattr(graph, "_ROWS", 1 if seeds_at_once == 1 else 1000)
    model = lora_model("bert", torch.float32, hidden_size=WIDTH)
    la = laplace.Laplace(
        model,
        "classification",
        "lora",
        "lowrank_kron",
        backend_kwargs={"rank": 4, "kfac_approx": kfac_approx},
    )
    batches = ragged_batches(batch_size=4)
    la.fit(batches)  # once, it finds out whose rows are whose
    forwards = []
    la.model.register_forward_hook(lambda *_: forwards.append(1))
    with NewTensors(model.parameters()) as fitting:
        la.fit(batches)
    assert len(forwards) == len(batches)
    one_pass = bare_loop(
        la,
        batches[0],
        torch.eye(N_CLASSES)[:1],
    )
    norms = one_pass.calls["native_layer_norm_backward"]
    n_backward = fitting.calls["native_layer_norm_backward"] / norms
    assert n_backward == len(batches) * (N_CLASSES - 1) / seeds_at_once

    forwards.clear()
    with NewTensors(model.parameters()) as predicting:
        la(batches[0], link_approx="probit")
    assert len(forwards) == 1
    assert predicting.calls["native_layer_norm_backward"] / norms <= N_CLASSES

    for made in (fitting, predicting):
        assert made.operands
        for shape in made.operands:
            assert sum(size in LARGE for size in shape) < 2, shape
    batch_loop = bare_loop(
        la,
        batches[0],
        torch.eye(N_CLASSES)[: N_CLASSES - 1],
    )
    gradients = 4 * max(block.weight.numel() for block in la.blocks)  # of four examples, one seed
    # Rows wait until they are as many numbers as the factors, and then stand beside these.
    waiting = la.backend.zeros().nbytes // 4 + seeds_at_once * gradients
    updated = waiting + la.backend.zeros().nbytes // 4
    assert fitting.largest <= max(seeds_at_once * batch_loop.largest, updated)
    assert predicting.largest <= N_CLASSES * max(batch_loop.largest, gradients)


def test_the_posterior_of_a_7b_adapter_takes_65_mb_at_most():
    """Query and value of 32 layers, width 4096, r 8, rank 10: sums and eigenvectors together."""
    torch.manual_seed(0)
    blocks = []
    for shape in [(8, 4096), (4096, 8)] * 64:
        small_output = shape[0] == 8
        device = torch.device("cpu")
        dtype = torch.float32
        block = KroneckerBlock.zeros(shape, small_output, 10, True, device, dtype)
        StreamingUpdates().add(
            block.input_factor,
            torch.randn(32, shape[1]),
        )
        StreamingUpdates().add(
            block.output_factor,
            torch.randn(32, shape[0]),
        )
        block.normalizer += 1
        blocks.append(block)
    sums = LowRankKron(blocks)
    posterior = sums.decompose()
    held = [*tree_leaves(sums.state_dict())]
    for block in posterior.blocks:
        held += [*block.small, *block.large]
    total = sum(tensor.nbytes for tensor in held if isinstance(tensor, torch.Tensor))
    assert 60e6 < total <= 65e6
