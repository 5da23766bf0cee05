"""What is never built: a d x d matrix of a large factor, and a Jacobian of all parameters."""

import laplace
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.tiny_models import laplace_keywords, lora_model, ragged_batches

WIDTH = 44
LARGE = {WIDTH, 2 * WIDTH, 3 * WIDTH}  # sizes of the large factors, and of nothing else


class NewTensors(TorchDispatchMode):
    """Shapes of all tensors that operations make, views of their inputs left out."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        inputs = {
            tensor.untyped_storage().data_ptr()
            for tensor in tree_leaves((args, kwargs))
            if isinstance(tensor, torch.Tensor)
        }
        for tensor in tree_leaves(results):
            if isinstance(tensor, torch.Tensor):
                view = tensor.untyped_storage().data_ptr() in inputs
                if not view:
                    self.shapes.add(tuple(tensor.shape))
        return results


@pytest.mark.parametrize("kfac_approx", ["gradient", "expand", "reduce"])
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_no_large_matrix_and_no_whole_jacobian(kind, kfac_approx):
    model = lora_model(kind, torch.float32, hidden_size=WIDTH)
    la = laplace.Laplace(
        model,
        "classification",
        "lora",
        "lowrank_kron",
        backend_kwargs={"rank": 4, "kfac_approx": kfac_approx},
        **laplace_keywords(kind),
    )
    batches = ragged_batches(batch_size=4)
    with NewTensors() as fitting:
        la.fit(batches)
        la.log_marginal_likelihood()
    with NewTensors() as predicting:
        probs = la(batches[0], link_approx="probit")
    for shape in fitting.shapes | predicting.shapes:
        assert sum(size in LARGE for size in shape) < 2, shape
    largest = max(torch.Size(shape).numel() for shape in predicting.shapes)
    assert largest < probs.numel() * la.n_params  # the Jacobian of all blocks
