"""Posteriors over answers of several tokens: exact, and all that other answers have."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, kl_div, pad
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
    curvature_of,
    evidence,
    exact_ggn,
    full_rank,
    gradient_blocks,
    labels_of,
    predicted,
    softmax_fisher,
)
from tests.support.models import (
    CLASS_TOKEN_IDS,
    VOCABULARY,
    llama_with_output_layer,
    lora_model,
    ragged_batches,
    untrained,
    without_labels,
)
from tests.support.posteriors import GRID, another_training, make
from tests.support.texts import RowsOfTheVocabulary, encoder_decoder
from tests.support.trainers import trainer_of

# The models are not trained.
pytestmark = pytest.mark.filterwarnings("ignore:.*(have only|no better than guessing)")


# The same sums, of other shapes.
SAME = {"rtol": 1e-10, "atol": 1e-12}
MEAN_FIELD = {"link_approx": "mean_field"}


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
        return labels_of(self.batches)

    @property
    def inputs(self) -> list[dict[str, Any]]:
        return [without_labels(batch) for batch in self.batches]

    @property
    def first_inputs(self) -> dict[str, Any]:
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
    return Case(
        options={},
        batches=batches,
        choices=batches,
    )


def means_of_each_text(side: str = "right") -> Case:
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

    def logits_of(model: nn.Module, choices: Any) -> torch.Tensor:
        return logits_of_choices(model, choices, case.normalised)

    texts = []
    for batch in case.choices:
        texts += unpadded_choices(batch)
    of_its_own = copy_of(model)
    return alone(of_its_own, logits_of, texts)


def copy_of(model: nn.Module) -> nn.Module:
    """Copy a model for dense algebra, which changes its mode and asks for gradients."""
    return copy.deepcopy(model).eval()


def assert_near(found: torch.Tensor, H: torch.Tensor) -> None:
    """Compare curvatures, relative to the largest entry of all."""
    # Entries near 0 are sums of large ones that cancel.
    largest = H.max().item()
    assert_close(found, H, rtol=1e-9, atol=1e-9 * largest)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("make_case", CASES)
@pytest.mark.parametrize("structure", ["lowrank_kron", "full"])
def test_curvature_evidence_and_predictions_are_those_of_dense_algebra(
    structure, make_case, side
):
    case = make_case(side)
    model = lora_model("gpt2")
    la = fitted(case, structure, model, **full_rank(structure))

    logits, Js = dense(model, case)
    fisher = softmax_fisher(logits)
    if structure == "full":
        blocks = [exact_ggn(Js, fisher)]
    else:
        blocks = gradient_blocks(model, Js, fisher)
    H = torch.block_diag(*blocks)
    assert_near(curvature_of(la), H)

    loss = cross_entropy(logits, case.labels, reduction="sum")
    assert_close(la.loss, loss, **EXACT)
    prior = torch.ones_like(la.mean)
    expected = evidence(H, -loss, la.mean, prior)
    assert_close(la.log_marginal_likelihood(), expected, **EXACT)

    f_mu, f_var = predicted(la, case.inputs)
    covariances = block_diagonal_covariance(blocks, Js)
    assert_close(f_mu, logits, **EXACT)
    assert_close(f_var, covariances, **EXACT)


@dataclass(frozen=True)
class OneToken:
    """Posteriors of the same texts: of class tokens, and of choices of one token."""

    of_tokens: Any
    batches: list[dict[str, Any]]
    of_choices: Any
    choices: list[dict[str, Any]]


@pytest.fixture(params=["lowrank_kron", "diag", "full"])
def one_token(request: pytest.FixtureRequest) -> OneToken:
    model = lora_model("gpt2")
    batches = ragged_batches()
    of_tokens = make(model, request.param, class_token_ids=CLASS_TOKEN_IDS)
    of_tokens.fit(batches)
    choices = one_token_choices(batches)
    of_choices = make(model, request.param)
    of_choices.fit(choices)
    return OneToken(of_tokens, batches, of_choices, choices)


def test_choices_of_one_token_have_the_evidence_of_class_tokens(one_token):
    found = one_token.of_choices.log_marginal_likelihood()
    expected = one_token.of_tokens.log_marginal_likelihood()
    assert_close(found, expected, **SAME)


def test_choices_of_one_token_are_predicted_as_class_tokens(one_token):
    for batch, choices in zip(one_token.batches, one_token.choices, strict=True):
        expected = one_token.of_tokens(batch, **MEAN_FIELD)
        found = one_token.of_choices(choices, **MEAN_FIELD)
        assert_close(found, expected, **SAME)


def test_choices_of_one_token_choose_a_prior_as_class_tokens(one_token):
    la = one_token.of_choices
    expected = one_token.of_tokens
    search = {"method": "gridsearch", **MEAN_FIELD, **GRID}
    la.optimize_prior_precision(val_loader=one_token.choices, **search)
    expected.optimize_prior_precision(val_loader=one_token.batches, **search)
    assert_close(la.prior_precision, expected.prior_precision, **SAME)


def test_any_tokens_of_the_vocabulary_are_choices():
    """As where a text's most probable tokens are compared."""
    model = lora_model("gpt2").eval()
    (batch,) = ragged_batches(batch_size=8)
    whole_vocabulary = list(range(VOCABULARY))
    logits = make(model, class_token_ids=whole_vocabulary).model(batch)
    # Other ones for each text, and in no order of their numbers.
    best = logits.topk(3).indices
    of_one_token = best.unsqueeze(-1).tolist()
    prompts = prompts_of(batch)
    choices = choices_batch(prompts, of_one_token)
    la = make(model)
    la.fit([choices | {"labels": batch["labels"]}])
    found = la.model(choices).softmax(-1)
    expected = logits.gather(1, best).softmax(-1)
    assert_close(found, expected, **EXACT)


@pytest.mark.parametrize("make_case", CASES)
@pytest.mark.parametrize("kfac_approx", ["gradient", "expand"])
def test_padding_changes_nothing(make_case, kfac_approx):
    # "expand" counts positions, and would count padding where it is not masked.
    settings = {"kfac_approx": kfac_approx}
    right = fitted(make_case("right"), backend_kwargs=settings)
    left = fitted(make_case("left"), backend_kwargs=settings)
    found = right.log_marginal_likelihood()
    assert_close(found, left.log_marginal_likelihood(), **EXACT)


@pytest.fixture(params=[of_all_texts, of_each_text])
def case(request: pytest.FixtureRequest) -> Case:
    """Texts with answers of all, and texts with choices of their own."""
    return request.param()


@pytest.mark.parametrize("method", ["agreement", "marglik", "gridsearch", "val_gd"])
def test_every_method_chooses_a_prior(case, method):
    la = fitted(case)
    data = {
        "agreement": {"train_loader": case.batches},
        "marglik": {"n_steps": 2},
        "gridsearch": {"val_loader": case.batches, **MEAN_FIELD, **GRID},
        "val_gd": {"val_loader": case.batches, "n_steps": 2},
    }
    la.optimize_prior_precision(method=method, **data[method])
    assert torch.isfinite(la.prior_precision).all()


def test_statistics_predict_as_the_posterior(case):
    la = fitted(case)
    statistics = la.predictive_statistics(case.batches)
    moments = statistics.moments(la.prior_precision)
    exact = la(case.first_inputs, **MEAN_FIELD)
    found = la(moments, **MEAN_FIELD)
    of_first = found[: len(exact)]
    # Statistics are kept in float32.
    assert_close(of_first, exact, rtol=1e-5, atol=1e-6)


def test_learnt_variances_and_predictions_are_of_as_many_choices(case):
    la = fitted(case)
    inputs = case.first_inputs
    expected = la(inputs, **MEAN_FIELD)
    prediction = la.predict(inputs)
    assert prediction.probabilities.shape == expected.shape
    la.amortize(case.batches, unlabelled=None)
    learnt = la(inputs, **MEAN_FIELD, pred_type="amortized")
    assert learnt.shape == expected.shape


@pytest.fixture(params=[means_of_all_texts, means_of_each_text])
def case_of_means(request: pytest.FixtureRequest) -> Case:
    return request.param()


def test_files_know_the_answers(case_of_means, tmp_path):
    model = lora_model("gpt2").eval()
    la = fitted(case_of_means, model=model)
    la.save_pretrained(tmp_path)
    loaded = laplace_lora_ext.from_pretrained(model, tmp_path)
    expected = case_of_means.options.get("class_token_ids")
    assert loaded.model.class_token_ids == expected
    inputs = case_of_means.first_inputs
    assert torch.equal(loaded(inputs), la(inputs))


def test_files_of_means_are_not_read_for_sums(case_of_means, tmp_path):
    model = lora_model("gpt2").eval()
    la = fitted(case_of_means, model=model)
    la.save_pretrained(tmp_path)
    message = "normalised was True at the fit, and now is False"
    with pytest.raises(ValueError, match=message):
        laplace_lora_ext.from_pretrained(model, tmp_path, normalised=False)


def test_mixtures_know_the_answers(case_of_means):
    first = fitted(case_of_means, model=lora_model("gpt2").eval())
    second = fitted(case_of_means, model=another_training("gpt2").eval())
    mixture = LaplaceMixture([first, second])
    inputs = case_of_means.first_inputs
    of_first = first(inputs, **MEAN_FIELD)
    of_second = second(inputs, **MEAN_FIELD)
    mean = (of_first + of_second) / 2
    assert_close(mixture(inputs, **MEAN_FIELD), mean, **EXACT)


def test_means_and_sums_are_not_mixed(case_of_means):
    of_means = fitted(case_of_means, model=lora_model("gpt2").eval())
    another = another_training("gpt2").eval()
    of_sums = fitted(case_of_means.with_sums(), model=another)
    with pytest.raises(ValueError, match=r"differ in .* normalised or"):
        LaplaceMixture([of_means, of_sums])


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
    case = of_all_texts()
    model = encoder_decoder(kind)
    la = fitted(case, structure, model)
    prompts = []
    for batch in case.batches:
        prompts += prompts_of(batch)
    logits, Js = alone(copy_of(model), logits_of_written_answers, prompts)
    loss = cross_entropy(logits, case.labels, reduction="sum")
    assert_close(la.loss, loss, **EXACT)
    if structure == "full":
        fisher = softmax_fisher(logits)
        H = exact_ggn(Js, fisher)
        assert_near(la.H, H)
    f_mu, _ = predicted(la, case.inputs)
    assert_close(f_mu, logits, **EXACT)


def test_unequal_numbers_of_choices_are_fitted_and_not_compared():
    (batch,) = ragged_batches(batch_size=8)
    prompts = prompts_of(batch)
    labels = batch["labels"]
    three_answers = ANSWERS[:3]
    # In batches of their own, since within one the numbers can't differ.
    of_four = choices_batch(prompts[:4], [ANSWERS] * 4)
    of_three = choices_batch(prompts[4:], [three_answers] * 4)
    loader = [
        of_four | {"labels": labels[:4]},
        of_three | {"labels": labels[4:]},
    ]
    la = make(lora_model("gpt2"))
    la.fit(loader)
    assert la(of_four, **MEAN_FIELD).shape == (4, 4)
    assert la(of_three, **MEAN_FIELD).shape == (4, 3)
    with pytest.raises(ValueError, match="unequal numbers of choices"):
        la.optimize_prior_precision(method="gridsearch", val_loader=loader, **GRID)


def test_nothing_is_printed_and_no_name_is_out_of_date(caplog, capsys):
    case = of_all_texts()
    la = fitted(case)
    la(case.first_inputs)
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
    lengths = [batch["input_ids"].shape[-1] for batch in batches]
    longest = max(lengths)
    rows = []
    for batch in batches:
        for number, label in enumerate(batch["labels"]):
            row = {"labels": label}
            for key, values in without_labels(batch).items():
                tokens = values[number]
                n_missing = longest - tokens.shape[-1]
                row[key] = pad(tokens, (0, n_missing))
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
        # The model's own signature knows nothing of `score_mask`.
        remove_unused_columns=False,
        save_strategy="no",
        logging_strategy="no",
        **settings,
    )
    # Its class is changed here, since `trainer_of` makes a plain one.
    trainer.__class__ = OfAnswers
    trainer.answers = make(model, **case.options).model
    return trainer


def test_stages_train_and_fit_them(case, tmp_path):
    trainer = trainer_for(tmp_path, case)
    # Stages warn of an adapter that looks trained.
    untrained(trainer.model)
    la = train_in_stages(
        trainer,
        likelihood="classification",
        held_out=0.3,
        **case.options,
    )
    assert la.n_data == len(trainer.train_dataset)
    assert la.model.class_token_ids == case.options.get("class_token_ids")
    p = la(case.first_inputs, **MEAN_FIELD)
    sums = p.sum(-1)
    assert_close(sums, torch.ones_like(sums))


def gpt2() -> nn.Module:
    return lora_model("gpt2")


@dataclass(frozen=True)
class Figures:
    """What a fit and a student come to, and how many rows were held at once."""

    values: dict[str, Any]
    most_rows: int


def figures_of(model: nn.Module, case: Case) -> Figures:
    inputs = case.first_inputs
    la = make(model, **full_rank(), **case.options)
    weights = [block.weight.requires_grad_() for block in la.blocks]
    with RowsOfTheVocabulary(model) as rows:
        la.fit(case.batches)
        student = la.model.around(model)
        student.divide_vocabulary()
        log_p = student.log_probs(inputs)
        # Some function of all of them, whose slopes are compared.
        total = log_p.square().sum()
        slopes = torch.autograd.grad(total, weights)
    values = {
        "H": la.H.to_matrix(),
        "loss": la.loss,
        "prediction": la(inputs, **MEAN_FIELD),
        "log_p": log_p,
        "slopes": slopes,
    }
    return Figures(values, rows.most)


@pytest.mark.parametrize("build", [gpt2, llama_with_output_layer])
@pytest.mark.parametrize("make_case", CASES)
def test_parts_of_the_vocabulary_give_the_same_and_hold_few_rows(
    make_case, build, monkeypatch
):
    model = build().double().eval()
    case = make_case("left")
    # One seed at a time: several have as many times the rows.
    monkeypatch.setattr(graph, "_ROWS", 1)
    at_once = figures_of(model, case)
    monkeypatch.setattr(vocabulary, "MOST_ROWS", 1)
    in_parts = figures_of(model, case)
    assert_close(in_parts.values, at_once.values, rtol=1e-9, atol=1e-10)
    # An adapted output layer's own weights have gradients at each token.
    if build is gpt2:
        n_texts, n_choices, _ = case.choices[0]["input_ids"].shape
        assert in_parts.most_rows == n_texts * n_choices
        assert in_parts.most_rows < at_once.most_rows


def joined_logits(
    model: Callable[[Any], torch.Tensor],
    case: Case,
) -> torch.Tensor:
    return torch.cat([model(inputs) for inputs in case.inputs])


def divergence(targets: torch.Tensor, logits: torch.Tensor) -> float:
    """Compute the mean Kullback-Leibler divergence from targets `(N, C)`."""
    log_p = logits.log_softmax(-1)
    return kl_div(log_p, targets, reduction="batchmean").item()


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
    # So broad a posterior that its predictions are far from the model's.
    la.prior_precision = 1e-7
    of_batches = [la(inputs, **MEAN_FIELD) for inputs in case.inputs]
    targets = torch.cat(of_batches)

    of_model = joined_logits(la.model, case)
    before = divergence(targets, of_model)
    # Otherwise there would be nothing to learn.
    assert before > 0.05
    name = la.distill(trainer, unlabelled=None)
    model.set_adapter(name)
    model.eval()
    student = la.model.around(model)
    after = divergence(targets, joined_logits(student, case))
    assert after < 0.2 * before
