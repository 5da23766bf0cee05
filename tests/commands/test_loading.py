"""Adapters as they are loaded, or refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from laplace_lora_ext.commands import loading
from laplace_lora_ext.commands import run as commands
from laplace_lora_ext.saving import read_state, write_state
from tests.support.commands import run
from tests.support.saved_adapters import (
    NAMES,
    SMALL,
    read_rows,
    save_adapter,
    write_rows,
)

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


def test_a_report_needs_a_posterior(classifier, refusal, tmp_path):
    message = refusal(
        "report",
        adapter=classifier,
        data=tmp_path / "missing.csv",
        output=tmp_path / "report.html",
    )
    assert "no posterior" in message


# --- heads and answers ----------------------------------------------------------------


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


def test_a_language_model_needs_answers_that_have_a_text(decoder, options, refusal):
    options["adapter"] = decoder
    assert "--answers" in refusal("calibrate", **options)
    message = refusal("calibrate", answers=(" ", "B"), **options)
    assert "An answer has no text among [' ', 'B']" in message


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


# --- texts ----------------------------------------------------------------------------


def test_columns_of_other_names(options, tmp_path):
    train = write_rows(tmp_path / "train.csv", 8)
    train.write_text(train.read_text().replace("text,label", "body,class"))
    options["train"] = train
    run("calibrate", text_column="body", label_column="class", **options)
    assert (tmp_path / "posterior" / "laplace_posterior.safetensors").exists()


def test_a_text_that_is_too_long_is_named_before_any_is_read(options, refusal):
    with open(options["train"], "a", encoding="utf-8") as file:
        file.write(json.dumps({"text": "red " * 65, "label": "air"}) + "\n")
    message = refusal("calibrate", **options)
    assert "Row 25 of" in message
    assert "has 65 tokens, and the model takes 64" in message
    run("calibrate", max_length=64, **options)


# --- bases ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float17"}, "float17 is no precision"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"max_length": 0}, "max_length must be"),
    ],
)
def test_values_that_are_wrong(change, message, options, refusal):
    assert message in refusal("calibrate", **options, **change)


def test_a_folder_without_an_adapter(options, refusal, tmp_path):
    options["adapter"] = tmp_path
    assert "holds no adapter" in refusal("calibrate", **options)


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
