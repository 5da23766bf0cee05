"""The experiment that crosses curvatures with priors, at its smallest."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch.testing import assert_close

from benchmarks.experiments.cross import BY_HELD_OUT, BY_TEST, EVIDENCES, Trial
from benchmarks.fine_tuning import TEST
from benchmarks.methods import CURVATURES, posterior
from benchmarks.methods.priors import LINKS, FromBatches
from benchmarks.models import AdaptedModel
from benchmarks.options import Cross
from tests.benchmarks.support import rows_by, run, values_of
from tests.support.models import lora_model, ragged_batches, without_labels

PRIORS = [*EVIDENCES, BY_HELD_OUT.key, BY_TEST.key]


# --- the experiment -------------------------------------------------------------------


def test_every_curvature_meets_every_prior(tmp_path, tiny_models):
    finished = run(
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
    rows = rows_by(finished.figures["methods"], "method", "prior")
    of_model = {("map", ""), ("map", "held_out_temperature")}
    keys = [method.key for method in CURVATURES]
    of_posteriors = set(product(keys, PRIORS))
    assert set(rows) == of_model | of_posteriors
    for curvature in keys:
        best = rows[curvature, BY_TEST.key]
        by_held_out = rows[curvature, BY_HELD_OUT.key]
        # The test texts' own choice is the best of the grid, which the held-out fifth
        # shares.
        assert best["nll"] <= by_held_out["nll"]


# --- several priors -------------------------------------------------------------------


@pytest.mark.parametrize("key", ["diag", "kron"])
@pytest.mark.parametrize("link", LINKS)
def test_several_priors_predict_as_each_does_alone(key, link):
    batches = ragged_batches()
    model = AdaptedModel(lora_model("bert").eval())
    la = posterior(key).build(model)
    la.fit(batches)
    tried = [torch.tensor([value]) for value in (1e-3, 5.0, 300.0)]
    predicts = FromBatches(la, {TEST: batches})
    predictions = predicts.of_each(tried, link)
    predicted = [of_prior[TEST] for of_prior in predictions]
    for prior_precision, of_prior in zip(tried, predicted, strict=True):
        la.prior_precision = prior_precision
        of_batches = [la(batch, link_approx=link) for batch in batches]
        alone = torch.cat(of_batches)
        assert_close(of_prior, alone.detach())
    # Otherwise any of them would do.
    assert not torch.allclose(predicted[0], predicted[-1], atol=1e-3)


# --- the head alone -------------------------------------------------------------------


def features_of(model, batch):
    """Record what the head reads of a batch, `(texts, width)`."""
    features = []

    def note(_, inputs):
        (of_batch,) = inputs
        features.append(of_batch.detach())

    head = model.get_submodule("base_model.model.classifier.modules_to_save.default")
    with head.register_forward_pre_hook(note):
        model(**without_labels(batch))
    (x,) = features
    return x


def test_last_layer_laplace_has_the_head_alone():
    model = lora_model("bert").eval()
    la = posterior("head").build(AdaptedModel(model))
    kinds = {block.kind for block in la.blocks}
    assert kinds == {"head"}

    batches = ragged_batches()
    la.fit(batches)
    batch = batches[0]
    # The data tell nothing beside such a prior: weights and biases are independent.
    prior_precision = 1e9
    la.prior_precision = torch.tensor([prior_precision])
    f_var = la.predictive_moments(batch).f_var

    x = features_of(model, batch)
    of_weights = x.square().sum(-1)
    of_bias = 1
    variance = of_weights + of_bias
    expected = variance[:, None, None] * torch.eye(la.n_outputs)
    assert_close(prior_precision * f_var, expected.to(f_var), rtol=1e-5, atol=1e-5)


def test_a_head_has_every_prior_too(prepared):
    pretrained = prepared("mrpc", learning_rate=1e-2)
    # Two texts leave none to hold out.
    ten_texts = 5 * list(pretrained.task.train)
    task = replace(pretrained.task, train=ten_texts)
    pretrained = replace(pretrained, task=task)
    options = Cross(grid_size=3, quiet=True, cache=pretrained.options.cache)
    trial = Trial(pretrained, options, seed=0)
    rows = trial.with_curvature(posterior("head"))
    assert values_of(rows, "prior") == PRIORS
