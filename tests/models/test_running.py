"""Threads that share a model take turns, or run it together; compiled code is out."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from threading import Barrier, BrokenBarrierError, Event, get_ident
from time import sleep
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from laplace_lora_ext.models.running import Turns
from tests.support.models import N_CLASSES, first_batch, lora_model, ragged_batches
from tests.support.posteriors import STRUCTURES, fitted


def test_fits_statistics_and_predictions_of_one_model_exclude_each_other():
    la = fitted()
    batches = ragged_batches()
    batch = first_batch()
    expected = la(batch)

    # Weights that another thread draws or moves would show here.
    def predict_the_same() -> None:
        assert_close(la(batch), expected, rtol=0, atol=0)

    uses = [
        partial(la.fit, batches),
        partial(la.predictive_statistics, batches),
        partial(la, batch, pred_type="nn", n_samples=2),
        predict_the_same,
    ]
    with ThreadPoolExecutor(max_workers=4) as pool:
        # Each often enough that they meet.
        for future in [pool.submit(use) for use in uses * 4]:
            # Raises what its thread has raised.
            future.result()


# --- learnt variances -----------------------------------------------------------------


def by_learnt_variances(la: Any, batch: Any) -> Callable[[], Any]:
    return lambda: la(batch, pred_type="amortized")


def meet(
    model: nn.Module, uses: list[Callable[[], Any]], timeout: float = 20
) -> list[Any]:
    """Use a model by two threads, each of which waits for the other one within it.

    An error is returned as a result.
    """
    barrier = Barrier(2, timeout=timeout)
    met = set()

    def wait(*_: Any) -> None:
        if get_ident() not in met:
            met.add(get_ident())
            barrier.wait()

    handle = model.register_forward_pre_hook(wait)
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(use) for use in uses]
    handle.remove()
    return [future.exception() or future.result() for future in futures]


@pytest.mark.parametrize("training", [False, True])
def test_two_threads_are_within_the_model_at_once_where_variances_are_learnt(training):
    batches = ragged_batches()[:2]
    la = fitted(batches=batches)
    la.amortize(batches)
    expected = [la(batch, pred_type="amortized") for batch in batches]
    model = la.model.model.train(training)
    before = attributes_of(model)
    uses = [by_learnt_variances(la, batch) for batch in batches]
    found = meet(la.model.transformer, uses)
    for each, right in zip(found, expected, strict=True):
        assert torch.equal(each, right)
    uses = [partial(la.predict_proba, x, pred_type="amortized") for x in batches]
    for each in meet(la.model.transformer, uses):
        assert each.shape == (3, N_CLASSES)
    assert attributes_of(model) == before


def test_who_waits_for_a_turn_alone_is_not_passed_over():
    turns = Turns()
    together = partial(turns.together, "a model", nullcontext, lambda: True)
    is_within, may_leave = Event(), Event()
    entered = []

    def enter(turn: Any, name: str) -> None:
        with turn():
            entered.append(name)
            is_within.set()
            assert may_leave.wait(20)

    with ThreadPoolExecutor(3) as pool:
        pool.submit(enter, together, "first")
        assert is_within.wait(20)
        pool.submit(enter, turns.alone, "alone")
        while not turns._n_waiting:
            sleep(0.001)
        pool.submit(enter, together, "late")
        sleep(0.1)
        assert entered == ["first"]
        may_leave.set()
    assert set(entered[1:]) == {"alone", "late"}


def test_threads_that_find_another_mode_wait_for_those_within():
    la = fitted()
    la.amortize(ragged_batches())
    batch = first_batch()
    expected = la(batch, pred_type="amortized")
    is_within, may_leave = Event(), Event()

    def wait(*_: Any) -> None:
        handle.remove()
        is_within.set()
        assert may_leave.wait(20)

    handle = la.model.transformer.register_forward_pre_hook(wait)
    predict = by_learnt_variances(la, batch)
    with ThreadPoolExecutor(2) as pool:
        pool.submit(predict)
        assert is_within.wait(20)
        # In which dropout would show.
        la.model.model.train()
        second = pool.submit(predict)
        sleep(0.2)
        may_leave.set()
    assert torch.equal(second.result(), expected)


def test_no_other_thread_is_within_a_model_that_is_changed():
    batches = ragged_batches()[:2]
    la = fitted(batches=batches)
    la.amortize(batches)
    learnt = by_learnt_variances(la, batches[1])
    for other in (learnt, partial(la, batches[1])):
        found = meet(la.model.transformer, [partial(la, batches[0]), other], 0.2)
        assert any(isinstance(each, BrokenBarrierError) for each in found)


def attributes_of(model: nn.Module) -> list[dict[str, Any]]:
    """Copy what each module of a model holds."""
    return [dict(vars(module)) for module in model.modules()]


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_partly_compiled_model_has_the_posterior_of_the_model_as_it_was(structure):
    batch = first_batch()
    as_it_was = fitted(structure=structure)
    expected = as_it_was.predictive_moments(batch)
    model = lora_model("bert")
    bert = model.base_model.model.bert
    bert.encoder = torch.compile(bert.encoder)
    before = attributes_of(model)
    message = "The model is compiled: fits and predictions run it eag"
    with pytest.warns(UserWarning, match=message):
        la = fitted(model=model, structure=structure)
    found = la.predictive_moments(batch)
    assert_close(found, expected, rtol=1e-12, atol=1e-15)
    assert attributes_of(model) == before
