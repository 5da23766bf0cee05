"""A mean of several posteriors' predictions."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, load_peft_weights
from torch.testing import assert_close
from torch.utils.data import DataLoader

from laplace_lora_ext import GridSearch, LaplaceMixture
from laplace_lora_ext.models.adapters import add_fresh_adapter
from laplace_lora_ext.predictive.links import shared_noise, softmax_samples
from tests.support.models import (
    base_model,
    lora_model,
    ragged_batches,
    real_targets,
    without_labels,
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
    """Make one batch of texts with two numbers each."""
    (batch,) = ragged_batches(batch_size=8)
    return [batch | {"labels": real_targets(8, 2)}]


def preferences():
    """Make one batch of pairs of texts, of which one is preferred."""
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


@dataclass(frozen=True)
class Two:
    """Posteriors around two adapters of one model, and their data."""

    first: Any
    second: Any
    batches: list

    def mixture(self) -> LaplaceMixture:
        return LaplaceMixture([self.first, self.second])


def add_second(model, **lora_config):
    """Add and activate an adapter with random weights, by default like the first."""
    if lora_config:
        config = LoraConfig(r=2, **lora_config)
        model.add_adapter("second", config)
        model.set_adapter("second")
    else:
        add_fresh_adapter(model, "second")
    for name, weight in model.double().named_parameters():
        if ".second" in name:
            torch.nn.init.normal_(weight, std=0.4)


def two(name: str = "classes", **lora_config) -> Two:
    """Fit posteriors with priors that differ; the second's adapter may, too."""
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
    add_second(model, **lora_config)
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
    for options in ({}, {"joint": True}, {"diagonal_output": True}):
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


def test_preferences_have_the_members_mean_probability():
    both = two("rewards")
    (batch,) = both.batches
    first = both.first(batch, fitting=True)
    second = both.second(batch, fitting=True)
    found = both.mixture()(batch, fitting=True)
    assert_close(found, (first + second) / 2)


def test_entropies_are_those_of_all_members_draws():
    both = two()
    mixture = both.mixture()
    batch = both.batches[0]
    passes = [count_forward_passes(la) for la in mixture.members]
    found = mixture.predict(batch, "probit", n_samples=40, generator=generator(5))
    assert passes == [[1], [1]]

    shared = generator(5)  # the second member draws after the first
    drawn = []
    for la in (both.first, both.second):
        f_mu, f_var = la.predictive_moments(batch)
        noise = shared_noise(f_mu, 40, shared)
        log_p = softmax_samples(f_mu, f_var, noise)
        drawn.append(log_p.exp())
    p = torch.cat(drawn)
    total = torch.special.entr(p.mean(0)).sum(-1)
    of_draws = torch.special.entr(p).sum(-1)
    aleatoric = of_draws.mean(0)
    of_label = p[:, range(3), found.labels]
    assert_close(found.total_entropy, total)
    assert_close(found.epistemic_entropy, total - aleatoric)
    assert_close(found.label_variance, of_label.var(0, correction=0))


def test_decisions_have_the_probabilities_of_their_link():
    mixture = two().mixture()
    batch = ragged_batches()[0]
    decided = mixture.predict(batch, "probit")
    assert_close(decided.probabilities, mixture(batch, link_approx="probit"))
    expected = mixture(batch, link_approx="mean_field").numpy()
    assert mixture.predict_proba(batch) == pytest.approx(expected)


@pytest.mark.parametrize("labelled", [True, False])
def test_members_pass_over_the_same_rows_of_a_loader_that_shuffles(labelled):
    mixture = two().mixture()
    texts = [Texts()[place] for place in range(11)]
    if not labelled:
        texts = [without_labels(text) for text in texts]
    torch.manual_seed(0)
    shuffled = DataLoader(texts, batch_size=3, shuffle=True)
    statistics = mixture.predictive_statistics(shuffled, dtype=torch.float64)
    found = mixture(statistics.moments(1.0), link_approx="mean_field")

    in_order = [mixture(batch, link_approx="mean_field") for batch in DataLoader(texts)]
    expected = torch.cat(in_order)
    # Each prediction is nearest to that of its own text.
    distances = (found[:, None] - expected).abs().sum(-1)
    order = distances.argmin(1)
    assert order.tolist() != list(range(11))
    assert sorted(order.tolist()) == list(range(11))
    assert_close(found, expected[order])
    has_targets = statistics.members[0].targets is not None
    assert has_targets == labelled


# --- priors ---------------------------------------------------------------------------


def priors_of(*posteriors):
    return [la.prior_precision.item() for la in posteriors]


def loss_by_hand(both, batches):
    """Compute the mean negative log-likelihood of what a mixture predicts."""
    mixture = both.mixture()
    likelihood = both.first.trained_likelihood
    losses = []
    for batch in batches:
        predicted = mixture(batch, link_approx="mean_field", fitting=True)
        # Of numbers these are moments, of classes probabilities.
        outputs = predicted if likelihood.is_gaussian else [predicted.log()]
        nll = likelihood.nll(outputs, batch["labels"], both.first.sigma_noise)
        losses.append(nll)
    return torch.cat(losses).mean().item()


@pytest.mark.parametrize("kind", KINDS)
def test_a_factor_of_the_members_priors_is_chosen_for_the_mixture(kind):
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
    assert priors_of(*mixture.members) == pytest.approx([2 * best, 0.5 * best])
    # Of the structures, "lowrank_kron" alone has statistics.
    if kind != "diagonal":
        given = mixture.predictive_statistics(batches)
        search = GridSearch(val_loader=given, link_approx="mean_field", **GRID)
        assert_close(search(mixture).objective, history.objective)


def test_given_posteriors_keep_their_priors_and_the_mixture_its_own():
    both = two()
    mixture = both.mixture()
    batch = both.batches[0]
    before = both.first(batch)
    # The mixture's is a factor of its members' own.
    mixture.prior_precision = 10
    assert priors_of(both.first, both.second) == [2, 0.5]
    assert torch.equal(both.first(batch), before)
    both.first.prior_precision = 7
    both.first.fit([batch])
    assert mixture.n_data == 8
    assert priors_of(*mixture.members) == [20, 5]


def test_a_search_that_fails_leaves_the_priors():
    both = two()
    mixture = both.mixture()
    mixture.prior_precision = 10
    mixture.members[1].prior_precision = 6.0

    def failing_loss(*_):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        mixture.optimize_prior_precision(val_loader=both.batches, loss=failing_loss)
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
    changes = []

    with ThreadPoolExecutor(1) as pool:

        def change_prior(*_):
            if not changes:
                change = pool.submit(setattr, mixture, "prior_precision", 100.0)
                changes.append(change)
                wait(changes, timeout=1)  # without a lock it would be done by now

        # While the first member predicts, and the second has not begun.
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
    "second",
    [
        pytest.param({}, id="adapters alike"),
        pytest.param(
            {"target_modules": ["key"], "task_type": "SEQ_CLS"},
            id="adapters of other layers",
        ),
    ],
)
def test_it_is_saved_and_loaded_with_its_adapters_and_heads(second, tmp_path):
    both = two(**second)
    mixture = both.mixture()
    batch = both.batches[0]
    mixture.prior_precision = 3
    mixture.save_pretrained(tmp_path)
    torch.manual_seed(0)
    without_adapters = base_model("bert").double()
    model = lora_model("bert")  # which has the first adapter
    before = trainable(model)
    for given in (without_adapters, model):
        loaded = LaplaceMixture.from_pretrained(given, tmp_path)
        assert_close(loaded(batch), mixture(batch))
    assert model.active_adapter == "default"
    assert trainable(model) == before


def test_no_damaged_mixture_is_loaded(tmp_path):
    mixture = two().mixture()
    mixture.save_pretrained(tmp_path)
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
    posterior = tmp_path / "second" / "laplace_posterior.safetensors"
    posterior.write_text("{")
    with pytest.raises(ValueError, match="second"):
        LaplaceMixture.from_pretrained(model, tmp_path)
    assert list(model.peft_config) == ["default"]


def test_adapters_are_drawn_from_each_member(tmp_path):
    both = two()
    mixture = both.mixture()
    folder = tmp_path / "mixed"
    drawn = mixture.sample_adapters(3, folder, generator(2))
    names = [of_draw.relative_to(folder).as_posix() for of_draw in drawn]
    assert names == ["sample_0", "sample_1", "sample_2/second"]

    # Of three draws the first member gives two.
    shared = generator(2)
    of_first = both.first.sample_adapters(2, tmp_path / "first", shared)
    of_second = both.second.sample_adapters(1, tmp_path / "second", shared)
    for found, expected in zip(drawn, [*of_first, *of_second], strict=True):
        assert_same_weights(found, expected)


def assert_same_weights(folder: Path, other: Path) -> None:
    """Compare the adapters of two folders."""
    found = load_peft_weights(str(folder))
    for name, weight in load_peft_weights(str(other)).items():
        assert torch.equal(found[name], weight)


# --- free text ------------------------------------------------------------------------


def two_of_texts() -> Two:
    """Fit posteriors of a language model."""
    model = lora_model("gpt2").eval()
    first = fitted_text(model)
    add_second(model)
    second = fitted_text(model.eval())
    return Two(first, second, text_batches())


def test_members_score_texts_together():
    both = two_of_texts()
    batch = both.batches[0]
    mixture = both.mixture()
    found = mixture.score(batch, 3, generator()).tokens
    # Of three draws the first member gives two.
    shared = generator()
    first = both.first.score(batch, 2, shared).tokens
    second = both.second.score(batch, 1, shared).tokens
    expected = (2 * first.log_prob.exp() + second.log_prob.exp()) / 3
    assert_close(found.log_prob.exp(), expected)
    expected_of_map = (first.map_log_prob.exp() + second.map_log_prob.exp()) / 2
    assert_close(found.map_log_prob.exp(), expected_of_map)


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
            eos_token_id=-1,  # so that no text ends early
            pad_token_id=0,
        )

    found = write(both.mixture()).sequences
    expected = text
    for _ in range(3):
        p = torch.zeros(()).double()
        for adapter in ("default", "second"):
            model.set_adapter(adapter)
            logits = model(input_ids=expected).logits
            p = p + logits[:, -1].softmax(-1)
        most_probable = p.argmax(-1, keepdim=True)
        expected = torch.cat([expected, most_probable], dim=1)
    assert torch.equal(found, expected)
    with pytest.raises(ValueError, match="adapters of one model"):
        write(LaplaceMixture([both.second, fitted_text()]))


# --- what cannot be mixed -------------------------------------------------------------


def alone():
    return [fitted()]


def with_one_that_is_not_fitted():
    return [fitted(), make(lora_model("bert"))]


def with_more_classes():
    of_four = fitted(model=lora_model("bert", n_labels=4))
    return [fitted(), of_four]


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
    both = two()
    both.second.model.model.delete_adapter("second")
    return [both.first, both.second]


def with_other_weights():
    both = two()
    both.second.blocks[0].weight.data.mul_(2)
    return [both.first, both.second]


REFUSED = [
    (alone, "needs two posteriors"),
    (with_one_that_is_not_fitted, "not fitted"),
    (with_more_classes, "n_outputs.* 3,.* 4,"),
    (with_numbers, "differ in likelihood"),
    (with_answers_in_another_order, r"1, 2, 3.*3, 2, 1"),
    (with_another_base, "different base models .*pooler"),
    (without_an_adapter, "lost weights of the posterior: .*second"),
    (with_other_weights, "have changed since the fit"),
]


@pytest.mark.parametrize(("posteriors", "message"), REFUSED)
def test_what_cannot_be_mixed_is_refused(posteriors, message):
    given = posteriors()
    with pytest.raises((ValueError, RuntimeError, AttributeError), match=message):
        LaplaceMixture(given)


def test_what_a_mixture_lacks_is_said(tmp_path):
    both = two()
    mixture = both.mixture()
    assert repr(mixture).count("fitted to 8 examples; prior precision") == 2
    with pytest.raises(ValueError, match=r"gridsearch. or a GridSearch"):
        mixture.optimize_prior_precision("marglik")
    given = mixture.predictive_statistics(both.batches)
    in_other_order = LaplaceMixture([both.second, both.first])
    with pytest.raises(ValueError, match="belong to another fit"):
        in_other_order.optimize_prior_precision(val_loader=given)
    of_two_models = LaplaceMixture([both.first, fitted()])
    with pytest.raises(ValueError, match="one PeftModel"):
        of_two_models.save_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError):
        LaplaceMixture.from_pretrained(lora_model("bert"), tmp_path)
