"""The experiment on how many passes a fit needs, at its smallest."""

import transformers

from benchmarks.experiments import signs
from tests.benchmarks.support import run, write_intents


def test_fits_by_draws_stand_beside_the_exact_one(encoder, tmp_path, monkeypatch):
    # An encoder that has no head yet, and is hardly trained: its curvature is small.
    folder = tmp_path / "encoder"
    for part in (transformers.AutoModel, transformers.AutoTokenizer):
        part.from_pretrained(encoder).save_pretrained(folder)
    monkeypatch.setattr("benchmarks.models.encoder_folder", lambda: folder)
    monkeypatch.setattr(signs, "BROAD", 1e-9)
    write_intents({"travel": "abcde"}, 4, tmp_path)
    command = (
        "signs --quiet --task clinc150 --steps 3 --checkpoints 1 --passes 1 3 "
        f"--train-examples 20 --test-examples 10 --data {tmp_path} "
        f"--cache {tmp_path}/cache"
    )
    exact, *drawn = run(command, tmp_path / "results")["rows"]
    assert exact["name"] == "exact"
    assert exact["passes"] == 4
    assert exact["covariance"] == exact["probability_broad"] == 0
    assert [row["name"] for row in drawn] == 4 * ["labels"] + 4 * ["signs"]
    assert [row["passes"] for row in drawn] == 2 * [1, 1, 3, 3]
    assert all(row["covariance_broad"] > 0 for row in drawn)
