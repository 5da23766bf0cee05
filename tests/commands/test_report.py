"""Sentences about results, each of its case, and a page of HTML."""

import re

import pytest
import torch
from torch import Tensor

from laplace_lora_ext.commands.report import (
    HEADER,
    as_text,
    figures_of,
    page,
    reason,
    verdict,
)
from laplace_lora_ext.plots import Outcomes
from laplace_lora_ext.predictive.predictions import Prediction
from tests.support.commands import run

NAMES = ("plant", "air")


def outcomes_of(posterior: Tensor, spread: float, **options: float) -> Outcomes:
    """Give every text a posterior's probability of its label; eight of ten are right.

    Draws spread so far around that.
    """
    of_label = torch.tensor(8 * [0.05] + 32 * [0.95])
    labels = torch.zeros(40, dtype=torch.long)
    p = torch.stack([posterior, 1 - posterior], dim=1)
    drawn = torch.stack([p + spread, p - spread]).clamp(0.01, 0.99)
    prediction = Prediction.of_draws(p, drawn)
    trained = torch.stack([of_label, 1 - of_label], dim=1)
    return Outcomes(trained, prediction, labels, **options)


MODEST = torch.tensor(8 * [0.2] + 32 * [0.8])
SEEING = torch.tensor(8 * [0.45] + 32 * [0.8])


@pytest.mark.parametrize(
    ("posterior", "spread", "options", "expected"),
    [
        (
            SEEING,
            0.1,
            {"temperature": 2.0},
            # By ln(0.45 / 0.187) for eight texts, and ln(0.8 / 0.813) for 32.
            "posterior is better than the temperature by 0.163 ± 0.057 nats a text",
        ),
        (MODEST, 0.1, {"temperature": 0.5}, "posterior is better than the temperature"),
        (1 - MODEST, 0.1, {"temperature": 2.0}, "temperature is better than the post"),
        (MODEST, 0.1, {"temperature": 6.0}, "A temperature does as well"),
        (MODEST, 0.1, {}, "No temperature was chosen"),
        (MODEST, 0.0, {"temperature": 2.0}, "the posterior is a temperature of 0.75"),
    ],
)
def test_a_verdict_says_by_how_much(posterior, spread, options, expected):
    found = verdict(outcomes_of(posterior, spread, **options), 4 / 3)
    share = (posterior > 0.5).double().mean()
    assert found.startswith(f"{share:.0%} of the answers are right: the trained model")
    assert re.search("claims 95%, the posterior (75|80)%", found)
    assert expected in found


def test_one_text_proves_no_difference():
    p = torch.tensor([[0.9, 0.1]])
    prediction = Prediction.of_draws(p, torch.stack([p, p.flip(1)]))
    one = Outcomes(p, prediction, torch.tensor([0]), temperature=2.0)
    assert "A temperature does as well" in verdict(one, 1.0)


def test_the_best_of_each_measure_is_marked():
    trained, temperature, posterior = figures_of(
        outcomes_of(SEEING, 0.1, temperature=2.0)
    )
    assert trained[1] == temperature[1] == posterior[1] == "0.800*"
    assert posterior[2].endswith("*")
    assert not trained[2].endswith("*")
    header, row = as_text([HEADER, trained]).splitlines()
    assert row.rindex(trained[-1]) == header.index("Brier")


@pytest.mark.parametrize(
    ("spread", "expected"),
    [
        (0.0, "air (80%)"),
        (0.02, "100% of the doubt is about the text"),
        (0.6, "about the weights"),
    ],
)
def test_a_reason_names_what_competes_and_what_the_doubt_is_about(spread, expected):
    found = reason(outcomes_of(MODEST, spread).prediction, 0, NAMES)
    assert found.startswith("air (80%) or plant (20%)")
    assert expected in found
    assert ("of the doubt" in found) == (spread > 0)


def test_a_page_shows_the_most_doubtful_texts_and_needs_no_other_file():
    results = outcomes_of(SEEING, 0.1, temperature=2.0)
    document = page("A < B", "Well.", results, 40 * ["A < B"], NAMES)
    assert document.count("<svg") == 2
    # Two tables: of three methods, and of twenty texts, with a head each.
    assert document.count("<tr>") == 1 + 3 + 1 + 20
    # In the title and the heading too.
    assert document.count("A &lt; B") == 2 + 20
    cells = '"wrong">air</span></td><td data-column="label">plant</td><td '
    assert document.count(cells + 'data-column="trained model">0.95<') == 8
    for mark in ("src=", "<link", "@import", "url(http"):
        assert mark not in document


def test_a_report_is_written_once(calibrated, refusal, tmp_path):
    # In a folder that is made.
    output = tmp_path / "reports" / "report.html"
    options = {"data": calibrated.test, "output": output, **calibrated.options}
    run("report", title="Mine", **options)
    _, _, body = output.read_text(encoding="utf-8").partition("<body>")
    assert re.match(r"<h1>Mine</h1><p class=\S+>85% of the answers", body)
    assert "exists" in refusal("report", **options)
