"""A fit that was ended goes on from where it was, and from nowhere else."""

import os
import random
import signal

import pytest
import torch

from laplace_lora_ext import LowRankKron
from laplace_lora_ext.files import with_tensors, without_tensors
from laplace_lora_ext.fitting.checkpoint import Checkpoint
from tests.support.models import lora_model, ragged_batches
from tests.support.posteriors import KFAC_APPROX, STRUCTURES, count_forward_passes, make
from tests.support.ranks import on_ranks

LENGTHS = (7, 4, 5, 7, 3, 6, 2, 7, 5, 4)


class StoppedError(Exception):
    """Something that ends a fit."""


def batches():
    return ragged_batches(lengths=LENGTHS, batch_size=2)


def until(n: int, stop=StoppedError):
    """The batches, and an end after n of them."""

    def end():
        if stop is StoppedError:
            raise StoppedError
        os.kill(os.getpid(), stop)

    yield from batches()[:n]
    end()


def posterior(structure: str = "lowrank_kron", **backend_kwargs: object):
    settings = {"backend_kwargs": {"rank": 2, **backend_kwargs}}
    return make(lora_model("bert"), structure, **(settings if "low" in structure else {}))


def stopped_after(folder, n: int, la=None, every: int = 1):
    with pytest.raises(StoppedError):
        (la or posterior()).fit(until(n), checkpoint=folder, every=every)


def input_factors(H) -> set[int]:
    return {id(block.input_factor) for block in H.blocks}


def assert_same(la, other):
    precision = torch.tensor(0.1).double()
    la.prior_precision = other.prior_precision = precision
    assert torch.equal(la.log_marginal_likelihood(), other.log_marginal_likelihood())
    assert torch.equal(la(batches()[0]), other(batches()[0]))
    assert (la.n_data, la.n_outputs) == (other.n_data, other.n_outputs)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("n", [1, 4, 5])
def test_it_goes_on_and_ends_bit_for_bit_where_it_would_have(tmp_path, structure, n):
    whole = posterior(structure)
    whole.fit(batches())
    stopped_after(tmp_path, n, posterior(structure))
    la = posterior(structure)
    calls = count_forward_passes(la)
    la.fit(batches(), checkpoint=tmp_path, every=1)
    assert bool(calls) == (n < 5)
    assert_same(la, whole)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kfac_approx", KFAC_APPROX)
def test_factors_that_blocks_share_are_shared_again(tmp_path, kfac_approx):
    whole = posterior(kfac_approx=kfac_approx)
    whole.fit(batches())
    stopped_after(tmp_path, 3, posterior(kfac_approx=kfac_approx))
    la = posterior(kfac_approx=kfac_approx)
    la.fit(batches(), checkpoint=tmp_path, every=1)
    assert_same(la, whole)
    H = la.backend.zeros()
    la.backend.accumulate(H, *la.model.split(batches()[0]))
    again = LowRankKron.from_state_dict(with_tensors(*without_tensors(H.state_dict())))
    assert len(input_factors(again)) == len(input_factors(H))
    assert (len(input_factors(H)) < len(H)) == (kfac_approx != "gradient")


def test_random_numbers_go_on(tmp_path):
    whole = posterior(stochastic=True)
    torch.manual_seed(1)
    whole.fit(batches())
    stopped, la = posterior(stochastic=True), posterior(stochastic=True)
    torch.manual_seed(1)
    stopped_after(tmp_path, 3, stopped)
    torch.manual_seed(7)
    la.fit(batches(), checkpoint=tmp_path, every=1)
    assert_same(la, whole)


@pytest.mark.parametrize("seed", range(20))
def test_kills_at_any_moment(tmp_path, seed):
    whole = posterior()
    whole.fit(batches())
    choose = random.Random(seed)

    def job(_):
        la = posterior()
        loader = until(choose.randrange(6), signal.SIGKILL)
        la.fit(loader, checkpoint=tmp_path, every=choose.randrange(1, 4))

    for _ in range(2):
        (result,) = on_ranks(job, 1)
        assert str(result) == "killed"
    la = posterior()
    la.fit(batches(), checkpoint=tmp_path)
    assert_same(la, whole)


def test_ranks_have_files_of_their_own(tmp_path):
    whole = posterior(rank=100)
    whole.fit(batches())

    def job(rank, interrupted):
        la = posterior(rank=100)
        shard = batches()[:2] if rank else batches()[2:]
        if interrupted:
            shard = until(2) if rank else shard
        la.fit(shard, checkpoint=tmp_path, every=1)
        return la.log_marginal_likelihood(torch.tensor(0.1)).item()

    on_ranks(job, 2, True)
    assert len(list(tmp_path.iterdir())) == 2
    expected = whole.log_marginal_likelihood(torch.tensor(0.1)).item()
    assert on_ranks(job, 2, False) == pytest.approx([expected] * 2, rel=1e-10)
    assert not list(tmp_path.iterdir())


def test_a_file_of_another_version_is_refused(tmp_path, monkeypatch):
    stopped_after(tmp_path, 2)
    monkeypatch.setattr("laplace_lora_ext.fitting.checkpoint._FORMAT", 2)
    with pytest.raises(ValueError, match="of another version: remove it"):
        posterior().fit(batches(), checkpoint=tmp_path)


def test_a_truncated_or_damaged_file_is_refused(tmp_path):
    state = {"sums": [torch.randn(3, 2), torch.zeros(2, 0)], "n": 3, "tail": True}
    keeper = Checkpoint(tmp_path, 1, {"settings": "some"})
    keeper.has("a batch")
    keeper.keep(state)
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    generator = random.Random(0)
    damaged = [data[:n] for n in (*range(header), *generator.sample(range(header, len(data)), 100))]
    for place in generator.sample(range(len(data)), 100):
        damaged.append(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"checkpoint {path}: it .*remove it to start afresh"):
            keeper.begin(None)
    path.write_bytes(data)
    torch.testing.assert_close(keeper.begin(None), state, rtol=0, atol=0)


def test_another_fit_is_refused_and_the_file_left(tmp_path):
    stopped_after(tmp_path, 2)
    (path,) = tmp_path.iterdir()
    before = path.read_bytes()
    other = posterior()
    other.blocks[1].weight.data.mul_(2)
    for la, differing in (
        (other, "LoRA weights"),
        (posterior(rank=3), "settings"),
        (posterior("diag"), "settings"),
    ):
        with pytest.raises(ValueError, match=f"from a fit with other {differing}: remove it"):
            la.fit(batches(), checkpoint=tmp_path)
        assert la.n_data == 0
    with pytest.raises(ValueError, match="batch 1: the 2 batches so far differ from those"):
        posterior().fit(batches()[::-1], checkpoint=tmp_path)
    with pytest.raises(ValueError, match="holds 2 batches, but the loader gave 1"):
        posterior().fit(batches()[:1], checkpoint=tmp_path)
    assert path.read_bytes() == before


def test_a_write_that_fails_leaves_the_last_one(tmp_path, monkeypatch):
    stopped_after(tmp_path, 2)
    (path,) = tmp_path.iterdir()
    before = path.read_bytes()

    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        posterior().fit(batches(), checkpoint=tmp_path, every=1)
    assert path.read_bytes() == before


def test_how_often_it_is_written(tmp_path):
    stopped_after(tmp_path, 3, every=2)
    la = posterior()
    calls = count_forward_passes(la)
    la.fit(batches(), checkpoint=tmp_path)
    assert len(calls) == 3
    with pytest.raises(ValueError, match="every must be at least 1"):
        la.fit(batches(), checkpoint=tmp_path, every=0)
