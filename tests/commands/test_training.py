"""What a training shows."""

import torch
from transformers import TrainingArguments

from laplace_lora_ext.commands.training import trainer_with_bar
from tests.support.models import lora_model
from tests.support.ranks import Texts


def test_a_training_shows_its_steps_and_no_figures(tmp_path, capsys):
    settings = TrainingArguments(
        str(tmp_path),
        max_steps=3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        dataloader_pin_memory=False,
    )
    trainer_with_bar(lora_model("bert", torch.float32), settings, Texts(8)).train()
    printed = capsys.readouterr()
    assert "3/3" in printed.err
    assert "loss" not in printed.out + printed.err
