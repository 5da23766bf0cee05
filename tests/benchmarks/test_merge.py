"""Adapters that are merged: products of posteriors, PEFT's ways, and the experiment."""

import pytest
from peft import LoraConfig, get_peft_model
from torch.testing import assert_close

from benchmarks.experiments.merge import (
    DENSITY,
    HALVES,
    halves_of,
    merged_by_peft,
)
from tests.benchmarks.support import rows_with, run, values_of
from tests.support.models import base_model
from tests.support.posteriors import fitted, sizes


def test_lora_weights_are_merged_as_peft_does():
    config = LoraConfig(
        r=2,
        lora_alpha=2,  # a scaling of 1, as PEFT gives a merged adapter
        target_modules=["query"],
        init_lora_weights=False,
    )
    model = get_peft_model(base_model("bert"), config).double()
    model.add_adapter("other", config)
    posteriors = []
    for name in ("default", "other"):
        model.set_adapter(name)
        posteriors.append(fitted(model=model.double()))
    # What PEFT merges is what we are to find from the posteriors' means.
    model.add_weighted_adapter(
        adapters=["default", "other"],
        weights=[0.5, 0.5],
        adapter_name="merged",
        combination_type="ties",
        density=DENSITY,
    )
    weights = model.named_parameters()
    expected = [weight for name, weight in weights if ".merged." in name]

    means = [la.mean for la in posteriors]
    la = posteriors[0]
    found = merged_by_peft(la.blocks, means, "ties")
    assert len(expected) == len(la.blocks)
    parts = found.split(sizes(la))
    for part, weight in zip(parts, expected, strict=True):
        assert_close(part, weight.flatten())


@pytest.mark.parametrize(
    ("halved", "labels_of_first", "labels_of_second"),
    [
        ("texts", {0, 1, 2, 3}, {0, 1, 2, 3}),
        ("intents", {0, 1}, {2, 3}),
    ],
)
def test_halves_are_of_each_intents_texts_or_of_the_intents(
    halved,
    labels_of_first,
    labels_of_second,
):
    assert halved in HALVES
    # Four texts of each of four intents, by turns.
    records = []
    for place in range(16):
        record = {"labels": place % 4, "place": place}
        records.append(record)
    first, second = halves_of(records, halved, n_classes=4)
    assert len(first) == 8
    assert len(second) == 8
    found_in_first = values_of(first, "labels")
    found_in_second = values_of(second, "labels")
    assert set(found_in_first) == labels_of_first
    assert set(found_in_second) == labels_of_second


def test_each_way_to_merge_has_a_row(intents, tmp_path):
    finished = run(
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
    rows = finished.rows
    assert len(rows) == 2 * 9
    for halved in HALVES:
        of_half = rows_with(rows, halves=halved)
        adapters = set(values_of(of_half, "adapter"))
        assert len(adapters) == 9
    assert "product of posteriors" in finished.printed
    assert "Differences from the mean" in finished.printed
