"""A fit is taken over whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import laplace_lora_ext.lora_laplace
from tests.support.models import lora_model, pairs, plain_model, ragged_batches
from tests.support.posteriors import STRUCTURES, make, sizes
from tests.support.snapshots import Snapshot, half_trained


def broken_off(batches: list, error: BaseException) -> Iterator[Any]:
    yield from batches[:-1]
    raise error


def failing_fits() -> dict[str, tuple[type[BaseException], Callable[[], Any]]]:
    X, y = pairs(3)[-1]
    nan = X.clone()
    nan[2, 3] = torch.nan
    good = pairs(3)[:2]
    return {
        "loader": (OSError, lambda: broken_off(pairs(3), OSError("gone"))),
        "interrupt": (KeyboardInterrupt, lambda: broken_off(pairs(3), KeyboardInterrupt())),
        "label": (ValueError, lambda: [*good, (X, y + 1)]),
        "NaN": (ValueError, lambda: [*good, (nan, y)]),
        "type of a batch": (TypeError, lambda: [*good, X]),
        "shape": (RuntimeError, lambda: [*good, (X[:, :4], y)]),
        "empty": (ValueError, list),
    }


FAILURES = failing_fits()


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_failing_first_fit_leaves_everything(structure, failure):
    model = half_trained(plain_model(lora_dropout=0.5))
    la = make(model, structure)
    before, attributes = Snapshot(model), set(vars(la))
    error, loader = FAILURES[failure]
    with pytest.raises(error):
        la.fit(loader())
    before.assert_equal(model)
    assert set(vars(la)) == attributes
    assert la.n_data == 0
    fresh = make(plain_model(lora_dropout=0.5), structure)
    for posterior in (la, fresh):
        posterior.fit(pairs(3), override=False)
    assert la.n_data == fresh.n_data == 12
    assert torch.equal(la.log_marginal_likelihood(), fresh.log_marginal_likelihood())


@pytest.mark.parametrize("override", [True, False])
@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_failing_refit_leaves_the_fit_before_it(structure, failure, override):
    model = plain_model(lora_dropout=0.5)
    la = make(model, structure)
    la.fit(pairs(2))
    la.prior_precision = 3.0
    X = pairs(3)[0][0]

    def state() -> list[torch.Tensor]:
        la_state = [la(X), la.log_marginal_likelihood(), la.mean, la.log_likelihood]
        return [*la_state, torch.tensor(la.n_data), la.posterior_precision_matrix()]

    la.posterior_precision_matrix = lambda: torch.as_tensor(
        la.H.diag() if structure.endswith("kron") else la.H
    )
    before, expected = Snapshot(model), state()
    error, loader = FAILURES[failure]
    with pytest.raises(error):
        la.fit(loader(), override=override)
    before.assert_equal(model)
    for now, then in zip(state(), expected, strict=True):
        assert torch.equal(now, then)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("step", ["the check after the pass", "the decomposition"])
def test_an_interrupt_after_the_pass_leaves_the_fit_before_it(structure, step, monkeypatch):
    la, (X, _) = make(plain_model(), structure), pairs()[0]
    la.fit(pairs(2))
    expected = la.log_marginal_likelihood(), la(X)
    before = dict(vars(la))

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        if step == "the decomposition":
            patched.setattr(type(la), "_decomposed", interrupt)
        else:
            patched.setattr(laplace_lora_ext.lora_laplace, "check_same", interrupt)
        with pytest.raises(KeyboardInterrupt):
            la.fit(pairs(3))
    assert all(vars(la)[name] is value for name, value in before.items() if name != "_backend")
    assert torch.equal(la.log_marginal_likelihood(), expected[0])
    assert torch.equal(la(X), expected[1])


@pytest.mark.parametrize("structure", STRUCTURES)
def test_data_may_be_added_after_a_failing_refit(structure):
    evidences = []
    for fail in (False, True):
        la = make(plain_model(lora_dropout=0.5), structure)
        la.fit(pairs(2))
        if fail:
            with pytest.raises(OSError, match="gone"):
                la.fit(broken_off(pairs(3), OSError("gone")), override=False)
        la.fit(pairs(3)[2:], override=False)
        assert la.n_data == 12
        evidences.append(la.log_marginal_likelihood())
    assert torch.equal(*evidences)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("which", ["lora", "base"])
def test_weights_that_change_while_the_data_are_read_are_refused(structure, which):
    la = make(plain_model(), structure)
    la.fit(pairs(3))
    before = la.log_marginal_likelihood()
    weight = la.blocks[0].weight if which == "lora" else la.blocks[0].owner.base_layer.weight

    def trained_on():
        for batch in pairs(3):
            yield batch
            weight.data.mul_(1.5)

    with pytest.raises(RuntimeError, match=r"while its training data were read\. The .*first"):
        la.fit(trained_on())
    assert torch.equal(la.log_marginal_likelihood(), before)


@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
def test_curvature_that_is_not_finite_names_the_layer(structure, monkeypatch):
    la = make(lora_model("bert"), structure)
    compute, index = la._curv_closure, 2

    def broken(*args, **kwargs):
        loss, H = compute(*args, **kwargs)
        if structure == "kron":
            H.kfacs[index][0][0, 0] = torch.inf
        else:
            H[(sum(sizes(la)[:index]),) * H.ndim] = torch.nan
        return loss, H

    monkeypatch.setattr(la, "_curv_closure", broken)
    with pytest.raises(ValueError, match=rf"LoRA layer {la.blocks[index].name}: non-finite"):
        la.fit(ragged_batches())


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_users_labels_are_not_changed(structure):
    batches = ragged_batches()
    labels = [batch["labels"].clone() for batch in batches]
    make(lora_model("bert"), structure).fit(batches)
    assert all(torch.equal(b["labels"], own) for b, own in zip(batches, labels, strict=True))
