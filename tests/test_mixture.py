"""A mean of several posteriors' predictions."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from peft import load_peft_weights
from torch.testing import assert_close
from torch.utils.data import DataLoader

from laplace_lora_ext import GridSearch, LaplaceMixture
from laplace_lora_ext.models.adapters import add_fresh_adapter
from laplace_lora_ext.predictive.links import (
    shared_noise,
    softmax_samples,
)
from tests.support.models import (
    base_model,
    lora_model,
    ragged_batches,
    real_targets,
)
from tests.support.posteriors import (
    count_forward_passes,
    fitted,
    generator,
    make,
    plain_regression,
)
from tests.support.ranks import Texts
from tests.support.texts import fitted_text, text_batches

GRID = {
    "log_prior_prec_min": -1,
    "log_prior_prec_max": 1,
    "grid_size": 3,
    "optimize_scale": False,
}


# --- posteriors around two adapters ---------------------------------------------------


def numbers():
    (batch,) = ragged_batches(batch_size=8)
    return [batch | {"labels": real_targets(8, 2)}]


def preferences():
    """Pairs of texts, of which one is preferred."""
    batch, *_ = ragged_batches(n_classes=2)
    pairs = {"labels": batch["labels"]}
    for key in ("input_ids", "attention_mask"):
        text = batch[key]
        pairs[key] = torch.stack([text, text.flip(0)], dim=1)
    return [pairs]


@dataclass(frozen=True)
class Kind:
    """A model, its data, and what its posteriors are made with."""

    base: str = "bert"
    n_labels: int = 3
    data: Callable[[], list] = ragged_batches
    keywords: Mapping[str, Any] = field(default_factory=dict)


KINDS = {
    "classes": Kind(),
    "diagonal": Kind(keywords={"structure": "diag"}),
    "answers": Kind(base="gpt2"),
    "numbers": Kind(
        n_labels=2,
        data=numbers,
        keywords={"likelihood": "regression"},
    ),
    "rewards": Kind(
        n_labels=1,
        data=preferences,
        keywords={"likelihood": "reward_modeling"},
    ),
}


class Two(NamedTuple):
    """Posteriors around two adapters of one model, and their data."""

    first: Any
    second: Any
    batches: list

    def mixture(self) -> LaplaceMixture:
        return LaplaceMixture([self.first, self.second])


def add_second(model, **other):
    """A second adapter, which is active then, with random weights."""
    if other:
        config = type(model.peft_config["default"])(r=2, **other)
        model.add_adapter("second", config)
        model.set_adapter("second")
    else:
        add_fresh_adapter(model, "second")
    for name, weight in model.double().named_parameters():
        if ".second" in name:
            torch.nn.init.normal_(weight, std=0.4)


def two(name: str = "classes", **other) -> Two:
    kind = KINDS[name]
    model = lora_model(kind.base, n_labels=kind.n_labels)
    batches = kind.data()

    def posterior(prior_precision):
        return fitted(
            kind.base,
            batches,
            model=model,
            prior_precision=prior_precision,
            **kind.keywords,
        )

    first = posterior(2.0)
    add_second(model, **other)
    second = posterior(0.5)
    model.set_adapter("default")
    return Two(first, second, batches)


# --- predictions ----------------------------------------------------------------------

CALLS = [
    {"link_approx": "probit"},
    {"link_approx": "mean_field"},
    {"link_approx": "bridge"},
    {"link_approx": "bridge_norm"},
    {"link_approx": "mc"},
    {"link_approx": "mc", "pred_type": "nn", "n_samples": 3},
]


@pytest.mark.parametrize("kind", ["classes", "answers"])
def test_probabilities_are_the_members_mean(kind):
    both = two(kind)
    mixture = both.mixture()
    batch = both.batches[0]
    for call in CALLS:
        shared = generator()  # the second member draws after the first
        first = both.first(batch, generator=shared, **call)
        second = both.second(batch, generator=shared, **call)
        found = mixture(batch, generator=generator(), **call)
        assert_close(found, (first + second) / 2)


def squared(mean, covariance):
    """Square numbers where variances are given, or pairs for covariances."""
    if covariance.ndim == mean.ndim:
        return mean**2
    return mean[..., None] * mean[..., None, :]


@pytest.mark.parametrize("kind", ["numbers", "rewards"])
def test_numbers_have_the_mixtures_moments(kind):
    both = two(kind)
    mixture = both.mixture()
    (batch,) = both.batches
    for options in (
        {},
        {"joint": True},
        {"diagonal_output": True},
    ):
        m, S = both.first(batch, **options)
        n, T = both.second(batch, **options)
        mean, covariance = mixture(batch, **options)
        assert_close(mean, (m + n) / 2)
        of_first = S + squared(m, S)
        of_second = T + squared(n, T)
        second_moment = covariance + squared(mean, covariance)
        assert_close(second_moment, (of_first + of_second) / 2)
    with pytest.raises(ValueError, match="predicts numbers"):
        mixture.predict_proba(batch)
    if kind == "rewards":
        first = both.first(batch, fitting=True)
        second = both.second(batch, fitting=True)
        assert_close(mixture(batch, fitting=True), (first + second) / 2)


def test_entropies_are_those_of_all_members_draws():
    both = two()
    mixture = both.mixture()
    batch = both.batches[0]
    passes = [count_forward_passes(la) for la in mixture.members]
    found = mixture.predict(batch, "probit", n_samples=40, generator=generator(5))
    assert passes == [[1], [1]]
    shared = generator(5)
    drawn = []
    for la in (both.first, both.second):
        moments = la.predictive_moments(batch)
        noise = shared_noise(moments.f_mu, 40, shared)
        drawn.append(softmax_samples(*moments, noise).exp())
    drawn = torch.cat(drawn)
    total = torch.special.entr(drawn.mean(0)).sum(-1)
    aleatoric = torch.special.entr(drawn).sum(-1).mean(0)
    assert_close(found.probabilities, mixture(batch, link_approx="probit"))
    assert_close(found.total_entropy, total)
    assert_close(found.epistemic_entropy, total - aleatoric)
    of_label = drawn[:, range(3), found.labels]
    assert_close(found.label_variance, of_label.var(0, correction=0))
    expected = mixture(batch, link_approx="mean_field").numpy()
    assert mixture.predict_proba(batch) == pytest.approx(expected)


@pytest.mark.parametrize("labelled", [True, False])
def test_members_pass_over_the_same_rows_of_a_loader_that_shuffles(
    labelled,
):
    mixture = two().mixture()
    n = 11
    texts = [Texts()[place] for place in range(n)]
    if not labelled:
        for text in texts:
            del text["labels"]
    torch.manual_seed(0)
    shuffled = DataLoader(texts, batch_size=3, shuffle=True)
    statistics = mixture.predictive_statistics(shuffled, dtype=torch.float64)
    found = mixture(statistics.moments(1.0), link_approx="mean_field")
    in_order = [mixture(batch, link_approx="mean_field") for batch in DataLoader(texts)]
    expected = torch.cat(in_order)
    # Each prediction is nearest to that of its own text.
    distances = (found[:, None] - expected).abs().sum(-1)
    order = distances.argmin(1)
    assert order.tolist() != list(range(n))
    assert sorted(order.tolist()) == list(range(n))
    assert_close(found, expected[order])
    has_targets = statistics.members[0].targets is not None
    assert has_targets == labelled


# --- priors ---------------------------------------------------------------------------


def loss_by_hand(both, batches):
    """Mean negative log-likelihood of what a mixture of the posteriors predicts."""
    mixture = both.mixture()
    predicted = []
    for batch in batches:
        found = mixture(batch, link_approx="mean_field", fitting=True)
        predicted.append(found if isinstance(found, tuple) else (found,))
    outputs = [torch.cat(parts) for parts in zip(*predicted, strict=True)]
    labels = torch.cat([batch["labels"] for batch in batches])
    likelihood = both.first.trained_likelihood
    if not likelihood.is_gaussian:
        outputs = [outputs[0].log()]
    return likelihood.nll(outputs, labels, both.first.sigma_noise).mean().item()


@pytest.mark.parametrize("kind", KINDS)
def test_a_factor_of_the_members_priors_is_chosen_for_the_mixture(
    kind,
):
    both = two(kind)
    batches = both.batches
    mixture = both.mixture()
    history = mixture.optimize_prior_precision(val_loader=batches, **GRID)
    factors = [0.1, 1, 10]
    losses = []
    for factor in factors:
        both.first.prior_precision = 2 * factor
        both.second.prior_precision = 0.5 * factor
        losses.append(loss_by_hand(both, batches))
    assert history.objective.tolist() == pytest.approx(losses, rel=1e-5)
    best = factors[losses.index(min(losses))]
    assert mixture.prior_precision.item() == pytest.approx(best)
    priors = [la.prior_precision.item() for la in mixture.members]
    assert priors == pytest.approx([2 * best, 0.5 * best])
    if kind != "diagonal":
        given = mixture.predictive_statistics(batches)
        search = GridSearch(val_loader=given, link_approx="mean_field", **GRID)
        assert_close(search(mixture).objective, history.objective)


def priors_of(*posteriors):
    return [la.prior_precision.item() for la in posteriors]


def test_given_posteriors_keep_their_priors_and_the_mixture_its_own():
    first, second, batches = both = two()
    mixture = both.mixture()
    before = first(batches[0])
    mixture.prior_precision = 10
    assert priors_of(first, second) == [2, 0.5]
    assert torch.equal(first(batches[0]), before)
    first.prior_precision = 7
    first.fit(batches[:1])
    assert mixture.n_data == 8
    mixture.members[1].prior_precision = 6.0
    with pytest.raises(ZeroDivisionError):
        mixture.optimize_prior_precision(val_loader=batches, loss=lambda *_: 1 / 0)
    assert mixture.prior_precision.item() == 10
    assert priors_of(*mixture.members) == [20, 6]


def test_a_search_in_inference_mode_keeps_ordinary_numbers():
    both = two()
    with torch.inference_mode():
        mixture = both.mixture()
        mixture.optimize_prior_precision(val_loader=both.batches, **GRID)
        mixture.prior_precision = 2 * mixture.prior_precision
    for each in (mixture, *mixture.members):
        assert not each.prior_precision.is_inference()


def test_a_prediction_is_of_one_factor_whatever_other_threads_do():
    both = two()
    mixture = both.mixture()
    batch = both.batches[0]
    expected = mixture(batch)
    futures = []

    with ThreadPoolExecutor(1) as pool:

        def change_prior(*_):
            if not futures:
                change = pool.submit(setattr, mixture, "prior_precision", 100.0)
                futures.append(change)
                wait(futures, timeout=1)  # without a lock it would be done by now

        handle = both.first.model.model.register_forward_hook(change_prior)
        found = mixture(batch)
        handle.remove()
    assert torch.equal(found, expected)
    assert mixture.prior_precision.item() == 100
    assert not torch.equal(mixture(batch), expected)


# --- files ----------------------------------------------------------------------------


def trainable(model):
    return [name for name, weight in model.named_parameters() if weight.requires_grad]


@pytest.mark.parametrize(
    "targets",
    [
        {},
        {"target_modules": ["key"], "task_type": "SEQ_CLS"},
    ],
)
def test_it_is_saved_and_loaded_with_its_adapters_and_heads(targets, tmp_path):
    both = two(**targets)
    mixture = both.mixture()
    batch = both.batches[0]
    mixture.prior_precision = 3
    mixture.save_pretrained(tmp_path)
    torch.manual_seed(0)
    bare = base_model("bert").double()
    model = lora_model("bert")  # which has the first adapter
    before = trainable(model)
    for given in (bare, model):
        loaded = LaplaceMixture.from_pretrained(given, tmp_path)
        assert_close(loaded(batch), mixture(batch))
    assert model.active_adapter == "default"
    assert trainable(model) == before


def test_no_damaged_mixture_is_loaded(tmp_path):
    two().mixture().save_pretrained(tmp_path)
    model = lora_model("bert")
    description = tmp_path / "laplace_mixture.json"
    content = description.read_text()
    twice = content.replace("second", "default")
    cut_off = content[:-1]
    of_one = '{"members":["second"]}'
    message = r"laplace_mixture.json (is damaged|holds no mixture)"
    for damaged in (twice, cut_off, of_one):
        description.write_text(damaged)
        with pytest.raises(ValueError, match=message):
            LaplaceMixture.from_pretrained(model, tmp_path)
    description.write_text(content)
    (tmp_path / "second" / "laplace_posterior.safetensors").write_text("{")
    with pytest.raises(ValueError, match="second"):
        LaplaceMixture.from_pretrained(model, tmp_path)
    assert list(model.peft_config) == ["default"]


def test_adapters_are_drawn_from_each_member(tmp_path):
    both = two()
    mixed = tmp_path / "mixed"
    folders = both.mixture().sample_adapters(3, mixed, generator(2))
    parts = [folder.relative_to(mixed).as_posix() for folder in folders]
    assert parts == ["sample_0", "sample_1", "sample_2/second"]
    shared = generator(2)
    by_hand = [
        *both.first.sample_adapters(2, tmp_path / "first", shared),
        *both.second.sample_adapters(1, tmp_path / "second", shared),
    ]
    for folder, other in zip(folders, by_hand, strict=True):
        found = load_peft_weights(str(folder))
        expected = load_peft_weights(str(other))
        for name, weight in expected.items():
            assert torch.equal(found[name], weight)


# --- free text ------------------------------------------------------------------------


def two_of_texts() -> Two:
    model = lora_model("gpt2").eval()
    first = fitted_text(model)
    add_second(model)
    second = fitted_text(model.eval())
    return Two(first, second, text_batches())


def test_members_score_texts_together():
    both = two_of_texts()
    batch = both.batches[0]
    found = both.mixture().score(batch, 3, generator()).tokens
    # Of three draws the first member gives two.
    shared = generator()
    one = both.first.score(batch, 2, shared).tokens
    other = both.second.score(batch, 1, shared).tokens
    expected = (2 * one.log_prob.exp() + other.log_prob.exp()) / 3
    assert_close(found.log_prob.exp(), expected)
    expected = (one.map_log_prob.exp() + other.map_log_prob.exp()) / 2
    assert_close(found.map_log_prob.exp(), expected)


def test_members_write_texts_together():
    both = two_of_texts()
    model = both.first.model.model
    text = both.batches[0]["input_ids"][:1, :4]

    def write(mixture):
        return mixture.generate(
            input_ids=text,
            n_samples=0,
            max_new_tokens=3,
            do_sample=False,
            eos_token_id=-1,
            pad_token_id=0,
        )

    expected = text
    found = write(both.mixture()).sequences
    for _ in range(3):
        p = 0
        for adapter in ("default", "second"):
            model.set_adapter(adapter)
            logits = model(input_ids=expected).logits
            p = p + logits[:, -1].softmax(-1)
        expected = torch.cat([expected, p.argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(found, expected)
    with pytest.raises(ValueError, match="adapters of one model"):
        write(LaplaceMixture([both.second, fitted_text()]))


# --- what cannot be mixed -------------------------------------------------------------


def alone():
    return [fitted()]


def with_one_that_is_not_fitted():
    return [fitted(), make(lora_model("bert"))]


def with_more_classes():
    return [
        fitted(),
        fitted(model=lora_model("bert", n_labels=4)),
    ]


def with_numbers():
    regression, _ = plain_regression(3)
    return [regression, fitted()]


def answering(*tokens):
    la = make(lora_model("gpt2"), class_token_ids=tokens)
    la.fit(ragged_batches())
    return la


def with_answers_in_another_order():
    return [answering(1, 2, 3), answering(3, 2, 1)]


def with_another_base():
    model = lora_model("bert")
    model.get_base_model().bert.pooler.dense.bias.data += 0.1
    return [fitted(), fitted(model=model)]


def without_an_adapter():
    first, second, _ = two()
    second.model.model.delete_adapter("second")
    return [first, second]


def with_other_weights():
    first, second, _ = two()
    second.blocks[0].weight.data.mul_(2)
    return [first, second]


REFUSED = [
    (alone, "needs two posteriors"),
    (with_one_that_is_not_fitted, "not fitted"),
    (with_more_classes, "n_outputs.* 3,.* 4,"),
    (with_numbers, "differ in likelihood"),
    (with_answers_in_another_order, r"1, 2, 3.*3, 2, 1"),
    (with_another_base, "different base models .*pooler"),
    (
        without_an_adapter,
        "lost weights of the posterior: .*second",
    ),
    (with_other_weights, "have changed since the fit"),
]


@pytest.mark.parametrize(("posteriors", "message"), REFUSED)
def test_what_cannot_be_mixed_is_refused(posteriors, message):
    given = posteriors()
    with pytest.raises((ValueError, RuntimeError, AttributeError), match=message):
        LaplaceMixture(given)


def test_what_a_mixture_lacks_is_said(tmp_path):
    first, second, batches = both = two()
    mixture = both.mixture()
    assert repr(mixture).count("fitted to 8 examples; prior precision") == 2
    with pytest.raises(ValueError, match=r"gridsearch. or a GridSearch"):
        mixture.optimize_prior_precision("marglik")
    given = mixture.predictive_statistics(batches)
    in_other_order = LaplaceMixture([second, first])
    with pytest.raises(ValueError, match="belong to another fit"):
        in_other_order.optimize_prior_precision(val_loader=given)
    of_two_models = LaplaceMixture([first, fitted()])
    with pytest.raises(ValueError, match="one PeftModel"):
        of_two_models.save_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError):
        LaplaceMixture.from_pretrained(lora_model("bert"), tmp_path)
