"""Which examples each rank reads: all ranks together each of them once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.data_loader import SkipBatchSampler
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from laplace_lora_ext.predictive.data_sets import over_loader
from laplace_lora_ext.processes.shards import (
    Share,
    divided,
    examples_of,
    in_order,
    in_order_like,
    joined,
)
from tests.support.ranks import accelerated, failures, on_ranks

SIZES = [1, 2, 5, 8, 9, 11, 12, 13]
NO_EXAMPLES = torch.empty(0).long()
BATCH_SIZE = 2

# --- loaders that are dealt to ranks --------------------------------------------------


def numbered(
    n: int,
    batch_size: int = BATCH_SIZE,
    **options,
) -> DataLoader:
    """Load numbers from 0 to n, which are the examples' places too."""
    examples = torch.arange(n)
    return DataLoader(examples, batch_size=batch_size, **options)


def strided(
    rank: int,
    world: int,
    n: int,
) -> DataLoader:
    sampler = DistributedSampler(range(n))
    return numbered(n, sampler=sampler)


def strided_and_dropping(
    rank: int,
    world: int,
    n: int,
) -> DataLoader:
    sampler = DistributedSampler(range(n), drop_last=True)
    return numbered(n, sampler=sampler)


def prepared(
    rank: int,
    world: int,
    n: int,
) -> DataLoader:
    loader = numbered(n)
    return accelerated(rank, world, loader)


def prepared_and_shuffled(
    rank: int,
    world: int,
    n: int,
) -> DataLoader:
    loader = numbered(n, shuffle=True)
    return accelerated(rank, world, loader)


def prepared_uneven(
    rank: int,
    world: int,
    n: int,
) -> DataLoader:
    loader = numbered(n)
    return accelerated(rank, world, loader, even_batches=False)


def prepared_by_splitting(
    rank: int,
    world: int,
    n: int,
) -> DataLoader:
    # Of which each of three ranks gets two.
    loader = numbered(n, batch_size=6)
    return accelerated(rank, world, loader, split_batches=True)


class SortedBatches:
    """Batches of many sizes, as those with as many tokens are."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[list[int]]:
        start = 0
        while start < self.n:
            end = min(self.n, start + 1 + start % 3)
            yield list(range(start, end))
            start = end

    def __len__(self) -> int:
        return len(list(self))


def prepared_by_batches(
    rank: int,
    world: int,
    n: int,
) -> DataLoader:
    examples = torch.arange(n)
    batches = SortedBatches(n)
    loader = DataLoader(examples, batch_sampler=batches)
    return accelerated(rank, world, loader)


def dealt_in_order(
    rank: int,
    world: int,
    n: int,
) -> DataLoader:
    examples = torch.arange(n)
    return in_order(examples, BATCH_SIZE, None)


@dataclass(frozen=True)
class Given:
    """What a share's pass gave: all ranks' column, and sizes of this rank's batches."""

    column: list[int]
    batch_sizes: list[int]


def given(loader: DataLoader) -> Given:
    """Pass over this rank's share and join the examples of all ranks."""
    share = Share(loader)
    assert share.is_dealt
    batch_sizes = []
    examples = [NO_EXAMPLES]
    places = [NO_EXAMPLES]
    for batch in share.loader:
        batch_sizes.append(len(batch))
        of_batch = share.places(len(batch))
        # Ranks pass over a batch that is no part of their share, with the others.
        if len(of_batch):
            examples.append(batch)
            places.append(of_batch)
    of_rank = torch.cat(examples)
    assert share.size == len(of_rank)
    column = column_of(torch.cat(places), of_rank)
    return Given(column, batch_sizes)


def column_of(places: Tensor, values: Tensor) -> list[int]:
    """Join the values of all ranks, each at its place."""
    (column,) = joined(places, (values,))
    return column.tolist()


LOADERS = {
    "DistributedSampler": strided,
    "DistributedSampler, dropping": strided_and_dropping,
    "Accelerate": prepared,
    "Accelerate, shuffled": prepared_and_shuffled,
    "Accelerate, uneven": prepared_uneven,
    "Accelerate, split": prepared_by_splitting,
    "Accelerate, batches of many sizes": prepared_by_batches,
    "in order": dealt_in_order,
}


@pytest.mark.parametrize("kind", LOADERS)
def test_all_ranks_together_have_each_example_once_and_in_order(kind):
    make_loader = LOADERS[kind]
    world = 3

    # Ranks take a while to start, so that all sizes are tried by the same.
    def job(rank):
        of_sizes = {}
        for n in SIZES:
            loader = make_loader(rank, world, n)
            of_sizes[n] = given(loader)
        return of_sizes

    of_ranks = on_ranks(job, world)
    for of_rank in of_ranks:
        assert isinstance(of_rank, dict), of_rank
    for n in SIZES:
        everything = list(range(n))
        n_batches = set()
        for of_rank in of_ranks:
            result = of_rank[n]
            assert result.column == everything
            if kind != "Accelerate, batches of many sizes":
                assert max(result.batch_sizes) <= BATCH_SIZE
            n_batches.add(len(result.batch_sizes))
        # Ranks that share a model pass over it together.
        assert len(n_batches) == 1


def passes_over(share: Share) -> list[list[int]]:
    """Pass over a share twice."""
    passes = []
    for _ in range(2):
        column, *_ = over_loader(share, as_column)
        passes.append(column.tolist())
    return passes


def as_column(batch: Tensor) -> tuple[Tensor]:
    """Return the examples themselves."""
    return (batch,)


def test_a_share_that_is_read_once_gives_every_pass_the_same():
    n = 40
    shuffled = numbered(n, batch_size=3, shuffle=True)
    share = Share.read_once(shuffled)
    first, second = passes_over(share)
    assert first == second
    # Otherwise nothing would be shuffled.
    assert first != list(range(n))


def test_a_share_that_ranks_read_once_gives_every_pass_the_same():
    n = 5

    def job(rank):
        shuffled = prepared_and_shuffled(rank, 2, n)
        share = Share.read_once(shuffled)
        return passes_over(share)

    everything = list(range(n))
    for first, second in on_ranks(job, 2):
        assert first == everything
        assert second == everything


# --- other loaders --------------------------------------------------------------------


@dataclass(frozen=True)
class Shared:
    """A share of a loader that each rank has wholly, and all ranks' examples."""

    is_dealt: bool
    size: int | None
    column: list[int]


def shared(
    loader,
    rank: int,
) -> Shared:
    """Join examples of all ranks, of which rank 1 adds 10 to its own."""
    share = Share(loader)
    # A pass over a share tells the places of each batch in turn.
    places = []
    values = []
    for batch in share.loader:
        of_batch = share.places(len(batch))
        places.append(of_batch)
        values.append(batch + 10 * rank)
    column = column_of(torch.cat(places), torch.cat(values))
    return Shared(
        share.is_dealt,
        share.size,
        column,
    )


def by_batch_size() -> DataLoader:
    return numbered(5, batch_size=3)


def by_batch_sampler() -> DataLoader:
    sampler = BatchSampler(
        range(5),
        batch_size=3,
        drop_last=False,
    )
    examples = torch.arange(5)
    return DataLoader(examples, batch_sampler=sampler)


@pytest.mark.parametrize("make_loader", [by_batch_size, by_batch_sampler])
def test_a_loader_without_a_sampler_of_ranks_gives_each_its_own(make_loader):
    expected = Shared(
        is_dealt=False,
        size=5,
        column=[*range(5), *range(10, 15)],
    )

    def job(rank):
        loader = make_loader()
        return shared(loader, rank)

    of_ranks = on_ranks(job, 2)
    assert of_ranks == [expected] * 2


def test_a_list_of_batches_gives_each_rank_its_own():
    batches = [torch.arange(3), torch.arange(2)]
    of_rank_0 = [0, 1, 2, 0, 1]
    of_rank_1 = [10, 11, 12, 10, 11]
    expected = Shared(
        is_dealt=False,
        size=None,
        column=of_rank_0 + of_rank_1,
    )

    def job(rank):
        return shared(batches, rank)

    of_ranks = on_ranks(job, 2)
    assert of_ranks == [expected] * 2


def test_a_sampler_of_ranks_deals_nothing_to_a_single_process():
    sampler = DistributedSampler(range(5), num_replicas=2, rank=0)
    share = Share(numbered(5, sampler=sampler))
    assert not share.is_dealt


# --- refused --------------------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(7))


class Own(Sampler):
    """Gives one example twice, and others never."""

    def __iter__(self) -> Iterator[int]:
        return iter([3, 1, 3])

    def __len__(self) -> int:
        return 3


def sharded_stream(rank: int) -> DataLoader:
    loader = DataLoader(Stream(), batch_size=2)
    return accelerated(rank, 2, loader, dispatch_batches=False)


def dispatched(rank: int) -> DataLoader:
    loader = numbered(4)
    return accelerated(rank, 2, loader, dispatch_batches=True)


def for_four_processes(rank: int) -> DataLoader:
    sampler = DistributedSampler(range(8), num_replicas=4, rank=rank)
    return numbered(8, sampler=sampler)


def dropping(examples: list) -> list:
    return examples[:1]


def with_a_collator_that_drops(rank: int) -> DataLoader:
    sampler = DistributedSampler(range(4))
    return numbered(4, sampler=sampler, collate_fn=dropping)


def the_same_on_all_ranks(rank: int) -> DataLoader:
    return numbered(4)


@pytest.mark.parametrize(
    ("make_loader", "message"),
    [
        (sharded_stream, "repeats examples where it shards an iterable"),
        (dispatched, "or dispatches"),
        (for_four_processes, "among 4 processes, and there are 2"),
        (with_a_collator_that_drops, "must return one for each"),
        (the_same_on_all_ranks, "have the same 4 examples"),
    ],
)
def test_what_would_count_twice_is_refused(make_loader, message):
    def job(rank):
        loader = make_loader(rank)
        over_loader(loader, lambda batch: (torch.as_tensor(batch),))

    of_ranks = on_ranks(job, 2)
    for error in failures(of_ranks):
        assert message in error


# --- ranks without data ---------------------------------------------------------------


def test_a_rank_without_data_adds_nothing():
    def job(rank):
        share = Share([])
        if rank == 1:
            return joined(NO_EXAMPLES, None)
        rows = torch.arange(4).reshape(2, 2) + 10 * rank
        labels = rows[:, 0]
        return joined(share.places(2), (rows, labels))

    of_rank_0 = [[0, 1], [2, 3]]
    of_rank_2 = [[20, 21], [22, 23]]
    for rows, labels in on_ranks(job, 3):
        assert rows.tolist() == of_rank_0 + of_rank_2
        assert labels.tolist() == [0, 2, 20, 22]


def test_ranks_without_data_have_nothing_to_join():
    def job(_):
        return joined(NO_EXAMPLES, None)

    of_ranks = on_ranks(job, 2)
    assert of_ranks == [None, None]


def test_labels_of_some_ranks_alone_are_refused():
    def job(rank):
        places = torch.arange(2) + 2 * rank
        values = torch.arange(2.0) + rank
        columns = (values,)
        if rank == 1:
            columns = (values, values)
        joined(places, columns)

    message = "Some batches have labels and others have none: give all or none labels."
    of_ranks = on_ranks(job, 2)
    assert failures(of_ranks) == [message] * 2


# --- examples that a sampler leaves out -----------------------------------------------


class Drawing(Sampler):
    """Draws three examples by NumPy's generators, its own or the one of all."""

    def __init__(self, generator: Any = np.random) -> None:
        self.generator = generator
        self.n_passes = 0

    def __iter__(self) -> Iterator[int]:
        self.n_passes += 1
        return iter(self.generator.choice(20, 3, replace=False).tolist())

    def __len__(self) -> int:
        return 3


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(1)


ALL = list(range(20))
# Of twenty examples: options of a loader, and how many of which it gives.
GIVING = {
    "all": ({}, 20, ALL),
    "all, shuffled": ({"shuffle": True}, 20, ALL),
    "no last batch": ({"batch_size": 3, "drop_last": True}, 18, ALL[:18]),
    "a subset": ({"sampler": SubsetRandomSampler([4, 0])}, 2, [0, 4]),
    "a tensor": ({"sampler": torch.tensor([4, 0, 4])}, 2, [0, 4]),
    "some at random": ({"sampler": RandomSampler(ALL, num_samples=7)}, 7, ALL),
    "with weights": (
        {"sampler": WeightedRandomSampler([0.0] * 17 + [1.0] * 3, 40)},
        3,
        [17, 18, 19],
    ),
    "with a generator": (
        {"sampler": RandomSampler(ALL, num_samples=7, generator=seeded())},
        7,
        torch.randperm(20, generator=seeded())[:7].tolist(),
    ),
    "one's own": ({"sampler": Own()}, 2, [1, 3]),
    "one's own, at random": ({"sampler": Drawing()}, 3, ALL),
    "one's own, with a generator": (
        {"sampler": Drawing(np.random.default_rng(1))},
        3,
        np.random.default_rng(1).choice(20, 3, replace=False).tolist(),
    ),
    "batches": ({"batch_size": 1, "batch_sampler": [[2, 0], [1]]}, 3, [0, 1, 2]),
    "batches as examples": (
        {"batch_size": None, "sampler": BatchSampler([5, 6, 7], 2, True)},
        2,
        [5, 6],
    ),
    "batches after the first": (
        {"batch_size": 1, "batch_sampler": SkipBatchSampler([[2, 0], [1]], 1)},
        1,
        [1],
    ),
}


@pytest.mark.parametrize("kind", GIVING)
def test_a_loader_s_own_indices_are_the_examples(kind):
    options, n_given, among = GIVING[kind]
    loader = numbered(20, **options)
    examples = examples_of(loader).tolist()
    assert len(examples) == n_given
    assert set(examples) <= set(among)
    # The next pass draws as if nobody had asked, and whoever asks again gets the same.
    torch.manual_seed(2)
    np.random.seed(2)
    before = [example for batch in loader for example in batch.tolist()]
    torch.manual_seed(2)
    np.random.seed(2)
    assert examples_of(loader).tolist() == examples or "generator" in kind
    # Generators of their own have gone on with the pass above, and no further.
    if "generator" not in kind:
        after = [example for batch in loader for example in batch.tolist()]
        assert after == before


def test_what_a_sampler_leaves_out_is_not_held_out_either():
    weights = torch.ones(20)
    weights[:10] = 0
    sampler = WeightedRandomSampler(weights.tolist(), 200)
    loader = DataLoader(list(range(20)), sampler=sampler)
    ((rest, held, _),) = divided(loader, 0.3)
    assert sorted([*rest.indices, *held.indices]) == list(range(10, 20))


def test_a_stream_has_no_places():
    with pytest.raises(ValueError, match="A stream's examples"):
        examples_of(DataLoader(Stream(), batch_size=2))


def test_asking_for_the_examples_leaves_samplers_as_they_are():
    sampler = Drawing(np.random.default_rng(1))
    loader = numbered(20, sampler=sampler)
    examples = examples_of(loader).tolist()
    assert sampler.n_passes == 0
    assert examples_of(loader).tolist() == examples
    drawn = [example for batch in loader for example in batch.tolist()]
    assert sorted(drawn) == examples


def test_ranks_deal_what_a_sampler_of_ones_own_gives():
    def job(rank):
        own = Drawing(np.random.default_rng(rank))
        loader = accelerated(rank, 2, numbered(20, sampler=own))
        (column,) = over_loader(loader, as_column)
        return column.tolist()

    expected = np.random.default_rng(0).choice(20, 3, replace=False).tolist()
    assert on_ranks(job, 2) == [sorted(expected)] * 2


# --- how examples are loaded ----------------------------------------------------------


def prepare_worker(_: int) -> None:
    torch.set_num_threads(1)


LOADING = {
    "num_workers": 1,
    "pin_memory": True,
    "timeout": 30,
    "worker_init_fn": prepare_worker,
    "multiprocessing_context": "forkserver",
    "prefetch_factor": 3,
    "persistent_workers": True,
}


def loading(loader: DataLoader) -> dict[str, Any]:
    """Tell how a loader loads."""
    own = {name: getattr(loader, name) for name in LOADING}
    context = own.pop("multiprocessing_context")
    return own | {"multiprocessing_context": context.get_start_method()}


def test_loaders_that_are_dealt_or_put_in_order_load_as_before():
    loader = numbered(5, collate_fn=dropping, **LOADING)
    like = in_order_like(loader, range(3))
    assert loading(like) == LOADING
    assert like.collate_fn is dropping

    def job(rank):
        of_ranks = accelerated(rank, 2, numbered(5, **LOADING))
        strided = numbered(5, sampler=DistributedSampler(range(5)), **LOADING)
        return [loading(Share(each).loader) for each in (of_ranks, strided)]

    assert on_ranks(job, 2) == [[LOADING] * 2] * 2


# --- ranks with the same data ---------------------------------------------------------


def of_one_text(rank: int) -> list[Any]:
    """Batches of a text that all ranks have, padded otherwise on each."""
    ids = torch.tensor([[5, 6, 7] + [0] * rank])
    mask = (ids != 0).long()
    return [{"input_ids": ids, "attention_mask": mask, "labels": torch.ones(1)}]


def constant(batch: Any) -> tuple[Tensor]:
    """Return the same for all batches, as a trained model's losses nearly are."""
    return (torch.ones(1),)


def test_equal_results_make_no_copies_and_nor_do_equal_texts_that_are_dealt():
    def job(rank):
        own = [torch.tensor([rank])]
        sampler = DistributedSampler(range(2), shuffle=False)
        dealt = DataLoader(torch.ones(2), batch_size=1, sampler=sampler)
        results = []
        for loader in (own, dealt):
            (column,) = over_loader(loader, constant)
            results += column.tolist()
        return results

    assert on_ranks(job, 2) == [[1] * 4] * 2


def test_copies_are_known_by_their_inputs_however_they_are_padded():
    def job(rank):
        over_loader(of_one_text(rank), lambda batch: (torch.ones(1) + rank,))

    for message in failures(on_ranks(job, 2)):
        assert "Ranks 0 and 1 have the same 1 examples" in message


# --- held out -------------------------------------------------------------------------


def held_out(
    groups: Tensor,
    share: float,
    seed: int,
    n_parts: int = 1,
) -> list[Sequence[int]]:
    """Find the places that each part holds out; the others are its rest."""
    n = len(groups)
    everything = list(range(n))
    loader = DataLoader(everything, batch_size=4)
    noise = torch.Generator().manual_seed(seed)
    places = []
    for rest, held, of_data in divided(loader, share, groups, noise, n_parts):
        assert of_data == held.indices
        both = [*rest.indices, *held.indices]
        assert sorted(both) == everything
        places.append(held.indices)
    return places


# What is held out is drawn: a promise is to be kept whatever the draw.
seeds = pytest.mark.parametrize("seed", range(10))


@seeds
def test_classes_are_held_out_in_proportion_and_never_to_the_last(seed):
    three_large = torch.arange(90) % 3
    ten_of_one_text = torch.arange(3, 13)
    classes = torch.cat([three_large, ten_of_one_text])
    (held,) = held_out(classes, share=0.2, seed=seed)
    assert len(held) == 20
    counts = classes[held].bincount(minlength=13)
    of_large, of_others = counts.split([3, 10])
    # 20 texts of three classes of 30.
    assert set(of_large.tolist()) == {6, 7}
    assert not of_others.any()


@seeds
def test_one_of_two_texts_is_held_out_at_most(seed):
    two_of_each = torch.arange(20) % 10
    (held,) = held_out(two_of_each, share=0.7, seed=seed)
    classes = two_of_each[held].tolist()
    assert sorted(classes) == list(range(10))


@seeds
def test_parts_hold_out_each_text_once_and_each_class_in_proportion(seed):
    sizes = torch.tensor([5, 40, 55])
    classes = torch.arange(3).repeat_interleave(sizes)
    parts = held_out(
        classes,
        share=0.2,
        seed=seed,
        n_parts=5,
    )
    places = []
    for part in parts:
        places += part
        counts = classes[part].bincount(minlength=3)
        off = counts - sizes / 5
        assert off.abs().max() <= 1
    assert sorted(places) == list(range(100))


def test_each_example_of_a_class_is_as_likely_to_be_held_out():
    sizes = torch.tensor([2, 7, 11])
    classes = torch.arange(3).repeat_interleave(sizes)
    share = 0.25
    n_seeds = 1000
    n_examples = len(classes)
    n_held_out = int(share * n_examples)
    counts = torch.zeros(n_examples)
    for seed in range(n_seeds):
        (held,) = held_out(classes, share, seed)
        counts[held] += 1
    assert counts.sum() == n_held_out * n_seeds
    off = counts - share * n_seeds
    # Of a binomial number; one in millions is five deviations off.
    variance = n_seeds * share * (1 - share)
    deviation = variance**0.5
    assert off.abs().max() < 5 * deviation
