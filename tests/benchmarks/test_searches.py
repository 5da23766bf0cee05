"""The experiment on the numbers of the search, at its smallest."""

from unittest.mock import patch

from benchmarks.experiments.searches import SEARCHES
from laplace_lora_ext.tuning import gridsearch
from tests.benchmarks.support import rows_with, run


def test_each_search_chooses_by_the_same_texts_for_the_same_others(travel, tmp_path):
    few = {"as it is": SEARCHES["as it is"], "no variance": {"LEAST_GAIN": -1e9}}
    command = f"searches --tasks travel --classes 3 1 {travel} --texts 4 --held 2"
    with patch.dict(SEARCHES, few, clear=True):
        figures = run(f"{command} --draws 2", tmp_path / "results")
    rows = figures["rows"]
    assert len(rows) == 4
    of_ours, of_other = (rows_with(rows, search=search) for search in few)
    assert [row["draw"] for row in of_ours] == [0, 1]
    # The other search leaves a temperature alone.
    for ours, other in zip(of_ours, of_other, strict=True):
        assert ours["nll"] != other["nll"]
    # The change of the numbers has ended.
    assert gridsearch.LEAST_GAIN == 2
