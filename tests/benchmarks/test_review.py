"""The experiment on queues: figures by hand, and a run at its smallest."""

import pytest
import torch

from benchmarks.experiments.review import METHODS, averaged, figures_of
from tests.benchmarks.support import run, write_grammar


def test_figures_of_a_queue():
    sureness = torch.tensor([0.95, 0.9, 0.8, 0.6], dtype=torch.float64)
    p = torch.stack([sureness, 1 - sureness], dim=1)
    found = figures_of(p, torch.tensor([0, 0, 1, 0]), 0.9)
    # 0.95 and 0.9 promise more than 0.9, and all three no more than 0.883.
    assert found["share_at_promise"] == 0.5
    assert found["gap"] == pytest.approx(1 - 0.925)
    assert found["share_at_realised"] == 0.5
    none = figures_of(p, torch.tensor([1, 1, 1, 1]), 0.97)
    assert none == {"share_at_promise": 0, "gap": None, "share_at_realised": 0}
    mean = averaged("one", [found, none])
    assert mean["worst_gap"] == mean["mean_gap"] == found["gap"]
    assert mean["share_at_promise"] == 0.25


def test_every_method_has_a_row(tiny_models, tmp_path):
    write_grammar(tmp_path)
    finished = run(
        tmp_path / "results",
        "review --quiet",
        task="cola",
        data=tmp_path,
        model=tiny_models[False],
        steps=20,
        learning_rate=0.01,
        batch_size=8,
        cache=tmp_path / "cache",
    )
    assert set(finished.figures["queues"]) == set(METHODS)
    for rows in finished.figures["queues"].values():
        assert [row["seed"] for row in rows] == [0]
