"""How much memory a method's statistics take, and what is left out."""

import re
import warnings

import pytest
import torch
from torch.utils.data import DataLoader

from laplace_lora_ext.predictive.data_sets import Sample
from tests.support.models import lora_model, ragged_batches
from tests.support.posteriors import fitted, generator, make, plain_regression
from tests.support.ranks import Texts, failures, on_ranks

N_TEXTS = 30


def loader() -> DataLoader:
    return DataLoader(Texts(N_TEXTS), batch_size=4)


def agreement(la, data, **options):
    return la.optimize_prior_precision(
        method="agreement", train_loader=data, generator=generator(), **options
    )


def val_gd(la, data, **options):
    return la.optimize_prior_precision(
        method="val_gd", val_loader=data, n_steps=20, generator=generator(), **options
    )


METHODS = pytest.mark.parametrize("choose", [agreement, val_gd])
DATA = pytest.mark.parametrize(
    "make", [loader, lambda: list(loader())], ids=["loader", "list"]
)


def watched(la) -> list:
    """Make a list that gets all statistics of data that a search asks for."""
    kept = []
    ask = la.statistics_of

    def asked(*args):
        kept.append(ask(*args))
        return kept[-1]

    la.statistics_of = asked
    return kept


@METHODS
@DATA
def test_statistics_take_no_more_memory_than_is_allowed(choose, make):
    la = fitted(batches=loader())
    of_example = la.bytes_of_statistics()
    max_bytes = 11 * of_example + 5
    kept = watched(la)
    n_texts = []
    la.model.register_forward_hook(lambda _, __, logits: n_texts.append(len(logits)))
    message = (
        rf"by 11 of 30 examples.* all would take {30 * of_example:,} bytes.*"
        f"={max_bytes:,}"
    )
    with pytest.warns(UserWarning, match=message) as warned:
        history = choose(la, make(), max_bytes=max_bytes)
    assert len([one for one in warned if "max_bytes" in str(one.message)]) == 1
    (statistics,) = kept
    assert len(statistics) == 11
    assert statistics.nbytes <= max_bytes
    # Only a loader tells how many texts there are before the first has passed.
    assert sum(n_texts) == (11 if make is loader else N_TEXTS)

    # All choices are by the texts that were kept, which are some of all, each once.
    given = fitted(batches=loader())
    again = choose(given, statistics)
    assert torch.equal(again.objective, history.objective)
    of_all = given.predictive_statistics(loader()).f_mu
    distances = torch.cdist(statistics.f_mu.double(), of_all.double())
    assert distances.amin(1).max() < 1e-5
    assert len(set(distances.argmin(1).tolist())) == 11


@METHODS
@DATA
def test_nothing_changes_where_all_statistics_fit(choose, make):
    la = fitted(batches=loader())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        history = choose(la, make(), max_bytes=N_TEXTS * la.bytes_of_statistics())
    given = choose(la, la.predictive_statistics(make()))
    assert torch.equal(history.objective, given.objective)
    assert torch.equal(history.prior_precision, given.prior_precision)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: (fitted(), ragged_batches()), id="classes"),
        pytest.param(
            lambda: (fitted(backend_kwargs={"tail": False}), ragged_batches()),
            id="no tail",
        ),
        pytest.param(
            lambda: (
                fitted(
                    model=lora_model("bert", n_labels=14),
                    batches=ragged_batches(n_classes=14),
                ),
                ragged_batches(n_classes=14),
            ),
            id="contrasts",
        ),
        pytest.param(lambda: (fitted("gpt2"), ragged_batches()), id="answers"),
    ],
)
@pytest.mark.parametrize("link", ["mean_field", "probit"])
def test_the_size_is_known_before_any_pass(make, link):
    la, batches = make()
    statistics = la.statistics_of(batches, False, link)
    assert la.bytes_of_statistics(link) * len(statistics) >= statistics.nbytes
    of_targets = statistics.targets.nbytes
    outputs = 8 * la.n_outputs * len(statistics)
    assert la.bytes_of_statistics(link) * len(statistics) <= statistics.nbytes + outputs
    assert of_targets <= outputs


def test_targets_of_a_regression_count_too():
    la, X = plain_regression()
    statistics = la.statistics_of([(X, torch.zeros(len(X), 2).double())], False)
    assert la.bytes_of_statistics() * len(statistics) == statistics.nbytes


def test_structures_without_statistics_have_no_size():
    assert fitted(structure="diag").bytes_of_statistics() is None
    fitted(structure="diag").optimize_prior_precision(
        method="agreement", train_loader=ragged_batches(), max_bytes=1
    )


@METHODS
def test_one_example_that_takes_more_is_refused(choose):
    la = fitted()
    before = la.prior_precision
    size = la.bytes_of_statistics()
    message = re.escape(
        f"one example take {size:,} bytes, more than max_bytes={size - 1:,}."
    )
    with pytest.raises(ValueError, match=message):
        choose(la, ragged_batches(), max_bytes=size - 1)
    assert torch.equal(la.prior_precision, before)


@METHODS
def test_a_fit_comes_first(choose):
    with pytest.raises(AttributeError, match="not fitted"):
        choose(make(lora_model("bert")), ragged_batches())


def test_statistics_of_some_examples_can_be_asked_for():
    la = fitted()
    data = ragged_batches()
    n_all = sum(len(batch["labels"]) for batch in data)
    some = la.predictive_statistics(data, max_examples=3)
    assert len(some) == 3
    assert some.n_left_out == n_all - 3
    assert torch.equal(some.f_mu, la.predictive_statistics(data, max_examples=3).f_mu)
    assert la.predictive_statistics(data, max_examples=n_all).n_left_out == 0
    with pytest.raises(ValueError, match="max_examples must be at least 1"):
        la.predictive_statistics(data, max_examples=0)


def test_a_sample_holds_never_more_than_asked_for_and_every_row_has_the_same_chance():
    n_rows, n_kept = 2000, 300
    sample = Sample(n_kept)
    for places in torch.arange(n_rows).split(7):
        sample.add((places, 2 * places), places)
        assert len(sample.places()) <= n_kept
    places = sample.places()
    numbers, doubled = sample.columns()
    assert len(places.unique()) == n_kept
    assert sample.n_left_out == n_rows - n_kept
    assert torch.equal(numbers, places)
    assert torch.equal(doubled, 2 * places)
    # Quarters of the rows: the standard deviation of each number is 7.
    counts = torch.histc(places.float(), bins=4, min=0, max=n_rows)
    assert (counts - n_kept / 4).abs().max() < 3 * 7


# --- several processes ----------------------------------------------------------------


@METHODS
def test_the_limit_is_each_processes_own_and_all_choose_by_the_same(choose):
    limit = 9 * fitted(batches=loader()).bytes_of_statistics()

    def job(rank):
        own = list(loader())[rank::2]  # not dealt: each rank has other texts
        la = fitted(batches=own)
        kept = watched(la)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            choose(la, own, max_bytes=limit)
        texts = [str(one.message) for one in warned if "max_bytes" in str(one.message)]
        return len(kept[0]), kept[0].nbytes, la.prior_precision, texts

    results = on_ranks(job, 2)
    assert [n_kept for n_kept, *_ in results] == [9, 9]
    assert all(n_bytes <= limit for _, n_bytes, *_ in results)
    assert torch.equal(results[0][2], results[1][2])
    assert len(results[0][3]) == 1
    assert "by 9 of 30 examples" in results[0][3][0]
    assert results[1][3] == []


def test_ranks_with_the_same_data_are_still_refused():
    def job(rank):
        la = fitted(batches=list(loader())[rank::2])
        agreement(la, list(loader()), max_bytes=8 * la.bytes_of_statistics())

    for message in failures(on_ranks(job, 2)):
        assert "have the same" in message
