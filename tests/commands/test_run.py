"""What each command prints and writes."""

import json
import math
import re

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from torch.nn.functional import one_hot
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, pipeline

from laplace_lora_ext import LoRALaplace
from laplace_lora_ext.commands import run as commands
from laplace_lora_ext.commands.texts import read_rows
from laplace_lora_ext.plots import Outcomes
from laplace_lora_ext.predictive.predictions import Prediction
from laplace_lora_ext.saving import read_state, write_state
from tests.support.commands import run
from tests.support.saved_adapters import NAMES, tokenizer, write_rows


def test_a_calibration_prints_and_saves_a_verdict_beside_a_temperature(calibrated):
    lines = calibrated.printed.splitlines()
    assert (
        lines[0] == "On 40 validation texts, which have chosen prior and temperature:"
    )
    names = [line.split("  ")[0] for line in lines[2:5]]
    assert names == ["trained model", "temperature", "posterior"]
    saved = read_state(calibrated.options["posterior"])["metadata"]
    assert saved["class_names"] == list(calibrated.names)
    assert (saved["text_column"], saved["label_column"]) == ("text", "label")
    assert saved["verdict"] == lines[6]
    assert "85% of the answers are right" in saved["verdict"]
    p = saved["held_out"]["probabilities"]
    right = p.argmax(1) == saved["held_out"]["labels"]
    assert right.double().mean() == 0.85
    assert saved["temperature"] != 1
    assert lines[-1].endswith("laplace_posterior.safetensors.")


def test_without_validation_texts_agreement_chooses(options, refusal, capsys):
    run("calibrate", **options)
    assert "training texts" in capsys.readouterr().out
    assert "exists" in refusal("calibrate", **options)
    run("calibrate --overwrite", **options)
    new = {"data": options["train"], "accuracy": 0.5, "output": options["train"]}
    posterior = {"adapter": options["adapter"], "posterior": options["output"]}
    run("review --overwrite", **posterior, **new)
    assert "no texts were held out" in capsys.readouterr().out


def test_training_texts_prove_nothing(options, refusal, tmp_path, capsys):
    train, held_out = options["train"], write_rows(tmp_path / "held_out.jsonl", 20)
    both = tmp_path / "both.jsonl"
    both.write_text(held_out.read_text() + train.read_text())
    assert "All 24 texts" in refusal("calibrate", validation=train, **options)
    run("calibrate", validation=both, **options)
    printed = capsys.readouterr()
    assert "24 of 44 texts of" in printed.err
    assert printed.out.startswith("On 20 validation texts")

    posterior = {"adapter": options["adapter"], "posterior": options["output"]}
    output = tmp_path / "output"
    asked = {"data": train, "output": output, **posterior}
    assert "All 24 texts" in refusal("report", **asked)
    assert "All 24 texts" in refusal("review", accuracy=0.9, test=train, **asked)
    assert not output.exists()
    run("review", accuracy=0.1, test=both, **asked)
    printed = capsys.readouterr()
    assert "24 of 44 texts of" in printed.err
    assert "Of 20 labelled texts decided alone" in printed.out


def test_a_review_s_options_are_checked_before_its_texts(calibrated, refusal, tmp_path):
    asked = {"data": tmp_path / "none.csv", "output": tmp_path / "queue.csv"}
    asked |= calibrated.options
    assert "accuracy must be" in refusal("review", accuracy=95, **asked)
    assert "one number" in refusal("review", accuracy=0.9, costs=(1, 2, 3), **asked)


def test_a_posterior_of_the_hub_s_adapter_needs_a_folder(options, refusal):
    message = refusal("calibrate", adapter="user/name", train=options["train"])
    assert "user/name is no folder" in message


def test_names_in_another_order_are_no_better_than_guessing(options, refusal):
    message = refusal("calibrate", **(options | {"class_names": NAMES[::-1]}))
    assert "Are --class_names in the order of the model's outputs?" in message
    assert not options["output"].exists()


def test_held_out_labels_in_another_order_are_refused(options, refusal, tmp_path):
    held_out = write_rows(tmp_path / "held_out.jsonl", 20, n_wrong=20)
    message = refusal("calibrate", validation=held_out, **options)
    assert "if its outputs were air, plant" in message


def test_an_order_of_names_that_is_wrong_in_part_is_told():
    labels = torch.arange(4).repeat(20)

    def check(n_right: int) -> None:
        """Check answers of which the first are right, the others in another order."""
        answers = torch.tensor([0, 2, 3, 1])[labels]
        answers[:n_right] = labels[:n_right]
        p = one_hot(answers).double()
        results = Outcomes(p, Prediction.of_draws(p, p[None]), labels)
        commands._check_order(results, list("abcd"))

    with pytest.raises(ValueError, match=r"far more often .* were a, d, b, c"):
        check(n_right=4)
    check(n_right=32)  # it may confuse them


def test_predictions_are_in_order_and_go_on_where_they_stopped(
    calibrated, refusal, tmp_path, monkeypatch, capsys
):
    output = tmp_path / "new" / "predictions.jsonl"
    options = {"data": calibrated.test, "output": output, **calibrated.options}
    run("predict", batch_size=3, **options)
    predicted = read_rows(output)
    assert len(predicted) == 40
    texts = read_rows(calibrated.test)
    for number, (row, text) in enumerate(zip(predicted, texts, strict=True), start=1):
        p = row["probabilities"]
        assert list(p) == list(calibrated.names)
        assert sum(p.values()) == pytest.approx(1)
        assert row["label"] == max(p, key=p.__getitem__)
        assert row["probability"] == max(p.values())
        assert (row["id"], row["text"]) == (number, text["text"])
        assert row["epistemic_entropy"] is None or row["epistemic_entropy"] > 0
    assert "exists" in refusal("predict", **options)

    # An interruption may leave a line unfinished.
    lines = output.read_text().splitlines()
    output.write_text("\n".join([*lines[:6], lines[6][:20]]))
    run("predict --resume --all_columns", batch_size=3, **options)
    again = read_rows(output)
    assert again[6]["columns"] == texts[6]  # with the label that it was told
    for row, before in zip(again, predicted, strict=True):
        assert row["text"] == before["text"]
        # Batches begin at other texts, and rounding is that of other paddings.
        assert row["probability"] == pytest.approx(before["probability"], abs=1e-5)

    # Of other texts nothing is there yet, however many lines are.
    others = write_rows(tmp_path / "others.jsonl", 39, calibrated.names)
    message = refusal("predict --resume", **options | {"data": others})
    assert "predictions of other texts" in message
    assert read_rows(output) == again

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "predict_both", interrupted)
    output.unlink()
    with pytest.raises(SystemExit) as exit_of:
        run("predict", **options)
    assert exit_of.value.code == 130
    assert "go on with --resume" in capsys.readouterr().err


def test_where_no_variance_was_chosen_nothing_is_said_of_doubt(calibrated, tmp_path):
    folder = tmp_path / "posterior"
    state = read_state(calibrated.options["posterior"])
    state["prior_precision"] = torch.full_like(state["prior_precision"], 1e12)
    state["logit_scale"] = 4 / 3
    write_state(state, folder)
    options = calibrated.options | {"posterior": folder, "data": calibrated.test}
    run("predict", output=tmp_path / "lines.jsonl", **options)
    for row in read_rows(tmp_path / "lines.jsonl"):
        assert row["epistemic_entropy"] is None
        # Of two classes, the scale is that of the log-odds.
        before, after = (
            math.log(p / (1 - p)) for p in (row["trained_model"], row["probability"])
        )
        assert after == pytest.approx(4 / 3 * before, rel=1e-3)
    run("report", output=tmp_path / "report.html", **options)
    document = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "the posterior is a temperature of 0.75" in document


def test_learnt_variances_predict(calibrated, refusal, tmp_path):
    options = {"data": calibrated.test, "output": tmp_path / "amortized.jsonl"}
    by_default = calibrated.options | options
    assert "calibrate with --amortize" in refusal("predict --amortized", **by_default)
    adapter = calibrated.options["adapter"]
    run(
        "calibrate --amortize",
        adapter=adapter,
        train=calibrated.train,
        validation=calibrated.test,
        output=tmp_path,
        **calibrated.named,
    )
    run("predict --amortized", posterior=tmp_path, adapter=adapter, **options)
    exact = tmp_path / "exact.jsonl"
    run("predict", posterior=tmp_path, adapter=adapter, **options | {"output": exact})
    assert len(read_rows(options["output"])) == len(read_rows(exact)) == 40
    assert read_rows(options["output"]) != read_rows(exact)


def test_a_queue_has_the_most_doubtful_first_and_says_what_is_proven(
    calibrated, refusal, tmp_path, capsys
):
    output = tmp_path / "queue.csv"
    options = {"data": calibrated.test, "output": output, **calibrated.options}
    assert "--accuracy or --capacity" in refusal("review", **options)
    run("review", capacity=30, **options)
    printed = capsys.readouterr().out
    assert "25% of 40 texts are decided alone" in printed
    # Of texts that are the same, some are decided and some are not.
    (proof,) = re.findall(r"Of \d+ labelled texts decided alone.*", printed)
    assert "a little too kind" in printed
    rows = read_rows(output)
    assert [row["decided_by"] for row in rows] == ["person"] * 30 + ["model"] * 10
    sureness = [float(row["probability"]) for row in rows]
    assert sureness == sorted(sureness)
    (promise,) = re.findall(r"an accuracy of ([\d.]+\d)", printed)
    assert float(promise) == pytest.approx(sum(sureness[30:]) / 10, abs=1e-3)
    assert " or " in rows[0]["reason"]
    # What chose the prior is read again, and proves the same.
    run("review --overwrite", capacity=30, test=calibrated.test, **options)
    assert proof in capsys.readouterr().out
    assert read_rows(output) == rows
    # Texts of other labels prove something else.
    other = write_rows(tmp_path / "other.jsonl", 20, calibrated.names, n_wrong=20)
    run("review --overwrite", accuracy=0.1, test=other, **options)
    assert "labelled texts decided alone 0 were right" in capsys.readouterr().out
    # Rows may have ids of their own, as those of a queue.
    costs = {"costs": (1, 9), "data": output, "output": tmp_path / "costs.csv"}
    run("review", capacity=30, **options | costs)
    printed = capsys.readouterr().out
    lines = {"data": output, "output": tmp_path / "lines.jsonl"}
    run("predict", **options | lines)
    assert "promises a mean cost of 0.1" in printed
    texts = read_rows(calibrated.test)
    for row in [*rows, *read_rows(costs["output"]), *read_rows(lines["output"])]:
        assert texts[int(row["id"]) - 1]["text"] == row["text"]
    assert "Nothing is proven of a mean cost" in printed
    run("review --overwrite", capacity=100, **options)
    printed = capsys.readouterr().out
    assert "0% of 40 texts are decided alone" in printed
    assert printed.count("\n") == 3
    assert "Nothing is proven" in printed


def test_a_students_training_is_as_asked_for_and_in_a_new_folder(
    calibrated, refusal, tmp_path, monkeypatch
):
    def stop(la: object, trainer: Trainer, **_: object) -> None:
        args = trainer.args
        size = args.train_batch_size
        raise ValueError(args.num_train_epochs, args.learning_rate, args.seed, size)

    monkeypatch.setattr(LoRALaplace, "distill", stop)
    options = calibrated.options | {"train": calibrated.train}
    asked = {"epochs": 2.0, "learning_rate": 0.5, "seed": 7, "batch_size": 3}
    message = refusal("distill", output=tmp_path / "new", **asked, **options)
    assert "(2.0, 0.5, 7, 3)" in message
    assert "exists" in refusal("distill", output=tmp_path, **options)


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
    # Steps of the training, whose bar has no name.
    assert re.search(r"\r100%", printed.err)
    student = folder / "calibrated"
    assert f"The student is in {student}.\n" in printed.out
    # Bars of its texts and of its training, and nothing that nobody asked for.
    assert not re.search("Loading weights|shards|warning", printed.err)
    knows = json.loads((student / "laplace_student.json").read_text("utf-8"))
    assert knows["class_names"] == list(calibrated.names)
    assert "held_out" not in knows
    if calibrated.names != NAMES:
        AutoPeftModelForCausalLM.from_pretrained(student)
        AutoModelForCausalLM.from_pretrained(folder / "merged")
        assert not (student / "base").exists()
        assert len(AutoTokenizer.from_pretrained(student)) == len(tokenizer())
        return
    text = "red sky"
    by_pipeline = pipeline("text-classification", model=str(student))(text, top_k=None)
    merged = pipeline("text-classification", model=str(folder / "merged"))
    scores, of_merged = (
        {row["label"]: row["score"] for row in rows}
        for rows in (by_pipeline, merged(text, top_k=None))
    )
    assert of_merged == pytest.approx(scores, abs=1e-6)
    assert merged.model.config.label2id == {"plant": 0, "air": 1}
    # What it has learnt, and not the fresh head of its base.
    assert by_pipeline[0]["label"] == "plant"
