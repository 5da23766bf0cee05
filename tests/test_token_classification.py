"""Labels of tokens: a text is one of the data, its labels examples."""

import math
import warnings

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.functional import cross_entropy
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
    # With B at 0, as PEFT begins, the gradient of A would be 0 everywhere.
    lora = LoraConfig(r=2, target_modules=target_modules, init_lora_weights=False)
    return get_peft_model(base, lora).to(dtype).eval()


def batches(n_labels=N_CLASSES, keep=0.6, **keywords):
    """Ragged texts of which some tokens are labelled, and one text has none."""
    found = ragged_batches(**keywords)
    draws = generator(3)
    for number, batch in enumerate(found):
        shape = batch["input_ids"].shape
        labels = torch.randint(0, n_labels, shape, generator=draws)
        is_kept = torch.rand(shape, generator=draws) < keep
        has_label = is_kept & batch["attention_mask"].bool()
        labels[~has_label] = IGNORED
        if number == 1:
            labels[1] = IGNORED
        batch["labels"] = labels
    return found


def is_labelled(batch) -> torch.Tensor:
    return batch["labels"] != IGNORED


def labels_of(data) -> torch.Tensor:
    """Join the labels of all labelled tokens."""
    return torch.cat([batch["labels"][is_labelled(batch)] for batch in data])


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


def tokens_of(model, found, every=False):
    """Read logits, Jacobians and labels of tokens, text by text."""
    weights = lora_weights(model)
    logits = []
    Js = []
    labels = []
    for batch in found:
        for row, is_real in enumerate(batch["attention_mask"].bool()):
            text = unpadded(batch, row)

            def forward(weights, text=text):
                output = torch.func.functional_call(model, weights, (), text)
                return output.logits[0]

            derivatives = torch.func.jacrev(forward)(weights)
            J = torch.cat([of_w.flatten(2) for of_w in derivatives.values()], dim=2)
            y = batch["labels"][row][is_real]
            counts = y != IGNORED
            if every:
                counts = torch.ones_like(counts)
            logits.append(forward(weights).detach()[counts])
            Js.append(J[counts])
            labels.append(y[counts])
    return torch.cat(logits), torch.cat(Js), torch.cat(labels)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
@pytest.mark.parametrize("structure", ["lowrank_kron", "diag", "full"])
def test_curvature_evidence_and_covariances_are_exact(kind, structure):
    la = fitted(kind, structure)
    model = la.model.model
    f, Js, y = tokens_of(model, batches())
    fisher = softmax_fisher(f)
    if structure == "lowrank_kron":
        H = gradient_curvature(model, Js, fisher)
        found = la.H.to_matrix()
    elif structure == "diag":
        H = exact_ggn(Js, fisher).diagonal().diag()
        found = la.H.diag()
    else:
        H = exact_ggn(Js, fisher)
        found = la.H
    # Low-rank factors leave out what is rounding beside their largest eigenvalue.
    rounding = 1e-10 * H.abs().max().item()
    assert_close(found, H, rtol=1e-9, atol=rounding)
    loss = cross_entropy(f, y, reduction="sum")
    assert_close(la.loss, loss, **EXACT)
    assert la.n_data == sum(len(batch["labels"]) for batch in batches())
    la.prior_precision = 3.0
    priors = torch.full((len(H),), 3.0, dtype=torch.float64)
    expected = evidence(H, -la.loss, la.mean, priors)
    assert_close(la.log_marginal_likelihood(), expected, **EXACT)

    covariance = Js @ torch.linalg.solve(H + priors.diag(), Js.mT)
    # Of labelled tokens.
    moments = [la.predictive_moments(batch) for batch in batches()]
    means = torch.cat([of_batch.f_mu for of_batch in moments])
    covariances = torch.cat([of_batch.f_var for of_batch in moments])
    assert_close(means, f, **EXACT)
    assert_close(covariances, covariance, **EXACT)


def test_batches_and_padding_change_nothing():
    expected = fitted().H.to_matrix()
    f_of_one = tokens_of(token_classifier(), batches(batch_size=8))[0]
    data = batches(batch_size=8)
    for batch_size in (2, 5):  # 5 leaves a last batch of another size
        parts = []
        for start in range(0, 8, batch_size):
            rows = slice(start, start + batch_size)
            parts.append({key: value[rows] for key, value in data[0].items()})
        la = fitted(data=parts)
        assert len(f_of_one) == is_labelled(data[0]).sum()
        at_once = fitted(data=data).H.to_matrix()
        assert_close(la.H.to_matrix(), at_once, **EXACT)
    longer = batches(padded_to=7)
    for batch in longer:
        for key, value in PADDING.items():
            batch[key] = nn.functional.pad(batch[key], (0, 3), value=value)
    assert_close(fitted(data=longer).H.to_matrix(), expected, **EXACT)


def test_drawn_labels_take_as_many_passes_as_draws_and_are_right_on_average():
    """A text costs its passes once for all of its tokens."""
    model = token_classifier()
    f, Js, _ = tokens_of(model, batches())
    blocks = gradient_blocks(model, Js, softmax_fisher(f))
    exact = torch.stack([block.trace() for block in blocks])
    la = fitted(model=model, backend_kwargs={"rank": 200, "num_samples": 4000})
    found = torch.stack([block.output_factor.trace for block in la.H_facs.blocks])
    assert_close(found, exact, rtol=0.05, atol=0)
    assert la.backend.settings["stochastic"] is None
    default = fitted(model=model, backend_kwargs={"rank": 200})
    logits = torch.zeros(5, N_CLASSES)
    seeds = default.backend.seeds(logits, torch.zeros(1, 5))
    assert seeds.vectors.shape == (8, 5, N_CLASSES)


@pytest.mark.parametrize("link", ["probit", "mean_field", "mc"])
def test_predictions_are_of_every_token_but_padding(link):
    la = fitted()
    model = la.model.model
    for batch in batches():
        mask = batch["attention_mask"].bool()
        p = la(batch, link_approx=link, generator=generator())
        assert p.shape == (*mask.shape, N_CLASSES)
        assert p[~mask].isnan().all()
        ones = torch.ones(mask.sum()).double()
        assert_close(p[mask].sum(-1), ones, **EXACT)
        again = la(without_labels(batch), link_approx=link, generator=generator())
        assert_close(again, p, equal_nan=True, **EXACT)
    # So narrow a prior leaves the model alone.
    la.prior_precision = 1e14
    of_tokens = [la(batch)[batch["attention_mask"].bool()] for batch in batches()]
    p = torch.cat(of_tokens)
    f, _, _ = tokens_of(model, batches(), every=True)
    assert_close(p, f.softmax(-1), rtol=1e-6, atol=1e-8)


def test_a_prediction_has_entropies_of_each_token():
    la = fitted()
    found = batches()
    batch = found[0]
    prediction = la.predict(batch, generator=generator())
    mask = batch["attention_mask"].bool()
    for column in prediction[1:]:
        assert column.shape == mask.shape
    assert (prediction.labels[~mask] == IGNORED).all()
    assert prediction.epistemic_entropy[~mask].isnan().all()
    assert (prediction.epistemic_entropy[mask] > 0).all()
    most_probable = prediction.probabilities.argmax(-1)
    assert torch.equal(prediction.labels[mask], most_probable[mask])
    shorter = {key: value[:1, :5] for key, value in found[1].items()}  # its padding cut
    of_loader = la.predict([shorter, *found], generator=generator())
    assert of_loader.labels[0, 5:].tolist() == [IGNORED] * 2
    of_loader = type(of_loader)(*(column[1:] for column in of_loader))
    assert of_loader.probabilities.shape == (8, 7, N_CLASSES)
    assert_close(
        of_loader.probabilities[:3], prediction.probabilities, equal_nan=True, **EXACT
    )


@pytest.mark.parametrize("method", ["agreement", "gridsearch", "val_gd", "marglik"])
def test_methods_choose_a_prior_by_labelled_tokens(method):
    la = fitted()
    data = {
        "agreement": {"train_loader": batches()},
        "gridsearch": {"val_loader": batches(), **PRIORS_ALONE},
        "val_gd": {"val_loader": batches(), "n_steps": 20, "generator": generator()},
        "marglik": {},
    }[method]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        history = la.optimize_prior_precision(method=method, **data)
    assert la.prior_precision.isfinite().all()
    if method != "gridsearch":
        return
    best = int(history.objective.argmin())
    la.prior_precision = history.prior_precision[best]
    losses = []
    for batch in batches():
        p = la(batch, link_approx="mean_field")[is_labelled(batch)]
        y = batch["labels"][is_labelled(batch)]
        losses.append(-p.log()[torch.arange(len(p)), y])
    loss = torch.cat(losses).mean()
    assert_close(history.objective[best], loss, rtol=1e-5, atol=1e-6)


def test_statistics_give_the_moments_of_labelled_tokens():
    la = fitted()
    statistics = la.predictive_statistics(batches(), dtype=torch.float64)
    expected = [la.predictive_moments(batch) for batch in batches()]
    moments = statistics.moments(la.prior_precision)
    f_mu = torch.cat([of_batch.f_mu for of_batch in expected])
    f_var = torch.cat([of_batch.f_var for of_batch in expected])
    assert_close(moments.f_mu, f_mu, **EXACT)
    assert_close(moments.f_var, f_var, **EXACT)
    assert torch.equal(statistics.targets, labels_of(batches()))


def test_learnt_variances_predict_every_token_by_one_pass():
    la = fitted()
    learnt = la.amortize(batches())
    n_labelled = len(labels_of(batches()))
    assert learnt.n_examples == 2 * n_labelled
    # What the classifier reads, and the log-probabilities.
    assert len(learnt.mean) == 12 + N_CLASSES
    (batch, *_) = batches()
    calls = record_calls(la.model.model)
    p = la(batch, pred_type="amortized", link_approx="mean_field")
    assert len(calls) == 1
    exact = la(batch, link_approx="mean_field")
    assert p.shape == exact.shape
    assert p.isnan().equal(exact.isnan())


def test_samples_are_of_every_token_but_padding():
    la = fitted()
    (batch, *_) = batches()
    mask = batch["attention_mask"].bool()
    la.prior_precision = 1e14
    f, _, _ = tokens_of(la.model.model, [batch], every=True)

    def check(samples, expected):
        assert samples.shape == (*samples.shape[:1], *mask.shape, N_CLASSES)
        assert samples[:, ~mask].isnan().all()
        of_each = expected.expand(len(samples), -1, -1)
        assert_close(samples[:, mask], of_each, rtol=0, atol=1e-5)

    for pred_type in ("glm", "nn"):
        options = {"pred_type": pred_type, "n_samples": 3}
        check(la.functional_samples(batch, **options), f)
        check(la.predictive_samples(batch, **options), f.softmax(-1))
    together = la.functional_samples(
        batch, n_samples=1, generator=generator(), joint=True
    )
    check(together, f)
    for pred_type in ("glm", "nn"):
        check(la.function(0, pred_type)(batch)[None], f)
    la.prior_precision = 1.0
    together = la.functional_samples(
        batch, n_samples=1, generator=generator(), joint=True
    )
    assert_close(la.function(0)(batch), together[0], equal_nan=True)


@pytest.mark.parametrize("structure", ["lowrank_kron", "full"])
def test_a_long_text_is_predicted_for_a_few_tokens_at_a_time(structure, monkeypatch):
    data = batches()
    texts = {key: value[:1] for key, value in data[0].items()}  # seven tokens
    la = fitted(structure=structure)
    assert is_labelled(texts).sum() > 2

    def found():
        prediction = la.predict(texts, generator=generator())
        results = [
            la(texts),
            *la.predictive_moments(texts),
            la.function(3)(texts),
            *prediction,
        ]
        if structure == "lowrank_kron":
            statistics = la.predictive_statistics([texts], dtype=torch.float64)
            results += [statistics.moments(2.0).f_var, statistics.targets]
        return results

    expected = found()
    # Jacobians of two tokens.
    n_numbers = 2 * la.n_params * N_CLASSES
    monkeypatch.setattr(recorder, "_NUMBERS", n_numbers)
    sizes = []
    visit = _Jacobians.gradients

    def note(visitor, gradients):
        sizes.append(visitor._size.numel())
        visit(visitor, gradients)

    monkeypatch.setattr(_Jacobians, "gradients", note)
    calls = record_calls(la.model.model)
    la(texts)
    assert len(calls) == 4  # of seven tokens
    assert max(sizes) == 2 * N_CLASSES
    assert_close(found(), expected, equal_nan=True, **EXACT)
    # Of several texts, each by itself.
    assert_close(la(data[0])[:1], expected[0], equal_nan=True, **EXACT)


def test_texts_that_come_one_at_a_time_may_lack_labels(monkeypatch):
    la = fitted()
    batch = batches()[1]
    assert (batch["labels"][1] == IGNORED).all()
    expected = la.predictive_statistics([batch], dtype=torch.float64)
    monkeypatch.setattr(recorder, "_ON_CPU", 1)
    found = la.predictive_statistics([batch], dtype=torch.float64)
    for column, expected_column in zip(found.columns, expected.columns, strict=True):
        assert_close(column, expected_column, **EXACT)
    p = la(batch, fitting=True)
    assert len(p) == is_labelled(batch).sum()


def test_figures_are_over_labelled_tokens():
    la = fitted()
    f, _, y = tokens_of(la.model.model, batches())
    trained = compare(la, batches()).trained
    assert trained["nll"] == pytest.approx(cross_entropy(f, y).item())
    accuracy = (f.argmax(-1) == y).double().mean().item()
    assert trained["accuracy"] == pytest.approx(accuracy)


def test_a_model_of_tokens_tells_its_likelihood_and_a_file_keeps_it(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        la = laplace_lora_ext.Laplace(token_classifier("llama", dtype=torch.float32))
    assert la.likelihood == TOKENS
    la.fit(batches())
    la.save_pretrained(tmp_path)
    loaded = laplace_lora_ext.from_pretrained(la.model.model, tmp_path)
    (batch, *_) = batches()
    assert_close(loaded(batch), la(batch), equal_nan=True)


def test_steps_of_a_reasoning_have_two_classes():
    """As TRL's PRMTrainer labels them: the last token of each step, -100 elsewhere."""
    data = ragged_batches()
    for batch in data:
        ends = torch.full_like(batch["input_ids"], IGNORED)
        ends[:, 1] = torch.arange(len(ends)) % 2
        batch["labels"] = ends
    la = fitted(model=token_classifier("gpt2", n_labels=2), data=data)
    f, Js, _ = tokens_of(la.model.model, data)
    expected = gradient_curvature(la.model.model, Js, softmax_fisher(f))
    assert_close(la.H.to_matrix(), expected, **EXACT)
    assert la(data[0]).shape == (3, 7, 2)


# --- several processes ----------------------------------------------------------------


class LabelledTexts(Dataset):
    """Texts with labels of tokens, each by itself and without padding."""

    def __init__(self, n_texts: int) -> None:
        (whole,) = batches(batch_size=8)
        whole["labels"][3] = IGNORED
        self.texts = []
        for row in range(n_texts):
            is_real = whole["attention_mask"][row].bool()
            text = {key: value[row][is_real] for key, value in whole.items()}
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
    texts = LabelledTexts(n_texts)
    sampler = None
    if dist.is_initialized():
        sampler = DistributedSampler(texts, shuffle=False)
    return DataLoader(texts, batch_size=batch_size, sampler=sampler, collate_fn=padded)


@pytest.mark.parametrize("structure", ["lowrank_kron", "diag"])
def test_batches_of_texts_without_a_label_teach_nothing(structure):
    without = batches()[0]
    without["labels"].fill_(IGNORED)
    data = batches()
    more = [data[0], without, *data[1:]]
    la = fitted(structure=structure)
    other = fitted(structure=structure, data=more)
    assert other.n_data == la.n_data + 3
    assert_close(other.loss, la.loss, **EXACT)
    found = other.H
    expected = la.H
    if structure == "lowrank_kron":
        found = found.to_matrix()
        expected = expected.to_matrix()
    assert_close(found, expected, **EXACT)
    assert compare(la, more).posterior == compare(la, data).posterior
    for method, name in (("agreement", "train_loader"), ("gridsearch", "val_loader")):
        chosen = []
        for loader in (data, more):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                la.optimize_prior_precision(method=method, **{name: loader})
            chosen.append(la.prior_precision)
        assert_close(*chosen)
    weights = [la.amortize(loader, unlabelled=None).weights for loader in (data, more)]
    assert_close(*weights)
    assert la.amortize(more).n_examples == la.amortize(data).n_examples


@pytest.mark.parametrize("structure", ["lowrank_kron", "diag"])
def test_several_processes_that_share_texts_do_as_one_does(structure):
    def job(_):
        loader = dealt_loader()
        la = fitted(structure=structure, data=loader)
        la.optimize_prior_precision(
            method="agreement", train_loader=loader, max_change=0.05
        )
        by_agreement = la.prior_precision
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # random models want the broadest prior
            la.optimize_prior_precision(
                method="gridsearch", val_loader=loader, **PRIORS_ALONE
            )
        learnt = la.amortize(loader, unlabelled=None)
        found = compare(la, loader)
        prediction = la.predict(loader, generator=generator())
        assert prediction.labels.shape == (5, 7)
        return (
            la.n_data,
            la.loss,
            la.log_marginal_likelihood(),
            by_agreement,
            la.prior_precision,
            learnt.weights.norm(),
            found.trained,
            found.posterior,
            torch.nan_to_num(prediction.probabilities),
            prediction.labels,
        )

    assert_alike(on_ranks(job, 2), job(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_statistics_of_several_processes_have_the_rows_of_texts_in_order(batch_size):
    def job(_):
        # By one text each, there is a batch without a label.
        loader = dealt_loader(batch_size=batch_size)
        la = fitted(data=loader)
        assert la.n_data == 5
        statistics = la.predictive_statistics(loader, dtype=torch.float64)
        return statistics.f_mu, statistics.targets, statistics.moments(3.0).f_var

    f, _, y = tokens_of(token_classifier(), [padded(LabelledTexts(5).texts)])
    results = on_ranks(job, 2)
    for f_mu, targets, _ in results:
        assert_close(f_mu, f, **EXACT)
        assert torch.equal(targets, y)
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


def with_labels(change):
    data = batches()
    change(data[0]["labels"])
    return data


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda y: y.fill_(0), "labels where attention_mask is 0: set them to -100"),
        (
            lambda y: y[0].fill_(N_CLASSES),
            "must be -100 or from 0 to 2, but range from 0 to 3",
        ),
    ],
)
def test_labels_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        fitted(data=with_labels(change))


def test_data_without_a_label_are_refused():
    data = batches()
    for batch in data:
        batch["labels"].fill_(IGNORED)
    with pytest.raises(ValueError, match=r"No token of the data has a label"):
        fitted(data=data)
    with pytest.raises(ValueError, match="no token is labelled"):
        fitted()(data[0], fitting=True)


def test_another_likelihood_is_named_where_it_would_fit():
    labels = {"labels": torch.zeros(3, dtype=torch.long)}
    texts = [batches()[0] | labels]
    with pytest.raises(
        ValueError, match=r'\(texts, tokens\).*likelihood "classification"'
    ):
        fitted(data=texts)
    with pytest.raises(ValueError, match='one label a text use "classification"'):
        fitted(model=lora_model("bert"))
    with pytest.raises(ValueError, match='use the likelihood "token_classification"'):
        make(token_classifier()).fit(batches())
    with pytest.raises(ValueError, match='a model that writes use "language_modeling"'):
        make(lora_model("gpt2"), "lowrank_kron", TOKENS)
    with pytest.raises(
        ValueError, match='hessian_structure="lowrank_kron", "diag" or "full"'
    ):
        make(token_classifier(), "kron", TOKENS)


def test_what_ranks_whole_texts_is_refused():
    la = fitted()
    with pytest.raises(NotImplementedError, match=r"epistemic_entropy.nansum\(1\)"):
        la.acquire(batches(), 2)
    prediction = la.predict(batches(), generator=generator())
    information = prediction.epistemic_entropy.nansum(1)
    assert information.shape == (8,)
    assert math.isfinite(information.sum())
