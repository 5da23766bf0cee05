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


def batches() -> list:
    return list(loader())


def agreement(la, data, **options):
    return la.optimize_prior_precision(
        method="agreement",
        train_loader=data,
        generator=generator(),
        **options,
    )


def val_gd(la, data, **options):
    return la.optimize_prior_precision(
        method="val_gd",
        val_loader=data,
        n_steps=20,
        generator=generator(),
        **options,
    )


METHODS = pytest.mark.parametrize("choose", [agreement, val_gd])
DATA = pytest.mark.parametrize("make_data", [loader, batches])


def watched(la) -> list:
    """Make a list that gets all statistics of data that a search asks for."""
    kept = []
    ask = la.statistics_of

    def asked(*args):
        statistics = ask(*args)
        kept.append(statistics)
        return statistics

    la.statistics_of = asked
    return kept


def warnings_of_limit(warned) -> list[str]:
    """Find the messages that name `max_bytes`."""
    messages = [str(one.message) for one in warned]
    return [message for message in messages if "max_bytes" in message]


@METHODS
@DATA
def test_statistics_take_no_more_memory_than_is_allowed(choose, make_data):
    la = fitted(batches=loader())
    of_example = la.bytes_of_statistics()
    n_kept = 11
    max_bytes = n_kept * of_example + 5  # too few bytes for a twelfth
    statistics_of_search = watched(la)
    n_texts = []

    def note_size(module, args, logits):
        n_texts.append(len(logits))

    la.model.register_forward_hook(note_size)
    of_all = N_TEXTS * of_example
    message = rf"by 11 of 30 examples.* all would take {of_all:,} bytes.*={max_bytes:,}"
    with pytest.warns(UserWarning, match=message) as warned:
        history = choose(la, make_data(), max_bytes=max_bytes)
    assert len(warnings_of_limit(warned)) == 1
    (statistics,) = statistics_of_search
    assert len(statistics) == n_kept
    assert statistics.nbytes <= max_bytes
    # Only a loader tells how many texts there are before the first has passed.
    n_passed = n_kept if make_data is loader else N_TEXTS
    assert sum(n_texts) == n_passed

    # All choices are by the texts that were kept, which are some of all, each once.
    given = fitted(batches=loader())
    again = choose(given, statistics)
    assert torch.equal(again.objective, history.objective)
    every = given.predictive_statistics(loader())
    distances = torch.cdist(statistics.f_mu.double(), every.f_mu.double())
    nearest = distances.min(dim=1)
    assert nearest.values.max() < 1e-5  # one is there, but for rounding
    assert len(nearest.indices.unique()) == n_kept


@METHODS
@DATA
def test_nothing_changes_where_all_statistics_fit(choose, make_data):
    la = fitted(batches=loader())
    max_bytes = N_TEXTS * la.bytes_of_statistics()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        history = choose(la, make_data(), max_bytes=max_bytes)
    statistics = la.predictive_statistics(make_data())
    given = choose(la, statistics)
    assert torch.equal(history.objective, given.objective)
    assert torch.equal(history.prior_precision, given.prior_precision)


def of_classes():
    return fitted(), ragged_batches()


def without_tail():
    return fitted(tail=False), ragged_batches()


def of_contrasts():
    """Fit so many classes that statistics hold contrasts of a few."""
    texts = ragged_batches(n_classes=14)
    model = lora_model("bert", n_labels=14)
    return fitted(model=model, batches=texts), texts


def of_answers():
    return fitted("gpt2"), ragged_batches()


@pytest.mark.parametrize(
    "make_case", [of_classes, without_tail, of_contrasts, of_answers]
)
@pytest.mark.parametrize("link", ["mean_field", "probit"])
def test_the_size_is_known_before_any_pass(make_case, link):
    la, texts = make_case()
    statistics = la.statistics_of(texts, progress_bar=False, link_approx=link)
    n_examples = len(statistics)
    foretold = la.bytes_of_statistics(link) * n_examples
    assert foretold >= statistics.nbytes
    # What a target takes is not known: a number of 8 bytes for each output is the most.
    most_of_targets = 8 * la.n_outputs * n_examples
    assert foretold <= statistics.nbytes + most_of_targets
    assert statistics.targets.nbytes <= most_of_targets


def test_targets_of_a_regression_count_too():
    la, X = plain_regression()
    y = torch.zeros(len(X), 2).double()
    statistics = la.statistics_of([(X, y)], progress_bar=False)
    assert la.bytes_of_statistics() * len(statistics) == statistics.nbytes


def test_structures_without_statistics_have_no_size():
    la = fitted(structure="diag")
    assert la.bytes_of_statistics() is None
    agreement(la, ragged_batches(), max_bytes=1)


@METHODS
def test_one_example_that_takes_more_is_refused(choose):
    la = fitted()
    before = la.prior_precision
    size = la.bytes_of_statistics()
    limit = size - 1
    message = f"one example take {size:,} bytes, more than max_bytes={limit:,}."
    with pytest.raises(ValueError, match=re.escape(message)):
        choose(la, ragged_batches(), max_bytes=limit)
    assert torch.equal(la.prior_precision, before)


@METHODS
def test_a_fit_comes_first(choose):
    la = make(lora_model("bert"))
    with pytest.raises(AttributeError, match="not fitted"):
        choose(la, ragged_batches())


def test_statistics_of_some_examples_can_be_asked_for():
    la = fitted()
    data = ragged_batches()
    n_all = sum(len(batch["labels"]) for batch in data)
    some = la.predictive_statistics(data, max_examples=3)
    assert len(some) == 3
    assert some.n_left_out == n_all - 3
    again = la.predictive_statistics(data, max_examples=3)
    assert torch.equal(again.f_mu, some.f_mu)
    every = la.predictive_statistics(data, max_examples=n_all)
    assert every.n_left_out == 0
    with pytest.raises(ValueError, match="max_examples must be at least 1"):
        la.predictive_statistics(data, max_examples=0)


def test_a_sample_holds_never_more_than_asked_for_and_every_row_has_the_same_chance():
    n_rows = 2000
    n_kept = 300
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
    excess = counts - n_kept / 4
    assert excess.abs().max() < 3 * 7


# --- several processes ----------------------------------------------------------------


def dealt_to(rank: int) -> list:
    """Take every second batch, whose texts no other rank has."""
    return batches()[rank::2]


@METHODS
def test_the_limit_is_each_processes_own_and_all_choose_by_the_same(choose):
    limit = 9 * fitted(batches=loader()).bytes_of_statistics()

    def job(rank):
        own = dealt_to(rank)
        la = fitted(batches=own)
        statistics_of_search = watched(la)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            choose(la, own, max_bytes=limit)
        (statistics,) = statistics_of_search
        assert len(statistics) == 9
        assert statistics.nbytes <= limit
        return la.prior_precision, warnings_of_limit(warned)

    first, second = on_ranks(job, 2)
    prior, warned = first
    (message,) = warned  # of the first rank, for all
    assert "by 9 of 30 examples" in message
    other_prior, other_warned = second
    assert torch.equal(other_prior, prior)
    assert other_warned == []


def test_ranks_with_the_same_data_are_still_refused():
    def job(rank):
        la = fitted(batches=dealt_to(rank))
        max_bytes = 8 * la.bytes_of_statistics()
        agreement(la, batches(), max_bytes=max_bytes)

    for message in failures(on_ranks(job, 2)):
        assert "have the same" in message
