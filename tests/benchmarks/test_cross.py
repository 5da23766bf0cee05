"""The experiment that crosses curvatures with priors, at its smallest."""

from itertools import product

import torch
from torch.testing import assert_close

from benchmarks.experiments.cross import BY_HELD_OUT, BY_TEST, EVIDENCES
from benchmarks.methods import CURVATURES, posterior
from benchmarks.models import AdaptedModel
from tests.benchmarks.support import rows_by, run
from tests.support.models import lora_model, ragged_batches, without_labels


def test_every_curvature_meets_every_prior(tmp_path, grammar):
    command = "cross --grid-size 5 --checkpoints 1"
    finished = run(tmp_path / "results", command, **grammar)
    rows = rows_by(finished.figures["methods"], "method", "prior")
    of_model = {("map", ""), ("map", "held_out_temperature")}
    # An encoder has a head.
    keys = ["head", *(method.key for method in CURVATURES)]
    priors = [*EVIDENCES, BY_HELD_OUT.key, BY_TEST.key]
    assert set(rows) == of_model | set(product(keys, priors))
    for curvature in keys:
        best = rows[curvature, BY_TEST.key]
        # The test texts' own choice is the best of the grid, which the held-out fifth
        # shares.
        assert best["nll"] <= rows[curvature, BY_HELD_OUT.key]["nll"]


def test_last_layer_laplace_has_the_head_alone():
    model = lora_model("bert").eval()
    la = posterior("head").build(AdaptedModel(model))
    assert {block.kind for block in la.blocks} == {"head"}
    batch, *_ = batches = ragged_batches()
    la.fit(batches)
    # The data tell nothing beside such a prior: weights and biases are independent.
    prior_precision = 1e9
    la.prior_precision = torch.tensor([prior_precision])
    f_var = la.predictive_moments(batch).f_var

    features = []
    head = model.get_submodule("base_model.model.classifier.modules_to_save.default")
    with head.register_forward_pre_hook(lambda _, inputs: features.append(inputs[0])):
        model(**without_labels(batch))
    (x,) = features
    variance = x.square().sum(-1) + 1  # of weights and of a bias
    expected = variance[:, None, None] * torch.eye(la.n_outputs)
    assert_close(prior_precision * f_var, expected.to(f_var), rtol=1e-5, atol=1e-5)
