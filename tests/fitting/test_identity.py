"""A posterior's sums and states are taken only where they belong."""

from __future__ import annotations

import pytest
import torch

from laplace_lora_ext.fitting.identity import hashes
from tests.support.models import lora_model
from tests.support.posteriors import fitted, make


@pytest.fixture(scope="module")
def state():
    return fitted().state_dict()


def test_a_state_of_other_weights_is_refused():
    la = fitted()
    state = la.state_dict()
    with torch.no_grad():
        la.blocks[0].weight.add_(1e-3)
    with pytest.raises(ValueError, match="other LoRA weights"):
        la.load_state_dict(state)


@pytest.mark.parametrize("key", sorted(fitted().state_dict()))
def test_a_state_that_lacks_something_is_refused(key, state):
    la = make(lora_model("bert"))
    with pytest.raises(ValueError, match=f"'{key}'"):
        la.load_state_dict({name: value for name, value in state.items() if name != key})
    assert la.n_data == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cls_name": "DiagLoRALaplace"}, "cls_name='DiagLoRALaplace', not 'LowRankKron"),
        ({"likelihood": "regression"}, "likelihood='regression', not 'classification'"),
    ],
)
def test_a_state_of_another_kind_is_refused(change, message, state):
    la = fitted()
    with pytest.raises(ValueError, match=message):
        la.load_state_dict(state | {"prior_precision": torch.tensor([7.0])} | change)
    assert la.prior_precision.tolist() == [1.0]


def test_a_state_in_another_precision_is_refused(state):
    la = fitted()
    state = state | {"mean": state["mean"].float()}
    with pytest.raises(ValueError, match=r"is in torch\.float32.*need torch\.float64"):
        la.load_state_dict(state)


def test_hashes_change_with_what_they_are_of_and_with_nothing_else():
    la, same = fitted(), fitted(prior_precision=3.0)
    before = hashes(la)
    assert hashes(same) == before
    assert differing(before, hashes(fitted(rank=2))) == {"settings"}
    assert differing(before, hashes(fitted(structure="diag"))) == {"settings"}
    with torch.no_grad():
        la.blocks[0].weight.add_(1e-3)
    assert differing(before, hashes(la)) == {"LoRA weights"}
    with torch.no_grad():
        same.model.model.get_input_embeddings().weight.add_(1e-3)
    assert differing(before, hashes(same)) == {"base or head"}


def differing(some, others):
    return {name for name, value in some.items() if others[name] != value}
