"""The experiment that crosses curvatures with priors, at its smallest."""

from itertools import product

from benchmarks.experiments.cross import BY_HELD_OUT, BY_TEST, EVIDENCES
from benchmarks.methods import CURVATURES, posterior
from benchmarks.models import AdaptedModel
from tests.benchmarks.support import rows_by, run
from tests.support.models import lora_model


def test_every_curvature_meets_every_prior(tmp_path, grammar):
    command = f"cross --grid-size 5 --checkpoints 1 {grammar}"
    figures = run(command, tmp_path / "results")
    rows = rows_by(figures["methods"], "method", "prior")
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
    la = posterior("head").build(AdaptedModel(lora_model("bert")))
    assert {block.kind for block in la.blocks} == {"head"}
