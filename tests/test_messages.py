"""Errors that name a place, and warnings that point at the user's own line."""

from __future__ import annotations

import inspect
import textwrap
import warnings
from pathlib import Path

import laplace
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import laplace_lora_ext
from laplace_lora_ext.messages import check_counts, listed, naming, warn
from tests.support.models import pairs, plain_model
from tests.support.posteriors import make


@pytest.mark.parametrize("kind", [ValueError, NotImplementedError])
def test_places_are_named_from_the_outermost_in(kind):
    original = kind("non-finite numbers")
    with pytest.raises(kind) as error, naming("batch 3"), naming("LoRA layer first"):
        raise original
    assert str(error.value) == "batch 3: LoRA layer first: non-finite numbers"
    assert error.value.__cause__.__cause__ is original


@pytest.mark.parametrize(
    "error",
    [RuntimeError("of torch"), KeyError("key"), UnicodeDecodeError("utf-8", b"", 0, 1, "why")],
    ids=lambda error: type(error).__name__,
)
def test_errors_of_other_types_pass_as_they_are(error):
    with pytest.raises(type(error)) as raised, naming("batch 3"):
        raise error
    assert raised.value is error


def function_of(module: str, source: str, **names: object):
    """The last function of a source that claims to be a module's."""
    namespace = {"__name__": module, **names}
    exec(compile(textwrap.dedent(source), f"{module}.py", "exec"), namespace)
    return [value for value in namespace.values() if inspect.isfunction(value)][-1]


@pytest.fixture
def deep():
    """A function of the library that warns below two more, one of them called by torch."""
    source = """
        def innermost():
            warn("too broad")
        def inner():
            torch.no_grad()(innermost)()
        def outermost():
            inner()
    """
    return function_of("laplace_lora_ext.made_up", source, warn=warn, torch=torch)


def test_a_warning_points_at_the_line_that_called_the_library(deep):
    with pytest.warns(UserWarning, match="too broad") as caught:
        deep()
    (warning,) = caught
    here = inspect.currentframe().f_lineno - 2
    assert (warning.filename, warning.lineno) == (__file__, here)


def test_a_user_of_a_similar_name_is_a_user(deep):
    theirs = function_of("laplace_lora_extras.main", "def run():\n    deep()", deep=deep)
    with pytest.warns(UserWarning, match="too broad") as caught:
        theirs()
    assert (caught[0].filename, caught[0].lineno) == ("laplace_lora_extras.main.py", 2)


def test_a_module_that_calls_the_library_as_a_script_is_warned(deep):
    script = function_of("__main__", "def run():\n    deep()", deep=deep)
    with pytest.warns(UserWarning, match="too broad") as caught:
        script()
    assert caught[0].filename == "__main__.py"


@pytest.mark.parametrize("structure", ["lowrank_kron", "kron"])
def test_fits_and_searches_warn_of_the_users_line(structure):
    """Through the host, torch and several layers of the library."""
    X, y = pairs(n=6)[0]
    la = make(plain_model(), structure)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        la.fit(DataLoader(TensorDataset(X, y), batch_size=4, drop_last=True))
        la.optimize_prior_precision(n_steps=1)
        la.optimize_prior_precision(method="agreement", train_loader=[(X[:4], y[:4])])
        la.optimize_prior_precision(
            method="gridsearch",
            val_loader=[(X, y)],
            loss=lambda *_: torch.tensor(1.0),
            grid_size=2,
        )
    messages = [str(warning.message) for warning in caught if warning.filename == __file__]
    for part in ("its data set has 6", "not converged in 1 steps", "the same at every point"):
        assert any(part in message for message in messages), part
    ours = [Path(str(package.__file__)).parent for package in (laplace, laplace_lora_ext)]
    assert not [w for w in caught if set(ours) & set(Path(w.filename).parents)]


@pytest.mark.parametrize(
    ("n", "end"), [(1, "a"), (8, "g, h"), (9, "g, h and 1 more"), (11, "g, h and 3 more")]
)
def test_of_many_names_eight_are_listed(n, end):
    names = listed("abcdefghijk"[:n])
    assert names.endswith(end)
    assert names.count(", ") == min(n, 8) - 1


@pytest.mark.parametrize("number", [0, -3, 2.5, "5", None, torch.tensor(3.0)])
def test_a_number_of_things_is_whole_and_at_least_1(number):
    with pytest.raises(ValueError, match=r"n_samples must be at least 1, and whole, not "):
        check_counts(n_steps=np.int64(1), n_samples=number)
