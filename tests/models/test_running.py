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
from tests.support.posteriors import fitted


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
    before = [dict(vars(module)) for module in model.modules()]
    uses = [partial(la, batch, pred_type="amortized") for batch in batches]
    found = meet(la.model.transformer, uses)
    for each, right in zip(found, expected, strict=True):
        assert torch.equal(each, right)
    uses = [partial(la.predict_proba, x, pred_type="amortized") for x in batches]
    for each in meet(la.model.transformer, uses):
        assert each.shape == (3, N_CLASSES)
    assert [dict(vars(m)) for m in model.modules()] == before


def test_who_waits_for_a_turn_alone_is_not_passed_over():
    turns = Turns()
    together = partial(turns.together, "a model", nullcontext)
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


def test_no_other_thread_is_within_a_model_that_is_changed():
    batches = ragged_batches()[:2]
    la = fitted(batches=batches)
    la.amortize(batches)
    learnt = partial(la, batches[1], pred_type="amortized")
    for other in (learnt, partial(la, batches[1])):
        found = meet(la.model.transformer, [partial(la, batches[0]), other], 0.2)
        assert any(isinstance(each, BrokenBarrierError) for each in found)


def test_a_partly_compiled_model_has_the_posterior_of_the_model_as_it_was():
    batch = first_batch()
    expected = fitted().predictive_moments(batch)
    model = lora_model("bert")
    bert = model.base_model.model.bert
    bert.encoder = torch.compile(bert.encoder)
    before = [dict(vars(module)) for module in model.modules()]
    message = "The model is compiled: fits and predictions run it eag"
    with pytest.warns(UserWarning, match=message):
        la = fitted(model=model)
    found = la.predictive_moments(batch)
    assert_close(found, expected, rtol=1e-12, atol=1e-15)
    assert [dict(vars(m)) for m in model.modules()] == before
