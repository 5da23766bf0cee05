"""The experiment that crosses curvatures with priors, at its smallest."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch.testing import assert_close

from benchmarks.experiments.cross import (
    BY_HELD_OUT,
    BY_TEST,
    CURVATURES,
    EVIDENCES,
    HEAD,
    Trial,
)
from benchmarks.fine_tuning import TEST
from benchmarks.methods import posterior
from benchmarks.methods.priors import LINKS, FromBatches
from benchmarks.models import AdaptedModel
from benchmarks.options import Cross
from tests.benchmarks.support import run
from tests.support.models import lora_model, ragged_batches


def test_every_curvature_meets_every_prior(tmp_path, capsys, tiny_models):
    finished = run(
        capsys,
        tmp_path / "results",
        "cross",
        task="choices",
        model=tiny_models[True],
        train_examples=10,
        test_examples=12,
        shifted_examples=8,
        files_per_library=30,
        steps=3,
        checkpoints=1,
        grid_size=5,
        cache=tmp_path / "cache",
    )
    rows = finished.figures["methods"]
    found = {(row["method"], row["prior"]): row for row in rows}
    assert len(found) == len(rows)
    priors = (*EVIDENCES, BY_HELD_OUT.key, BY_TEST.key)
    of_model = {("map", ""), ("map", "held_out_temperature")}
    assert set(found) == of_model | set(product(CURVATURES, priors))
    for curvature in CURVATURES:
        best = found[curvature, BY_TEST.key]["nll"]
        # The test texts' own choice is the best of the grid, which the held-out fifth
        # shares.
        assert best <= found[curvature, BY_HELD_OUT.key]["nll"]


@pytest.mark.parametrize("key", ["diag", "kron"])
@pytest.mark.parametrize("link", LINKS)
def test_several_priors_predict_as_each_does_alone(key, link):
    batches = ragged_batches(batch_size=3)
    la = posterior(key).build(AdaptedModel(lora_model("bert").double().eval()))
    la.fit(batches)
    tried = [torch.tensor([1e-3]), torch.tensor([5.0]), torch.tensor([300.0])]
    predicted = FromBatches(la, {TEST: batches}).of_each(tried, link)
    for prior_precision, of_prior in zip(tried, predicted, strict=True):
        la.prior_precision = prior_precision
        alone = torch.cat([la(batch, link_approx=link) for batch in batches])
        assert_close(of_prior[TEST], alone.detach())
    assert not torch.allclose(predicted[0][TEST], predicted[2][TEST], atol=1e-3)


def test_last_layer_laplace_has_the_head_alone():
    model = lora_model("bert").double().eval()
    la = posterior(HEAD).build(AdaptedModel(model))
    assert {block.kind for block in la.blocks} == {"head"}
    batches = ragged_batches(batch_size=3)
    la.fit(batches)
    # The data tell nothing beside such a prior: weights and biases are independent.
    la.prior_precision = torch.tensor([1e9])
    features = []

    def note(_, inputs):
        features.append(inputs[0].detach())

    classifier = model.get_submodule(
        "base_model.model.classifier.modules_to_save.default"
    )
    handle = classifier.register_forward_pre_hook(note)
    inputs = {name: batches[0][name] for name in ("input_ids", "attention_mask")}
    model(**inputs)
    handle.remove()
    covariance = 1e9 * la.predictive_moments(batches[0]).f_var
    variance = features[0].square().sum(-1) + 1
    expected = variance[:, None, None] * torch.eye(la.n_outputs)
    assert_close(covariance, expected.to(covariance), rtol=1e-5, atol=1e-5)


def test_a_head_has_every_prior_too(prepared):
    pretrained = prepared("mrpc", learning_rate=1e-2)
    more = replace(pretrained.task, train=5 * list(pretrained.task.train))
    pretrained = replace(pretrained, task=more)
    of_cross = Cross(grid_size=3, quiet=True, cache=pretrained.options.cache)
    rows = list(Trial(pretrained, of_cross, seed=0).with_curvature(posterior(HEAD)))
    assert [row["prior"] for row in rows] == [*EVIDENCES, BY_HELD_OUT.key, BY_TEST.key]
