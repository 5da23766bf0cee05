"""Training in stages: held-out texts choose the prior, and are learnt in the end."""

import json
import os
from copy import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    SubsetRandomSampler,
)
from transformers import Trainer

from laplace_lora_ext import (
    GridSearch,
    LaplaceMixture,
    from_pretrained,
    in_stages,
    train_in_stages,
)
from laplace_lora_ext.metrics import compare, quality
from laplace_lora_ext.saving import FILE
from laplace_lora_ext.training import stages
from laplace_lora_ext.training.stages import choose_priors, joined
from tests.support.matrices import plain
from tests.support.models import Batch, base_model, lora_model, pairs, plain_model
from tests.support.posteriors import fitted, make, normal, validation_loss
from tests.support.ranks import Texts, launched, on_ranks
from tests.support.texts import fitted_text, text_batches
from tests.support.trainers import N, Stop, Watch, trainer_of, values

BATCH, *_ = Texts(4).batches
TEXTS = [*Texts(N)]
# With it nothing is left out of a factor, so that the curvature is the same in any
# order.
ALL_COLUMNS = 24


# --- texts ----------------------------------------------------------------------------


class Learnable(Texts):
    """Four texts of five have the label that their tokens tell."""

    def __getitem__(self, index):
        text = super().__getitem__(index)
        is_real = text["attention_mask"].bool()
        told = index % 3
        text["input_ids"] = torch.where(is_real, 10 + told, text["input_ids"])
        return text | {"labels": torch.tensor(told if index % 5 else 0)}


class Stream(IterableDataset):
    """Texts without a length."""

    def __iter__(self):
        return iter(TEXTS)


def labelled(labels: Tensor) -> list[Batch]:
    """Make a text for each label."""
    texts = Texts(len(labels))
    return [text | {"labels": y} for text, y in zip(texts, labels, strict=True)]


def fresh_base(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Make the model that an adapter of `lora_model("bert")` belongs to."""
    torch.manual_seed(0)
    return base_model("bert").to(dtype)


# --- the parts ------------------------------------------------------------------------


def test_a_choice_of_members_leaves_the_posteriors_as_they_are():
    las = [fitted(prior_precision=prior) for prior in (2.0, 3.0)]
    hyperparameters, history = choose_priors(las, [BATCH])
    best = joined(las)
    for member, chosen in zip(best.members, hyperparameters, strict=True):
        member.hyperparameters = chosen
    probabilities = best(BATCH, link_approx="mean_field")
    figures = quality(probabilities, BATCH["labels"])
    # Between two scales at which losses are summed, it is interpolated.
    assert figures["nll"] == pytest.approx(history.loss, rel=1e-4)
    assert best.members[0].logit_scale == history.chosen.logit_scale != 1
    assert [la.prior_precision.item() for la in las] == [2, 3]


def test_members_choose_how_kinds_differ_by_the_prior_alone():
    la = make(plain(), modules_to_save=True)
    # Too sure, so that a scale of the logits would change what is chosen.
    for block in la.blocks[-2:]:
        block.weight.data *= 8
    la.fit(pairs(3))
    validation = pairs(10, n=5)
    alone, scaled = copy(la), copy(la)
    GridSearch(val_loader=validation, optimize_scale=False)(alone)
    GridSearch(val_loader=validation)(scaled)
    both, _ = choose_priors([la, la], validation)
    for found in both:
        factor = found.prior_precision / alone.prior_precision
        assert_close(factor, factor[:1].expand_as(factor))
    factor = both[0].prior_precision / scaled.prior_precision
    assert factor.max() > 1.1 * factor.min()
    # The posterior keeps its own.
    assert la.prior_precision.tolist() == [1]
    # Texts that are written choose one factor of them all.
    model = lora_model("gpt2", modules_to_save=["lm_head"]).eval()
    la = fitted_text(model, modules_to_save=True)
    both, _ = choose_priors([la, la], text_batches(lengths=(5, 4)))
    assert both[0].prior_precision.numel() == 1


# --- stages of a trainer --------------------------------------------------------------


# Settings of a trainer, the share held out, and each stage's steps and warm-up.
@pytest.mark.parametrize(
    ("settings", "share", "expected", "warmup"),
    [
        ({"max_steps": 10, "warmup_steps": 5}, 0.4, (6, 2), (3, 1)),
        # A share of all steps.
        ({"max_steps": 10, "warmup_steps": 0.5}, 0.4, (6, 2), (3, 1)),
        ({"max_steps": 1}, 0.4, (1, 1), (0, 0)),
        ({"max_steps": -1, "gradient_accumulation_steps": 2}, 0.2, (6, 3), (0, 0)),
        # 1 - 0.7 is a little more than 0.3, which must not add a step.
        ({"max_steps": -1, "per_device_train_batch_size": 2}, 0.7, (9, 8), (0, 0)),
    ],
)
def test_each_stage_takes_its_share_of_the_steps(
    tmp_path, settings, share, expected, warmup
):
    watch = Watch()
    trainer = trainer_of(tmp_path, watch, **settings)
    train_in_stages(trainer, share)
    assert tuple(map(len, watch.steps)) == expected
    for n_warmup, steps in zip(warmup, watch.steps, strict=True):
        rates, (n_remembered, *_) = zip(*steps, strict=True)
        assert rates.index(max(rates)) == n_warmup
        assert rates[0] == (0 if n_warmup else 1e-2)
        # Each stage has an optimizer of its own.
        assert n_remembered == 0
    log = trainer.state.log_history
    stages = [entry["stage"] for entry in log if "learning_rate" in entry]
    first, second = expected
    assert stages == ["stage_1"] * first + ["stage_2"] * second


def test_the_seed_chooses_what_is_held_out_and_the_second_stage_learns_it(tmp_path):
    watch = Watch()
    # 0 is a seed too, and no lack of one.
    for seed in (None, 0):
        trainer = trainer_of(
            tmp_path, watch, data_seed=seed, max_steps=2, save_strategy="no"
        )
        with pytest.warns(UserWarning, match="looks trained"):
            train_in_stages(trainer, 0.25)
    assert [len(data) for data in watch.data] == [15, N, 15, N]
    one, _, other, _ = watch.data
    assert one.indices != other.indices


def test_the_prior_is_what_the_held_out_texts_choose(tmp_path):
    watch = Watch()
    data, model = Learnable(N), lora_model("bert")
    options = {"model": model, "data": data, "max_steps": 20, "learning_rate": 0.05}
    options["eval_data"] = {"several": data}  # which have no figures
    trainer = trainer_of(tmp_path, watch, save_strategy="no", **options)
    la = train_in_stages(trainer, 0.4, backend_kwargs={"rank": ALL_COLUMNS})
    chosen = la.prior_precision.item()

    def fitted_to(examples: Dataset, model: nn.Module):
        return fitted(batches=DataLoader(examples, N), model=model, rank=ALL_COLUMNS)

    # The same by hand: the first stage's adapter, fitted to its texts, on a grid.
    trained_on = watch.data[0].indices
    held_out = Subset(data, [place for place in range(N) if place not in trained_on])
    first = PeftModel.from_pretrained(fresh_base(torch.float64), tmp_path / "stage_1")
    by_hand = fitted_to(Subset(data, trained_on), first)
    validation = DataLoader(held_out, N)
    history = GridSearch(val_loader=validation)(by_hand)
    # Within the grid, so that another choice of texts would make another.
    assert 0 < history.choice < 100
    assert chosen == by_hand.prior_precision.item()
    assert la.logit_scale == pytest.approx(by_hand.logit_scale)
    loss = validation_loss(by_hand, chosen, validation, link_approx="mean_field")
    figures = trainer.state.log_history[-1]
    assert figures["laplace_held_out_nll"] == pytest.approx(loss, rel=1e-4)
    assert figures["laplace_prior_precision"] == chosen
    assert figures["laplace_logit_scale"] == la.logit_scale

    # The posterior is that of the second stage's weights, with what the first has
    # chosen.
    of_second = fitted_to(data, model)
    of_second.hyperparameters = la.hyperparameters
    assert_close(la(BATCH), of_second(BATCH))


def test_all_is_in_the_output_folder_and_the_logs(tmp_path):
    config = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"])
    model = get_peft_model(fresh_base(), config)
    trainer = trainer_of(
        tmp_path,
        model=model,
        eval_data=Texts(9),
        eval_strategy="steps",
        eval_steps=1,
        load_best_model_at_end=True,
    )
    la = train_in_stages(trainer, members=2)
    assert model.active_adapter == "default"
    assert (tmp_path / "stage_1" / "checkpoint-4").exists()
    # As after any training.
    assert (tmp_path / "training_args.bin").exists()
    log = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    assert log == trainer.state.log_history
    expected = compare(la, DataLoader(Texts(9), batch_size=5)).posterior["nll"]
    assert log[-1]["eval_laplace_nll"] == pytest.approx(expected, abs=1e-5)
    # The best weights of the second stage alone are loaded at its end: of one step for
    # each member.
    of_second = [entry for entry in log if entry.get("stage") == "stage_2"]
    best, _ = (each["eval_loss"] for each in of_second if "eval_loss" in each)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(best, rel=1e-5)
    # The best weights of "default" are not the other's.
    one, other = la.members
    assert not torch.equal(one.mean, other.mean)
    assert log[-1]["laplace_logit_scale"] == one.logit_scale != 1

    again = LaplaceMixture.from_pretrained(fresh_base(), tmp_path)
    assert_close(again(BATCH), la(BATCH))
    # A member's folder is also that of one posterior, under any adapter's name.
    folder = tmp_path / "member_1"
    renamed = PeftModel.from_pretrained(fresh_base(), folder, "mine")
    assert_close(from_pretrained(renamed, folder)(BATCH), other(BATCH))

    # Of one member in the same folder nothing is left of the mixture.
    alone = trainer_of(tmp_path, eval_data=Stream())
    save_model = alone.save_model

    def upload(*args: Any, **options: Any) -> None:
        """Save a checkpoint, or in the end all that is in the folder."""
        assert args or (tmp_path / FILE).exists()
        save_model(*args, **options)

    alone.save_model = upload
    train_in_stages(alone)
    with pytest.raises(FileNotFoundError):
        LaplaceMixture.from_pretrained(fresh_base(), tmp_path)


def test_a_training_does_not_end_in_vain_for_its_evaluation_data(tmp_path):
    without_labels = [{"input_ids": text["input_ids"]} for text in Texts(3)]
    trainer = trainer_of(tmp_path, eval_data=without_labels)
    with pytest.warns(UserWarning, match="no figures of eval_dataset: .*No labels"):
        train_in_stages(trainer)
    assert "laplace_held_out_nll" in trainer.state.log_history[-1]
    assert (tmp_path / "trainer_state.json").exists()


# --- runs that were killed ------------------------------------------------------------


def test_a_run_that_was_killed_goes_on_to_the_same_weights(tmp_path, monkeypatch):
    whole = trainer_of(tmp_path / "whole", max_steps=6)
    expected = train_in_stages(whole, members=2)
    # Of two members and two stages, each after another seed.
    assert torch.initial_seed() == whole.args.seed + 4

    # Beside checkpoints of other trainings.
    folder = tmp_path / "killed"
    trainer_of(folder, learning_rate=0.1).train()
    train_in_stages(trainer_of(folder, learning_rate=0.1, max_steps=8))
    # Up to 5.22, transformers reads no "default" that has other adapters beside it.
    monkeypatch.setattr(Trainer, "_load_from_checkpoint", lambda *_: None)
    # Of five steps of the first stage, for each member, and two of the second: within
    # the first member's last training, and before the other's.
    for stop, resumes in ((12, False), (2, True)):
        killed = trainer_of(folder, Stop(stop), max_steps=6)
        handler = killed.callback_handler
        before = [killed.args, killed.train_dataset, *handler.callbacks]
        with pytest.raises(KeyboardInterrupt, match="killed"):
            train_in_stages(killed, members=2, resume_from_checkpoint=resumes)
        # The trainer is left as it was.
        assert [killed.args, killed.train_dataset, *handler.callbacks] == before
        assert killed.optimizer is None
        assert list(killed.model.peft_config) == ["default"]

    watch = Watch()
    resumed = trainer_of(folder, watch, max_steps=6)
    la = train_in_stages(resumed, resume_from_checkpoint=True, members=2)
    assert list(map(len, watch.steps)) == [2]
    assert_close(values(resumed.model), values(whole.model), rtol=0, atol=0)
    assert torch.equal(la(BATCH), expected(BATCH))
    losses = [
        [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        for trainer in (resumed, whole)
    ]
    assert losses[0] == losses[1]


def test_the_last_checkpoint_is_that_of_most_steps(tmp_path):
    stages._write(tmp_path, {})
    os.utime(tmp_path / stages._MARK, (0, 0))  # before all that follows
    for name in ("checkpoint-9", "checkpoint-10"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "trainer_state.json").touch()
    (tmp_path / "checkpoint-11").mkdir()  # not whole
    assert stages._begun(tmp_path) == ({}, tmp_path / "checkpoint-10")


def test_a_run_goes_on_as_it_began_alone(tmp_path):
    with pytest.raises(KeyboardInterrupt, match="killed"):
        train_in_stages(trainer_of(tmp_path, Stop(3)))
    changes = {
        "weight_decay": 0.1,
        "learning_rate": 0.1,
        "max_steps": 6,
        "num_train_epochs": 2,
        "per_device_train_batch_size": 5,
        "seed": 1,
        "gradient_accumulation_steps": 2,
        "optim": "sgd",
        "lr_scheduler_type": "cosine",
        "warmup_steps": 1,
        "label_smoothing_factor": 0.1,
        "max_grad_norm": 2.0,
        "adam_beta1": 0.8,
        "adam_beta2": 0.9,
        "data": TEXTS[7:] + TEXTS[:7],
    }
    for name, value in changes.items():
        watch = Watch()
        trainer = trainer_of(tmp_path, watch, **{name: value})
        told = name.removeprefix("per_device_")
        message = f"stage_1 is .* with {told}=.* this one has .*{value}"
        if name == "data":
            message = "with held-out examples="
        with pytest.raises(ValueError, match=f"(?i){message}"):
            train_in_stages(trainer, resume_from_checkpoint=True)
        assert watch.steps == []
    other = trainer_of(tmp_path)
    other.model.peft_config["default"].lora_alpha = 99
    with pytest.raises(ValueError, match="this one has 99"):
        train_in_stages(other, resume_from_checkpoint=True)


# --- what cannot work -----------------------------------------------------------------


WITHOUT_TEXT = [text | {"attention_mask": torch.zeros(7)} for text in TEXTS]
# Attributes that a trainer has, arguments of the call, and what the error says.
REFUSED = [
    ({"train_dataset": iter(TEXTS)}, {}, "has a length"),
    ({"model_init": dict}, {}, "model_init"),
    ({"optimizer": object()}, {}, "optimizer"),
    ({"get_train_dataloader": lambda: DataLoader(Texts(N))}, {}, "self.train_data"),
    ({"train_dataset": labelled(torch.arange(3))}, {"held_out": 0.4}, "No class"),
    ({"train_dataset": WITHOUT_TEXT}, {}, "no text"),
    ({}, {"members": 2}, "'member_1' already"),
]
# What a refused call leaves in a trainer.
KEPT = ("args", "train_dataset", "optimizer", "lr_scheduler", "state", "model")


@pytest.mark.parametrize(("attributes", "arguments", "message"), REFUSED)
def test_what_cannot_work_is_refused_before_any_training(
    tmp_path, attributes, arguments, message
):
    watch = Watch()
    trainer = trainer_of(tmp_path, watch)
    trainer.model.add_adapter("member_1", trainer.model.peft_config["default"])
    vars(trainer).update(attributes)
    before = {attribute: getattr(trainer, attribute) for attribute in KEPT}
    with pytest.raises((ValueError, NotImplementedError), match=message):
        train_in_stages(trainer, **arguments)
    assert watch.steps == []
    for attribute, value in before.items():
        assert getattr(trainer, attribute) is value, attribute


# --- a loop of one's own --------------------------------------------------------------


def test_a_loop_of_ones_own_trains_on_what_its_loader_gives():
    model = plain_model(2)
    # Targets are differences of their numbers.
    data = [(x, x[:2] - x[2:4]) for x in normal(12, 5)]
    places = [place for place in range(12) if place not in (3, 6)]
    calls = []

    def train(trained, examples, share):
        assert trained is model
        inputs = [x.tolist() for x, _ in examples]
        seen = [place for place, (x, _) in enumerate(data) if x.tolist() in inputs]
        calls.append((seen, share))
        # As a training would, so that the second stage has another model.
        for weight in model.parameters():
            weight.data.mul_(0.9)

    loader = DataLoader(data, batch_size=4, sampler=SubsetRandomSampler(places))
    options = {"likelihood": "regression", "sigma_noise": 0.5}
    la = in_stages(train, model, loader, 0.3, **options)
    (rest, first_share), everything = calls
    assert (len(rest), first_share) == (7, 0.7)
    assert set(rest) < set(places)
    assert everything == (places, 0.25)
    assert la.n_data == len(places)
    # The held-out examples have chosen it.
    assert la.sigma_noise.item() != 0.5


# --- numbers and labels of tokens -----------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_the_noise_of_numbers_is_among_the_figures(tmp_path):
    model = lora_model("bert", torch.float32, n_labels=1)
    data = labelled(50 + 10 * normal(N).float())
    trainer = trainer_of(tmp_path, model=model, data=data, eval_data=data[:5])
    la = train_in_stages(trainer, members=2)
    noises = [member.sigma_noise.item() for member in la.members]
    assert len(set(noises)) == 2
    figures = trainer.state.log_history[-1]
    assert figures["laplace_sigma_noise"] == pytest.approx(sum(noises) / 2)
    assert 0 <= figures["eval_laplace_coverage"] <= 1


# --- several processes ----------------------------------------------------------------


def test_processes_train_and_choose_together(tmp_path):
    def job(rank):
        launched(rank, 2, 29517)
        trainer = trainer_of(
            tmp_path, max_steps=2, ddp_backend="gloo", eval_data=Texts(9)
        )
        la = train_in_stages(trainer, members=2)
        return la(BATCH), la.members[0].n_data, trainer.state.log_history[-1]

    first, second = on_ranks(job, 2)
    assert_close(first[0], second[0])
    assert first[1:] == second[1:]
    assert first[1] == N


def test_answers_are_read_by_the_tokenizer_of_the_trainer(tmp_path):
    trainer = trainer_of(tmp_path)
    trainer.processing_class = "no tokenizer"
    with pytest.raises(TypeError, match="'str' object is not callable"):
        train_in_stages(trainer, class_texts=["A", "B"])
    trainer.model = lora_model("gpt2")
    assert stages._likelihood(trainer, {"class_token_ids": [1, 2]}) is None
