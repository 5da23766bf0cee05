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
        # What a label is can be learnt from the token.
        labels = [token % N_CLASSES for token in ids]
        # Some tokens before the last have none.
        for place, token in enumerate(ids[:-1]):
            if token % 3 == 0:
                labels[place] = IGNORED
        text = {"input_ids": ids, "attention_mask": [1] * length, "labels": labels}
        texts.append(text)
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


def fitted_to(trainer: Trainer):
    """Train, and fit a posterior to the same texts."""
    trainer.train()
    la = Laplace(trainer.model)
    loader = loader_of(trainer, trainer.train_dataset)
    la.fit(loader)
    return la


def assert_fitted_to_training_texts(la: Any, trainer: Trainer) -> None:
    """Compare a posterior's loss with that of all labelled tokens."""
    assert la.likelihood == "token_classification"
    assert la.n_data == N
    batch = trainer.data_collator(list(trainer.train_dataset))
    labels = batch.pop("labels")
    trainer.model.eval()
    with torch.no_grad():
        logits = trainer.model(**batch).logits
    # Labels that are ignored count for nothing here, too.
    loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    # Sums in float32, over other batches.
    assert_close(la.loss.float(), loss, rtol=1e-4, atol=1e-4)


def mean_loss(la: Any, batch: Any) -> float:
    """Average the negative log-probability of all labelled tokens."""
    p = la(batch, link_approx="mean_field")
    labels = batch["labels"]
    assert p.shape == (*labels.shape, N_CLASSES)
    is_labelled = labels != IGNORED
    log_p = p[is_labelled].log()
    loss = nll_loss(log_p, labels[is_labelled])
    return loss.item()


@pytest.mark.parametrize("members", [1, 2])
def test_trainers_of_tokens_train_in_stages(members, tmp_path):
    trainer = trainer_of_tokens(tmp_path, eval_data=labelled(7))
    la = train_in_stages(trainer, members=members)
    assert_fitted_to_training_texts(la.members[0], trainer)
    figures = trainer.state.log_history[-1]
    assert math.isfinite(figures["laplace_held_out_nll"])

    batch = trainer.data_collator(trainer.eval_dataset)
    nll = mean_loss(la, batch)
    assert figures["eval_laplace_nll"] == pytest.approx(nll, rel=1e-4)
    ece = compare(la, [batch]).posterior["ece"]
    assert figures["eval_laplace_ece"] == pytest.approx(ece, rel=1e-3)


def test_a_second_training_of_tokens_leaves_a_second_member(tmp_path):
    trainer = trainer_of_tokens(tmp_path)
    la = fitted_to(trainer)
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


def test_a_student_of_tokens_is_refused_with_what_to_use_instead(tmp_path):
    trainer = trainer_of_tokens(tmp_path)
    la = fitted_to(trainer)
    before = values(trainer.model)
    with pytest.raises(NotImplementedError, match=r"one a token: use la\.amortize"):
        la.distill(trainer)
    assert values(trainer.model).keys() == before.keys()
