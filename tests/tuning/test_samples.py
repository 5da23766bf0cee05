"""How much memory a method's statistics take, and what is left out."""

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from laplace_lora_ext.predictive.data_sets import Sample
from laplace_lora_ext.predictive.statistics import bytes_of_statistics
from tests.support.models import lora_model, ragged_batches
from tests.support.posteriors import (
    fitted,
    generator,
    make,
    plain_regression,
)
from tests.support.ranks import (
    Texts,
    failures,
    on_ranks,
)

# Not a multiple of the batch size, so that the last batch is a part of one.
N_TEXTS = 30


def loader() -> DataLoader:
    return DataLoader(Texts(N_TEXTS), batch_size=4)


def batches() -> list:
    return list(loader())


def agreement(
    la: Any,
    data: Any,
    **options: Any,
):
    return la.optimize_prior_precision(
        method="agreement",
        train_loader=data,
        generator=generator(),
        **options,
    )


def val_gd(
    la: Any,
    data: Any,
    **options: Any,
):
    return la.optimize_prior_precision(
        method="val_gd",
        val_loader=data,
        n_steps=20,
        generator=generator(),
        **options,
    )


METHODS = pytest.mark.parametrize("choose", [agreement, val_gd])
# Each method, and each kind of data.
WITH_DATA = pytest.mark.parametrize(
    ("choose", "make_data"), [(agreement, loader), (val_gd, batches)]
)


def bytes_of(la: Any, link: str = "mean_field") -> int:
    return bytes_of_statistics(la, link)


def watched(la: Any) -> list[Any]:
    """Make a list that gets all statistics of data that a search asks for."""
    kept: list[Any] = []
    ask = la.predictive_statistics

    def asked(*args: Any, **kwargs: Any) -> Any:
        statistics = ask(*args, **kwargs)
        kept.append(statistics)
        return statistics

    la.predictive_statistics = asked
    return kept


def warnings_of_limit(warned: Sequence[Any]) -> list[str]:
    """Find the messages that name `max_bytes`."""
    messages = [str(one.message) for one in warned]
    return [message for message in messages if "max_bytes" in message]


# --- a limit --------------------------------------------------------------------------

N_KEPT = 11


@pytest.fixture
def la():
    return fitted(batches=loader())


@pytest.fixture
def limit(la: Any) -> int:
    """So many bytes that a twelfth example has too few."""
    return N_KEPT * bytes_of(la) + 5


LIMITED = pytest.mark.filterwarnings("ignore:.*max_bytes")


@WITH_DATA
def test_a_limit_that_leaves_examples_out_is_said_once(la, limit, choose, make_data):
    of_all = N_TEXTS * bytes_of(la)
    message = rf"by 11 of 30 examples.* all would take {of_all:,} bytes.*={limit:,}"
    with pytest.warns(UserWarning, match=message) as warned:
        choose(la, make_data(), max_bytes=limit)
    assert len(warnings_of_limit(warned)) == 1


@WITH_DATA
@LIMITED
def test_statistics_take_no_more_memory_than_is_allowed(la, limit, choose, make_data):
    statistics_of_search = watched(la)
    choose(la, make_data(), max_bytes=limit)
    (statistics,) = statistics_of_search
    assert len(statistics) == N_KEPT
    assert statistics.nbytes <= limit


@pytest.mark.parametrize(
    ("choose", "make_data", "n_passed"),
    [
        (agreement, loader, N_KEPT),
        # Only a loader tells how many texts there are before the first has passed.
        (val_gd, batches, N_TEXTS),
    ],
)
@LIMITED
def test_of_a_loader_no_more_texts_pass_than_are_kept(
    la,
    limit,
    choose,
    make_data,
    n_passed,
):
    n_texts = []

    def note_size(
        module: torch.nn.Module,
        args: Any,
        logits: Tensor,
    ) -> None:
        n_texts.append(len(logits))

    la.model.register_forward_hook(note_size)
    choose(la, make_data(), max_bytes=limit)
    assert sum(n_texts) == n_passed


@WITH_DATA
@LIMITED
def test_all_choices_are_by_the_texts_that_were_kept(la, limit, choose, make_data):
    statistics_of_search = watched(la)
    history = choose(la, make_data(), max_bytes=limit)
    (statistics,) = statistics_of_search
    given = fitted(batches=loader())
    again = choose(given, statistics)
    assert torch.equal(again.objective, history.objective)


@WITH_DATA
@LIMITED
def test_the_texts_that_were_kept_are_some_of_all_each_once(
    la,
    limit,
    choose,
    make_data,
):
    every = la.predictive_statistics(loader())
    statistics_of_search = watched(la)
    choose(la, make_data(), max_bytes=limit)
    (statistics,) = statistics_of_search
    kept = statistics.f_mu.double()
    all_texts = every.f_mu.double()
    distances = torch.cdist(kept, all_texts)
    nearest = distances.min(dim=1)
    # One is there, but for rounding.
    assert nearest.values.max() < 1e-5
    assert len(nearest.indices.unique()) == N_KEPT


@WITH_DATA
def test_nothing_changes_where_all_statistics_fit(la, choose, make_data):
    max_bytes = N_TEXTS * bytes_of(la)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        history = choose(la, make_data(), max_bytes=max_bytes)
    statistics = la.predictive_statistics(make_data())
    given = choose(la, statistics)
    assert torch.equal(history.objective, given.objective)
    assert torch.equal(history.prior_precision, given.prior_precision)


# --- the size of statistics -----------------------------------------------------------

Case = tuple[Any, list[dict[str, Tensor]]]


def of_classes() -> Case:
    return fitted(), ragged_batches()


def without_tail() -> Case:
    return fitted(tail=False), ragged_batches()


def of_contrasts() -> Case:
    """Fit so many classes that statistics hold contrasts of a few."""
    texts = ragged_batches(n_classes=14)
    model = lora_model("bert", n_labels=14)
    return fitted(model=model, batches=texts), texts


def of_answers() -> Case:
    return fitted("gpt2"), ragged_batches()


@pytest.mark.parametrize(
    ("make_case", "link"),
    [
        (of_classes, "mean_field"),
        (without_tail, "mean_field"),
        (of_contrasts, "mean_field"),
        (of_contrasts, "probit"),
        (of_answers, "mean_field"),
    ],
)
def test_the_size_is_known_before_any_pass(make_case, link):
    la, texts = make_case()
    statistics = la.predictive_statistics(texts, link_approx=link)
    n_examples = len(statistics)
    foretold = bytes_of(la, link) * n_examples
    assert foretold >= statistics.nbytes
    # What a target takes is not known: a number of 8 bytes for each output is the most.
    most_of_targets = 8 * la.n_outputs * n_examples
    assert foretold <= statistics.nbytes + most_of_targets
    assert statistics.targets.nbytes <= most_of_targets


def test_targets_of_a_regression_count_too():
    la, X = plain_regression()
    y = torch.zeros(len(X), 2).double()
    batch = (X, y)
    statistics = la.predictive_statistics([batch])
    foretold = bytes_of(la) * len(statistics)
    # Exactly, for these targets are float64 and as many as the outputs.
    assert foretold == statistics.nbytes


def test_structures_that_keep_no_statistics_are_not_limited():
    agreement(fitted(structure="diag"), ragged_batches(), max_bytes=1)
    with pytest.raises(NotImplementedError, match="lowrank_kron"):
        val_gd(fitted(structure="diag"), ragged_batches())


@METHODS
def test_one_example_that_takes_more_is_refused(choose):
    la = fitted()
    before = la.prior_precision
    size = bytes_of(la)
    limit = size - 1
    with pytest.raises(ValueError, match=f"{size:,} bytes, .*max_bytes={limit:,}"):
        choose(la, ragged_batches(), max_bytes=limit)
    assert torch.equal(la.prior_precision, before)


@METHODS
def test_a_fit_comes_first(choose):
    la = make(lora_model("bert"))
    with pytest.raises(AttributeError, match="not fitted"):
        choose(la, ragged_batches())


# --- some examples --------------------------------------------------------------------


def test_statistics_of_some_examples_can_be_asked_for():
    la = fitted()
    batches = ragged_batches()
    some = la.predictive_statistics(batches, max_examples=3)
    assert len(some) == 3
    assert some.n_left_out == 8 - 3


def test_statistics_of_some_examples_are_the_same_each_time():
    la = fitted()
    batches = ragged_batches()
    some = la.predictive_statistics(batches, max_examples=3)
    again = la.predictive_statistics(batches, max_examples=3)
    assert torch.equal(again.f_mu, some.f_mu)


def test_as_many_examples_as_there_are_leave_none_out():
    la = fitted()
    batches = ragged_batches()
    every = la.predictive_statistics(batches, max_examples=8)
    assert every.n_left_out == 0


def test_statistics_of_no_example_are_refused():
    la = fitted()
    with pytest.raises(ValueError, match="max_examples must be at least 1"):
        la.predictive_statistics(ragged_batches(), max_examples=0)


# So many rows to each that is sampled that most of those first kept are replaced.
N_ROWS = 2000
N_SAMPLED = 300


@pytest.fixture
def sample() -> Sample:
    """A sample of numbers that came a few at a time, and of their doubles."""
    sample = Sample(N_SAMPLED)
    for places in torch.arange(N_ROWS).split(7):
        sample.add((places, 2 * places), places)
        assert len(sample.places()) <= N_SAMPLED
    return sample


def test_a_sample_holds_as_many_rows_as_asked_for(sample):
    places = sample.places()
    assert len(places.unique()) == N_SAMPLED
    assert sample.n_left_out == N_ROWS - N_SAMPLED


def test_a_sample_holds_whole_rows(sample):
    places = sample.places()
    numbers, doubled = sample.columns()
    assert torch.equal(numbers, places)
    assert torch.equal(doubled, 2 * places)


def test_every_row_has_the_same_chance(sample):
    places = sample.places().float()
    # Quarters of the rows: the standard deviation of each number is 7.
    counts = torch.histc(places, bins=4, min=0, max=N_ROWS)
    excess = counts - N_SAMPLED / 4
    assert excess.abs().max() < 3 * 7


# --- several processes ----------------------------------------------------------------


def dealt_to(rank: int) -> list:
    """Take every second batch, whose texts no other rank has."""
    return batches()[rank::2]


@METHODS
def test_the_limit_is_each_processes_own_and_all_choose_by_the_same(choose):
    of_one = bytes_of(fitted(batches=loader()))
    limit = 9 * of_one

    def job(rank: int) -> tuple[Tensor, list[str]]:
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
    # Of the first rank, for all.
    (message,) = warned
    assert "by 9 of 30 examples" in message
    other_prior, other_warned = second
    assert torch.equal(other_prior, prior)
    assert other_warned == []


def test_ranks_with_the_same_data_are_still_refused():
    def job(rank: int) -> None:
        la = fitted(batches=dealt_to(rank))
        max_bytes = 8 * bytes_of(la)
        agreement(la, batches(), max_bytes=max_bytes)

    results = on_ranks(job, 2)
    for message in failures(results):
        assert "have the same" in message
