"""Threads that share a model take turns."""

import copy
import gc
import os
import pickle
import signal
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Event, Thread

import pytest
import torch
from torch import nn

from laplace_lora_ext.models.locks import _LOCKS, lock_of
from tests.support.models import ragged_batches
from tests.support.posteriors import fitted

N_THREADS, N_PREDICTIONS = 4, 200


def test_threads_predict_what_one_thread_does_and_leave_the_model_as_it_was():
    la = fitted()
    batches = [
        batch for size in (1, 2, 3, 5) for batch in ragged_batches(batch_size=size, seed=size)
    ]
    links = ("probit", "mean_field")
    serial = {(i, link): la(b, link_approx=link) for i, b in enumerate(batches) for link in links}
    state = [(p, p.requires_grad, p.grad, p.clone()) for p in la.model.parameters()]
    modes = [module.training for module in la.model.modules()]

    def predict(number: int) -> float:
        index, link = number % len(batches), links[number % 2]
        found = la(batches[index], link_approx=link)
        return (found - serial[index, link]).abs().max().item()

    with ThreadPoolExecutor(N_THREADS) as pool:
        errors = list(pool.map(predict, range(N_PREDICTIONS)))
    assert max(errors) == 0
    for parameter, requires_grad, grad, value in state:
        assert parameter.requires_grad == requires_grad
        assert parameter.grad is grad
        assert torch.equal(parameter, value)
    assert [module.training for module in la.model.modules()] == modes
    assert not any(block.layer._forward_hooks for block in la.blocks)


def test_fits_statistics_and_predictions_of_one_model_exclude_each_other():
    la = fitted()
    batches = ragged_batches()
    expected = la(batches[0]), la.log_marginal_likelihood()
    uses = [
        lambda: la.fit(batches),
        lambda: la.predictive_statistics(batches),
        lambda: la(batches[0], pred_type="nn", link_approx="mc", n_samples=2),
        lambda: torch.testing.assert_close(la(batches[0]), expected[0], rtol=0, atol=0),
    ]
    with ThreadPoolExecutor(N_THREADS) as pool:
        for future in [pool.submit(use) for use in uses * 6]:
            future.result()
    torch.testing.assert_close(la.log_marginal_likelihood(), expected[1], rtol=1e-6, atol=0)


USES = {
    "state": lambda la, folder: la.state_dict()["prior_precision"],
    "save": lambda la, folder: la.save_pretrained(folder),
    "samples": lambda la, folder: la.sample(1, torch.Generator()),
    "adapters": lambda la, folder: la.sample_adapters(1, folder),
}


@pytest.mark.parametrize("use", USES)
def test_nothing_of_a_prior_precision_that_is_only_tried_gets_out(use, tmp_path):
    la = fitted()
    trying, go_on = Event(), Event()

    def loss(*_: torch.Tensor) -> torch.Tensor:
        trying.set()
        assert go_on.wait(30)
        return torch.zeros(())

    def tune() -> None:
        la.optimize_prior_precision(
            method="gridsearch", val_loader=ragged_batches(), loss=loss, grid_size=2
        )

    with ThreadPoolExecutor(2) as pool:
        tuning = pool.submit(tune)
        assert trying.wait(30)
        using = pool.submit(USES[use], la, tmp_path)
        done, _ = wait([using], timeout=0.5)
        go_on.set()
        tuning.result()
        using.result()
    assert not done


def test_a_model_has_one_lock_and_another_model_another():
    first, second = fitted(), fitted()
    assert first.model.lock is first.model.lock
    assert first.model.lock is not second.model.lock
    with first.model.lock, first.model.lock:  # a thread may take it again
        waiting = Thread(target=lambda: first.model.lock.acquire(), daemon=True)
        waiting.start()
        waiting.join(0.05)
        assert waiting.is_alive()
        Thread(target=lambda: second(ragged_batches()[0])).run()


def test_a_lock_is_neither_copied_nor_kept():
    module = nn.Linear(2, 2)
    lock = lock_of(module)
    assert lock_of(copy.deepcopy(module)) is not lock
    assert torch.equal(pickle.loads(pickle.dumps(module)).weight, module.weight)
    before = len(_LOCKS)
    del module
    gc.collect()
    assert len(_LOCKS) < before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_process_that_was_forked_while_a_thread_ran_the_model_says_so():
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    held, done = Event(), Event()

    def hold():
        with lock_of(model):
            held.set()
            done.wait()

    thread = Thread(target=hold)
    thread.start()
    held.wait()
    with lock_of(other):  # of the thread that forks
        child = os.fork()
    if child == 0:
        signal.alarm(20)  # where it waits for ever
        try:
            with lock_of(other), pytest.raises(RuntimeError, match="was forked while another"):
                lock_of(model)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    done.set()
    thread.join()
    with lock_of(model):
        pass
