"""Numbers that are read together."""

from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.models import lora_model, ragged_batches
from tests.support.posteriors import make

# These wait for an accelerator. (Samples of weights are compared in main memory.)
READING = ("_local_scalar_dense", "nonzero")


class Readings(TorchDispatchMode):
    """Counts how often a program asks for a number."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ in READING
        return func(*args, **(kwargs or {}))


def test_a_batch_is_read_as_often_whatever_the_number_of_layers():
    batches = ragged_batches()
    first, *_ = batches
    counts = []
    # One layer, and all.
    for layers in ([0], None):
        la = make(lora_model("bert"), layers_to_transform=layers)
        # The first pass proves more.
        la.fit(batches)
        with Readings() as fitting:
            la.fit(batches)
        with Readings() as predicting:
            la(first, link_approx="mean_field")
        with Readings() as passing:
            la.predictive_statistics(batches)
        of_each = (fitting, predicting, passing)
        counts.append([readings.count for readings in of_each])
    of_one, of_all = counts
    assert of_one == of_all
    # That readings are counted at all.
    assert min(of_one) > 0
