"""Labels of tokens: a text is one of the data, its labels examples."""

import math
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.functional import cross_entropy, nll_loss
from torch.nn.utils.rnn import pad_sequence
from torch.testing import assert_close
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import (
    BertForTokenClassification,
    GPT2Config,
    GPT2ForTokenClassification,
    LlamaConfig,
    LlamaForTokenClassification,
)

import laplace_lora_ext
import laplace_lora_ext.passes.recorder as recorder
from laplace_lora_ext import Moments
from laplace_lora_ext.metrics import compare
from laplace_lora_ext.passes.recorder import _Jacobians
from tests.support.dense import (
    EXACT,
    evidence,
    exact_ggn,
    gradient_blocks,
    gradient_curvature,
    lora_weights,
    softmax_fisher,
    unpadded,
)
from tests.support.models import (
    N_CLASSES,
    VOCABULARY,
    base_model,
    lora_model,
    ragged_batches,
    record_calls,
    without_labels,
)
from tests.support.posteriors import PRIORS_ALONE, generator, make
from tests.support.ranks import assert_alike, failures, on_ranks

TOKENS = "token_classification"
EXACTLY = {"backend_kwargs": {"rank": 200, "stochastic": False}}
IGNORED = -100
PADDING = {
    "input_ids": 0,
    "attention_mask": 0,
    "labels": IGNORED,
}


def token_classifier(
    kind="bert",
    n_labels=N_CLASSES,
    dtype=torch.float64,
) -> nn.Module:
    torch.manual_seed(0)
    if kind == "bert":
        base = BertForTokenClassification(base_model("bert", n_labels).config)
        target_modules = ["query", "value"]
    elif kind == "gpt2":
        config = GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=12,
            n_layer=2,
            n_head=2,
            n_positions=64,
            num_labels=n_labels,
            bos_token_id=0,
            eos_token_id=0,
            attn_implementation="eager",
        )
        base = GPT2ForTokenClassification(config)
        target_modules = ["c_attn"]
    else:
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=12,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=24,
            num_labels=n_labels,
            pad_token_id=0,
        )
        base = LlamaForTokenClassification(config)
        target_modules = ["q_proj", "v_proj"]
    lora = LoraConfig(
        r=2,
        target_modules=target_modules,
        # With B at 0, as PEFT begins, the gradient of A would be 0 everywhere.
        init_lora_weights=False,
    )
    return get_peft_model(base, lora).to(dtype).eval()


def is_real(batch) -> torch.Tensor:
    """Tell tokens from padding, `(texts, tokens)`."""
    return batch["attention_mask"].bool()


def batches(n_labels=N_CLASSES, **keywords):
    """Ragged texts of which some tokens are labelled, and one text has none."""
    found = ragged_batches(**keywords)
    draws = generator(3)
    for number, batch in enumerate(found):
        shape = batch["input_ids"].shape
        labels = torch.randint(0, n_labels, shape, generator=draws)
        is_drawn = torch.rand(shape, generator=draws) < 0.6
        labels[~is_drawn | ~is_real(batch)] = IGNORED
        if number == 1:
            labels[1] = IGNORED
        batch["labels"] = labels
    return found


def is_labelled(batch) -> torch.Tensor:
    return batch["labels"] != IGNORED


def labels_of(data) -> torch.Tensor:
    """Join the labels of all labelled tokens."""
    return torch.cat([batch["labels"][is_labelled(batch)] for batch in data])


def texts_of(batch, rows: slice):
    """Take some texts of a batch, with their padding."""
    return {key: value[rows] for key, value in batch.items()}


def fitted(
    kind="bert",
    structure="lowrank_kron",
    data=None,
    model=None,
    **keywords,
):
    model = model or token_classifier(kind)
    settings = EXACTLY if structure == "lowrank_kron" else {}
    la = make(model, structure, TOKENS, **settings | keywords)
    la.fit(batches() if data is None else data)
    return la


@dataclass(frozen=True)
class Tokens:
    """Logits, Jacobians `(tokens, C, parameters)` and labels of tokens."""

    f: torch.Tensor
    Js: torch.Tensor
    y: torch.Tensor


def tokens_of(model, data, every=False) -> Tokens:
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

            derivatives = torch.func.jacrev(forward)(weights)
            of_weights = [derivative.flatten(2) for derivative in derivatives.values()]
            y = batch["labels"][row][is_token]
            counts = (y != IGNORED) | every
            logits.append(forward(weights).detach()[counts])
            Js.append(torch.cat(of_weights, dim=2)[counts])
            labels.append(y[counts])
    return Tokens(
        f=torch.cat(logits),
        Js=torch.cat(Js),
        y=torch.cat(labels),
    )


def curvature_of(la) -> torch.Tensor:
    """Make one matrix of a fitted curvature, whatever its structure."""
    if hasattr(la.H, "to_matrix"):
        return la.H.to_matrix()
    if la.H.ndim == 1:
        return la.H.diag()
    return la.H


def dense_curvature(structure, model, tokens: Tokens) -> torch.Tensor:
    """Compute by dense algebra what `curvature_of` a structure is to be."""
    fisher = softmax_fisher(tokens.f)
    if structure == "lowrank_kron":
        return gradient_curvature(model, tokens.Js, fisher)
    exact = exact_ggn(tokens.Js, fisher)
    if structure == "diag":
        return exact.diagonal().diag()
    return exact


def moments_of(la, data) -> Moments:
    """Join the moments of the labelled tokens of all batches."""
    of_batches = [la.predictive_moments(batch) for batch in data]
    f_mu = torch.cat([moments.f_mu for moments in of_batches])
    f_var = torch.cat([moments.f_var for moments in of_batches])
    return Moments(f_mu, f_var)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
@pytest.mark.parametrize("structure", ["lowrank_kron", "diag", "full"])
def test_curvature_evidence_and_covariances_are_exact(kind, structure):
    data = batches()
    la = fitted(kind, structure, data)
    model = la.model.model
    tokens = tokens_of(model, data)
    assert torch.equal(tokens.y, labels_of(data))
    H = dense_curvature(structure, model, tokens)
    # Low-rank factors leave out what is rounding beside their largest eigenvalue.
    rounding = 1e-10 * H.abs().max().item()
    assert_close(curvature_of(la), H, rtol=1e-9, atol=rounding)

    loss = cross_entropy(tokens.f, tokens.y, reduction="sum")
    assert_close(la.loss, loss, **EXACT)
    assert la.n_data == 8  # texts, and not tokens
    la.prior_precision = 3.0
    priors = torch.full_like(la.mean, 3.0)
    expected = evidence(H, -loss, la.mean, priors)
    assert_close(la.log_marginal_likelihood(), expected, **EXACT)

    f_mu, f_var = moments_of(la, data)
    precision = H + priors.diag()
    covariances = tokens.Js @ torch.linalg.solve(precision, tokens.Js.mT)
    assert_close(f_mu, tokens.f, **EXACT)
    assert_close(f_var, covariances, **EXACT)


def test_batches_and_padding_change_nothing():
    (whole,) = batches(batch_size=8)
    at_once = fitted(data=[whole]).H.to_matrix()
    for batch_size in (2, 5):  # 5 leaves a last batch of another size
        parts = []
        for start in range(0, 8, batch_size):
            part = texts_of(whole, slice(start, start + batch_size))
            parts.append(part)
        found = fitted(data=parts).H.to_matrix()
        assert_close(found, at_once, **EXACT)

    expected = fitted().H.to_matrix()
    longer = batches()
    for batch in longer:
        for key, value in PADDING.items():
            batch[key] = nn.functional.pad(batch[key], (0, 3), value=value)
    found = fitted(data=longer).H.to_matrix()
    assert_close(found, expected, **EXACT)


def test_drawn_labels_take_as_many_passes_as_draws_and_are_right_on_average():
    """A text costs its passes once for all of its tokens."""
    model = token_classifier()
    tokens = tokens_of(model, batches())
    fisher = softmax_fisher(tokens.f)
    blocks = gradient_blocks(model, tokens.Js, fisher)
    exact = torch.stack([block.trace() for block in blocks])
    drawn = fitted(model=model, backend_kwargs={"rank": 200, "num_samples": 4000})
    # A block has the trace of its output factor.
    found = torch.stack([block.output_factor.trace for block in drawn.H_facs.blocks])
    assert_close(found, exact, rtol=0.05, atol=0)

    assert drawn.backend.settings["stochastic"] is None
    default = fitted(model=model, backend_kwargs={"rank": 200})
    logits = torch.zeros(5, N_CLASSES)
    texts = torch.zeros(1, 5)
    seeds = default.backend.seeds(logits, texts)
    assert seeds.vectors.shape == (8, 5, N_CLASSES)


@pytest.mark.parametrize("link", ["probit", "mean_field", "mc"])
def test_predictions_are_of_every_token_but_padding(link):
    la = fitted()
    for batch in batches():
        mask = is_real(batch)
        p = la(batch, link_approx=link, generator=generator())
        assert p.shape == (*mask.shape, N_CLASSES)
        assert p[~mask].isnan().all()
        ones = torch.ones(mask.sum()).double()
        assert_close(p[mask].sum(-1), ones, **EXACT)
        again = la(without_labels(batch), link_approx=link, generator=generator())
        assert_close(again, p, equal_nan=True, **EXACT)


def test_so_narrow_a_prior_leaves_the_model_alone():
    la = fitted()
    la.prior_precision = 1e14
    p = torch.cat([la(batch)[is_real(batch)] for batch in batches()])
    every = tokens_of(la.model.model, batches(), every=True)
    assert_close(p, every.f.softmax(-1), rtol=1e-6, atol=1e-8)


def test_a_prediction_has_entropies_of_each_token():
    la = fitted()
    data = batches()
    batch = data[0]
    prediction = la.predict(batch, generator=generator())
    mask = is_real(batch)
    _, *by_token = prediction
    for column in by_token:
        assert column.shape == mask.shape
    most_probable = prediction.probabilities.argmax(-1)
    assert torch.equal(prediction.labels[mask], most_probable[mask])
    assert (prediction.labels[~mask] == IGNORED).all()
    assert (prediction.epistemic_entropy[mask] > 0).all()
    assert prediction.epistemic_entropy[~mask].isnan().all()


def test_a_prediction_of_a_loader_pads_its_batches_to_one_width():
    la = fitted()
    data = batches()
    # The text is of four tokens.
    narrow = {key: value[:1, :5] for key, value in data[1].items()}
    found = la.predict([narrow, *data], generator=generator())
    assert found.labels[0, 5:].tolist() == [IGNORED] * 2
    probabilities = found.probabilities[1:]
    assert probabilities.shape == (8, 7, N_CLASSES)
    expected = la.predict(data[0], generator=generator()).probabilities
    assert_close(probabilities[:3], expected, equal_nan=True, **EXACT)


DATA_OF_METHODS = {
    "agreement": {"train_loader": batches()},
    "gridsearch": {"val_loader": batches(), **PRIORS_ALONE},
    "val_gd": {"val_loader": batches(), "n_steps": 20},
    "marglik": {},
}


@pytest.mark.filterwarnings("ignore:The best prior precision of the grid")
@pytest.mark.parametrize("method", DATA_OF_METHODS)
def test_methods_choose_a_prior_by_labelled_tokens(method):
    la = fitted()
    torch.manual_seed(0)
    la.optimize_prior_precision(method=method, **DATA_OF_METHODS[method])
    assert la.prior_precision.isfinite().all()


@pytest.mark.filterwarnings("ignore:The best prior precision of the grid")
def test_a_grid_search_minimises_the_loss_of_labelled_tokens():
    la = fitted()
    history = la.optimize_prior_precision(
        method="gridsearch", val_loader=batches(), **PRIORS_ALONE
    )
    best = int(history.objective.argmin())
    la.prior_precision = history.prior_precision[best]
    probabilities = []
    for batch in batches():
        p = la(batch, link_approx="mean_field")
        probabilities.append(p[is_labelled(batch)])
    loss = nll_loss(torch.cat(probabilities).log(), labels_of(batches()))
    assert_close(history.objective[best], loss, rtol=1e-5, atol=1e-6)


def test_statistics_give_the_moments_of_labelled_tokens():
    la = fitted()
    statistics = la.predictive_statistics(batches(), dtype=torch.float64)
    found = statistics.moments(la.prior_precision)
    expected = moments_of(la, batches())
    assert_close(found.f_mu, expected.f_mu, **EXACT)
    assert_close(found.f_var, expected.f_var, **EXACT)
    assert torch.equal(statistics.targets, labels_of(batches()))


def test_learnt_variances_predict_every_token_by_one_pass():
    la = fitted()
    learnt = la.amortize(batches())
    # Each once in its own text, and once in one with swapped tokens.
    n_labelled = len(labels_of(batches()))
    assert learnt.n_examples == 2 * n_labelled
    # What the classifier reads, and the log-probabilities.
    hidden_size = 12
    assert len(learnt.mean) == hidden_size + N_CLASSES
    (batch, *_) = batches()
    calls = record_calls(la.model.model)
    p = la(batch, pred_type="amortized", link_approx="mean_field")
    assert len(calls) == 1
    exact = la(batch, link_approx="mean_field")
    assert p.shape == exact.shape
    assert p.isnan().equal(exact.isnan())


def assert_of_every_token(samples, batch, expected):
    """Check that samples are what is expected of tokens, and NaN at padding."""
    mask = is_real(batch)
    n_samples = len(samples)
    assert samples.shape == (n_samples, *mask.shape, N_CLASSES)
    assert samples[:, ~mask].isnan().all()
    of_each = expected.expand(n_samples, -1, -1)
    assert_close(samples[:, mask], of_each, rtol=0, atol=1e-5)


@pytest.mark.parametrize("pred_type", ["glm", "nn"])
def test_samples_are_of_every_token_but_padding(pred_type):
    la = fitted()
    (batch, *_) = batches()
    # So narrow a prior that each sample is the model's own logits.
    la.prior_precision = 1e14
    f = tokens_of(la.model.model, [batch], every=True).f
    logits = la.functional_samples(batch, pred_type, n_samples=3)
    assert_of_every_token(logits, batch, f)
    probabilities = la.predictive_samples(batch, pred_type, n_samples=3)
    assert_of_every_token(probabilities, batch, f.softmax(-1))
    of_function = la.function(0, pred_type)(batch)
    assert_of_every_token(of_function[None], batch, f)


def test_a_joint_sample_is_that_of_one_function():
    la = fitted()
    (batch, *_) = batches()

    def joint_sample():
        return la.functional_samples(
            batch, n_samples=1, generator=generator(), joint=True
        )

    assert_close(la.function(0)(batch), joint_sample()[0], equal_nan=True)
    la.prior_precision = 1e14
    f = tokens_of(la.model.model, [batch], every=True).f
    assert_of_every_token(joint_sample(), batch, f)


@pytest.mark.parametrize("structure", ["lowrank_kron", "full"])
def test_a_long_text_is_predicted_for_a_few_tokens_at_a_time(structure, monkeypatch):
    data = batches()
    text = texts_of(data[0], slice(1))
    n_tokens = 7
    assert is_real(text).sum() == n_tokens
    assert is_labelled(text).sum() > 2  # more than go together below
    la = fitted(structure=structure)

    def predictions():
        found = {
            "probabilities": la(text),
            "moments": la.predictive_moments(text),
            "function": la.function(3)(text),
            "prediction": la.predict(text, generator=generator()),
        }
        if structure == "lowrank_kron":
            statistics = la.predictive_statistics([text], dtype=torch.float64)
            found["variances"] = statistics.moments(2.0).f_var
            found["targets"] = statistics.targets
        return found

    expected = predictions()
    of_two_tokens = 2 * la.n_params * N_CLASSES
    monkeypatch.setattr(recorder, "_NUMBERS", of_two_tokens)
    sizes = []
    visit = _Jacobians.gradients

    def note(visitor, gradients):
        sizes.append(visitor._size.numel())
        visit(visitor, gradients)

    monkeypatch.setattr(_Jacobians, "gradients", note)
    calls = record_calls(la.model.model)
    la(text)
    assert len(calls) == math.ceil(n_tokens / 2)
    assert max(sizes) == 2 * N_CLASSES
    assert_close(predictions(), expected, equal_nan=True, **EXACT)
    # Of several texts, each by itself.
    of_first = la(data[0])[:1]
    assert_close(of_first, expected["probabilities"], equal_nan=True, **EXACT)


def test_texts_that_come_one_at_a_time_may_lack_labels(monkeypatch):
    la = fitted()
    batch = batches()[1]
    assert (batch["labels"][1] == IGNORED).all()
    expected = la.predictive_statistics([batch], dtype=torch.float64)
    # Not even one text's rows may be in a pass together.
    monkeypatch.setattr(recorder, "_ON_CPU", 1)
    found = la.predictive_statistics([batch], dtype=torch.float64)
    assert_close(found.columns, expected.columns, **EXACT)
    p = la(batch, fitting=True)
    assert len(p) == is_labelled(batch).sum()


def test_figures_are_over_labelled_tokens():
    la = fitted()
    tokens = tokens_of(la.model.model, batches())
    trained = compare(la, batches()).trained
    nll = cross_entropy(tokens.f, tokens.y).item()
    assert trained["nll"] == pytest.approx(nll)
    is_right = tokens.f.argmax(-1) == tokens.y
    accuracy = is_right.double().mean().item()
    assert trained["accuracy"] == pytest.approx(accuracy)


@pytest.mark.filterwarnings("ignore:The posterior is over")
def test_a_model_of_tokens_tells_its_likelihood_and_a_file_keeps_it(tmp_path):
    model = token_classifier("llama", dtype=torch.float32)
    la = laplace_lora_ext.Laplace(model)
    assert la.likelihood == TOKENS
    la.fit(batches())
    la.save_pretrained(tmp_path)
    loaded = laplace_lora_ext.from_pretrained(model, tmp_path)
    (batch, *_) = batches()
    assert_close(loaded(batch), la(batch), equal_nan=True)


def test_steps_of_a_reasoning_have_two_classes():
    """As TRL's PRMTrainer labels them: the last token of each step, -100 elsewhere."""
    data = ragged_batches()
    for batch in data:
        labels = torch.full_like(batch["input_ids"], IGNORED)
        labels[:, 1] = torch.arange(len(labels)) % 2
        batch["labels"] = labels
    la = fitted(model=token_classifier("gpt2", n_labels=2), data=data)
    tokens = tokens_of(la.model.model, data)
    expected = dense_curvature("lowrank_kron", la.model.model, tokens)
    assert_close(la.H.to_matrix(), expected, **EXACT)
    assert la(data[0]).shape == (3, 7, 2)


# --- texts without labels -------------------------------------------------------------


@pytest.fixture
def with_a_batch_without_labels():
    """The batches, with one more whose texts lack labels."""
    first, *others = batches()
    without = first | {"labels": torch.full_like(first["labels"], IGNORED)}
    return [first, without, *others]


@pytest.mark.parametrize("structure", ["lowrank_kron", "diag"])
def test_texts_without_a_label_add_nothing_to_a_fit(
    structure, with_a_batch_without_labels
):
    la = fitted(structure=structure)
    other = fitted(structure=structure, data=with_a_batch_without_labels)
    assert other.n_data == la.n_data + 3
    assert_close(other.loss, la.loss, **EXACT)
    assert_close(curvature_of(other), curvature_of(la), **EXACT)


@pytest.mark.filterwarnings("ignore:The best prior precision of the grid")
@pytest.mark.parametrize("structure", ["lowrank_kron", "diag"])
def test_texts_without_a_label_change_no_figure_and_no_choice(
    structure, with_a_batch_without_labels
):
    la = fitted(structure=structure)
    data = batches()
    more = with_a_batch_without_labels
    assert compare(la, more).posterior == compare(la, data).posterior

    def by_agreement(loader):
        la.optimize_prior_precision(method="agreement", train_loader=loader)
        return la.prior_precision

    def by_a_grid_search(loader):
        la.optimize_prior_precision(method="gridsearch", val_loader=loader)
        return la.prior_precision

    def learnt_weights(loader):
        return la.amortize(loader, unlabelled=None).weights

    for choose in (by_agreement, by_a_grid_search, learnt_weights):
        assert_close(choose(more), choose(data))
    assert la.amortize(more).n_examples == la.amortize(data).n_examples


# --- several processes ----------------------------------------------------------------


class LabelledTexts(Dataset):
    """Texts with labels of tokens, each by itself and without padding."""

    def __init__(self, n_texts: int) -> None:
        (whole,) = batches(batch_size=8)
        whole["labels"][3] = IGNORED
        self.texts = []
        for row in range(n_texts):
            is_token = is_real(whole)[row]
            text = {key: value[row][is_token] for key, value in whole.items()}
            self.texts.append(text)

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.texts[index]


def padded(texts):
    """Pad texts to the longest of them, so that batches have widths of their own."""
    batch = {}
    for key, value in PADDING.items():
        rows = [text[key] for text in texts]
        batch[key] = pad_sequence(rows, batch_first=True, padding_value=value)
    return batch


def dealt_loader(n_texts=5, batch_size=2):
    """Load this rank's texts, or all where there is one process."""
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


@pytest.mark.filterwarnings("ignore:The best prior precision of the grid")
@pytest.mark.parametrize("structure", ["lowrank_kron", "diag"])
def test_several_processes_that_share_texts_do_as_one_does(structure):
    def job(_):
        loader = dealt_loader()
        la = fitted(structure=structure, data=loader)
        la.optimize_prior_precision(
            method="agreement",
            train_loader=loader,
            max_change=0.05,
        )
        by_agreement = la.prior_precision
        la.optimize_prior_precision(
            method="gridsearch",
            val_loader=loader,
            **PRIORS_ALONE,
        )
        learnt = la.amortize(loader, unlabelled=None)
        figures = compare(la, loader)
        prediction = la.predict(loader, generator=generator())
        assert prediction.labels.shape == (5, 7)
        return {
            "n_data": la.n_data,
            "loss": la.loss,
            "evidence": la.log_marginal_likelihood(),
            "prior by agreement": by_agreement,
            "prior by a grid search": la.prior_precision,
            "learnt variances": learnt.weights.norm(),
            "figures of the model": figures.trained,
            "figures of the posterior": figures.posterior,
            "probabilities": torch.nan_to_num(prediction.probabilities),
            "labels": prediction.labels,
        }

    assert_alike(on_ranks(job, 2), job(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_statistics_of_several_processes_have_the_rows_of_texts_in_order(batch_size):
    def job(_):
        # By one text each, there is a batch without a label.
        loader = dealt_loader(batch_size=batch_size)
        la = fitted(data=loader)
        assert la.n_data == 5
        statistics = la.predictive_statistics(loader, dtype=torch.float64)
        variances = statistics.moments(3.0).f_var
        return statistics.f_mu, statistics.targets, variances

    whole = padded(LabelledTexts(5).texts)
    tokens = tokens_of(token_classifier(), [whole])
    results = on_ranks(job, 2)
    for f_mu, targets, _ in results:
        assert_close(f_mu, tokens.f, **EXACT)
        assert torch.equal(targets, tokens.y)
    assert_alike(results, job(0), **EXACT)


def test_a_collator_that_makes_texts_of_its_own_is_refused_by_their_number():
    def twice(texts):
        return padded([*texts, *texts])

    def job(_):
        la = fitted(data=dealt_loader())
        loader = dealt_loader()
        loader.collate_fn = twice
        la.predictive_statistics(loader)

    for message in failures(on_ranks(job, 2)):
        assert "The collator did not make 2 examples of 2" in message


# --- bad input ------------------------------------------------------------------------


def label_padding(labels):
    labels.fill_(0)


def name_a_class_too_many(labels):
    labels[0] = N_CLASSES


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (label_padding, "labels where attention_mask is 0: set them to -100"),
        (
            name_a_class_too_many,
            "must be -100 or from 0 to 2, but range from 0 to 3",
        ),
    ],
)
def test_labels_that_do_not_fit_are_refused(change, message):
    data = batches()
    change(data[0]["labels"])
    with pytest.raises(ValueError, match=message):
        fitted(data=data)


def test_data_without_a_label_are_refused():
    data = batches()
    for batch in data:
        batch["labels"].fill_(IGNORED)
    with pytest.raises(ValueError, match=r"No token of the data has a label"):
        fitted(data=data)
    with pytest.raises(ValueError, match="no token is labelled"):
        fitted()(data[0], fitting=True)


def test_another_likelihood_is_named_where_it_would_fit():
    of_texts = batches()[0] | {"labels": torch.zeros(3, dtype=torch.long)}
    message = r'\(texts, tokens\).*likelihood "classification"'
    with pytest.raises(ValueError, match=message):
        fitted(data=[of_texts])
    with pytest.raises(ValueError, match='one label a text use "classification"'):
        fitted(model=lora_model("bert"))
    with pytest.raises(ValueError, match='use the likelihood "token_classification"'):
        make(token_classifier()).fit(batches())
    with pytest.raises(ValueError, match='a model that writes use "language_modeling"'):
        make(lora_model("gpt2"), "lowrank_kron", TOKENS)


def test_what_ranks_whole_texts_is_refused():
    la = fitted()
    with pytest.raises(NotImplementedError, match=r"epistemic_entropy.nansum\(1\)"):
        la.acquire(batches(), 2)
    prediction = la.predict(batches(), generator=generator())
    information = prediction.epistemic_entropy.nansum(1)
    assert information.shape == (8,)
    assert math.isfinite(information.sum())


def test_a_structure_without_rows_of_tokens_is_refused():
    message = 'hessian_structure="lowrank_kron", "diag" or "full"'
    with pytest.raises(ValueError, match=message):
        make(token_classifier(), "kron", TOKENS)
