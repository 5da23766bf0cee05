"""Labels of tokens: a text is one of the data, its labels examples."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, nll_loss, one_hot
from torch.nn.utils.rnn import pad_sequence
from torch.testing import assert_close
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import laplace_lora_ext
import laplace_lora_ext.passes.recorder as recorder
from laplace_lora_ext import Moments, plots
from laplace_lora_ext.curvature.backend import LowRankKronEF
from laplace_lora_ext.metrics import compare
from laplace_lora_ext.passes.recorder import _Jacobians
from tests.support.dense import (
    EXACT,
    curvature_of,
    dense_curvature,
    evidence,
    full_rank,
    glm_covariance,
    gradient_blocks,
    gradient_curvature,
    lora_weights,
    softmax_fisher,
    unpadded,
)
from tests.support.models import (
    N_CLASSES,
    Batch,
    lora_model,
    record_calls,
    without_labels,
)
from tests.support.posteriors import (
    PRIORS_ALONE,
    generator,
    make,
)
from tests.support.ranks import assert_alike, failures, on_ranks
from tests.support.tokens import IGNORED, is_real, token_classifier
from tests.support.tokens import labelled_batches as batches

TOKENS = "token_classification"
N_TEXTS = 8
# A prior precision that leaves weights a standard deviation of 1e-7.
NARROW = 1e14
PADDING = {
    "input_ids": 0,
    "attention_mask": 0,
    "labels": IGNORED,
}
# Of predictions, which are NaN at padding.
EXACT_OR_NAN = EXACT | {"equal_nan": True}

# Factors of blocks and a number a weight, whose sums are made in different ways.
of_two_structures = pytest.mark.parametrize(
    "structure",
    ["lowrank_kron", "diag"],
)


def first_batch() -> Batch:
    first, *_ = batches()
    return first


def is_labelled(batch: Batch) -> Tensor:
    return batch["labels"] != IGNORED


def labels_of(data: Sequence[Batch]) -> Tensor:
    """Join the labels of all labelled tokens."""
    of_batches = []
    for batch in data:
        labels = batch["labels"]
        of_batches.append(labels[is_labelled(batch)])
    return torch.cat(of_batches)


def texts_of(batch: Batch, rows: slice) -> Batch:
    """Take some texts of a batch, with their padding."""
    return {key: value[rows] for key, value in batch.items()}


def fitted(
    kind: str = "bert",
    structure: str = "lowrank_kron",
    data: Any = None,
    model: nn.Module | None = None,
    **keywords: Any,
):
    """Fit a posterior at full rank and by exact seeds."""
    if model is None:
        model = token_classifier(kind)
    if data is None:
        data = batches()
    settings = full_rank(structure, stochastic=False) | keywords
    la = make(model, structure, TOKENS, **settings)
    la.fit(data)
    return la


@dataclass(frozen=True)
class Tokens:
    """Logits, Jacobians `(tokens, C, parameters)` and labels of tokens."""

    f: Tensor
    Js: Tensor
    y: Tensor


def tokens_of(
    model: nn.Module,
    data: Sequence[Batch],
    every: bool = False,
) -> Tokens:
    """Compute what belongs to labelled tokens, or to all, from each text alone."""
    weights = lora_weights(model)
    logits = []
    Js = []
    labels = []
    for batch in data:
        for row, is_token in enumerate(is_real(batch)):
            text = unpadded(batch, row)

            def forward(weights, text=text):
                output = torch.func.functional_call(model, weights, (), text)
                return output.logits[0]

            compute_derivatives = torch.func.jacrev(forward)
            derivatives = compute_derivatives(weights)
            of_weights = []
            for derivative in derivatives.values():
                of_weights.append(derivative.flatten(2))
            J = torch.cat(of_weights, dim=2)
            f = forward(weights).detach()
            of_text = batch["labels"][row]
            y = of_text[is_token]
            is_label = y != IGNORED
            counts = is_label | every
            logits.append(f[counts])
            Js.append(J[counts])
            labels.append(y[counts])
    return Tokens(
        f=torch.cat(logits),
        Js=torch.cat(Js),
        y=torch.cat(labels),
    )


def logits_of_all_tokens(la, data: Sequence[Batch]) -> Tensor:
    """Compute the model's own logits, of labelled tokens and others."""
    model = la.model.model
    tokens = tokens_of(model, data, every=True)
    return tokens.f


def moments_of(la, data: Sequence[Batch]) -> Moments:
    """Join the moments of the labelled tokens of all batches."""
    means = []
    covariances = []
    for batch in data:
        moments = la.predictive_moments(batch)
        means.append(moments.f_mu)
        covariances.append(moments.f_var)
    return Moments(
        f_mu=torch.cat(means),
        f_var=torch.cat(covariances),
    )


def statistics_of(la, data: Sequence[Batch]):
    # By default in float32, which is not as exact as what they are compared with.
    return la.predictive_statistics(data, dtype=torch.float64)


def predicted(la, data: Batch | Sequence[Batch]):
    """Predict by draws of one seed, so that calls can be compared."""
    return la.predict(data, generator=generator())


@pytest.mark.parametrize(
    ("kind", "structure"),
    [
        ("bert", "lowrank_kron"),
        ("gpt2", "lowrank_kron"),
        ("llama", "full"),
        ("bert", "diag"),
    ],
)
def test_curvature_evidence_and_covariances_are_exact(kind, structure):
    data = batches()
    la = fitted(kind, structure, data)
    model = la.model.model
    tokens = tokens_of(model, data)
    labels = labels_of(data)
    assert torch.equal(tokens.y, labels)
    fisher = softmax_fisher(tokens.f)
    H = dense_curvature(structure, model, tokens.Js, fisher)
    # Low-rank factors leave out what is rounding beside their largest eigenvalue.
    largest = H.abs().max()
    rounding = 1e-10 * largest.item()
    found = curvature_of(la)
    assert_close(found, H, rtol=1e-9, atol=rounding)

    loss = cross_entropy(tokens.f, tokens.y, reduction="sum")
    assert_close(la.loss, loss, **EXACT)
    # Texts, and not tokens.
    assert la.n_data == N_TEXTS
    la.prior_precision = 3.0
    priors = torch.full_like(la.mean, 3.0)
    found = la.log_marginal_likelihood()
    expected = evidence(H, -loss, la.mean, priors)
    assert_close(found, expected, **EXACT)

    moments = moments_of(la, data)
    covariances = glm_covariance(tokens.Js, H, priors)
    assert_close(moments.f_mu, tokens.f, **EXACT)
    assert_close(moments.f_var, covariances, **EXACT)


def test_the_empirical_fisher_sums_over_labelled_tokens():
    data = batches()
    model = token_classifier()
    settings = full_rank("lowrank_kron")
    la = make(model, "lowrank_kron", TOKENS, backend=LowRankKronEF, **settings)
    la.fit(data)
    tokens = tokens_of(model, data)
    slopes = tokens.f.softmax(-1) - one_hot(tokens.y, N_CLASSES)
    of_labels = torch.einsum("nc,nk->nck", slopes, slopes)
    expected = gradient_curvature(model, tokens.Js, of_labels)
    assert_close(la.H.to_matrix(), expected, rtol=1e-8, atol=1e-10)


def test_pictures_of_labels_of_tokens_are_refused():
    la = fitted()
    for draw in (plots.reliability, plots.risk_coverage, plots.entropies):
        with pytest.raises(ValueError, match="token_classification has one a token"):
            draw(la, batches())


# 5 leaves a last batch of another size.
@pytest.mark.parametrize("batch_size", [2, 5])
def test_the_size_of_batches_changes_nothing(batch_size):
    (whole,) = batches(batch_size=N_TEXTS)
    parts = []
    for start in range(0, N_TEXTS, batch_size):
        rows = slice(start, start + batch_size)
        part = texts_of(whole, rows)
        parts.append(part)
    in_parts = fitted(data=parts)
    at_once = fitted(data=[whole])
    found = curvature_of(in_parts)
    expected = curvature_of(at_once)
    assert_close(found, expected, **EXACT)


@pytest.mark.parametrize("draws", ["labels", "signs"])
def test_draws_are_right_on_average(draws):
    model = token_classifier()
    tokens = tokens_of(model, batches())
    fisher = softmax_fisher(tokens.f)
    blocks = gradient_blocks(model, tokens.Js, fisher)
    exact = [block.trace() for block in blocks]

    settings = full_rank(num_samples=4000, draws=draws)
    drawn = fitted(model=model, **settings)
    found = []
    for block in drawn.H_facs.blocks:
        # A block has the trace of its output factor.
        found.append(block.output_factor.trace)
    # So many draws come within two hundredths.
    assert_close(found, exact, rtol=0.05, atol=0)


def test_drawn_labels_are_the_same_whatever_the_batch():
    texts = [
        texts_of(batch, slice(row, row + 1))
        for batch in batches()
        for row in range(len(batch["labels"]))
    ]
    of_each = fitted(data=texts, **full_rank(num_samples=2))
    of_all = fitted(**full_rank(num_samples=2))
    assert_close(curvature_of(of_each), curvature_of(of_all), **EXACT)


def test_signs_are_drawn_by_default_and_take_two_passes():
    """A text costs its passes once for all of its tokens."""
    backend = fitted(**full_rank()).backend
    assert backend.settings["stochastic"] is None
    n_tokens = 5
    logits = torch.zeros(n_tokens, N_CLASSES)
    of_texts = torch.zeros(1, n_tokens)
    seeds = backend.seeds(logits, of_texts)
    n_draws = 2
    expected = (n_draws, n_tokens, N_CLASSES)
    assert seeds.vectors.shape == expected


@pytest.mark.parametrize(
    "link",
    ["probit", "mean_field", "mc"],
)
def test_predictions_are_of_every_token_but_padding(link):
    la = fitted()

    def predict(batch: Batch) -> Tensor:
        # Of one seed, since "mc" draws.
        return la(batch, link_approx=link, generator=generator())

    for batch in batches():
        mask = is_real(batch)
        p = predict(batch)
        n_texts, n_tokens = mask.shape
        assert p.shape == (n_texts, n_tokens, N_CLASSES)
        of_padding = p[~mask]
        assert of_padding.isnan().all()
        of_tokens = p[mask]
        sums = of_tokens.sum(-1)
        ones = torch.ones_like(sums)
        assert_close(sums, ones, **EXACT)
        # Which tokens are labelled is nothing that a prediction may depend on.
        again = predict(without_labels(batch))
        assert_close(again, p, **EXACT_OR_NAN)


def test_a_prediction_has_entropies_of_each_token():
    batch = first_batch()
    prediction = predicted(fitted(), batch)
    mask = is_real(batch)
    # All but the probabilities have a number a token.
    _, *by_token = prediction
    for column in by_token:
        assert column.shape == mask.shape
    most_probable = prediction.probabilities.argmax(-1)
    expected = most_probable.where(mask, IGNORED)
    assert torch.equal(prediction.labels, expected)
    information = prediction.epistemic_entropy
    of_tokens = information[mask]
    assert (of_tokens > 0).all()
    of_padding = information[~mask]
    assert of_padding.isnan().all()


def test_a_prediction_of_a_loader_pads_its_batches_to_one_width():
    la = fitted()
    first, second, _ = batches()
    width = 7
    # Its first text is of four tokens.
    narrower = 5
    only_the_first = slice(1)
    narrow = texts_of(second, only_the_first)
    for key, value in narrow.items():
        narrow[key] = value[:, :narrower]
    found = predicted(la, [narrow, first])
    of_narrow, *_ = found.labels
    added = of_narrow[narrower:]
    assert len(added) == width - narrower
    assert (added == IGNORED).all()
    of_first = found.probabilities[1:]
    n_texts = 3
    assert of_first.shape == (n_texts, width, N_CLASSES)
    by_itself = predicted(la, first)
    assert_close(of_first, by_itself.probabilities, **EXACT_OR_NAN)


# --- choices of a prior ---------------------------------------------------------------

may_end_at_the_grids_edge = pytest.mark.filterwarnings(
    "ignore:The best prior precision of the grid"
)


@may_end_at_the_grids_edge
def test_a_grid_search_minimises_the_loss_of_labelled_tokens():
    la = fitted()
    # Without a scale of the logits, which would change the predictions below.
    history = la.optimize_prior_precision(
        method="gridsearch",
        val_loader=batches(),
        **PRIORS_ALONE,
    )
    losses = history.objective
    best = losses.argmin()
    la.prior_precision = history.prior_precision[best]
    of_batches = []
    for batch in batches():
        p = la(batch, link_approx="mean_field")
        of_batches.append(p[is_labelled(batch)])
    probabilities = torch.cat(of_batches)
    labels = labels_of(batches())
    loss = nll_loss(probabilities.log(), labels)
    # The search keeps its statistics in float32.
    assert_close(losses[best], loss, rtol=1e-5, atol=1e-6)


# --- predictions at a cost of their own -----------------------------------------------


def assert_of_every_token(samples, batch, expected):
    """Check that samples are what is expected of tokens, and NaN at padding."""
    mask = is_real(batch)
    for sample in samples:
        assert sample.shape == (*mask.shape, N_CLASSES)
        of_padding = sample[~mask]
        assert of_padding.isnan().all()
        of_tokens = sample[mask]
        assert_close(of_tokens, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("pred_type", ["glm", "nn"])
def test_samples_are_of_every_token_but_padding(pred_type):
    la = fitted()
    batch = first_batch()
    # Each sample is then the model's own logits.
    la.prior_precision = NARROW
    f = logits_of_all_tokens(la, [batch])
    p = f.softmax(-1)
    logits = la.functional_samples(batch, pred_type, n_samples=3)
    assert len(logits) == 3
    assert_of_every_token(logits, batch, f)
    probabilities = la.predictive_samples(batch, pred_type, n_samples=3)
    assert len(probabilities) == 3
    assert_of_every_token(probabilities, batch, p)
    function = la.function(0, pred_type)
    of_function = function(batch)
    assert_of_every_token([of_function], batch, f)


def predictions_of(la, text: Batch) -> dict[str, Any]:
    """Predict a text in every way."""
    function = la.function(3)
    return {
        "probabilities": la(text),
        "moments": la.predictive_moments(text),
        "function": function(text),
        "prediction": predicted(la, text),
    }


def kept_of(la, text: Batch) -> dict[str, Tensor]:
    """Tell what is kept of a text's labelled tokens."""
    statistics = statistics_of(la, [text])
    moments = statistics.moments(2.0)
    return {
        "variances": moments.f_var,
        "targets": statistics.targets,
    }


@pytest.fixture
def long_text() -> Batch:
    """Make a text of seven tokens, of which more than two are labelled."""
    only_the_first = slice(1)
    text = texts_of(first_batch(), only_the_first)
    n_tokens = is_real(text).sum()
    assert n_tokens == 7
    n_labelled = is_labelled(text).sum()
    assert n_labelled > 2
    return text


def two_tokens_at_a_time(
    la,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Leave the Jacobians of two tokens room, and no more."""
    numbers_of_two = 2 * N_CLASSES * la.n_params
    monkeypatch.setattr(recorder, "_NUMBERS", numbers_of_two)


@pytest.mark.parametrize(
    "structure",
    ["lowrank_kron", "full"],
)
def test_a_long_text_is_predicted_alike_by_a_few_tokens_at_a_time(
    structure, long_text, monkeypatch
):
    la = fitted(structure=structure)
    # At once, before there is room for two tokens only.
    expected = predictions_of(la, long_text)
    two_tokens_at_a_time(la, monkeypatch)
    found = predictions_of(la, long_text)
    assert_close(found, expected, **EXACT_OR_NAN)
    # Of several texts, each by itself.
    of_first, *_ = la(first_batch())
    (of_text,) = expected["probabilities"]
    assert_close(of_first, of_text, **EXACT_OR_NAN)


def test_statistics_of_a_long_text_are_kept_by_a_few_tokens_at_a_time(
    long_text, monkeypatch
):
    la = fitted()
    expected = kept_of(la, long_text)
    two_tokens_at_a_time(la, monkeypatch)
    found = kept_of(la, long_text)
    assert_close(found, expected, **EXACT)


def test_a_long_text_takes_a_pass_for_each_two_tokens(long_text, monkeypatch):
    la = fitted()
    two_tokens_at_a_time(la, monkeypatch)
    n_rows = []
    visit = _Jacobians.gradients

    def note(visitor, gradients):
        of_pass = visitor._size.numel()
        n_rows.append(of_pass)
        visit(visitor, gradients)

    monkeypatch.setattr(_Jacobians, "gradients", note)
    calls = record_calls(la.model.model)
    la(long_text)
    # The last of seven tokens has a pass for itself.
    n_passes = math.ceil(7 / 2)
    assert len(calls) == n_passes
    assert max(n_rows) == 2 * N_CLASSES


def test_texts_that_come_one_at_a_time_may_lack_labels(monkeypatch):
    la = fitted()
    _, batch, _ = batches()
    labelled = is_labelled(batch)
    _, of_second, *_ = labelled
    assert not of_second.any()
    expected = statistics_of(la, [batch])
    # Not even one text's rows may be in a pass together.
    monkeypatch.setattr(recorder, "_ON_CPU", 1)
    found = statistics_of(la, [batch])
    assert_close(found.columns, expected.columns, **EXACT)
    p = la(batch, fitting=True)
    assert len(p) == labelled.sum()


def test_figures_are_over_labelled_tokens():
    la = fitted()
    tokens = tokens_of(la.model.model, batches())
    nll = cross_entropy(tokens.f, tokens.y)
    most_probable = tokens.f.argmax(-1)
    is_right = most_probable == tokens.y
    accuracy = is_right.double().mean()
    trained = compare(la, batches()).trained
    assert trained["nll"] == pytest.approx(nll.item())
    assert trained["accuracy"] == pytest.approx(accuracy.item())


def test_a_model_of_tokens_tells_its_likelihood():
    la = laplace_lora_ext.Laplace(token_classifier())
    assert la.likelihood == TOKENS


# --- texts without labels -------------------------------------------------------------


@pytest.fixture
def with_a_batch_without_labels():
    """The batches, with one more whose texts lack labels."""
    first, *others = batches()
    none = torch.full_like(first["labels"], IGNORED)
    without = first | {"labels": none}
    return [first, without, *others]


@of_two_structures
def test_texts_without_a_label_add_nothing_to_a_fit_or_a_figure(
    structure, with_a_batch_without_labels
):
    la = fitted(structure=structure)
    other = fitted(structure=structure, data=with_a_batch_without_labels)
    n_without = 3
    assert other.n_data == la.n_data + n_without
    assert_close(other.loss, la.loss, **EXACT)
    found = curvature_of(other)
    expected = curvature_of(la)
    assert_close(found, expected, **EXACT)
    found = compare(la, with_a_batch_without_labels)
    expected = compare(la, batches())
    assert found.posterior == expected.posterior


def chosen_by_agreement(la, loader) -> Tensor:
    la.optimize_prior_precision(method="agreement", train_loader=loader)
    return la.prior_precision


def chosen_by_a_grid_search(la, loader) -> Tensor:
    la.optimize_prior_precision(method="gridsearch", val_loader=loader)
    return la.prior_precision


def learnt_weights(la, loader) -> Tensor:
    # Swapped tokens are drawn for each batch, of which one more changes the draws.
    learnt = la.amortize(loader, unlabelled=None)
    return learnt.weights


@may_end_at_the_grids_edge
@pytest.mark.parametrize(
    "choose",
    [chosen_by_agreement, chosen_by_a_grid_search, learnt_weights],
)
def test_texts_without_a_label_change_no_choice(choose, with_a_batch_without_labels):
    la = fitted()
    found = choose(la, with_a_batch_without_labels)
    expected = choose(la, batches())
    assert_close(found, expected)


# --- several processes ----------------------------------------------------------------


class LabelledTexts(Dataset):
    """Texts with labels of tokens, each by itself and without padding."""

    def __init__(self, n_texts: int) -> None:
        (whole,) = batches(batch_size=N_TEXTS)
        # One text without a label is among them, which one rank alone sees.
        whole["labels"][3] = IGNORED
        masks = is_real(whole)
        self.texts = []
        for row in range(n_texts):
            text = {}
            for key, value in whole.items():
                of_row = value[row]
                text[key] = of_row[masks[row]]
            self.texts.append(text)

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Batch:
        return self.texts[index]


def padded(texts):
    """Pad texts to the longest of them, so that batches have widths of their own."""
    batch = {}
    for key, value in PADDING.items():
        rows = [text[key] for text in texts]
        batch[key] = pad_sequence(
            rows,
            batch_first=True,
            padding_value=value,
        )
    return batch


def dealt_loader(n_texts=5, batch_size=2):
    """Load this rank's texts, or all where there is one process."""
    # Two ranks can't share five alike: the sampler repeats one, which must not count.
    texts = LabelledTexts(n_texts)
    sampler = None
    if dist.is_initialized():
        sampler = DistributedSampler(texts, shuffle=False)
    return DataLoader(
        texts,
        batch_size=batch_size,
        sampler=sampler,
        collate_fn=padded,
    )


@may_end_at_the_grids_edge
@of_two_structures
def test_several_processes_that_share_texts_do_as_one_does(structure):
    def job(_):
        loader = dealt_loader()
        la = fitted(structure=structure, data=loader)
        la.optimize_prior_precision(
            method="agreement",
            train_loader=loader,
            max_change=0.05,
        )
        # Before the grid search writes its own.
        by_agreement = la.prior_precision
        la.optimize_prior_precision(
            method="gridsearch",
            val_loader=loader,
            **PRIORS_ALONE,
        )
        learnt = la.amortize(loader, unlabelled=None)
        figures = compare(la, loader)
        prediction = predicted(la, loader)
        # Five texts, the longest of seven tokens.
        assert prediction.labels.shape == (5, 7)
        probabilities = prediction.probabilities
        return {
            "n_data": la.n_data,
            "loss": la.loss,
            "evidence": la.log_marginal_likelihood(),
            "prior by agreement": by_agreement,
            "prior by a grid search": la.prior_precision,
            "learnt variances": learnt.weights.norm(),
            "figures of the model": figures.trained,
            "figures of the posterior": figures.posterior,
            # Two NaN are never alike.
            "probabilities": probabilities.nan_to_num(),
            "labels": prediction.labels,
        }

    of_ranks = on_ranks(job, 2)
    alone = job(0)
    # Batches are other ones, and statistics are kept in float32.
    assert_alike(of_ranks, alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_statistics_of_several_processes_have_the_rows_of_texts_in_order(batch_size):
    def job(_):
        # By one text each, there is a batch without a label.
        loader = dealt_loader(batch_size=batch_size)
        la = fitted(data=loader)
        assert la.n_data == 5
        statistics = statistics_of(la, loader)
        moments = statistics.moments(3.0)
        return {
            "logits": statistics.f_mu,
            "labels": statistics.targets,
            "variances": moments.f_var,
        }

    texts = LabelledTexts(5).texts
    whole = padded(texts)
    tokens = tokens_of(token_classifier(), [whole])
    of_ranks = on_ranks(job, 2)
    alone = job(0)
    assert_alike(of_ranks, alone, **EXACT)
    for of_rank in of_ranks:
        assert_close(of_rank["logits"], tokens.f, **EXACT)
        assert torch.equal(of_rank["labels"], tokens.y)


def test_a_collator_that_makes_texts_of_its_own_is_refused_by_their_number():
    def twice(texts):
        return padded([*texts, *texts])

    def job(_):
        la = fitted(data=dealt_loader())
        loader = dealt_loader()
        loader.collate_fn = twice
        la.predictive_statistics(loader)

    of_ranks = on_ranks(job, 2)
    for message in failures(of_ranks):
        assert "The collator did not make 2 examples of 2" in message


# --- bad input ------------------------------------------------------------------------


def label_padding(labels):
    labels.fill_(0)


def name_a_class_too_many(labels):
    labels[0] = N_CLASSES


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            label_padding,
            "labels where attention_mask is 0: set them to -100",
        ),
        (
            name_a_class_too_many,
            "must be -100 or from 0 to 2, but range from 0 to 3",
        ),
    ],
)
def test_labels_that_do_not_fit_are_refused(change, message):
    batch = first_batch()
    change(batch["labels"])
    with pytest.raises(ValueError, match=message):
        fitted(data=[batch])


def test_data_without_a_label_are_refused():
    data = batches()
    for batch in data:
        batch["labels"].fill_(IGNORED)
    with pytest.raises(ValueError, match="No token of the data has a label"):
        fitted(data=data)
    la = fitted()
    first, *_ = data
    with pytest.raises(ValueError, match="no token is labelled"):
        la(first, fitting=True)


def fit_labels_of_texts():
    batch = first_batch()
    n_texts = len(batch["labels"])
    batch["labels"] = torch.zeros(n_texts, dtype=torch.long)
    fitted(data=[batch])


def fit_a_model_of_texts():
    fitted(model=lora_model("bert"))


def fit_a_model_of_tokens_as_one_of_texts():
    la = make(token_classifier())
    la.fit(batches())


def make_one_of_a_model_that_writes():
    make(lora_model("gpt2"), "lowrank_kron", TOKENS)


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (
            fit_labels_of_texts,
            r'\(texts, tokens\).*likelihood "classification"',
        ),
        (
            fit_a_model_of_texts,
            'one label a text use "classification"',
        ),
        (
            fit_a_model_of_tokens_as_one_of_texts,
            'use the likelihood "token_classification"',
        ),
        (
            make_one_of_a_model_that_writes,
            'a model that writes use "language_modeling"',
        ),
    ],
)
def test_another_likelihoods_data_or_models_are_told_which_it_is(
    attempt: Callable[[], None],
    message: str,
):
    with pytest.raises(ValueError, match=message):
        attempt()


def test_a_structure_without_rows_of_tokens_is_refused():
    with pytest.raises(ValueError, match="hessian_structure"):
        make(token_classifier(), "kron", TOKENS)
