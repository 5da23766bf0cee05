"""A fit is taken over whole or not at all."""

from collections.abc import Iterator
from copy import copy
from typing import Any

import pytest
import torch

from laplace_lora_ext import from_pretrained
from tests.support.models import (
    lora_model,
    pairs,
    plain_model,
    ragged_batches,
)
from tests.support.posteriors import STRUCTURES, make
from tests.support.snapshots import Snapshot, half_trained


def broken_off(batches: list, error: BaseException) -> Iterator[Any]:
    yield from batches[:-1]
    raise error


def broken_off_by_an_error():
    return broken_off(pairs(3), OSError("gone"))


def broken_off_by_the_user():
    return broken_off(pairs(3), KeyboardInterrupt())


def ending_with(last) -> list:
    """Two good batches and another one."""
    return [*pairs(2), last]


def unknown_label():
    X, y = pairs(3)[-1]
    return ending_with((X, y + 1))


def not_a_number():
    X, y = pairs(3)[-1]
    X = X.clone()
    X[2, 3] = torch.nan
    return ending_with((X, y))


def without_labels():
    X, _ = pairs(3)[-1]
    return ending_with(X)


def too_few_features():
    X, y = pairs(3)[-1]
    return ending_with((X[:, :4], y))


def empty():
    return []


FAILURES = [
    (broken_off_by_an_error, OSError),
    (broken_off_by_the_user, KeyboardInterrupt),
    (unknown_label, ValueError),
    (not_a_number, ValueError),
    (without_labels, TypeError),
    (too_few_features, RuntimeError),
    (empty, ValueError),
]


@pytest.mark.parametrize(("loader", "error"), FAILURES)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_failing_first_fit_leaves_everything(structure, loader, error):
    model = half_trained(plain_model(lora_dropout=0.5))
    la = make(model, structure)
    before = Snapshot(model)
    attributes = set(vars(la))
    with pytest.raises(error):
        la.fit(loader())
    before.assert_equal(model)
    assert set(vars(la)) == attributes
    assert la.n_data == 0
    fresh = make(plain_model(lora_dropout=0.5), structure)
    for posterior in (la, fresh):
        posterior.fit(pairs(3), override=False)
    assert la.n_data == fresh.n_data == 12
    assert torch.equal(
        la.log_marginal_likelihood(),
        fresh.log_marginal_likelihood(),
    )


def facts_of(
    la: Any,
    X: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    return (
        la(X),
        la.log_marginal_likelihood(),
        la.mean.clone(),
        la.loss.clone(),
    )


@pytest.mark.parametrize("override", [True, False])
@pytest.mark.parametrize(("loader", "error"), FAILURES)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_failing_refit_leaves_the_fit_before_it(structure, loader, error, override):
    model = plain_model(lora_dropout=0.5)
    X, _ = pairs()[0]
    la = make(model, structure)
    la.fit(pairs(2))
    la.prior_precision = 3.0
    facts = facts_of(la, X)
    snapshot = Snapshot(model)
    before = dict(vars(la))
    with pytest.raises(error):
        la.fit(loader(), override=override)
    snapshot.assert_equal(model)
    for name, value in before.items():
        if name != "_backend":
            assert vars(la)[name] is value, name
    for found, expected in zip(facts_of(la, X), facts, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_fit_in_parts_is_one_fit(structure, saved, tmp_path):
    """To the last digit, though one column of a large factor is far fewer than all."""
    options = {"backend_kwargs": {"rank": 1}} if structure == "lowrank_kron" else {}
    model = lora_model("bert")
    texts = ragged_batches(batch_size=1)
    at_once, in_parts = (make(model, structure, **options) for _ in range(2))
    at_once.fit(texts)
    for text in texts:
        in_parts.fit([text], override=False)
        if saved:
            in_parts.save_pretrained(tmp_path)
            in_parts = from_pretrained(model, tmp_path)
    assert in_parts.n_data == at_once.n_data == 8
    assert torch.equal(
        in_parts.log_marginal_likelihood(),
        at_once.log_marginal_likelihood(),
    )
    assert torch.equal(in_parts(texts[0]), at_once(texts[0]))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_state_is_restored_whole_or_not_at_all(structure):
    """The host sets one attribute after the other, and here refuses one of the last."""
    model = plain_model()
    X, _ = pairs()[0]
    la = make(model, structure)
    la.fit(pairs(2))
    state = la.state_dict()
    la.fit(pairs(3))
    facts = facts_of(la, X)
    before = dict(vars(la))
    with pytest.raises(ValueError, match="temperature must be positive"):
        la.load_state_dict(state | {"temperature": -1.0})
    assert all(vars(la)[name] is value for name, value in before.items())
    assert all(torch.equal(*pair) for pair in zip(facts_of(la, X), facts, strict=True))
    la.load_state_dict(state)
    assert la.n_data == 8


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_copy_keeps_the_fit_that_it_was_copied_with(structure):
    model = plain_model()
    X, _ = pairs()[0]
    la = make(model, structure)
    la.fit(pairs(2))
    other = copy(la)
    facts = facts_of(other, X)
    la.fit(pairs(3)[2:], override=False)
    assert (la.n_data, other.n_data) == (12, 8)
    assert all(
        torch.equal(*pair) for pair in zip(facts_of(other, X), facts, strict=True)
    )
