"""Times and processes: what becomes of jobs that are slow, fail or leave."""

import os
import time

import pytest
import torch

from benchmarks.measuring import Message, peak_memory, run_limited


def sleep_after_message(seconds):
    yield Message("figure", 1)
    time.sleep(seconds)
    raise ValueError("woken")


def leave():
    os._exit(3)


def test_what_was_sent_before_a_failure_counts():
    sent = [Message("figure", 1)]
    messages, reason = run_limited(sleep_after_message, (0,), limit=60.0)
    assert messages == sent
    assert reason == "ValueError: woken"
    messages, reason = run_limited(leave, ())
    assert messages == []
    assert reason == "its process ended with exit code 3"
    messages, reason = run_limited(sleep_after_message, (60,), limit=0.5)
    assert messages in (sent, [])  # the limit may be over before the process has begun
    assert reason == "took longer than the limit of 0.5 s"


def test_the_peak_is_that_of_tensors_that_are_there_together():
    of_float = 4e-6  # megabytes
    given = torch.zeros(1_000)
    with peak_memory("cpu") as memory:
        first = torch.zeros(5_000)
        first.add_(given.mean()).view(50, 100)  # in place, and a view
        del first
        torch.zeros(2_000)
        second = torch.zeros(4_000, requires_grad=True)
        # Beside it the result, which the graph keeps, and the gradient.
        second.exp().sum().backward()
    assert memory.megabytes == pytest.approx(12_000 * of_float, rel=0.01)
