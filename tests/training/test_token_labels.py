"""Trainers of labels of tokens: stages, second trainings, the callback and students."""

import math
import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.nn.functional import cross_entropy
from torch.testing import assert_close
from transformers import (
    BertForTokenClassification,
    DataCollatorForTokenClassification,
    PreTrainedTokenizerFast,
)

from laplace_lora_ext import (
    Laplace,
    LaplaceCallback,
    LaplaceMixture,
    from_pretrained,
    train_in_stages,
)
from laplace_lora_ext.likelihoods import IGNORED, TOKENS
from laplace_lora_ext.metrics import compare
from laplace_lora_ext.training.trainers import loader_of
from tests.support.models import N_CLASSES, base_model, ragged_batches
from tests.support.trainers import N, trainer_of, values


@pytest.fixture(autouse=True)
def _few_texts():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def labelled(n_texts, classes=N_CLASSES):
    """Make texts of unlike lengths, with labels at some tokens.

    TRL's PRMTrainer marks a step's last token so.
    """
    lengths = [2 + number % 6 for number in range(n_texts)]
    (batch,) = ragged_batches(lengths=lengths, batch_size=n_texts)
    texts = []
    for tokens, length in zip(batch["input_ids"], lengths, strict=True):
        ids = tokens[:length].tolist()
        # What a label is can be learnt from the token.
        labels = [token % classes if token % 3 else IGNORED for token in ids]
        labels[-1] = ids[-1] % classes
        texts.append(
            {"input_ids": ids, "attention_mask": [1] * length, "labels": labels}
        )
    return texts


def classifier(classes=N_CLASSES):
    """Make a model that labels tokens, whose adapter is untrained."""
    torch.manual_seed(0)
    base = BertForTokenClassification(base_model("bert", classes).config)
    lora = LoraConfig(task_type="TOKEN_CLS", r=2, target_modules=["query", "value"])
    return get_peft_model(base, lora)


def trainer_of_tokens(folder, *callbacks, classes=N_CLASSES, **settings):
    trainer = trainer_of(
        folder,
        *callbacks,
        model=classifier(classes),
        data=labelled(N, classes),
        **settings,
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"<pad>": 0}, "<pad>")), pad_token="<pad>"
    )
    trainer.data_collator = DataCollatorForTokenClassification(tokenizer)
    return trainer


def loss_of(trainer, data):
    """Sum the loss of all labelled tokens of the trainer's model as it is."""
    batch = trainer.data_collator(list(data))
    labels = batch.pop("labels")
    with torch.no_grad():
        logits = trainer.model.eval()(**batch).logits
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def n_labels(data):
    return sum(label != IGNORED for text in data for label in text["labels"])


@pytest.mark.parametrize("members", [1, 2])
def test_trainers_of_tokens_train_in_stages(members, tmp_path):
    trainer = trainer_of_tokens(tmp_path, eval_data=labelled(7))
    la = train_in_stages(trainer, members=members)
    first = la.members[0]
    assert first.likelihood == TOKENS
    assert first.n_data == N
    assert_close(
        first.loss.float(),
        loss_of(trainer, trainer.train_dataset),
        rtol=1e-4,
        atol=1e-4,
    )
    figures = trainer.state.log_history[-1]
    assert math.isfinite(figures["laplace_held_out_nll"])
    batch = trainer.data_collator(trainer.eval_dataset)
    p = la(batch, link_approx="mean_field")
    assert p.shape == (*batch["input_ids"].shape, N_CLASSES)
    labels = batch["labels"]
    of_labelled, y = p[labels != IGNORED], labels[labels != IGNORED]
    nll = -of_labelled[torch.arange(len(y)), y].log().mean().item()
    assert figures["eval_laplace_nll"] == pytest.approx(nll, rel=1e-4)
    assert figures["eval_laplace_ece"] == pytest.approx(
        compare(la, [batch]).posterior["ece"], rel=1e-3
    )


def test_a_second_training_of_tokens_leaves_a_second_member(tmp_path):
    trainer = trainer_of_tokens(tmp_path)
    trainer.train()
    la = Laplace(trainer.model)
    la.fit(loader_of(trainer, trainer.train_dataset))
    before = values(trainer.model)
    history = la.optimize_prior_precision(method="second_training", trainer=trainer)
    for name, value in before.items():
        assert torch.equal(trainer.model.state_dict()[name], value), name
    (other,) = history.posteriors
    assert other.likelihood == TOKENS
    assert other.n_data == 0.8 * N
    batch = trainer.data_collator(trainer.train_dataset[:4])
    mean = (la(batch) + other(batch)) / 2
    assert_close(LaplaceMixture([la, other])(batch), mean, equal_nan=True)


@pytest.mark.parametrize("method", ["agreement", "gridsearch", "second_training"])
def test_the_callback_fits_saves_and_measures_labels_of_tokens(method, tmp_path):
    trainer = trainer_of_tokens(
        tmp_path, eval_strategy="steps", eval_steps=2, eval_data=labelled(7)
    )
    callback = LaplaceCallback(method=method, trainer=trainer)
    trainer.add_callback(callback)
    trainer.train()
    la = callback.la
    assert la is not None
    assert la.likelihood == TOKENS
    assert la.n_data == N
    assert_close(
        la.loss.float(), loss_of(trainer, trainer.train_dataset), rtol=1e-4, atol=1e-4
    )
    (entry,) = [
        each for each in trainer.state.log_history if "laplace_evidence" in each
    ]
    batch = trainer.data_collator(trainer.eval_dataset)
    found = compare(la, [batch]).posterior
    assert entry["eval_laplace_nll"] == pytest.approx(found["nll"], rel=1e-4)
    read = from_pretrained(trainer.model, tmp_path)
    assert_close(
        read(batch, link_approx="mean_field"),
        la(batch, link_approx="mean_field"),
        equal_nan=True,
    )


def test_steps_of_a_reasoning_train_in_stages(tmp_path):
    trainer = trainer_of_tokens(tmp_path, classes=2)
    la = train_in_stages(trainer)
    statistics = la.predictive_statistics(loader_of(trainer, trainer.train_dataset))
    assert len(statistics) == n_labels(trainer.train_dataset)
    assert la(trainer.data_collator(trainer.train_dataset[:3])).shape == (3, 4, 2)


def test_a_student_of_tokens_is_refused_with_what_to_use_instead(tmp_path):
    trainer = trainer_of_tokens(tmp_path)
    trainer.train()
    la = Laplace(trainer.model)
    la.fit(loader_of(trainer, trainer.train_dataset))
    before = values(trainer.model)
    with pytest.raises(NotImplementedError, match=r"one a token: use la\.amortize"):
        la.distill(trainer)
    assert values(trainer.model).keys() == before.keys()
