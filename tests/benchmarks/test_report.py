"""What a run leaves behind: tables of figures."""

from benchmarks.report import paired_differences


def test_differences_are_of_the_same_seed():
    table = [
        ("plain", 0, 1.0),
        ("plain", 0, 2.0),
        ("plain", 1, 5.0),
        ("other", 1, 5.5),
        ("other", 0, 1.4),
        ("none", 0, None),
        ("none", 1, None),
    ]
    rows = [{"name": name, "seed": seed, "nll": nll} for name, seed, nll in table]
    other, none = paired_differences(rows, "plain", ("nll",))
    # -0.1 and 0.5: their deviation is 0.6 / √2, their mean's error 0.3.
    assert other == {"name": "other", "nll": "+0.200 ± 0.300"}
    assert none == {"name": "none", "nll": "-"}
