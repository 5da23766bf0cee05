"""A state restores a posterior as it was, or changes nothing."""

from __future__ import annotations

import pytest
import torch

from tests.support.models import ragged_batches
from tests.support.posteriors import STRUCTURES, fitted, make, some_precision


def test_state_dict_round_trip(tmp_path):
    la, batches = fitted(), ragged_batches()
    la.prior_precision = some_precision(la, "layerwise")
    torch.save(la.state_dict(), tmp_path / "posterior.pt")
    other = make(la.model.model, backend_kwargs={"rank": 3})
    other.load_state_dict(torch.load(tmp_path / "posterior.pt", weights_only=True))
    assert torch.equal(la(batches[0]), other(batches[0]))
    assert torch.equal(la.log_marginal_likelihood(), other.log_marginal_likelihood())
    other.fit(batches, override=False)
    assert other.n_data == 16


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_state_can_take_more_data(structure):
    la, (first, *rest) = fitted(structure=structure), ragged_batches()
    other = fitted(structure=structure, prior_precision=3.0)
    other.load_state_dict(la.state_dict())
    for posterior in (la, other):
        posterior.fit(rest, override=False)
    torch.testing.assert_close(other(first), la(first), rtol=1e-12, atol=0)
    torch.testing.assert_close(other.state_dict()["H"], la.state_dict()["H"], rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("structure", ["lowrank_kron", "kron", "diag"])
def test_a_state_that_can_not_be_read_changes_nothing(structure):
    la, (batch, *_) = fitted(structure=structure), ragged_batches()
    before, expected = dict(vars(la)), la(batch)
    state = la.state_dict() | {"prior_precision": torch.tensor([7.0]), "H": 3}
    with pytest.raises((TypeError, AttributeError)):
        la.load_state_dict(state)
    assert all(vars(la)[name] is value for name, value in before.items() if name != "_agreement")
    assert torch.equal(la(batch), expected)


@pytest.mark.parametrize("key", sorted(fitted().state_dict().keys() - {"learnt_variance"}))
def test_a_state_that_lacks_something_is_refused(key):
    la = fitted()
    state = {name: value for name, value in la.state_dict().items() if name != key}
    other = make(la.model.model)
    with pytest.raises(ValueError, match=f"'{key}'"):
        other.load_state_dict(state)
    assert other.n_data == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cls_name": "DiagLoRALaplace"}, "cls_name='DiagLoRALaplace', not 'LowRankKron"),
        ({"likelihood": "regression"}, "likelihood='regression', not 'classification'"),
        ({"mean": torch.zeros(3)}, r"is in torch\.float32.*need torch\.float64"),
    ],
)
def test_a_state_of_another_kind_is_refused(change, message):
    la = fitted()
    with pytest.raises(ValueError, match=message):
        la.load_state_dict(la.state_dict() | {"prior_precision": torch.tensor([7.0])} | change)
    assert la.prior_precision.tolist() == [1.0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 4}, "rank=3, not 4"),
        ({"rank": 3, "kfac_approx": "expand"}, "kfac_approx='gradient', not 'expand'"),
        ({"rank": 3, "tail": False}, "tail=True, not False"),
        ({"rank": 3, "stochastic": True}, "stochastic=None, not True"),
    ],
)
def test_a_state_of_other_settings_is_not_loaded(settings, message):
    la = fitted()
    with pytest.raises(ValueError, match=f"fitted with {message}"):
        make(la.model.model, backend_kwargs=settings).load_state_dict(la.state_dict())
