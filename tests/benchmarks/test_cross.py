"""The experiment that crosses curvatures with priors, at its smallest."""

from itertools import product

from benchmarks.experiments.cross import BY_HELD_OUT, BY_TEST, CURVATURES, EVIDENCES
from tests.benchmarks.support import run


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
