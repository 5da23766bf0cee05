"""Values and errors that ranks tell each other."""

import pytest

from laplace_lora_ext import processes
from tests.support.ranks import failures, on_ranks


def fail_at(place: str, rank: int) -> None:
    with processes.together():
        if rank == 1 and place == "before":
            raise ValueError("batch 3 is bad")
        processes.gathered(rank)
        with processes.together():  # as a method that calls another
            processes.gathered(rank)
            if rank == 1 and place == "between":
                raise ValueError("batch 3 is bad")
            processes.gathered(rank)
        if rank == 1 and place == "after":
            raise ValueError("batch 3 is bad")


@pytest.mark.parametrize("place", ["before", "between", "after"])
def test_an_error_of_one_rank_is_raised_on_all(place):
    results = on_ranks(lambda rank: fail_at(place, rank), 3)
    # The rank itself has its own error, and the others are told of it.
    assert failures(results) == [
        "Rank 1 failed. ValueError: batch 3 is bad",
        "batch 3 is bad",
        "Rank 1 failed. ValueError: batch 3 is bad",
    ]
    assert [type(error) for error in results] == [
        processes.RankError,
        ValueError,
        processes.RankError,
    ]


def test_ranks_that_fail_at_once_have_their_own_errors_and_talk_again():
    def job(rank):
        with pytest.raises(ValueError, match=f"of rank {rank}"), processes.together():
            raise ValueError(f"of rank {rank}")
        # Were an exchange of theirs left open, this one would be taken for it.
        with pytest.raises((ValueError, processes.RankError)):
            fail_at("between", rank)
        return processes.gathered(rank)

    of_ranks = on_ranks(job, 2)
    assert of_ranks == [[0, 1]] * 2
