"""What was done to a model is undone, whenever Ctrl-C comes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from laplace_lora_ext.undoing import removing_hooks, undoing
from tests.support.models import lora_model, ragged_batches
from tests.support.posteriors import generator, make
from tests.support.snapshots import Snapshot, half_trained
from tests.support.texts import fitted_text, text_batches


@contextmanager
def interrupted(function: str, line: int) -> Iterator[None]:
    """Within, the first call of a function of that name is broken off before some line of it."""
    left = [line]

    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_name != function:
            return None
        if event == "line":
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def test_it_is_undone_once_more():
    done = []

    def undo() -> None:
        done.append(1)
        done.append(2)

    with pytest.raises(KeyboardInterrupt), interrupted("undo", 2), undoing(undo):
        pass
    assert done == [1, 1, 2]


def test_hooks_are_removed_by_whatever_is_raised():
    layer = torch.nn.Linear(1, 1)

    def use(error: BaseException) -> None:
        with removing_hooks() as handles:
            handles.append(layer.register_forward_hook(lambda *_: None))
            raise error

    for error in (ValueError(), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            use(error)
        with pytest.raises(KeyboardInterrupt), interrupted("remove", 1):
            use(error)
    assert not layer._forward_hooks


CLASSIFIER = {
    "fit": lambda la, batches: la.fit(batches),
    "glm": lambda la, batches: la(batches[0]),
    "nn": lambda la, batches: la(batches[0], pred_type="nn", link_approx="mc", n_samples=2),
}


@pytest.mark.parametrize("line", [1, 3, 30, 200])
@pytest.mark.parametrize("use", CLASSIFIER)
@pytest.mark.parametrize("structure", ["lowrank_kron", "kron"])
def test_an_interrupt_as_things_are_put_back_leaves_everything(structure, use, line):
    model = half_trained(lora_model("bert"))
    la, batches = make(model, structure), ragged_batches()
    la.fit(batches)
    before = Snapshot(model)
    with pytest.raises(KeyboardInterrupt), interrupted("restore", line):
        CLASSIFIER[use](la, batches)
    before.assert_equal(model, random_state=False)
    CLASSIFIER[use](la, batches)


@pytest.mark.parametrize("line", [5, 12, 40])
def test_an_interrupt_as_torch_swaps_weights_puts_them_back(line):
    model = half_trained(lora_model("bert"))
    la, (batch, *_) = make(model), ragged_batches()
    la.fit(ragged_batches())
    before = Snapshot(model)
    with pytest.raises(KeyboardInterrupt), interrupted("swap_tensors_dict", line):
        la(batch, pred_type="nn", link_approx="mc", n_samples=2)
    before.assert_equal(model, random_state=False)


@pytest.mark.parametrize("function", ["restore", "remove", "swap_tensors_dict"])
def test_an_interrupt_leaves_a_language_model_as_it_was(function):
    model = half_trained(lora_model("gpt2"))
    la, (batch, *_) = fitted_text(model), text_batches()
    prompt = {key: batch[key][:1, :4] for key in ("input_ids", "attention_mask")}

    def write() -> torch.Tensor:
        return la.generate(**prompt, n_samples=2, generator=generator(), max_new_tokens=3).sequences

    expected, before = write(), Snapshot(model)
    with pytest.raises(KeyboardInterrupt), interrupted(function, 2):
        write()
    before.assert_equal(model, random_state=False)
    assert torch.equal(write(), expected)
