"""Which examples each rank reads: all ranks together each of them once."""

import itertools
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import pytest
import torch
from accelerate.data_loader import SkipBatchSampler
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

from laplace_lora_ext.predictive.data_sets import over_loader
from laplace_lora_ext.processes.shards import (
    Share,
    divide,
    examples_of,
    in_order,
    in_order_like,
    join_ranks,
)
from tests.support.models import generator
from tests.support.ranks import accelerated, failures, on_ranks

SIZES = [1, 2, 5, 8, 9, 11, 12, 13]
NO_EXAMPLES = torch.empty(0).long()
BATCH_SIZE = 2

# --- loaders that are dealt to ranks --------------------------------------------------


def numbered(n: int, batch_size: int = BATCH_SIZE, **options) -> DataLoader:
    """Load numbers from 0 to n, which are the examples' places too."""
    examples = torch.arange(n)
    return DataLoader(examples, batch_size=batch_size, **options)


def of_sorted_batches(n: int) -> DataLoader:
    """Load batches of many sizes, as those with as many tokens are."""
    ends = itertools.pairwise([0, 1, 3, 6, 10, 15])
    batches = [list(range(a, min(b, n))) for a, b in ends if a < n]
    return DataLoader(torch.arange(n), batch_sampler=batches)


def given(loader: DataLoader) -> tuple[list[int], list[int]]:
    """Pass over this rank's share; return all ranks' examples and sizes of batches."""
    share = Share(loader)
    assert share.is_dealt
    examples, places, batch_sizes = [NO_EXAMPLES], [NO_EXAMPLES], []
    for batch in share.loader:
        batch_sizes.append(len(batch))
        of_batch = share.take_indices(len(batch))
        # Ranks pass over a batch that is no part of their share, with the others.
        if len(of_batch):
            examples.append(batch)
            places.append(of_batch)
    of_rank = torch.cat(examples)
    assert share.size == len(of_rank)
    (column,) = join_ranks(torch.cat(places), (of_rank,))
    return column.tolist(), batch_sizes


# By rank and number of examples, for three ranks.
LOADERS = {
    "DistributedSampler": lambda rank, n: numbered(
        n, sampler=DistributedSampler(range(n))
    ),
    "Accelerate, shuffled": lambda rank, n: accelerated(
        rank, 3, numbered(n, shuffle=True)
    ),
    "Accelerate, batches of many sizes": lambda rank, n: accelerated(
        rank, 3, of_sorted_batches(n)
    ),
    "in order": lambda rank, n: in_order(torch.arange(n), BATCH_SIZE),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_all_ranks_together_have_each_example_once_and_in_order(kind):
    # Ranks take a while to start, so that all sizes are tried by the same.
    def job(rank):
        return [given(LOADERS[kind](rank, n)) for n in SIZES]

    for n, *of_ranks in zip(SIZES, *on_ranks(job, 3), strict=True):
        for column, batch_sizes in of_ranks:
            assert column == list(range(n))
            if kind != "Accelerate, batches of many sizes":
                assert max(batch_sizes) <= BATCH_SIZE
        # Ranks that share a model pass over it together.
        assert len({len(batch_sizes) for _, batch_sizes in of_ranks}) == 1


def test_a_share_that_is_read_once_gives_every_pass_the_same():
    def job(rank):
        again = partial(torch.stack, out=torch.empty(BATCH_SIZE).long())
        shuffled = numbered(40, shuffle=True, collate_fn=again)
        if rank is not None:
            shuffled = accelerated(rank, 2, shuffled)
        share = Share.read_once(shuffled)
        return [
            over_loader(share, lambda batch: (batch,))[0].tolist() for _ in range(2)
        ]

    first, second = job(None)
    # Otherwise nothing would be shuffled.
    assert first == second != list(range(40))
    assert on_ranks(job, 2) == [[list(range(40))] * 2] * 2


@pytest.mark.parametrize(
    ("make_loader", "size"),
    [
        (lambda: of_sorted_batches(5), 5),
        (lambda: [torch.arange(3), torch.arange(3, 5)], None),
    ],
)
def test_a_loader_without_a_sampler_of_ranks_gives_each_its_own(make_loader, size):
    # Of which rank 1 adds 10 to its own.
    def job(rank):
        share = Share(make_loader())
        assert not share.is_dealt
        assert share.size == size
        # A pass over a share tells the places of each batch in turn.
        values = torch.cat(list(share.loader)) + 10 * rank
        places = torch.cat([share.take_indices(len(batch)) for batch in share.loader])
        return join_ranks(places, (values,))[0].tolist()

    assert on_ranks(job, 2) == [[*range(5), *range(10, 15)]] * 2


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


def padded(n: int) -> dict[str, Tensor]:
    ids = torch.tensor([[5, 6] + [0] * n])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


TWICE = {
    "repeats examples where it shards an iterable": lambda rank: accelerated(
        rank, 2, DataLoader(Stream(), batch_size=2), dispatch_batches=False
    ),
    "or dispatches": lambda rank: accelerated(
        rank, 2, numbered(4), dispatch_batches=True
    ),
    "must return one for each": lambda rank: numbered(
        4, sampler=DistributedSampler(range(4)), collate_fn=lambda rows: rows[:1]
    ),
    "have the same 4 examples": lambda rank: numbered(4),
    # However they are padded.
    "have the same 1 examples": lambda rank: [padded(rank)],
}


@pytest.mark.parametrize("message", TWICE)
def test_what_would_count_twice_is_refused(message):
    def first_column(batch) -> tuple[Tensor]:
        rows = batch["input_ids"][:, 0] if isinstance(batch, dict) else batch
        return (torch.as_tensor(rows, device="cpu"),)

    for error in failures(
        on_ranks(lambda rank: over_loader(TWICE[message](rank), first_column), 2)
    ):
        assert message in error


# --- ranks without data ---------------------------------------------------------------


def test_a_rank_without_data_adds_nothing():
    def job(rank):
        share = Share([])
        if rank == 1:
            return join_ranks(NO_EXAMPLES, None)
        rows = torch.arange(4).reshape(2, 2) + 10 * rank
        labels = rows[:, 0]
        return join_ranks(share.take_indices(2), (rows, labels))

    for rows, labels in on_ranks(job, 3):
        assert rows.tolist() == [[0, 1], [2, 3], [20, 21], [22, 23]]
        assert labels.tolist() == [0, 2, 20, 22]


def test_labels_of_some_ranks_alone_are_refused():
    def job(rank):
        assert join_ranks(NO_EXAMPLES, None) is None
        values = torch.arange(2.0) + rank
        join_ranks(torch.arange(2) + 2 * rank, (values,) * (1 + rank))

    for message in failures(on_ranks(job, 2)):
        assert "Some batches have labels" in message


# --- examples that a sampler leaves out -----------------------------------------------


class Drawing(Sampler):
    """Draws three examples by a generator of its own."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(1)

    def __iter__(self) -> Iterator[int]:
        return iter(self.generator.choice(20, 3, replace=False).tolist())

    def __len__(self) -> int:
        return 3


ALL = list(range(20))
# Of twenty examples: options of a loader, and how many of which it gives.
GIVING = {
    "all, shuffled": ({"shuffle": True}, 20, ALL),
    "no last batch": ({"batch_size": 3, "drop_last": True, "shuffle": True}, 20, ALL),
    "with a generator": (
        {"sampler": RandomSampler(ALL, num_samples=7, generator=generator(1))},
        7,
        torch.randperm(20, generator=generator(1))[:7].tolist(),
    ),
    "with replacement": ({"sampler": RandomSampler(ALL, replacement=True)}, 20, ALL),
    "by weights": ({"sampler": WeightedRandomSampler([0, *[1] * 19], 20)}, 19, ALL[1:]),
    "one's own": ({"sampler": Own()}, 2, [1, 3]),
    "one's own, with a generator": ({"sampler": Drawing()}, 3, list(Drawing())),
    "batches after the first": (
        {"batch_size": 1, "batch_sampler": SkipBatchSampler([[2, 0], [1]], 1)},
        1,
        [1],
    ),
}


@pytest.mark.parametrize("kind", GIVING)
def test_a_loader_s_own_indices_are_the_examples(kind):
    options, n_given, among = GIVING[kind]
    own = generator()
    loader = numbered(20, generator=own, **options)
    torch.manual_seed(1)
    examples = examples_of(loader).tolist()
    assert len(examples) == n_given
    assert set(examples) <= set(among)
    # Whoever asks again gets the same, and torch draws on as if nobody had asked.
    state = torch.manual_seed(2).get_state()
    assert examples_of(loader).tolist() == examples
    assert torch.equal(torch.get_rng_state(), state)
    # So does the loader's own generator, also when others are read alike.
    list(in_order_like(loader, examples))
    assert torch.equal(own.get_state(), generator().get_state())


# --- ranks with the same data ---------------------------------------------------------


def test_equal_results_make_no_copies_and_nor_do_equal_texts_that_are_dealt():
    def job(rank):
        sampler = DistributedSampler(range(2), shuffle=False)
        dealt = DataLoader(torch.ones(2), batch_size=1, sampler=sampler)
        owns = ([torch.tensor([[[3, 5]], [[5, 3]]][rank])], [["red", "blue"][rank]])
        for loader in (*owns, dealt):
            # The same for all batches, as a trained model's losses nearly are.
            (column,) = over_loader(loader, lambda _: (torch.ones(1),))
            assert column.tolist() == [1, 1]
        # Nor are ranks without data copies of each other.
        Share([]).refuse_copies()

    assert on_ranks(job, 2) == [None] * 2


# --- held out -------------------------------------------------------------------------


def held_out(groups: Tensor, share: float, seed: int) -> Sequence[int]:
    """Find the places that are held out; the others are the rest."""
    n = len(groups)
    everything = list(range(n))
    loader = DataLoader(everything, batch_size=4)
    rest, held, of_data = divide(
        loader, share, groups, torch.arange(n), generator(seed)
    )
    assert of_data == held.indices
    assert sorted([*rest.indices, *held.indices]) == everything
    return held.indices


# What is held out is drawn: a promise is to be kept whatever the draw.
SEEDS = range(10)


def test_classes_are_held_out_in_proportion_and_never_to_the_last():
    three_large_and_ten_of_one = torch.cat([torch.arange(90) % 3, torch.arange(3, 13)])
    two_of_each = torch.arange(20) % 10
    for seed in SEEDS:
        held = held_out(three_large_and_ten_of_one, share=0.2, seed=seed)
        counts = three_large_and_ten_of_one[held].bincount(minlength=13)
        # 20 texts of three classes of 30.
        assert sorted(counts.tolist()) == [0] * 10 + [6, 7, 7]
        assert not counts[3:].any()
        held = held_out(two_of_each, share=0.7, seed=seed)
        assert sorted(two_of_each[held].tolist()) == list(range(10))


def test_copies_are_held_out_together():
    copies = torch.tensor([5, 7, 5, 9, 7, 5, 8, 6, 7, 4])
    loader = DataLoader(list(range(10)))
    for seed in SEEDS:
        one_class = torch.zeros(10, dtype=torch.long)
        rest, held, _ = divide(loader, 0.3, one_class, copies, generator(seed))
        assert sorted([*rest.indices, *held.indices]) == list(range(10))
        of_held = set(copies[held.indices].tolist())
        assert len(of_held) == 2  # of six
        assert not of_held & set(copies[rest.indices].tolist())


def test_each_example_of_a_class_is_as_likely_to_be_held_out():
    classes = torch.arange(3).repeat_interleave(torch.tensor([2, 7, 11]))
    share, n_seeds = 0.25, 300
    counts = torch.zeros(len(classes))
    for seed in range(n_seeds):
        held = held_out(classes, share, seed)
        assert len(held) == len(classes) / 4
        counts[held] += 1
    # Of a binomial number; one in millions is five deviations off.
    deviation = (n_seeds * share * (1 - share)) ** 0.5
    assert (counts - share * n_seeds).abs().max() < 5 * deviation
