"""Adapters that are merged: products of posteriors, PEFT's ways, and the experiment."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.testing import assert_close

from benchmarks.experiments.merge import (
    DENSITY,
    HALVES,
    TOLERANCE,
    halves_of,
    merged_by_peft,
    product,
)
from tests.benchmarks.support import run
from tests.support.models import base_model, ragged_batches
from tests.support.posteriors import fitted, generator


def test_the_mode_of_a_product_is_that_of_dense_algebra():
    posteriors = [fitted(batches=batches) for batches in _two_data_sets()]
    sizes = posteriors[0].mean.shape
    means = [torch.randn(sizes, generator=generator(k)).double() for k in range(2)]
    found = product(posteriors, means, prior_precision=1e-4)
    total = torch.zeros(len(found), len(found)).double()
    wanted = torch.zeros(len(found)).double()
    for la, mean in zip(posteriors, means, strict=True):
        assert la.prior_precision.item() == pytest.approx(1e-4)
        precision = la.posterior_precision.to_matrix().double()
        total += precision
        wanted += precision @ mean
    # As far as conjugate gradients go: the residual is what they bound.
    residual = total @ found - wanted
    assert residual.norm() <= 2 * TOLERANCE**0.5 * wanted.norm()
    assert (found - torch.stack(means).mean(0)).norm() > 1e-2 * found.norm()


def _two_data_sets():
    batches = ragged_batches()
    return batches[:1], batches[1:]


def test_lora_weights_are_merged_as_peft_does():
    # With scaling 1, as PEFT gives a merged adapter.
    config = LoraConfig(
        r=2, lora_alpha=2, target_modules=["query"], init_lora_weights=False
    )
    model = get_peft_model(base_model("bert"), config).double()
    model.add_adapter("other", config)
    posteriors = []
    for name in ("default", "other"):
        model.set_adapter(name)
        posteriors.append(fitted(model=model.double()))
    model.add_weighted_adapter(
        ["default", "other"], [0.5, 0.5], "merged", "ties", density=DENSITY
    )
    means = [la.mean for la in posteriors]
    blocks = posteriors[0].blocks
    found = merged_by_peft(blocks, means, "ties")
    found = found.split([block.weight.numel() for block in blocks])
    merged = [w for name, w in model.named_parameters() if ".merged." in name]
    assert len(merged) == len(blocks)
    for part, weight in zip(found, merged, strict=True):
        assert_close(part, weight.flatten())


def test_halves_are_of_each_intents_texts_or_of_the_intents():
    records = [{"labels": place % 4, "place": place} for place in range(16)]
    for halved in HALVES:
        halves = halves_of(records, halved, n_classes=4)
        assert [len(half) for half in halves] == [8, 8]
        labels = [{record["labels"] for record in half} for half in halves]
        if halved == "texts":
            assert labels == [{0, 1, 2, 3}] * 2
        else:
            assert labels == [{0, 1}, {2, 3}]


def test_each_way_to_merge_has_a_row(intents, tmp_path, capsys):
    finished = run(
        capsys,
        tmp_path / "results",
        "merge --quiet",
        task="clinc150",
        data=intents(n_intents=4),
        train_examples=16,
        test_examples=8,
        steps=3,
        checkpoints=1,
        cache=tmp_path / "cache",
    )
    rows = finished.figures["rows"]
    assert len(rows) == 2 * 8
    for halved in HALVES:
        names = [row["adapter"] for row in rows if row["halves"] == halved]
        assert len(set(names)) == 8
    assert "product of posteriors" in finished.printed
