"""What a training of a student shows, and folders as others open them."""

import json
import re

import pytest
import torch
from peft import AutoPeftModelForCausalLM, AutoPeftModelForSequenceClassification
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from tests.support.commands import run
from tests.support.saved_adapters import NAMES, tokenizer


def test_others_open_a_student_by_its_folder_alone(calibrated, tmp_path, capsys):
    folder = tmp_path / "student"
    run(
        "distill --merge",
        train=calibrated.train,
        output=folder,
        epochs=2,
        **calibrated.options,
    )
    printed = capsys.readouterr()
    # Steps of the training, and no figures that nobody asked for.
    assert re.search(r"\b(\d+)/\1\b", printed.err)
    assert "loss" not in printed.out + printed.err
    student = folder / "calibrated"
    assert printed.out.startswith(f"The student is in {student}.\n")
    # Bars of its texts and of its training, and nothing that nobody asked for.
    assert not re.search("Loading weights|shards|warning", printed.err)
    knows = json.loads((student / "laplace_student.json").read_text("utf-8"))
    assert knows["class_names"] == list(calibrated.names)
    assert "held_out" not in knows
    if calibrated.names != NAMES:
        model = AutoPeftModelForCausalLM.from_pretrained(student)
        AutoModelForCausalLM.from_pretrained(folder / "merged")
        assert len(AutoTokenizer.from_pretrained(student)) == len(tokenizer())
        return
    text = "red sky"
    by_pipeline = pipeline("text-classification", model=str(student))(text, top_k=None)
    merged = pipeline("text-classification", model=str(folder / "merged"))
    assert [row["label"] for row in merged(text, top_k=None)] == [
        row["label"] for row in by_pipeline
    ]
    model = AutoPeftModelForSequenceClassification.from_pretrained(student).eval()
    assert model.config.id2label == dict(enumerate(NAMES))
    encoded = AutoTokenizer.from_pretrained(student)(text, return_tensors="pt")
    with torch.no_grad():
        p = model(**encoded).logits.softmax(-1)[0]
    for row in by_pipeline:
        number = NAMES.index(row["label"])
        assert row["score"] == pytest.approx(p[number].item(), abs=1e-6)
    # What it has learnt, and not the fresh head of its base.
    assert by_pipeline[0]["label"] == "plant"
