"""Which examples of a loader each rank passes over: all ranks together each of them once."""

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from laplace_lora_ext.predictive.data_sets import over_loader
from laplace_lora_ext.processes.shards import (
    Share,
    divided,
    examples_of,
    in_order,
    joined,
    total_size,
)
from tests.support.ranks import accelerated, failures, on_ranks

SIZES = [1, 2, 5, 8, 9, 11, 12, 13]


def numbered(n: int, **options) -> DataLoader:
    return DataLoader(torch.arange(n), **{"batch_size": 2} | options)


def strided(_, world, n, **options):
    sampler = DistributedSampler(torch.arange(n), **options)
    return numbered(n, sampler=sampler)


def prepared(rank, world, n, shuffle=False, batch_size=2, **options):
    loader = numbered(n, shuffle=shuffle, batch_size=batch_size)
    return accelerated(rank, world, loader, **options)


def by_batches(rank, world, n):
    return accelerated(rank, world, DataLoader(torch.arange(n), batch_sampler=SortedBatches(n)))


class SortedBatches(BatchSampler):
    """Batches of many sizes, as those with as many tokens are."""

    def __init__(self, n: int) -> None:
        super().__init__(SequentialSampler(range(n)), 2, drop_last=False)
        del self.batch_size


SortedBatches.__module__ = "torch.utils.data"  # as if it were one that gives all

LOADERS = {
    "DistributedSampler": strided,
    "DistributedSampler, dropping": lambda *a: strided(*a, drop_last=True),
    "Accelerate": prepared,
    "Accelerate, shuffled": lambda *a: prepared(*a, shuffle=True),
    "Accelerate, uneven": lambda *a: prepared(*a, even_batches=False),
    "Accelerate, split": lambda *a: prepared(*a, batch_size=6, split_batches=True),
    "Accelerate, batches of many sizes": by_batches,
    "in order": lambda rank, world, n: in_order(torch.arange(n), 2, None),
}


def given(loader):
    """Columns of all ranks, how many batches there were, and how many examples in the largest."""
    share = Share(loader)
    assert share.is_dealt
    batches = []
    parts = [torch.empty(0).long()]
    places = [torch.empty(0).long()]
    for batch in share.loader:
        batches.append(len(batch))
        here = share.places(len(batch))
        if len(here):
            parts.append(batch)
            places.append(here)
    assert share.size == sum(map(len, parts))
    (column,) = joined(torch.cat(places), (torch.cat(parts),)) or ()
    return column.tolist(), len(batches), max(batches)


@pytest.mark.parametrize("kind", LOADERS)
def test_all_ranks_together_have_each_example_once_and_in_order(kind):
    def job(rank):
        return [given(LOADERS[kind](rank, 3, n)) for n in SIZES]

    of_ranks = on_ranks(job, 3)
    assert isinstance(of_ranks[0], list), of_ranks[0]
    for results in zip(*of_ranks, strict=True):
        columns, n_batches, largest = zip(*results, strict=True)
        n = len(columns[0])
        assert all(column == list(range(n)) for column in columns)
        assert len(set(n_batches)) == 1  # ranks that share a model pass over it together
        if kind != "Accelerate, batches of many sizes":
            assert max(largest) <= 2
    assert [len(column) for column, *_ in of_ranks[0]] == SIZES


def test_a_share_that_is_read_once_gives_every_pass_the_same():
    def job(rank):
        loader = prepared(rank, 2, 5, shuffle=True)
        share = Share.read_once(loader)
        return [over_loader(share, lambda batch: (batch,))[0].tolist() for _ in range(2)]

    for passes in on_ranks(job, 2):
        assert passes == [list(range(5))] * 2
    shuffled = Share.read_once(DataLoader(torch.arange(40), batch_size=3, shuffle=True))
    passes = [over_loader(shuffled, lambda batch: (batch,))[0].tolist() for _ in range(2)]
    assert passes[0] == passes[1] != list(range(40))


def test_other_loaders_give_a_rank_its_own():
    loaders = {
        "list": [torch.arange(3), torch.arange(2)],
        "loader": numbered(5, batch_size=3),
        "batches": DataLoader(torch.arange(5), batch_sampler=BatchSampler(range(5), 3, False)),
    }

    def job(rank):
        found = []
        for loader in loaders.values():
            share = Share(loader)
            places = torch.cat([share.places(len(batch)) for batch in share.loader])
            values = torch.cat(list(share.loader)) + 10 * rank
            found.append((share.is_dealt, share.size, joined(places, (values,))[0].tolist()))
        return found, total_size(loaders["loader"], 7), total_size(loaders["list"], 7)

    for found, total, unknown in on_ranks(job, 2):
        assert [result[:2] for result in found] == [(False, None), (False, 5), (False, 5)]
        assert found[0][2] == [0, 1, 2, 0, 1, 10, 11, 12, 10, 11]
        assert found[1][2] == found[2][2] == [*range(5), *range(10, 15)]
        assert (total, unknown) == (10, 7)
    assert not Share(strided(0, 1, 5, num_replicas=2, rank=0)).is_dealt  # one process alone


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(7))


class Own(Sampler):
    def __iter__(self):
        return iter([3, 1, 3])

    def __len__(self):
        return 3


REFUSED = {
    "repeats examples where it shards an iterable": lambda rank: accelerated(
        rank, 2, DataLoader(Stream(), batch_size=2), dispatch_batches=False
    ),
    "or dispatches": lambda rank: accelerated(rank, 2, numbered(4), dispatch_batches=True),
    "among 4 processes, and there are 2": lambda rank: strided(
        rank, 4, 8, num_replicas=4, rank=rank
    ),
    "a sampler of your own": lambda rank: accelerated(rank, 2, numbered(5, sampler=Own())),
    "must return one for each": lambda rank: DataLoader(
        torch.arange(4), 2, sampler=DistributedSampler(range(4)), collate_fn=lambda x: x[:1]
    ),
    "have the same 4 examples": lambda rank: numbered(4),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_would_count_twice_is_refused(message):
    def job(rank):
        share = Share(REFUSED[message](rank))
        pairs = [(share.places(len(batch)), torch.as_tensor(batch)) for batch in share.loader]
        places, values = (torch.cat(part) for part in zip(*pairs, strict=True))
        joined(places, (values,))

    for error in failures(on_ranks(job, 2)):
        assert message in error


def test_a_rank_without_data_or_labels():
    def job(rank):
        share = Share([])
        if rank == 1:
            return joined(torch.empty(0).long(), None)
        values = torch.arange(4).reshape(2, 2) + 10 * rank
        return joined(share.places(2), (values, values[:, 0]))

    for first, second in on_ranks(job, 3):
        assert first.tolist() == [[0, 1], [2, 3], [20, 21], [22, 23]]
        assert second.tolist() == [0, 2, 20, 22]
    assert on_ranks(lambda _: joined(torch.empty(0).long(), None), 2) == [None, None]
    numbers = torch.arange(2.0)
    some = on_ranks(lambda r: joined(torch.arange(2) + 2 * r, (numbers + r,) * (1 + r)), 2)
    assert (
        failures(some)
        == ["Some batches have labels and others have none: give all or none labels."] * 2
    )


@pytest.mark.parametrize(
    ("options", "examples"),
    [
        ({}, range(5)),
        ({"shuffle": True}, range(5)),
        ({"sampler": SubsetRandomSampler([4, 0])}, [0, 4]),
        ({"sampler": WeightedRandomSampler([1.0] * 5, 3)}, range(5)),
        ({"sampler": Own()}, [1, 3]),
        ({"batch_sampler": [[2, 0], [1]], "batch_size": 1}, range(3)),
    ],
)
def test_examples_that_a_sampler_leaves_out_are_no_part_of_the_data(options, examples):
    assert examples_of(numbered(5, **options)).tolist() == list(examples)


def held_out(n, share, groups, seed, parts=1):
    """Places that each part holds out; the others are its rest."""
    found = []
    loader = DataLoader(list(range(n)), 4)
    for rest, held in divided(loader, share, groups, torch.Generator().manual_seed(seed), parts):
        assert sorted([*rest.indices, *held.indices]) == list(range(n))
        found.append(held.indices)
    return found


RARE = torch.cat([torch.arange(90) % 3, torch.arange(3, 13)])  # ten classes of one text each


@pytest.mark.parametrize("seed", range(10))
def test_classes_are_held_out_in_proportion_and_never_to_the_last(seed):
    (held,) = held_out(100, 0.2, RARE, seed)
    assert len(held) == 20
    counts = RARE[held].bincount(minlength=13)
    assert 6 <= counts[:3].min() <= counts[:3].max() <= 7
    assert not counts[3:].any()
    pairs = torch.arange(20) % 10  # two of each class
    (held,) = held_out(20, 0.7, pairs, seed)
    assert pairs[held].sort().values.tolist() == list(range(10))
    uneven = torch.tensor([0] * 5 + [1] * 40 + [2] * 55)
    parts = held_out(100, 0.2, uneven, seed, 5)
    assert sorted(place for part in parts for place in part) == list(range(100))
    for part in parts:
        counts = uneven[part].bincount(minlength=3) - torch.tensor([1, 8, 11])
        assert counts.abs().max() <= 1


def test_each_example_of_a_class_is_as_likely_to_be_held_out():
    uneven = torch.tensor([0] * 2 + [1] * 7 + [2] * 11)
    of_all = sum(
        torch.tensor(held_out(20, 0.25, uneven, seed)[0]).bincount(minlength=20)
        for seed in range(1000)
    )
    assert of_all.sum() == 5000
    assert (of_all - 250).abs().max() < 5 * (1000 * 0.25 * 0.75) ** 0.5  # standard deviations
