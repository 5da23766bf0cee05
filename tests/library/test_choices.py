"""Posteriors over answers of several tokens: exact, and all that other answers have."""

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
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
    llama_with_output_layer,
    lora_model,
    ragged_batches,
    without_labels,
)
from tests.support.posteriors import GRID, STRUCTURES, another_training, make
from tests.support.texts import RowsOfTheVocabulary, encoder_decoder
from tests.support.trainers import trainer_of


@dataclass(frozen=True)
class Case:
    """A posterior's options and batches, and the same texts as batches of choices."""

    options: dict[str, Any]
    batches: list[dict[str, Any]]
    choices: list[dict[str, Any]]

    @property
    def normalised(self) -> bool:
        return self.options.get("normalised", False)


def of_all_texts(side: str) -> Case:
    batches = ragged_batches(padding_side=side, n_classes=4)
    return Case({"class_token_ids": ANSWERS}, batches, of_prompts(batches, ANSWERS))


def means_of_all_texts(side: str) -> Case:
    case = of_all_texts(side)
    return Case(case.options | {"normalised": True}, case.batches, case.choices)


def of_each_text(side: str) -> Case:
    batches = batches_of_own_choices(side)
    return Case({}, batches, batches)


def means_of_each_text(side: str) -> Case:
    return Case({"normalised": True}, *[batches_of_own_choices(side)] * 2)


CASES = [of_all_texts, means_of_all_texts, of_each_text, means_of_each_text]


def dense(
    model: nn.Module,
    case: Case,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, Jacobians and labels of all texts, each choice by itself."""

    def logits_of(
        model: nn.Module,
        choices: Any,
    ) -> torch.Tensor:
        return logits_of_choices(model, choices, case.normalised)

    texts = [text for batch in case.choices for text in unpadded_choices(batch)]
    logits, Js = alone(model.eval(), logits_of, texts)
    return logits, Js, torch.cat([batch["labels"] for batch in case.choices])


def quietly(call: Callable[[], Any]) -> Any:
    """Call without the warnings of an untrained model."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*(have only|no better than guessing)")
        return call()


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("make_case", CASES)
@pytest.mark.parametrize("structure", ["lowrank_kron", "full"])
def test_curvature_evidence_and_predictions_are_those_of_dense_algebra(
    structure, make_case, side
):
    model, case = lora_model("gpt2"), make_case(side)
    options = dict(case.options)
    if structure == "lowrank_kron":
        options["backend_kwargs"] = {"rank": 100}
    la = make(model, structure, **options)
    quietly(lambda: la.fit(case.batches))

    logits, Js, y = dense(copy.deepcopy(model), case)
    fisher = softmax_fisher(logits)
    if structure == "full":
        blocks = [exact_ggn(Js, fisher)]
        found = la.H
    else:
        blocks = gradient_blocks(model, Js, fisher)
        found = la.H.to_matrix()
    H = torch.block_diag(*blocks)
    assert_close(found, H, rtol=1e-9, atol=1e-9 * H.max().item())

    loss = cross_entropy(logits, y, reduction="sum")
    assert_close(la.loss, loss, **EXACT)
    prior = torch.ones(la.n_params).double()
    expected = evidence(H, -loss, la.mean, prior)
    assert_close(la.log_marginal_likelihood(), expected, **EXACT)

    moments = [la.predictive_moments(without_labels(batch)) for batch in case.batches]
    assert_close(torch.cat([of_batch.f_mu for of_batch in moments]), logits, **EXACT)
    covariance = torch.cat([of_batch.f_var for of_batch in moments])
    assert_close(covariance, block_diagonal_covariance(blocks, Js), **EXACT)


@pytest.mark.parametrize("structure", [name for name in STRUCTURES if name != "kron"])
def test_choices_of_one_token_are_class_tokens(structure):
    model, batches = lora_model("gpt2"), ragged_batches()
    plain = make(model, structure, class_token_ids=CLASS_TOKEN_IDS)
    of_choices = make(model, structure)
    choices = one_token_choices(batches)
    quietly(lambda: plain.fit(batches))
    quietly(lambda: of_choices.fit(choices))
    close = {"rtol": 1e-10, "atol": 1e-12}
    assert_close(
        of_choices.log_marginal_likelihood(), plain.log_marginal_likelihood(), **close
    )
    for batch, of_batch in zip(batches, choices, strict=True):
        expected = plain(batch, link_approx="mean_field")
        assert_close(of_choices(of_batch, link_approx="mean_field"), expected, **close)
    for la, loader in ((plain, batches), (of_choices, choices)):
        la.optimize_prior_precision(
            method="gridsearch", val_loader=loader, link_approx="mean_field", **GRID
        )
    assert_close(of_choices.prior_precision, plain.prior_precision, **close)


def test_any_tokens_of_the_vocabulary_are_choices():
    """As where a text's most probable tokens are compared."""
    model = lora_model("gpt2").eval()
    (batch,) = ragged_batches(batch_size=8)
    every = make(model, class_token_ids=list(range(60)))
    logits = every.model(batch)
    best = logits.topk(3).indices
    choices = choices_batch(prompts_of(batch), best[..., None].tolist())
    la = make(model)
    quietly(lambda: la.fit([choices | {"labels": batch["labels"]}]))
    found = la.model(choices).softmax(-1)
    assert_close(found, logits.gather(1, best).softmax(-1), **EXACT)


@pytest.mark.parametrize("make_case", CASES)
@pytest.mark.parametrize("kfac_approx", ["gradient", "expand"])
def test_padding_changes_nothing(make_case, kfac_approx):
    evidences = []
    for side in ("right", "left"):
        case = make_case(side)
        la = make(
            lora_model("gpt2"),
            backend_kwargs={"kfac_approx": kfac_approx},
            **case.options,
        )
        quietly(lambda la=la, case=case: la.fit(case.batches))
        evidences.append(la.log_marginal_likelihood())
    assert_close(evidences[0], evidences[1], **EXACT)


@pytest.mark.parametrize("make_case", [of_all_texts, of_each_text])
def test_every_method_takes_them(make_case):
    case = make_case("right")
    la = make(lora_model("gpt2"), **case.options)
    quietly(lambda: la.fit(case.batches))
    for method, data in (
        ("agreement", {"train_loader": case.batches}),
        ("marglik", {"n_steps": 2}),
        (
            "gridsearch",
            {"val_loader": case.batches, "link_approx": "mean_field", **GRID},
        ),
        ("val_gd", {"val_loader": case.batches, "n_steps": 2}),
    ):
        la.prior_precision = 1.0
        la.optimize_prior_precision(method=method, **data)
        assert torch.isfinite(la.prior_precision).all()
    inputs = without_labels(case.batches[0])
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


@pytest.mark.parametrize("make_case", [means_of_all_texts, means_of_each_text])
def test_files_and_mixtures_know_the_answers(make_case, tmp_path):
    case = make_case("right")
    model = lora_model("gpt2").eval()
    la = make(model, **case.options)
    quietly(lambda: la.fit(case.batches))
    la.save_pretrained(tmp_path)
    loaded = laplace_lora_ext.from_pretrained(model, tmp_path)
    assert loaded.model.class_token_ids == case.options.get("class_token_ids")
    inputs = without_labels(case.batches[0])
    assert torch.equal(loaded(inputs), la(inputs))
    with pytest.raises(
        ValueError, match="normalised was True at the fit, and now is False"
    ):
        laplace_lora_ext.from_pretrained(model, tmp_path, normalised=False)

    other = make(another_training("gpt2").eval(), **case.options)
    quietly(lambda: other.fit(case.batches))
    mixture = LaplaceMixture([la, other])
    options = {"link_approx": "mean_field"}
    mean = (la(inputs, **options) + other(inputs, **options)) / 2
    assert_close(mixture(inputs, **options), mean, **EXACT)
    sums = make(another_training("gpt2").eval(), **case.options | {"normalised": False})
    quietly(lambda: sums.fit(case.batches))
    with pytest.raises(ValueError, match=r"differ in .* or normalised"):
        LaplaceMixture([la, sums])


@pytest.mark.parametrize("kind", ["bart", "t5"])
@pytest.mark.parametrize("structure", ["lowrank_kron", "full"])
def test_encoder_decoders_write_them(kind, structure):
    case = of_all_texts("right")
    model = encoder_decoder(kind)
    la = make(model, structure, **case.options)
    quietly(lambda: la.fit(case.batches))
    start = model.config.decoder_start_token_id

    def logits_of(
        model: nn.Module,
        prompt: list[int],
    ) -> torch.Tensor:
        logits = []
        for answer in ANSWERS:
            decoded = torch.tensor([[start, *answer]])
            output = model(input_ids=torch.tensor([prompt]), decoder_input_ids=decoded)
            log_p = output.logits[0].log_softmax(-1)
            logits.append(
                torch.stack([log_p[n, token] for n, token in enumerate(answer)]).sum()
            )
        return torch.stack(logits)

    prompts = [prompt for batch in case.batches for prompt in prompts_of(batch)]
    logits, Js = alone(copy.deepcopy(model).eval(), logits_of, prompts)
    y = torch.cat([batch["labels"] for batch in case.batches])
    assert_close(
        la.loss, cross_entropy(logits, y, reduction="sum"), rtol=1e-5, atol=1e-5
    )
    if structure == "full":
        expected = exact_ggn(Js, softmax_fisher(logits))
        assert_close(
            la.H, expected.to(la.H), rtol=1e-4, atol=1e-5 * expected.max().item()
        )
    moments = la.predictive_moments(without_labels(case.batches[0]))
    assert_close(
        moments.f_mu, logits[: len(moments.f_mu)].to(moments.f_mu), rtol=1e-5, atol=1e-5
    )


def test_unequal_numbers_of_choices_are_fitted_and_not_compared():
    (batch,) = ragged_batches(batch_size=8)
    prompts = prompts_of(batch)
    loader = []
    for rows, answers in ((slice(0, 4), ANSWERS), (slice(4, 8), ANSWERS[:3])):
        made = choices_batch(prompts[rows], [answers] * 4)
        loader.append(made | {"labels": batch["labels"][rows]})
    la = make(lora_model("gpt2"))
    quietly(lambda: la.fit(loader))
    for of_batch, n_choices in zip(loader, (4, 3), strict=True):
        assert la(without_labels(of_batch), link_approx="mean_field").shape == (
            4,
            n_choices,
        )
    with pytest.raises(ValueError, match="unequal numbers of choices"):
        la.optimize_prior_precision(method="gridsearch", val_loader=loader, **GRID)


def test_nothing_is_printed_and_no_name_is_out_of_date(caplog, capsys):
    case = of_all_texts("right")
    la = make(lora_model("gpt2"), **case.options)
    quietly(lambda: la.fit(case.batches))
    la(without_labels(case.batches[0]))
    printed = capsys.readouterr()
    assert not printed.out + printed.err
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


def trainer_for(
    folder: Any,
    case: Case,
    **settings: Any,
) -> Any:
    """Make a trainer of rows that are padded already, all of one length."""
    rows = []
    for batch in case.batches:
        for row in range(len(batch["labels"])):
            rows.append({key: value[row] for key, value in batch.items()})
    longest = max(row["input_ids"].shape[-1] for row in rows)
    for row in rows:
        for key, value in row.items():
            if value.ndim:
                row[key] = nn.functional.pad(value, (0, longest - value.shape[-1]))
    model = lora_model("gpt2", torch.float32)
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


@pytest.mark.parametrize("make_case", [of_all_texts, of_each_text])
def test_stages_train_and_fit_them(make_case, tmp_path):
    case = make_case("right")
    trainer = trainer_for(tmp_path, case)
    for name, weight in trainer.model.named_parameters():
        if "lora_B" in name:
            nn.init.zeros_(weight)
    la = quietly(
        lambda: train_in_stages(
            trainer, likelihood="classification", held_out=0.3, **case.options
        )
    )
    assert la.n_data == len(trainer.train_dataset)
    assert la.model.class_token_ids == case.options.get("class_token_ids")
    probabilities = la(without_labels(case.batches[0]), link_approx="mean_field")
    assert_close(probabilities.sum(-1), torch.ones(len(probabilities)))


@pytest.mark.parametrize("output_layer", [False, True])
@pytest.mark.parametrize("make_case", CASES)
def test_parts_of_the_vocabulary_give_the_same_and_hold_few_rows(
    make_case, output_layer, monkeypatch
):
    model = llama_with_output_layer() if output_layer else lora_model("gpt2")
    model.double().eval()
    case = make_case("left")
    (of_one, *_) = case.choices
    n_texts, n_choices, _ = of_one["input_ids"].shape
    inputs = without_labels(case.batches[0])
    # One seed at a time: several have as many times the rows.
    monkeypatch.setattr(graph, "_ROWS", 1)

    def figures():
        la = make(model, backend_kwargs={"rank": 100}, **case.options)
        weights = [block.weight.requires_grad_() for block in la.blocks]
        with RowsOfTheVocabulary(model) as rows:
            quietly(lambda: la.fit(case.batches))
            student = la.model.around(model)
            student.divide_vocabulary()
            log_p = student.log_probs(inputs)
            slopes = torch.autograd.grad(log_p.square().sum(), weights)
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
        assert n_in_parts == n_texts * n_choices < n_at_once


@pytest.mark.parametrize("make_case", [means_of_all_texts, means_of_each_text])
def test_a_student_has_the_posteriors_probabilities(make_case, tmp_path):
    case = make_case("right")
    trainer = trainer_for(
        tmp_path, case, max_steps=300, learning_rate=1e-2, lr_scheduler_type="constant"
    )
    # Sure of itself, where the posterior is not.
    trainer.model.base_model.model.lm_head.weight.data *= 20
    la = make(trainer.model, **case.options)
    quietly(lambda: la.fit(case.batches))
    la.prior_precision = 1e-7
    inputs = [without_labels(batch) for batch in case.batches]

    def distance(probabilities: list[torch.Tensor]) -> float:
        found = torch.cat(probabilities).log()
        return nn.functional.kl_div(found, targets, reduction="batchmean").item()

    targets = torch.cat([la(batch, link_approx="mean_field") for batch in inputs])
    answers = la.model
    before = distance([answers(batch).softmax(-1) for batch in inputs])
    name = la.distill(trainer, unlabelled=None)
    trainer.model.set_adapter(name)
    trainer.model.eval()
    student = answers.around(trainer.model)
    after = distance([student(batch).softmax(-1) for batch in inputs])
    assert before > 0.05
    assert after < 0.2 * before
