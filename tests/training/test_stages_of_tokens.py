"""Trainers of labels of tokens: stages, second trainings and students."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.nn.functional import cross_entropy, nll_loss
from torch.testing import assert_close
from transformers import (
    BertForTokenClassification,
    DataCollatorForTokenClassification,
    PreTrainedTokenizerFast,
    Trainer,
)

from laplace_lora_ext import Laplace, LaplaceMixture, train_in_stages
from laplace_lora_ext.metrics import compare
from laplace_lora_ext.models.batches import IGNORED
from laplace_lora_ext.training.trainers import loader_of
from tests.support.models import N_CLASSES, base_model, ragged_batches
from tests.support.trainers import N, trainer_of, values

# Much is said of so few texts.
pytestmark = pytest.mark.filterwarnings("ignore")

Text = dict[str, list[int]]


def labelled(n_texts: int) -> list[Text]:
    """Make texts of unlike lengths, with labels at some tokens.

    TRL's PRMTrainer marks a step's last token so.
    """
    lengths = [2 + number % 6 for number in range(n_texts)]
    (batch,) = ragged_batches(lengths=lengths, batch_size=n_texts)
    texts = []
    for tokens, length in zip(batch["input_ids"], lengths, strict=True):
        ids = tokens[:length].tolist()
        # What a label is can be learnt from the token; some before the last have none.
        labels = [token % N_CLASSES if token % 3 else IGNORED for token in ids]
        labels[-1] = ids[-1] % N_CLASSES
        texts.append(
            {"input_ids": ids, "attention_mask": [1] * length, "labels": labels}
        )
    return texts


def classifier() -> PeftModel:
    """Make a model that labels tokens, whose adapter is untrained."""
    torch.manual_seed(0)
    config = base_model("bert", N_CLASSES).config
    base = BertForTokenClassification(config)
    lora = LoraConfig(task_type="TOKEN_CLS", r=2, target_modules=["query", "value"])
    return get_peft_model(base, lora)


def trainer_of_tokens(folder: Path, **settings: Any) -> Trainer:
    """Make a trainer that pads labels as it pads tokens."""
    trainer = trainer_of(folder, model=classifier(), data=labelled(N), **settings)
    # The texts are tokens already: all that the collator asks it is how to pad.
    words = Tokenizer(WordLevel({"<pad>": 0}, "<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>")
    trainer.data_collator = DataCollatorForTokenClassification(tokenizer)
    return trainer


@pytest.mark.parametrize("members", [1, 2])
def test_trainers_of_tokens_train_in_stages(members, tmp_path):
    trainer = trainer_of_tokens(tmp_path, eval_data=labelled(7))
    la = train_in_stages(trainer, members=members)
    assert la.likelihood == "token_classification"
    assert la.n_data == N
    batch = trainer.data_collator(list(trainer.train_dataset))
    labels = batch.pop("labels").flatten()
    with torch.no_grad():
        logits = trainer.model.eval()(**batch).logits.flatten(0, 1)
    # Labels that are ignored count for nothing here, too; sums in float32.
    expected = cross_entropy(logits, labels, reduction="sum")
    assert_close(la.members[0].loss.float(), expected, rtol=1e-4, atol=1e-4)
    figures = trainer.state.log_history[-1]
    assert math.isfinite(figures["laplace_held_out_nll"])

    batch = trainer.data_collator(trainer.eval_dataset)
    log_p = la(batch, link_approx="mean_field").log().flatten(0, 1)
    nll = nll_loss(log_p, batch["labels"].flatten())
    assert figures["eval_laplace_nll"] == pytest.approx(nll.item(), rel=1e-4)
    ece = compare(la, [batch]).posterior["ece"]
    assert figures["eval_laplace_ece"] == pytest.approx(ece, rel=1e-3)


def test_a_second_training_of_tokens_leaves_a_second_member(tmp_path):
    trainer = trainer_of_tokens(tmp_path)
    trainer.train()
    la = Laplace(trainer.model)
    la.fit(loader_of(trainer, trainer.train_dataset))
    before = values(trainer.model)
    history = la.optimize_prior_precision(method="second_training", trainer=trainer)
    after = trainer.model.state_dict()
    for name, value in before.items():
        assert torch.equal(after[name], value), name
    (other,) = history.posteriors
    # A fifth is held out.
    assert other.n_data == 0.8 * N
    assert other.likelihood == "token_classification"
    batch = trainer.data_collator(trainer.train_dataset[:4])
    mean = (la(batch) + other(batch)) / 2
    mixture = LaplaceMixture([la, other])
    found = mixture(batch)
    # Of padding, no posterior predicts a number.
    assert_close(found, mean, equal_nan=True)
    with pytest.raises(NotImplementedError, match="amortize"):
        la.distill(trainer)
