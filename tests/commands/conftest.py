"""Tiny adapters that are trained and saved here, and posteriors of them."""

import io
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
)

from laplace_lora_cli import USAGE
from tests.support.commands import run
from tests.support.saved_adapters import NAMES, SMALL, save_adapter, write_rows


@pytest.fixture(scope="session")
def classifier(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    # Of the names and of padding its configuration knows nothing.
    config = BertConfig(**SMALL, max_position_embeddings=64, pad_token_id=None)
    return save_adapter(
        tmp_path_factory.mktemp("bert"),
        BertForSequenceClassification(config),
        task_type="SEQ_CLS",
        target_modules=["query", "value"],
    )


@pytest.fixture(scope="session")
def decoder(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    return save_adapter(
        tmp_path_factory.mktemp("llama"),
        LlamaForCausalLM(LlamaConfig(**SMALL, pad_token_id=0)),
        ("A", "B"),
        task_type="CAUSAL_LM",
        target_modules=["q_proj", "v_proj"],
    )


@pytest.fixture(scope="session", params=["classifier", "decoder"])
def calibrated(request, tmp_path_factory) -> SimpleNamespace:
    """An adapter with a posterior, and labelled texts."""
    folder = tmp_path_factory.mktemp("calibrated")
    adapter = request.getfixturevalue(request.param)
    names, named = NAMES, {"class_names": NAMES}
    if request.param == "decoder":
        names = ("A", "B")
        named = {"answers": names}
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
            **named,
        )
    return SimpleNamespace(
        # Of commands that read the posterior: nothing of what it was fitted with.
        options=options,
        names=names,
        # The option that names them, as `calibrate` was told.
        named=named,
        train=train,
        test=test,
        printed=printed.getvalue(),
    )


@pytest.fixture
def options(classifier, tmp_path) -> dict[str, object]:
    """What `calibrate` needs."""
    return {
        "adapter": classifier,
        "class_names": NAMES,
        "train": write_rows(tmp_path / "train.jsonl", 24),
        "output": tmp_path / "posterior",
    }


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
