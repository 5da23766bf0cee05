"""Posteriors over answers of several tokens: exact, and all that other answers have."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, pad
from torch.testing import assert_close
from transformers import Trainer

import laplace_lora_ext
from laplace_lora_ext import LaplaceMixture, train_in_stages
from tests.support.choices import (
    ANSWERS,
    batches_of_own_choices,
    choices_batch,
    logits_of_choices,
    of_prompts,
    prompts_of,
    unpadded_choices,
)
from tests.support.dense import (
    EXACT,
    alone,
    block_diagonal_covariance,
    curvature_of,
    evidence,
    exact_ggn,
    full_rank,
    gradient_blocks,
    labels_of,
    predicted,
    softmax_fisher,
)
from tests.support.models import lora_model, ragged_batches, untrained, without_labels
from tests.support.posteriors import GRID, another_training, make
from tests.support.texts import encoder_decoder
from tests.support.trainers import trainer_of

# The models are not trained.
pytestmark = pytest.mark.filterwarnings("ignore:.*(have only|no better than guessing)")


assert_same = partial(assert_close, **EXACT)
MEAN_FIELD = {"link_approx": "mean_field"}

Batch = dict[str, Any]
"""Tokens, masks and labels by their names, as a data loader gives them."""


@dataclass(frozen=True)
class Case:
    """A posterior's options and batches, and the same texts as batches of choices."""

    options: dict[str, Any]
    batches: list[Batch]
    choices: list[Batch]

    @property
    def normalised(self) -> bool:
        return self.options.get("normalised", False)

    @property
    def labels(self) -> Tensor:
        return labels_of(self.batches)

    @property
    def inputs(self) -> list[Batch]:
        return [without_labels(batch) for batch in self.batches]

    @property
    def first_inputs(self) -> Batch:
        return without_labels(self.batches[0])

    def with_means(self) -> "Case":
        """Take means in place of sums over an answer's tokens."""
        options = self.options | {"normalised": True}
        return replace(self, options=options)

    def with_sums(self) -> "Case":
        """Take sums, as is the default."""
        options = self.options | {"normalised": False}
        return replace(self, options=options)


def of_all_texts(side: str = "right") -> Case:
    batches = ragged_batches(padding_side=side, n_classes=4)
    return Case(
        options={"class_token_ids": ANSWERS},
        batches=batches,
        choices=of_prompts(batches, ANSWERS),
    )


def means_of_all_texts(side: str = "right") -> Case:
    return of_all_texts(side).with_means()


def of_each_text(side: str = "right") -> Case:
    batches = batches_of_own_choices(side)
    return Case(options={}, batches=batches, choices=batches)


def means_of_each_text(side: str = "right") -> Case:
    return of_each_text(side).with_means()


def gpt2() -> nn.Module:
    """Make a model as PEFT leaves it: in training mode, with dropout."""
    return lora_model("gpt2")


def served() -> nn.Module:
    """Make the same model as it is served."""
    return gpt2().eval()


def another_served() -> nn.Module:
    """Make what a second training of the same model would end with."""
    return another_training("gpt2").eval()


def fitted(
    case: Case,
    structure: str = "lowrank_kron",
    model: nn.Module | None = None,
    **keywords: Any,
) -> Any:
    """Fit a posterior of a case, by default of a tiny GPT-2 in float64."""
    if model is None:
        model = gpt2()
    la = make(model, structure, **case.options, **keywords)
    la.fit(case.batches)
    return la


def mean_field(la: Any, inputs: Any) -> Tensor:
    """Predict probabilities by the same link everywhere."""
    return la(inputs, **MEAN_FIELD)


def dense(model: nn.Module, case: Case) -> tuple[Tensor, Tensor]:
    """Compute logits and Jacobians of all texts, each choice by itself."""

    def logits_of(model: nn.Module, choices: Any) -> Tensor:
        return logits_of_choices(model, choices, case.normalised)

    texts = []
    for batch in case.choices:
        texts += unpadded_choices(batch)
    of_its_own = copy_of(model)
    return alone(of_its_own, logits_of, texts)


def copy_of(model: nn.Module) -> nn.Module:
    """Copy a model for dense algebra, which changes its mode and asks for gradients."""
    return copy.deepcopy(model).eval()


def assert_near(found: Tensor, H: Tensor) -> None:
    """Compare curvatures, relative to the largest entry of all."""
    # Entries near 0 are sums of large ones that cancel.
    largest = H.max().item()
    atol = 1e-9 * largest
    assert_close(found, H, rtol=1e-9, atol=atol)


@pytest.mark.parametrize(
    ("structure", "make_case", "side"),
    [
        ("lowrank_kron", of_all_texts, "right"),
        ("full", means_of_all_texts, "left"),
        ("lowrank_kron", means_of_each_text, "left"),
        ("full", of_each_text, "right"),
    ],
)
def test_curvature_evidence_and_predictions_are_those_of_dense_algebra(
    structure, make_case, side
):
    case = make_case(side)
    model = gpt2()
    settings = full_rank(structure, stochastic=False)
    la = fitted(case, structure, model, **settings)

    logits, Js = dense(model, case)
    fisher = softmax_fisher(logits)
    if structure == "full":
        blocks = [exact_ggn(Js, fisher)]
    else:
        blocks = gradient_blocks(model, Js, fisher)
    H = torch.block_diag(*blocks)
    found = curvature_of(la)
    assert_near(found, H)

    loss = cross_entropy(logits, case.labels, reduction="sum")
    assert_same(la.loss, loss)
    # The prior precision is 1 as long as none is chosen.
    prior = torch.ones_like(la.mean)
    expected = evidence(H, -loss, la.mean, prior)
    found = la.log_marginal_likelihood()
    assert_same(found, expected)

    f_mu, f_var = predicted(la, case.inputs)
    covariances = block_diagonal_covariance(blocks, Js)
    assert_same(f_mu, logits)
    assert_same(f_var, covariances)


def searched(la: Any, val_loader: list[Batch]) -> Tensor:
    """Choose the prior precision by a search of few values."""
    la.optimize_prior_precision(
        method="gridsearch", val_loader=val_loader, **MEAN_FIELD, **GRID
    )
    return la.prior_precision


@pytest.mark.parametrize("make_case", [of_all_texts, means_of_each_text])
def test_padding_changes_nothing(make_case):
    # It counts positions, and would count padding where it is not masked.
    settings = {"kfac_approx": "expand"}
    on_the_right = make_case("right")
    on_the_left = make_case("left")
    right = fitted(on_the_right, backend_kwargs=settings)
    left = fitted(on_the_left, backend_kwargs=settings)
    found = right.log_marginal_likelihood()
    expected = left.log_marginal_likelihood()
    assert_same(found, expected)


@pytest.fixture(params=[means_of_all_texts, means_of_each_text])
def case_of_means(request: pytest.FixtureRequest) -> Case:
    return request.param()


def test_files_of_means_are_not_read_for_sums(case_of_means, tmp_path):
    model = served()
    la = fitted(case_of_means, model=model)
    la.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="normalised"):
        laplace_lora_ext.from_pretrained(model, tmp_path, normalised=False)


def test_means_and_sums_are_not_mixed(case_of_means):
    case_of_sums = case_of_means.with_sums()
    of_means = fitted(case_of_means, model=served())
    of_sums = fitted(case_of_sums, model=another_served())
    with pytest.raises(ValueError, match=r"differ in .*normalised"):
        LaplaceMixture([of_means, of_sums])


def logits_of_written_answers(model: nn.Module, prompt: list[int]) -> Tensor:
    """Sum log-probabilities that an encoder-decoder gives to each answer alone."""
    start = model.config.decoder_start_token_id
    text = torch.tensor([prompt])
    logits = []
    for answer in ANSWERS:
        decoded = torch.tensor([[start, *answer]])
        output = model(input_ids=text, decoder_input_ids=decoded)
        log_p = output.logits[0].log_softmax(-1)
        # The last place would predict what comes behind the answer.
        places = torch.arange(len(answer))
        of_tokens = log_p[places, answer]
        logits.append(of_tokens.sum())
    return torch.stack(logits)


@pytest.mark.parametrize(
    ("kind", "structure"), [("bart", "full"), ("t5", "lowrank_kron")]
)
def test_encoder_decoders_write_them(kind, structure):
    case = of_all_texts()
    model = encoder_decoder(kind)
    la = fitted(case, structure, model)
    prompts = []
    for batch in case.batches:
        prompts += prompts_of(batch)
    of_its_own = copy_of(model)
    logits, Js = alone(of_its_own, logits_of_written_answers, prompts)
    loss = cross_entropy(logits, case.labels, reduction="sum")
    assert_same(la.loss, loss)
    if structure == "full":
        fisher = softmax_fisher(logits)
        H = exact_ggn(Js, fisher)
        assert_near(la.H, H)
    f_mu, _ = predicted(la, case.inputs)
    assert_same(f_mu, logits)


def test_unequal_numbers_of_choices_are_fitted_and_not_compared():
    (batch,) = ragged_batches(batch_size=8)
    prompts = prompts_of(batch)
    labels = batch["labels"]
    three_answers = ANSWERS[:3]
    # In batches of their own, since within one the numbers can't differ.
    of_four = choices_batch(prompts[:4], [ANSWERS] * 4)
    of_three = choices_batch(prompts[4:], [three_answers] * 4)
    loader = [of_four | {"labels": labels[:4]}, of_three | {"labels": labels[4:]}]
    la = make(gpt2())
    la.fit(loader)
    p_of_four = mean_field(la, of_four)
    assert p_of_four.shape == (4, 4)
    p_of_three = mean_field(la, of_three)
    assert p_of_three.shape == (4, 3)
    with pytest.raises(ValueError, match="unequal numbers of choices"):
        searched(la, loader)


# --- trainers -------------------------------------------------------------------------


class OfAnswers(Trainer):
    """Learns which answer is right, as many users' trainers do."""

    def compute_loss(self, model: Any, inputs: Any, **_: Any) -> Tensor:
        answers = self.answers.for_module(model)
        logits = answers(inputs)
        return cross_entropy(logits, inputs["labels"])


def padded_to_one_length(batches: list[Batch]) -> list[Batch]:
    """Take texts out of batches, all as long as the longest."""
    lengths = []
    for batch in batches:
        tokens = batch["input_ids"]
        lengths.append(tokens.shape[-1])
    longest = max(lengths)
    rows = []
    for batch in batches:
        inputs = without_labels(batch)
        for number, label in enumerate(batch["labels"]):
            row = {"labels": label}
            for key, values in inputs.items():
                tokens = values[number]
                n_missing = longest - tokens.shape[-1]
                row[key] = pad(tokens, (0, n_missing))
            rows.append(row)
    return rows


def trainer_for(folder: Any, case: Case, **settings: Any) -> Any:
    """Make a trainer of rows that are padded already, all of one length."""
    model = lora_model("gpt2", torch.float32)
    rows = padded_to_one_length(case.batches)
    trainer = trainer_of(
        folder,
        model=model,
        data=rows * 2,
        # The model's own signature knows nothing of `score_mask`.
        remove_unused_columns=False,
        save_strategy="no",
        logging_strategy="no",
        **settings,
    )
    la = make(model, **case.options)
    # Its class is changed here, since `trainer_of` makes a plain one.
    trainer.__class__ = OfAnswers
    trainer.answers = la.model
    return trainer


def test_stages_train_and_fit_them(tmp_path):
    case = of_each_text()
    trainer = trainer_for(tmp_path, case)
    # Stages warn of an adapter that looks trained.
    untrained(trainer.model)
    la = train_in_stages(
        trainer, likelihood="classification", held_out=0.3, **case.options
    )
    assert la.n_data == len(trainer.train_dataset)
    expected = case.options.get("class_token_ids")
    assert la.model.class_token_ids == expected
    p = mean_field(la, case.first_inputs)
    sums = p.sum(-1)
    # Of the choices alone, and not of the whole vocabulary.
    assert_close(sums, torch.ones_like(sums))


def joined_logits(model: Callable[[Any], Tensor], case: Case) -> Tensor:
    of_batches = [model(inputs) for inputs in case.inputs]
    return torch.cat(of_batches)


def divergence(targets: Tensor, logits: Tensor) -> float:
    """Compute the mean Kullback-Leibler divergence from targets `(N, C)`."""
    log_p = logits.log_softmax(-1)
    mean = kl_div(log_p, targets, reduction="batchmean")
    return mean.item()


def test_a_student_has_the_posteriors_probabilities(case_of_means, tmp_path):
    case = case_of_means
    trainer = trainer_for(
        tmp_path, case, max_steps=300, learning_rate=1e-2, lr_scheduler_type="constant"
    )
    model = trainer.model
    # Sure of itself, where the posterior is not.
    output_layer = model.base_model.model.lm_head
    output_layer.weight.data *= 20
    la = fitted(case, model=model)
    # So broad a posterior that its predictions are far from the model's.
    la.prior_precision = 1e-7
    of_batches = [mean_field(la, inputs) for inputs in case.inputs]
    targets = torch.cat(of_batches)

    logits = joined_logits(la.model, case)
    before = divergence(targets, logits)
    # Otherwise there would be nothing to learn.
    assert before > 0.05
    name = la.distill(trainer, unlabelled=None)
    model.set_adapter(name)
    model.eval()
    student = la.model.for_module(model)
    logits = joined_logits(student, case)
    after = divergence(targets, logits)
    assert after < 0.2 * before
