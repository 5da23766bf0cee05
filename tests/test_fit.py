"""A fit is taken over whole or not at all."""

from collections.abc import Iterator
from copy import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from laplace_lora_ext import from_pretrained
from tests.support.models import lora_model, pairs, plain_model, ragged_batches
from tests.support.posteriors import STRUCTURES, make, with_structures
from tests.support.snapshots import Snapshot, facts_of, half_trained

# --- loaders that fail after two good batches -----------------------------------------


def broken_off_by_the_user() -> Iterator[Any]:
    yield from pairs(2)
    raise KeyboardInterrupt


def another_pair() -> tuple[Tensor, Tensor]:
    """Make the batch that would be the third."""
    return pairs(3)[2]


def unknown_label():
    X, y = another_pair()
    return [*pairs(2), (X, y + 1)]


FAILURES = [
    (broken_off_by_the_user, KeyboardInterrupt),
    (unknown_label, ValueError),
    (list, ValueError),
]
structures = pytest.mark.parametrize("structure", STRUCTURES)

# --- what they leave ------------------------------------------------------------------


Facts = dict[str, Tensor]


def facts(la) -> Facts:
    X, _ = pairs()[0]
    return facts_of(la, X)


def assert_same(found: Facts, expected: Facts) -> None:
    """Compare to the last digit."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def with_dropout():
    """Make a module whose every pass in training mode is another one."""
    return plain_model(lora_dropout=0.5)


@pytest.mark.parametrize("override", [None, True, False])
@pytest.mark.parametrize(("structure", "failure"), with_structures(FAILURES))
def test_a_failing_fit_leaves_what_was_before_it(structure, failure, override):
    """None: it is the first fit."""
    loader, error = failure
    model = half_trained(with_dropout())
    la = make(model, structure)
    expected = {}
    if override is not None:
        la.fit(pairs(2))
        la.prior_precision = 3.0
        expected = facts(la)
    before = dict(vars(la))
    snapshot = Snapshot(model)
    with pytest.raises(error):
        la.fit(loader(), override=bool(override))
    snapshot.assert_equal(model)
    # A fit makes its backend anew, whether it fails or not.
    assert vars(la).keys() == before.keys()
    for name, value in before.items():
        assert vars(la)[name] is value or name == "_backend", name
    if expected:
        assert_same(facts(la), expected)
    # It can still be fitted, as if nothing had been tried.
    la.fit(pairs(3))
    fresh = make(with_dropout(), structure, prior_precision=la.prior_precision)
    fresh.fit(pairs(3))
    assert_same(facts(la), facts(fresh))


@pytest.mark.parametrize("saved", [False, True])
@structures
def test_a_fit_in_parts_is_one_fit(structure, saved, tmp_path):
    """To the last digit, though one column of a large factor is far fewer than all."""
    options = {}
    # The others have no rank.
    if structure == "lowrank_kron":
        options["backend_kwargs"] = {"rank": 1}
    model = lora_model("bert")
    texts = ragged_batches(batch_size=1)
    at_once = make(model, structure, **options)
    at_once.fit(texts)
    in_parts = make(model, structure, **options)
    for text in texts:
        in_parts.fit([text], override=False)
        if saved:
            in_parts.save_pretrained(tmp_path)
            in_parts = from_pretrained(model, tmp_path)
    assert at_once.n_data == 8
    assert_same(facts_of(in_parts, texts[0]), facts_of(at_once, texts[0]))


@structures
def test_a_state_is_restored_whole_or_not_at_all(structure):
    """The host sets one attribute after the other, and here refuses one of the last."""
    la = make(plain_model(), structure)
    la.fit(pairs(2))
    state = la.state_dict()
    la.fit(pairs(3))
    expected = facts(la)
    before = dict(vars(la))
    with pytest.raises(ValueError, match="temperature"):
        la.load_state_dict(state | {"temperature": -1.0})
    for name, value in before.items():
        assert vars(la)[name] is value, name
    assert_same(facts(la), expected)
    la.load_state_dict(state)
    assert la.n_data == 8


@structures
def test_a_copy_keeps_the_fit_that_it_was_copied_with(structure):
    la = make(plain_model(), structure)
    la.fit(pairs(2))
    other = copy(la)
    expected = facts(other)
    la.fit([another_pair()], override=False)
    assert (la.n_data, other.n_data) == (12, 8)
    assert_same(facts(other), expected)
