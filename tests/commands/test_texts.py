"""Files of other programs, and labels of one column."""

import json

import pytest

from laplace_lora_ext.commands.texts import column_of, numbers_of, read_rows

ROWS = [
    {"text": "red sky, a; b; c; d; e; f", "label": "0"},
    {"text": "blue rose", "label": "1"},
]
TABLE = 'text,label\n"red sky, a; b; c; d; e; f",0\nblue rose,1\n'
BY_TABS = b"text\tlabel\nred sky, a; b; c; d; e; f\t0\nblue rose\t1\n"
BY_BARS = b"text|label\nred sky, a; b; c; d; e; f|0\nblue rose|1\n"
# With columns that are empty.
BY_SEMICOLONS = b'text;label\r\n"red sky, a; b; c; d; e; f";0;;\r\nblue rose;1\r\n'


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("PLAIN.CSV", TABLE.encode()),
        ("excel.csv", TABLE.encode("utf-8-sig")),
        ("excel_in_german.csv", BY_SEMICOLONS),
        ("table.csv", BY_BARS),
        ("table.tsv", BY_TABS),
        ("marked.jsonl", json.dumps(ROWS[0]).encode("utf-8-sig")),
        ("list.json", json.dumps(ROWS, indent=2).encode()),
    ],
)
def test_files_of_other_programs(name, content, tmp_path):
    path = tmp_path / name
    path.write_bytes(content)
    rows = read_rows(str(path))
    assert rows == ROWS[: len(rows)]
    assert len(rows) == (1 if name == "marked.jsonl" else 2)


def test_marks_within_a_text_end_no_line(tmp_path):
    # Which JSON allows within a string, and `str.splitlines` divides at.
    text = "red\u2028\u2029\x85\x0b\x1csky"
    lines = tmp_path / "lines.jsonl"
    row = json.dumps({"text": text}, ensure_ascii=False)
    lines.write_text(f"{row}\n\n{row}\n", encoding="utf-8")
    assert read_rows(str(lines)) == [{"text": text}] * 2
    table = tmp_path / "table.csv"
    table.write_text(f"text,label\n{text},0\n", encoding="utf-8")
    assert read_rows(str(table)) == [{"text": text, "label": "0"}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("old.csv", "text,label\na,0\ncafé,1\n".encode("cp1252"), "not in UTF-8"),
        ("comma.csv", b"text,label\nred, sky,0\n", "Row 1 .* more columns than"),
        ("open.csv", b'text,label\n"red sky,0\nblue,1\n', "Line 3 .* can't be read"),
        ("quote.csv", b'text,label\n"red" sky,0\n', "Line 2 .* can't be read"),
        ("cut.jsonl", b'{"text": "a"}\n{"text": "b\n{}\n', "Line 2 .* no JSON"),
        ("numbers.json", b"[1, 2]", "Row 1 .* no object"),
        ("table.txt", TABLE.encode(), "Line 1 .* a CSV file"),
        ("empty.csv", b"text,label\n", "no rows"),
        ("missing.tsv", None, "does not exist"),
    ],
)
def test_other_files_are_refused_by_their_cause(name, content, message, tmp_path):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_rows(str(path))


@pytest.mark.parametrize("value", [None, "", " \n", float("nan")])
def test_a_row_without_a_text_is_named(value):
    rows = [{"text": "red"}, {"text": value}]
    with pytest.raises(ValueError, match=r"Row 2 of new\.csv has nothing in .*'text'"):
        column_of(rows, "text", "new.csv")
    with pytest.raises(ValueError, match="no column 'body', only text"):
        column_of(rows, "body", "new.csv")


def test_other_names_are_data_sets_of_the_hub(monkeypatch):
    load = lambda name, split: [{"text": name, "label": split}]  # noqa: E731
    monkeypatch.setattr("datasets.load_dataset", load)
    for source, split in (("news", "train"), ("news:test", "test")):
        assert read_rows(source) == [{"text": "news", "label": split}]


# --- labels ---------------------------------------------------------------------------

STARS = ["1", "2", "3", "4", "none"]


@pytest.mark.parametrize(
    ("names", "labels", "expected"),
    [
        (["plant", "air"], ["air", " plant"], [1, 0]),
        # A column of numbers, of which some were missing.
        (["plant", "air"], ["1.0", "0"], [1, 0]),
        # Names that are numbers are never taken for others.
        (STARS, ["none", "1", "4"], [4, 0, 3]),
        (["1.0", "2.0"], ["1.0", "2.0"], [0, 1]),
    ],
)
def test_labels_are_names_or_numbers_of_classes(names, labels, expected):
    assert numbers_of(labels, names, "") == expected


def test_a_label_of_neither_kind_is_named():
    with pytest.raises(ValueError, match=r"Row 3 of new\.csv has the label 'sea'"):
        numbers_of(["air", "air", "sea", "0"], ["plant", "air"], "new.csv")
    with pytest.raises(ValueError, match="label '0'"):
        numbers_of(["0", "4"], STARS, "new.csv")
