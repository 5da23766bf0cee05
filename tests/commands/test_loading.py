"""Adapters as they are loaded, or refused."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import LlamaConfig, LlamaForSequenceClassification

from laplace_lora_cli import ModelArguments
from laplace_lora_ext.commands import loading
from laplace_lora_ext.commands.loading import Loaded, load
from laplace_lora_ext.commands.texts import read_rows
from laplace_lora_ext.saving import read_state, write_state
from tests.support.commands import run
from tests.support.saved_adapters import (
    NAMES,
    SMALL,
    WORDS,
    save_adapter,
    tokenizer,
    write_rows,
)

# --- what a posterior's file knows ----------------------------------------------------


def test_other_classes_than_those_of_the_fit_are_refused(calibrated, refusal, tmp_path):
    output = tmp_path / "output"
    ((kind, names),) = calibrated.named.items()
    for others in (names[::-1], names[:1]):
        options = calibrated.options | {kind: others}
        message = refusal("report", data=calibrated.test, output=output, **options)
        assert f"was fitted with --{kind}" in message
        assert not output.exists()


def test_answers_of_a_posterior_from_python_are_compared_too(
    calibrated, refusal, tmp_path
):
    folder = tmp_path / "posterior"
    state = read_state(calibrated.options["posterior"])
    state["metadata"] = {"note": "mine"}
    write_state(state, folder)
    options = calibrated.options | {"posterior": folder, "data": calibrated.test}
    run("predict", output=tmp_path / "lines.jsonl", **options, **calibrated.named)
    if "answers" in calibrated.named:
        turned = options | {"answers": ("B", "A"), "output": tmp_path / "other.jsonl"}
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


def test_a_head_of_another_number_of_classes_is_refused(options, refusal):
    options["class_names"] = (*NAMES, "water")
    message = refusal("calibrate", **options)
    assert "not one of 3 classes, plant, air, water: pass --class_names" in message


def loaded_from(adapter: Path, **options: Any) -> Loaded:
    return load(ModelArguments(adapter=str(adapter), **options))


def copied(adapter: Path, folder: Path, **changes: object) -> Path:
    """Copy an adapter, and change what its configuration says."""
    shutil.copytree(adapter, folder)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


def with_base(adapter: Path, folder: Path) -> tuple[Path, Path]:
    """Copy an adapter and its base."""
    base = shutil.copytree(adapter.parent / "base", folder / "base")
    changes = {"base_model_name_or_path": str(base)}
    return copied(adapter, folder / "adapter", **changes), base


def test_an_adapter_of_no_task_is_a_classifiers_and_others_are_refused(
    classifier, options, refusal, tmp_path
):
    options["adapter"] = copied(classifier, tmp_path / "none", task_type=None)
    run("calibrate", **options)
    options |= {"output": tmp_path / "new"}
    other = copied(classifier, tmp_path / "tokens", task_type="TOKEN_CLS")
    assert "TOKEN_CLS" in refusal("calibrate", **(options | {"adapter": other}))


def test_a_head_that_nobody_has_saved_is_refused(
    classifier, options, refusal, tmp_path
):
    adapter, base = with_base(classifier, tmp_path)
    for file in (base / "model.safetensors", adapter / "adapter_model.safetensors"):
        weights = load_file(file)
        save_file({k: v for k, v in weights.items() if "classifier" not in k}, file)
    message = refusal("calibrate", **(options | {"adapter": adapter}))
    assert "has classifier.bias, classifier.weight: train" in message


def test_classes_have_the_names_of_their_numbers(classifier, tmp_path):
    adapter, base = with_base(classifier, tmp_path)
    path = base / "config.json"
    config = json.loads(path.read_text())
    # As "10" comes before "2" in a file whose keys were text.
    path.write_text(json.dumps(config | {"id2label": {"1": "air", "0": "plant"}}))
    assert loaded_from(adapter).class_names == ["plant", "air"]


def test_a_language_model_needs_answers(decoder, options, refusal):
    options["adapter"] = decoder
    assert "--answers" in refusal("calibrate", **options)


def test_a_text_that_is_cut_ends_where_its_answer_begins(decoder):
    loaded = loaded_from(decoder, answers=["A", "B"], max_length=2)
    (batch,) = loaded.batches(["red green rose"])
    assert loaded.tokenizer.decode(batch["input_ids"][0]) == "green rose"


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
    saved = read_state(options["output"])["metadata"]
    assert (saved["text_column"], saved["label_column"]) == ("body", "class")


def test_columns_and_lengths_are_matters_of_a_file(calibrated, tmp_path):
    rows = read_rows(calibrated.test)
    other = tmp_path / "other.csv"
    lines = ["body,class", *(f"{row['text']} red sky,?" for row in rows)]
    other.write_text("\n".join(lines), encoding="utf-8")
    options = calibrated.options | {"output": tmp_path / "lines.jsonl"}
    run("predict", data=other, text_column="body", max_length=3, **options)
    run("predict --resume", data=other, text_column="body", max_length=3, **options)
    cut = [row["probability"] for row in read_rows(options["output"])]
    options["output"] = tmp_path / "whole.jsonl"
    run("predict", data=other, text_column="body", **options)
    whole = [row["probability"] for row in read_rows(options["output"])]
    assert cut != pytest.approx(whole, rel=1e-4)


def test_a_text_that_is_too_long_is_named_before_any_is_read(options, refusal):
    with open(options["train"], "a", encoding="utf-8") as file:
        for length in (64, 65):
            row = {"text": "red " * length, "label": "air"}
            file.write(json.dumps(row) + "\n")
    message = refusal("calibrate", **options)
    assert "Row 26 of" in message
    assert "has 65 tokens, and the model takes 64" in message
    run("calibrate", max_length=64, **options)
    loaded = loaded_from(options["adapter"])
    loaded.tokenizer.model_max_length = 63
    with pytest.raises(ValueError, match=r"Row 25 .* takes 63"):
        loaded.texts(options["train"])


# --- bases ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["AutoConfig", "AutoModelForSequenceClassification"])
def test_a_base_is_of_the_revision_that_was_trained(
    name, classifier, tmp_path, monkeypatch
):
    adapter = copied(classifier, tmp_path / "adapter", revision="older")
    whole, asked = getattr(loading, name).from_pretrained, []

    def noted(*args: object, **options: object) -> object:
        asked.append(options["revision"])
        return whole(*args, **options)

    monkeypatch.setattr(loading, name, SimpleNamespace(from_pretrained=noted))
    loaded_from(adapter)
    assert asked == ["older"]


def test_unknown_precisions_and_places_are_refused(options, refusal):
    assert "`dtype`" in refusal("calibrate", dtype="float17", **options)
    # Which is no matter of the head.
    with pytest.raises(RuntimeError, match="Vulkan"):
        loaded_from(options["adapter"], device_map="vulkan")


# Of the base all linear layers are in four bits, and heads are not: six in each of two
# layers of BERT and its pooler, seven in each of two layers of Llama.
@pytest.mark.parametrize(
    ("kind", "named", "n_linear"),
    [("classifier", {}, 2 * 6 + 1), ("decoder", {"answers": ["A", "B"]}, 2 * 7)],
)
def test_bases_in_four_bits(kind, named, n_linear, request):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    adapter = request.getfixturevalue(kind)
    model = loaded_from(adapter, load_in_4bit=True, **named).model
    in_four_bits = [
        name
        for name, module in model.named_modules()
        if isinstance(module, bitsandbytes.nn.Linear4bit)
    ]
    assert len(in_four_bits) == n_linear
    assert not any("classifier" in name or "lm_head" in name for name in in_four_bits)


def test_a_tokenizer_of_the_base_may_have_more_tokens_and_none_for_padding(
    classifier, tmp_path
):
    adapter, base = with_base(classifier, tmp_path)
    for file in adapter.glob("*token*"):
        file.unlink()
    more = ("[UNK]", *WORDS, "one", "two", "three")
    words = tokenizer(more, pad_token=None, eos_token="three")
    words.save_pretrained(base)
    loaded = loaded_from(adapter)
    assert loaded.tokenizer.pad_token == "three"
    assert len(loaded.model.get_input_embeddings().weight) == len(more)


def test_a_text_is_read_before_its_padding_whatever_the_base_pads_with(tmp_path):
    # Of its own padding token the base knows; the adapter's tokenizer has another.
    config = LlamaConfig(**SMALL, num_labels=2, pad_token_id=WORDS.index("rose"))
    adapter = save_adapter(
        tmp_path,
        LlamaForSequenceClassification(config),
        task_type="SEQ_CLS",
        target_modules=["q_proj", "v_proj"],
    )
    tokenizer(padding_side="right").save_pretrained(adapter)
    loaded = loaded_from(adapter)
    (batch,) = loaded.batches(["red", "red green blue sky"])
    (alone,) = loaded.batches(["red"])
    with torch.no_grad():
        first, expected = (loaded.model(**each).logits[0] for each in (batch, alone))
    assert_close(first, expected)


# By default what the base was saved in.
@pytest.mark.parametrize(
    ("dtype", "expected"), [("auto", torch.float32), ("bfloat16", torch.bfloat16)]
)
def test_precision_goes_to_the_base(dtype, expected, classifier):
    base = loaded_from(classifier, dtype=dtype).model.get_base_model()
    embeddings = base.bert.embeddings.word_embeddings.weight
    assert embeddings.dtype == expected
    assert len(embeddings) == SMALL["vocab_size"]
    assert base.config.pad_token_id == 0
