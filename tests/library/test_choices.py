"""Posteriors over answers of several tokens: exact, and all that other answers have."""

import copy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.testing import assert_close
from transformers import Trainer

import laplace_lora_ext
from laplace_lora_ext import LaplaceMixture, train_in_stages
from laplace_lora_ext.models import vocabulary
from laplace_lora_ext.passes import graph
from tests.support.choices import (
    ANSWERS,
    batches_of_own_choices,
    choices_batch,
    logits_of_choices,
    of_prompts,
    one_token_choices,
    prompts_of,
    unpadded_choices,
)
from tests.support.dense import (
    EXACT,
    alone,
    block_diagonal_covariance,
    evidence,
    exact_ggn,
    gradient_blocks,
    softmax_fisher,
)
from tests.support.models import (
    CLASS_TOKEN_IDS,
    VOCABULARY,
    llama_with_output_layer,
    lora_model,
    ragged_batches,
    without_labels,
)
from tests.support.posteriors import GRID, STRUCTURES, another_training, make
from tests.support.texts import RowsOfTheVocabulary, encoder_decoder
from tests.support.trainers import trainer_of

# The models are not trained.
pytestmark = pytest.mark.filterwarnings("ignore:.*(have only|no better than guessing)")


@dataclass(frozen=True)
class Case:
    """A posterior's options and batches, and the same texts as batches of choices."""

    options: dict[str, Any]
    batches: list[dict[str, Any]]
    choices: list[dict[str, Any]]

    @property
    def normalised(self) -> bool:
        return self.options.get("normalised", False)

    @property
    def labels(self) -> torch.Tensor:
        return torch.cat([batch["labels"] for batch in self.batches])

    @property
    def inputs(self) -> list[dict[str, Any]]:
        return [without_labels(batch) for batch in self.batches]

    def with_means(self) -> "Case":
        """Take means in place of sums over an answer's tokens."""
        return replace(self, options=self.options | {"normalised": True})


def of_all_texts(side: str) -> Case:
    batches = ragged_batches(padding_side=side, n_classes=4)
    return Case(
        options={"class_token_ids": ANSWERS},
        batches=batches,
        choices=of_prompts(batches, ANSWERS),
    )


def means_of_all_texts(side: str) -> Case:
    return of_all_texts(side).with_means()


def of_each_text(side: str) -> Case:
    batches = batches_of_own_choices(side)
    return Case(
        options={},
        batches=batches,
        choices=batches,
    )


def means_of_each_text(side: str) -> Case:
    return of_each_text(side).with_means()


CASES = [of_all_texts, means_of_all_texts, of_each_text, means_of_each_text]


def fitted(
    case: Case,
    structure: str = "lowrank_kron",
    model: nn.Module | None = None,
    **keywords: Any,
) -> Any:
    """Fit a posterior of a case, by default of a tiny GPT-2 in float64."""
    if model is None:
        model = lora_model("gpt2")
    la = make(model, structure, **case.options, **keywords)
    la.fit(case.batches)
    return la


def dense(
    model: nn.Module,
    case: Case,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute logits and Jacobians of all texts, each choice by itself."""

    def logits_of(
        model: nn.Module,
        choices: Any,
    ) -> torch.Tensor:
        return logits_of_choices(model, choices, case.normalised)

    texts = [text for batch in case.choices for text in unpadded_choices(batch)]
    # Of a copy, whose weights may ask for gradients and whose mode may change.
    return alone(copy.deepcopy(model).eval(), logits_of, texts)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("make_case", CASES)
@pytest.mark.parametrize("structure", ["lowrank_kron", "full"])
def test_curvature_evidence_and_predictions_are_those_of_dense_algebra(
    structure, make_case, side
):
    case = make_case(side)
    model = lora_model("gpt2")
    settings = {}
    if structure == "lowrank_kron":
        settings["backend_kwargs"] = {"rank": 100}  # which leaves nothing out
    la = fitted(case, structure, model, **settings)

    logits, Js = dense(model, case)
    fisher = softmax_fisher(logits)
    if structure == "full":
        blocks = [exact_ggn(Js, fisher)]
        found = la.H
    else:
        blocks = gradient_blocks(model, Js, fisher)
        found = la.H.to_matrix()
    H = torch.block_diag(*blocks)
    assert_close(found, H, rtol=1e-9, atol=1e-9 * H.max().item())

    loss = cross_entropy(logits, case.labels, reduction="sum")
    assert_close(la.loss, loss, **EXACT)
    prior = torch.ones_like(la.mean)
    expected = evidence(H, -loss, la.mean, prior)
    assert_close(la.log_marginal_likelihood(), expected, **EXACT)

    moments = [la.predictive_moments(inputs) for inputs in case.inputs]
    means = torch.cat([of_batch.f_mu for of_batch in moments])
    covariances = torch.cat([of_batch.f_var for of_batch in moments])
    assert_close(means, logits, **EXACT)
    assert_close(covariances, block_diagonal_covariance(blocks, Js), **EXACT)


@pytest.mark.parametrize("structure", [name for name in STRUCTURES if name != "kron"])
def test_choices_of_one_token_are_class_tokens(structure):
    model = lora_model("gpt2")
    batches = ragged_batches()
    plain = make(model, structure, class_token_ids=CLASS_TOKEN_IDS)
    plain.fit(batches)
    choices = one_token_choices(batches)
    of_choices = make(model, structure)
    of_choices.fit(choices)
    close = {"rtol": 1e-10, "atol": 1e-12}
    found = of_choices.log_marginal_likelihood()
    assert_close(found, plain.log_marginal_likelihood(), **close)
    for batch, batch_of_choices in zip(batches, choices, strict=True):
        expected = plain(batch, link_approx="mean_field")
        found = of_choices(batch_of_choices, link_approx="mean_field")
        assert_close(found, expected, **close)

    search = {"method": "gridsearch", "link_approx": "mean_field", **GRID}
    plain.optimize_prior_precision(val_loader=batches, **search)
    of_choices.optimize_prior_precision(val_loader=choices, **search)
    assert_close(of_choices.prior_precision, plain.prior_precision, **close)


def test_any_tokens_of_the_vocabulary_are_choices():
    """As where a text's most probable tokens are compared."""
    model = lora_model("gpt2").eval()
    (batch,) = ragged_batches(batch_size=8)
    whole_vocabulary = list(range(VOCABULARY))
    logits = make(model, class_token_ids=whole_vocabulary).model(batch)
    best = logits.topk(3).indices
    tokens = best.unsqueeze(-1).tolist()  # choices of one token
    choices = choices_batch(prompts_of(batch), tokens)
    la = make(model)
    la.fit([choices | {"labels": batch["labels"]}])
    found = la.model(choices).softmax(-1)
    expected = logits.gather(1, best).softmax(-1)
    assert_close(found, expected, **EXACT)


@pytest.mark.parametrize("make_case", CASES)
@pytest.mark.parametrize("kfac_approx", ["gradient", "expand"])
def test_padding_changes_nothing(make_case, kfac_approx):
    evidences = {}
    for side in ("right", "left"):
        settings = {"kfac_approx": kfac_approx}
        la = fitted(make_case(side), backend_kwargs=settings)
        evidences[side] = la.log_marginal_likelihood()
    assert_close(evidences["right"], evidences["left"], **EXACT)


@pytest.fixture(params=[of_all_texts, of_each_text])
def case(request: pytest.FixtureRequest) -> Case:
    """Texts with answers of all, and texts with choices of their own."""
    return request.param("right")


@pytest.mark.parametrize("method", ["agreement", "marglik", "gridsearch", "val_gd"])
def test_every_method_chooses_a_prior(case, method):
    la = fitted(case)
    data = {
        "agreement": {"train_loader": case.batches},
        "marglik": {"n_steps": 2},
        "gridsearch": {"val_loader": case.batches, "link_approx": "mean_field", **GRID},
        "val_gd": {"val_loader": case.batches, "n_steps": 2},
    }
    la.optimize_prior_precision(method=method, **data[method])
    assert torch.isfinite(la.prior_precision).all()


def test_statistics_and_learnt_variances_predict_as_many_choices(case):
    la = fitted(case)
    inputs = case.inputs[0]
    exact = la(inputs, link_approx="mean_field")
    la.amortize(case.batches, unlabelled=None)
    learnt = la(inputs, link_approx="mean_field", pred_type="amortized")
    assert learnt.shape == exact.shape
    statistics = la.predictive_statistics(case.batches)
    moments = statistics.moments(la.prior_precision)
    of_statistics = la(moments, link_approx="mean_field")[: len(exact)]
    assert_close(of_statistics, exact, rtol=1e-5, atol=1e-6)  # kept in float32
    prediction = la.predict(inputs)
    assert prediction.probabilities.shape == exact.shape


@pytest.fixture(params=[means_of_all_texts, means_of_each_text])
def case_of_means(request: pytest.FixtureRequest) -> Case:
    return request.param("right")


def test_files_know_the_answers(case_of_means, tmp_path):
    model = lora_model("gpt2").eval()
    la = fitted(case_of_means, model=model)
    la.save_pretrained(tmp_path)
    loaded = laplace_lora_ext.from_pretrained(model, tmp_path)
    expected = case_of_means.options.get("class_token_ids")
    assert loaded.model.class_token_ids == expected
    inputs = case_of_means.inputs[0]
    assert torch.equal(loaded(inputs), la(inputs))
    message = "normalised was True at the fit, and now is False"
    with pytest.raises(ValueError, match=message):
        laplace_lora_ext.from_pretrained(model, tmp_path, normalised=False)


def test_mixtures_know_the_answers(case_of_means):
    la = fitted(case_of_means, model=lora_model("gpt2").eval())
    another = another_training("gpt2").eval()
    other = fitted(case_of_means, model=another)
    mixture = LaplaceMixture([la, other])
    inputs = case_of_means.inputs[0]
    predicted = []
    for each in (mixture, la, other):
        predicted.append(each(inputs, link_approx="mean_field"))
    of_mixture, *of_members = predicted
    mean = torch.stack(of_members).mean(0)
    assert_close(of_mixture, mean, **EXACT)

    options = case_of_means.options | {"normalised": False}
    of_sums = fitted(replace(case_of_means, options=options), model=another)
    with pytest.raises(ValueError, match=r"differ in .* normalised or"):
        LaplaceMixture([la, of_sums])


def logits_of_written_answers(model: nn.Module, prompt: list[int]) -> torch.Tensor:
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
        logits.append(log_p[places, answer].sum())
    return torch.stack(logits)


@pytest.mark.parametrize("kind", ["bart", "t5"])
@pytest.mark.parametrize("structure", ["lowrank_kron", "full"])
def test_encoder_decoders_write_them(kind, structure):
    case = of_all_texts("right")
    model = encoder_decoder(kind)
    la = fitted(case, structure, model)
    prompts = [prompt for batch in case.batches for prompt in prompts_of(batch)]
    copied = copy.deepcopy(model).eval()
    logits, Js = alone(copied, logits_of_written_answers, prompts)
    loss = cross_entropy(logits, case.labels, reduction="sum")
    assert_close(la.loss, loss, **EXACT)
    if structure == "full":
        H = exact_ggn(Js, softmax_fisher(logits))
        assert_close(la.H, H, rtol=1e-9, atol=1e-9 * H.max().item())
    f_mu, _ = la.predictive_moments(case.inputs[0])
    assert_close(f_mu, logits[: len(f_mu)], **EXACT)


def test_unequal_numbers_of_choices_are_fitted_and_not_compared():
    (batch,) = ragged_batches(batch_size=8)
    prompts = prompts_of(batch)
    labels = batch["labels"]
    of_four = choices_batch(prompts[:4], [ANSWERS] * 4)
    of_three = choices_batch(prompts[4:], [ANSWERS[:3]] * 4)
    loader = [
        of_four | {"labels": labels[:4]},
        of_three | {"labels": labels[4:]},
    ]
    la = make(lora_model("gpt2"))
    la.fit(loader)
    assert la(of_four, link_approx="mean_field").shape == (4, 4)
    assert la(of_three, link_approx="mean_field").shape == (4, 3)
    with pytest.raises(ValueError, match="unequal numbers of choices"):
        la.optimize_prior_precision(method="gridsearch", val_loader=loader, **GRID)


def test_nothing_is_printed_and_no_name_is_out_of_date(caplog, capsys):
    case = of_all_texts("right")
    la = fitted(case)
    la(case.inputs[0])
    printed = capsys.readouterr()
    assert not printed.out
    assert not printed.err
    assert not caplog.records


# --- trainers -------------------------------------------------------------------------


class OfAnswers(Trainer):
    """Learns which answer is right, as many users' trainers do."""

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        **_: Any,
    ) -> torch.Tensor:
        logits = self.answers.around(model)(inputs)
        return cross_entropy(logits, inputs["labels"])


def padded_to_one_length(batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Take texts out of batches, all as long as the longest."""
    longest = max(batch["input_ids"].shape[-1] for batch in batches)
    rows = []
    for batch in batches:
        for number, label in enumerate(batch["labels"]):
            row = {"labels": label}
            for key, values in without_labels(batch).items():
                tokens = values[number]
                n_missing = longest - tokens.shape[-1]
                row[key] = nn.functional.pad(tokens, (0, n_missing))
            rows.append(row)
    return rows


def trainer_for(
    folder: Any,
    case: Case,
    **settings: Any,
) -> Any:
    """Make a trainer of rows that are padded already, all of one length."""
    model = lora_model("gpt2", torch.float32)
    rows = padded_to_one_length(case.batches)
    trainer = trainer_of(
        folder,
        model=model,
        data=rows * 2,
        remove_unused_columns=False,
        save_strategy="no",
        logging_strategy="no",
        **settings,
    )
    trainer.__class__ = OfAnswers
    trainer.answers = make(model, **case.options).model
    return trainer


def test_stages_train_and_fit_them(case, tmp_path):
    trainer = trainer_for(tmp_path, case)
    for name, weight in trainer.model.named_parameters():
        if "lora_B" in name:
            nn.init.zeros_(weight)
    la = train_in_stages(
        trainer,
        likelihood="classification",
        held_out=0.3,
        **case.options,
    )
    assert la.n_data == len(trainer.train_dataset)
    assert la.model.class_token_ids == case.options.get("class_token_ids")
    probabilities = la(case.inputs[0], link_approx="mean_field")
    assert_close(probabilities.sum(-1), torch.ones(len(probabilities)))


@pytest.mark.parametrize("output_layer", [False, True])
@pytest.mark.parametrize("make_case", CASES)
def test_parts_of_the_vocabulary_give_the_same_and_hold_few_rows(
    make_case, output_layer, monkeypatch
):
    model = llama_with_output_layer() if output_layer else lora_model("gpt2")
    model.double().eval()
    case = make_case("left")
    n_texts, n_choices, _ = case.choices[0]["input_ids"].shape
    inputs = case.inputs[0]
    # One seed at a time: several have as many times the rows.
    monkeypatch.setattr(graph, "_ROWS", 1)

    def figures():
        la = make(model, backend_kwargs={"rank": 100}, **case.options)
        weights = [block.weight.requires_grad_() for block in la.blocks]
        with RowsOfTheVocabulary(model) as rows:
            la.fit(case.batches)
            student = la.model.around(model)
            student.divide_vocabulary()
            log_p = student.log_probs(inputs)
            total = log_p.square().sum()
            slopes = torch.autograd.grad(total, weights)
        figures = {
            "H": la.H.to_matrix(),
            "loss": la.loss,
            "prediction": la(inputs, link_approx="mean_field"),
            "log_p": log_p,
            "slopes": slopes,
        }
        return figures, rows.most

    expected, n_at_once = figures()
    monkeypatch.setattr(vocabulary, "MOST_ROWS", 1)
    found, n_in_parts = figures()
    assert_close(found, expected, rtol=1e-9, atol=1e-10)
    if not output_layer:  # whose own weights have gradients at each token
        assert n_in_parts == n_texts * n_choices
        assert n_in_parts < n_at_once


def test_a_student_has_the_posteriors_probabilities(case_of_means, tmp_path):
    case = case_of_means
    trainer = trainer_for(
        tmp_path,
        case,
        max_steps=300,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
    )
    model = trainer.model
    # Sure of itself, where the posterior is not.
    model.base_model.model.lm_head.weight.data *= 20
    la = fitted(case, model=model)
    la.prior_precision = 1e-7
    predicted = [la(inputs, link_approx="mean_field") for inputs in case.inputs]
    targets = torch.cat(predicted)

    def divergence(answers: Any) -> float:
        """Compute the mean Kullback-Leibler divergence from the posterior."""
        logits = torch.cat([answers(inputs) for inputs in case.inputs])
        log_p = logits.log_softmax(-1)
        return nn.functional.kl_div(log_p, targets, reduction="batchmean").item()

    before = divergence(la.model)
    student = la.distill(trainer, unlabelled=None)
    model.set_adapter(student)
    model.eval()
    after = divergence(la.model.around(model))
    assert before > 0.05
    assert after < 0.2 * before
