"""A mean of several posteriors' predictions."""

from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest
import torch
from peft import load_peft_weights
from torch import Tensor
from torch.distributions import MultivariateNormal
from torch.special import entr
from torch.testing import assert_close
from torch.utils.data import DataLoader

from laplace_lora_ext import GridSearch, LaplaceMixture
from laplace_lora_ext.predictive.links import shared_noise, softmax_samples
from tests.support.models import base_model, lora_model, ragged_batches, without_labels
from tests.support.posteriors import (
    count_forward_passes,
    fitted,
    generator,
    make,
    plain_regression,
)
from tests.support.ranks import Texts
from tests.support.tasks import Two, add_second, two
from tests.support.texts import fitted_text, text_batches

MEAN_FIELD = {"link_approx": "mean_field"}
# Factors of the members' priors.
GRID = {
    "log_prior_prec_min": -1,
    "log_prior_prec_max": 1,
    "grid_size": 3,
    "optimize_scale": False,
}
FACTORS = [0.1, 1, 10]
KINDS = ["classes", "numbers", "rewards", "several labels", "answers"]


# --- predictions ----------------------------------------------------------------------

CALLS = [
    {"link_approx": "probit"},
    {"link_approx": "mean_field"},
    {"link_approx": "bridge"},
    {"link_approx": "bridge_norm"},
    {"link_approx": "mc"},
    {"link_approx": "mc", "pred_type": "nn", "n_samples": 3},
]


def mean_of(first: Tensor, second: Tensor) -> Tensor:
    return (first + second) / 2


def test_probabilities_are_the_members_mean():
    both = two()
    mixture = both.mixture()
    batch = both.batch
    for call in CALLS:
        # The second member draws after the first.
        shared = generator()
        first = both.first(batch, generator=shared, **call)
        second = both.second(batch, generator=shared, **call)
        found = mixture(batch, generator=generator(), **call)
        expected = mean_of(first, second)
        assert_close(found, expected)


def squared(mean, covariance):
    """Square numbers where variances are given, or pairs for covariances."""
    if covariance.ndim == mean.ndim:
        return mean**2
    column = mean[..., None]
    row = mean[..., None, :]
    return column * row


kinds_of_numbers = pytest.mark.parametrize("kind", ["numbers", "rewards"])


@kinds_of_numbers
@pytest.mark.parametrize("options", [{}, {"joint": True}, {"diagonal_output": True}])
def test_numbers_have_the_mixtures_moments(kind, options):
    both = two(kind)
    mixture = both.mixture()
    (batch,) = both.batches
    m, S = both.first(batch, **options)
    n, T = both.second(batch, **options)
    mean, covariance = mixture(batch, **options)
    assert_close(mean, mean_of(m, n))
    # E[x xᵀ] = Cov[x] + E[x] E[x]ᵀ is the members' mean too.
    of_first = S + squared(m, S)
    of_second = T + squared(n, T)
    found = covariance + squared(mean, covariance)
    expected = mean_of(of_first, of_second)
    assert_close(found, expected)


def test_preferences_have_the_members_mean_probability():
    both = two("rewards")
    mixture = both.mixture()
    (batch,) = both.batches
    first = both.first(batch, fitting=True)
    second = both.second(batch, fitting=True)
    assert_close(mixture(batch, fitting=True), mean_of(first, second))
    with pytest.raises(ValueError, match="predicts numbers"):
        mixture.predict_proba(both.batch)


def test_entropies_are_those_of_all_members_draws():
    both = two()
    batch = both.batch
    found = both.mixture().predict(batch, "probit", 40, generator=generator(5))

    # The second member draws after the first.
    shared = generator(5)
    drawn = []
    for la in both.members:
        f_mu, f_var = la.predictive_moments(batch)
        log_p = softmax_samples(f_mu, f_var, shared_noise(f_mu, 40, shared))
        drawn.append(log_p.exp())
    p = torch.cat(drawn)
    total = entr(p.mean(0)).sum(-1)
    assert_close(found.total_entropy, total)
    assert_close(found.epistemic_entropy, total - entr(p).sum(-1).mean(0))
    # Of all draws of both, so that what the members disagree about counts too.
    of_label = p[:, range(len(found.labels)), found.labels]
    assert_close(found.label_variance, of_label.var(0, correction=0))


def test_decisions_have_the_probabilities_of_their_link_by_one_pass_of_each_member():
    both = two()
    mixture = both.mixture()
    batch = both.batch
    passes = [count_forward_passes(member) for member in mixture.members]
    by_probit = mixture.predict(batch, "probit")
    assert [len(each) for each in passes] == [1, 1]
    expected = mixture(batch, link_approx="probit")
    assert_close(by_probit.probabilities, expected)
    by_default = mixture.predict_proba(batch)
    assert by_default == pytest.approx(mixture(batch, **MEAN_FIELD).numpy())


@pytest.mark.parametrize("labelled", [True, False])
def test_members_pass_over_the_same_rows_of_a_loader_that_shuffles(labelled):
    mixture = two().mixture()
    texts = list(Texts())
    if not labelled:
        texts = [without_labels(text) for text in texts]
    # Of an order that is not the texts' own, as is checked below.
    torch.manual_seed(0)
    shuffled = DataLoader(texts, batch_size=3, shuffle=True)
    statistics = mixture.predictive_statistics(shuffled, dtype=torch.float64)
    for of_member in statistics.members:
        assert (of_member.targets is not None) == labelled
    found = mixture(statistics.moments(1.0), **MEAN_FIELD)
    expected = torch.cat([mixture(text, **MEAN_FIELD) for text in DataLoader(texts)])
    # Each prediction is nearest to that of its own text.
    order = torch.cdist(found, expected).argmin(1)
    assert_close(found, expected[order])
    places = list(range(len(texts)))
    assert order.tolist() != places
    assert sorted(order.tolist()) == places


# --- priors ---------------------------------------------------------------------------


def priors_of(*posteriors):
    return [la.prior_precision.item() for la in posteriors]


def loss_by_hand(both, batches):
    """Compute the mean negative log-likelihood of what a mixture predicts."""
    mixture = both.mixture()
    task = both.first.task
    losses = []
    for batch in batches:
        predicted = mixture(batch, **MEAN_FIELD, fitting=True)
        if task.has_noise:  # these are moments, and else probabilities
            f_mu, f_var = predicted
            noise = both.first.sigma_noise**2 * torch.eye(f_mu.shape[1]).to(f_var)
            density = MultivariateNormal(f_mu, f_var + noise)
            losses.append(-density.log_prob(batch["labels"].reshape(f_mu.shape)))
        else:
            losses.append(task.nll(predicted.log(), batch["labels"]))
    return torch.cat(losses).mean().item()


def losses_of_factors(both: Two) -> list[float]:
    """Compute the loss of a mixture with priors at each factor of the members'."""
    of_first, of_second = priors_of(*both.members)
    losses = []
    for factor in FACTORS:
        both.first.prior_precision = of_first * factor
        both.second.prior_precision = of_second * factor
        losses.append(loss_by_hand(both, both.batches))
    return losses


def search(mixture: LaplaceMixture, data):
    """Search the factors for that of the least loss of the data."""
    return mixture.optimize_prior_precision(val_loader=data, **GRID)


@pytest.mark.parametrize("kind", ["diagonal", *KINDS])
def test_a_factor_of_the_members_priors_is_chosen_for_the_mixture(kind):
    both = two(kind)
    mixture = both.mixture()
    history = search(mixture, both.batches)
    if kind != "diagonal":  # which has no statistics
        given = mixture.predictive_statistics(both.batches)
        method = GridSearch(val_loader=given, **MEAN_FIELD, **GRID)
        assert_close(method(mixture).objective, history.objective)
    losses = losses_of_factors(both)
    # Where the search keeps statistics, they are of float32.
    assert history.objective.tolist() == pytest.approx(losses, rel=1e-5)
    factor = history.chosen.prior_precision.item()
    assert priors_of(mixture) == pytest.approx([factor])
    assert priors_of(*mixture.members) == pytest.approx([2 * factor, 0.5 * factor])


def test_a_mixture_keeps_what_its_posteriors_were_when_they_were_given():
    both = two()
    mixture = both.mixture()
    before = both.first(both.batch)
    # The mixture's is a factor of its members' own.
    mixture.prior_precision = 10
    assert priors_of(*both.members) == [2, 0.5]
    assert torch.equal(both.first(both.batch), before)
    both.first.prior_precision = 7
    # One batch is fewer than the eight texts that it was fitted to.
    both.first.fit([both.batch])
    assert mixture.members[0].n_data == 8
    assert priors_of(*mixture.members) == [20, 5]


def test_a_search_that_only_chooses_leaves_the_priors():
    both = two()
    mixture = both.mixture()
    mixture.prior_precision = 10
    mixture.logit_scale = 3.0
    history = GridSearch(val_loader=both.batches).choose(mixture)
    assert mixture.prior_precision == 10
    assert mixture.logit_scale == 3
    assert priors_of(*mixture.members) == [20, 5]
    # Nor does what is chosen depend on the factors that the mixture has.
    expected = GridSearch(val_loader=both.batches).choose(both.mixture())
    assert_close(history.objective, expected.objective, rtol=0, atol=0)
    mixture.hyperparameters = history.chosen
    factor = history.chosen.prior_precision.item()
    assert priors_of(*mixture.members) == pytest.approx([2 * factor, 0.5 * factor])
    assert mixture.logit_scale == history.chosen.logit_scale


def test_a_search_in_inference_mode_keeps_ordinary_numbers():
    both = two()
    with torch.inference_mode():
        mixture = both.mixture()
        search(mixture, both.batches)
        mixture.prior_precision = 2 * mixture.prior_precision
    for each in (mixture, *mixture.members):
        prior_precision = each.prior_precision
        assert not prior_precision.is_inference()


def test_a_prediction_is_of_one_factor_whatever_other_threads_do():
    both = two()
    mixture = both.mixture()
    batch = both.batch
    expected = mixture(batch)
    changes = []

    with ThreadPoolExecutor(1) as pool:

        def change_prior(*_):
            if not changes:
                change = pool.submit(setattr, mixture, "prior_precision", 100.0)
                changes.append(change)
                # Without a lock it would be done by then.
                wait(changes, timeout=1)

        # While the first member predicts, and the second has not begun.
        model = both.first.model.model
        handle = model.register_forward_hook(change_prior)
        found = mixture(batch)
        handle.remove()
    assert torch.equal(found, expected)
    assert mixture.prior_precision == 100
    afterwards = mixture(batch)
    assert not torch.equal(afterwards, expected)


# --- files ----------------------------------------------------------------------------


def trainable(model) -> list[str]:
    return [name for name, weight in model.named_parameters() if weight.requires_grad]


def with_first_adapter():
    return lora_model("bert")


def bare_base():
    """Make the model that `lora_model("bert")` adapts."""
    torch.manual_seed(0)
    return base_model("bert").double()


@pytest.mark.parametrize(
    ("second", "make_model"),
    [
        ({}, bare_base),
        ({"target_modules": ["key"], "task_type": "SEQ_CLS"}, with_first_adapter),
    ],
)
def test_it_is_saved_and_loaded_with_its_adapters_and_heads(
    second, make_model, tmp_path
):
    both = two(**second)
    mixture = both.mixture()
    mixture.prior_precision = 3
    mixture.save_pretrained(tmp_path)
    loaded = LaplaceMixture.from_pretrained(make_model(), tmp_path)
    assert_close(loaded(both.batch), mixture(both.batch))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with a mixture of adapters "default" and "second"."""
    two().mixture().save_pretrained(tmp_path)
    return tmp_path


def test_loading_leaves_the_models_own_adapter_active_and_trainable(saved):
    model = with_first_adapter()
    before = trainable(model)
    LaplaceMixture.from_pretrained(model, saved)
    assert model.active_adapter == "default"
    assert trainable(model) == before


def test_a_damaged_member_is_named_and_leaves_no_adapter(saved):
    posterior = saved / "second" / "laplace_posterior.safetensors"
    posterior.write_text("{")
    model = lora_model("bert")
    with pytest.raises(ValueError, match="second"):
        LaplaceMixture.from_pretrained(model, saved)
    adapters = list(model.peft_config)
    assert adapters == ["default"]


def test_adapters_are_drawn_from_each_member(tmp_path):
    both = two()
    mixture = both.mixture()
    folder = tmp_path / "mixed"
    drawn = mixture.sample_adapters(3, folder, generator(2))
    expected = [
        folder / "sample_0",
        folder / "sample_1",
        folder / "sample_2" / "second",
    ]
    assert drawn == expected

    # Of three draws the first member gives two.
    shared = generator(2)
    of_first = both.first.sample_adapters(2, tmp_path / "first", shared)
    of_second = both.second.sample_adapters(1, tmp_path / "second", shared)
    of_members = [*of_first, *of_second]
    for found, expected in zip(drawn, of_members, strict=True):
        assert_same_weights(found, expected)


def assert_same_weights(folder: Path, other: Path) -> None:
    """Compare the adapters of two folders."""
    found = load_peft_weights(str(folder))
    expected = load_peft_weights(str(other))
    for name, weight in expected.items():
        assert torch.equal(found[name], weight)


# --- free text ------------------------------------------------------------------------


def two_of_texts() -> Two:
    """Fit posteriors of a language model."""
    model = lora_model("gpt2").eval()
    first = fitted_text(model)
    add_second(model)
    # Once more, since layers that were added are in training mode.
    second = fitted_text(model.eval())
    return Two(first, second, text_batches())


def test_members_score_texts_together():
    both = two_of_texts()
    batch = both.batch
    mixed = both.mixture().score(batch, 3, generator())
    # Of three draws the first member gives two.
    shared = generator()
    first = both.first.score(batch, 2, shared)
    second = both.second.score(batch, 1, shared)
    total = 2 * first.tokens.log_prob.exp() + second.tokens.log_prob.exp()
    assert_close(mixed.tokens.log_prob.exp(), total / 3)
    of_map = [each.tokens.map_log_prob.exp() for each in (first, second)]
    assert_close(mixed.tokens.map_log_prob.exp(), mean_of(*of_map))


# --- what cannot be mixed -------------------------------------------------------------


def with_one_that_is_not_fitted():
    empty = make(lora_model("bert"))
    return [fitted(), empty]


def with_more_classes():
    model = lora_model("bert", n_labels=4)
    of_four = fitted(model=model)
    return [fitted(), of_four]


def with_numbers():
    regression, _ = plain_regression(3)
    return [regression, fitted()]


def answering(*tokens):
    model = lora_model("gpt2")
    la = make(model, class_token_ids=tokens)
    la.fit(ragged_batches())
    return la


def with_answers_in_another_order():
    one = answering(1, 2, 3)
    other = answering(3, 2, 1)
    return [one, other]


def without_an_adapter():
    both = two()
    model = both.second.model.model
    model.delete_adapter("second")
    return both.members


def with_other_weights():
    both = two()
    block, *_ = both.second.blocks
    block.weight.data.mul_(2)
    return both.members


REFUSED = [
    (with_one_that_is_not_fitted, "not fitted"),
    (with_more_classes, "n_outputs.* 3,.* 4,"),
    (with_numbers, "differ in likelihood"),
    (with_answers_in_another_order, "1, 2, 3.*3, 2, 1"),
    (without_an_adapter, "lost weights .*second"),
    (with_other_weights, "have changed"),
]
ERRORS = (ValueError, RuntimeError, AttributeError)


@pytest.mark.parametrize(("posteriors", "message"), REFUSED)
def test_what_cannot_be_mixed_is_refused(posteriors, message):
    given = posteriors()
    with pytest.raises(ERRORS, match=message):
        LaplaceMixture(given)


def test_its_text_tells_of_each_member():
    mixture = two().mixture()
    text = repr(mixture)
    n_told = text.count("fitted to 8 examples; prior precision")
    assert n_told == 2


def test_evidence_chooses_no_prior_of_a_mixture():
    mixture = two().mixture()
    with pytest.raises(ValueError, match=r"gridsearch. or a GridSearch"):
        mixture.optimize_prior_precision("marglik")


def test_statistics_of_members_in_another_order_are_refused():
    both = two()
    mixture = both.mixture()
    given = mixture.predictive_statistics(both.batches)
    second_first = [both.second, both.first]
    in_other_order = LaplaceMixture(second_first)
    with pytest.raises(ValueError, match="belong to another fit"):
        in_other_order.optimize_prior_precision(val_loader=given)


def test_adapters_of_two_models_are_not_saved_together(tmp_path):
    one = fitted()
    other = fitted()
    of_two_models = LaplaceMixture([one, other])
    with pytest.raises(ValueError, match="one PeftModel"):
        of_two_models.save_pretrained(tmp_path)


def test_a_folder_without_a_mixture_is_not_found(tmp_path):
    model = lora_model("bert")
    with pytest.raises(FileNotFoundError):
        LaplaceMixture.from_pretrained(model, tmp_path)
