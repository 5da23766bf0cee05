"""Which examples a loader gives to a rank, and which of them again."""

import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from laplace_lora_ext.processes.shards import Sample, Shard, is_new, joined, rows
from tests.support.ranks import accelerated, on_ranks

SIZES = [1, 2, 5, 8, 9, 11, 12, 13]


def numbered(n: int, shuffle: bool = False, **options: object) -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    return DataLoader(torch.arange(n), shuffle=shuffle, generator=generator, **options)


def strided(n, rank, world, drop_last=False):
    data = torch.arange(n)
    sampler = DistributedSampler(data, world, rank, shuffle=True, drop_last=drop_last)
    return DataLoader(data, batch_size=2, sampler=sampler)


def prepared(n, rank, world, **options):
    split = options.get("split_batches", False)
    loader = numbered(n, batch_size=2 * world if split else 2)
    return prepare_data_loader(
        loader, num_processes=world, process_index=rank, put_on_device=False, **options
    )


LOADERS = {
    "DistributedSampler": strided,
    "Accelerate": prepared,
    "Accelerate, uneven": lambda *a: prepared(*a, even_batches=False),
    "Accelerate, split": lambda *a: prepared(*a, split_batches=True),
    "Accelerate, split, uneven": lambda *a: prepared(*a, split_batches=True, even_batches=False),
}


def given(loader) -> tuple[torch.Tensor, torch.Tensor]:
    """Places of a loader's examples, and the examples."""
    shard = Shard(loader)
    assert shard.is_known
    pairs = [(shard.places(len(batch)), batch) for batch in loader]
    nothing = torch.empty(0, dtype=torch.long)
    return (
        torch.cat([nothing, *(places for places, _ in pairs)]),
        torch.cat([nothing, *(batch for _, batch in pairs)]),
    )


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("kind", LOADERS)
def test_all_ranks_together_have_each_example_once_and_in_order(kind, world):
    for n in SIZES:
        ranks = [given(LOADERS[kind](n, rank, world)) for rank in range(world)]
        places = torch.cat([pair[0] for pair in ranks])
        examples = torch.cat([pair[1] for pair in ranks])
        found = examples[is_new(places)][places[is_new(places)].argsort()]
        if kind == "DistributedSampler":
            sampler = DistributedSampler(torch.arange(n), 1, 0, shuffle=True)
            assert found.tolist() == list(sampler)
        else:
            assert found.tolist() == list(range(n))


def test_what_a_sampler_drops_is_not_missed():
    places = torch.cat([given(strided(11, rank, 3, drop_last=True))[0] for rank in range(3)])
    assert sorted(places.tolist()) == list(range(9))


def test_other_loaders_give_a_rank_its_own():
    for loader in (
        [torch.arange(3), torch.arange(2)],
        numbered(5, batch_size=3),
        DataLoader(torch.arange(5), batch_sampler=BatchSampler(range(5), 3, drop_last=False)),
    ):
        shard = Shard(loader)
        assert not shard.is_known
        places = torch.cat([shard.places(len(batch)) for batch in loader])
        assert places.tolist() == list(range(5))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(7))


def test_repeated_examples_of_a_stream_are_warned_of():
    options = {"num_processes": 2, "process_index": 0, "put_on_device": False}
    loader = prepare_data_loader(
        DataLoader(Stream(), batch_size=2), dispatch_batches=False, **options
    )
    with pytest.warns(UserWarning, match="dispatch_batches=True"):
        Shard(loader)


@pytest.mark.parametrize("split", [False, True])
def test_batches_that_rank_0_hands_out(split):
    def job(rank):
        found = []
        for n in SIZES[2:]:
            data = [{"x": number} for number in torch.arange(n)]
            loader = DataLoader(data, batch_size=3)
            loader = accelerated(rank, 3, loader, dispatch_batches=True, split_batches=split)
            shard = Shard(loader)
            assert shard.is_known
            pairs = [(shard.places(len(batch["x"])), batch["x"]) for batch in loader]
            places, batches = (torch.cat(part) for part in zip(*pairs, strict=True))
            (values,) = joined(places, (batches,)) or ()
            found.append(values.tolist())
        return found

    for result in on_ranks(job, 3):
        assert result == [list(range(n)) for n in SIZES[2:]]


def test_columns_of_ranks_are_joined():
    def job(rank):
        shard = Shard([])
        if rank == 1:
            return joined(torch.empty(0, dtype=torch.long), None)
        values = torch.arange(4).reshape(2, 2) + 10 * rank
        return joined(shard.places(2), (values, values[:, 0]))

    for first, second in on_ranks(job, 3):
        assert first.tolist() == [[0, 1], [2, 3], [20, 21], [22, 23]]
        assert second.tolist() == [0, 2, 20, 22]
    assert on_ranks(lambda _: joined(torch.empty(0).long(), None), 2) == [None, None]
    places = torch.tensor([3, -1, 0])
    (values,) = joined(places, (torch.tensor([1, 2, 3]),)) or ()
    assert values.tolist() == [3, 1]


def test_rows_of_everything_that_has_as_many():
    tensor, y = torch.arange(6).reshape(3, 2), torch.arange(3)
    chosen = torch.tensor([True, False, True])
    batch = {"x": tensor, "nested": [tensor, "text"], "other": torch.zeros(2), "n": 3}
    X, kept = rows((batch, y), chosen)
    assert kept.tolist() == [0, 2]
    assert X["x"].tolist() == X["nested"][0].tolist() == [[0, 1], [4, 5]]
    assert (X["nested"][1], len(X["other"]), X["n"]) == ("text", 2, 3)


# Of the published generator SplitMix64, seeded with 0: its numbers are those of place 0.
SPLIT_MIX = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC)


@pytest.mark.parametrize(("seed", "number"), [*enumerate(SPLIT_MIX)])
def test_the_draw_of_an_example_is_that_of_a_published_generator(seed, number):
    chance = (number % 2**53) / 2**53
    loader, split = [torch.zeros(1, 2)], lambda X: (X, None)
    assert list(Sample(loader, split, chance, seed)) == []
    assert len(list(Sample(loader, split, chance + 2**-53, seed))) == 1
