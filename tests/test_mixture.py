"""A mean of several posteriors' predictions."""

from concurrent.futures import ThreadPoolExecutor, wait
from copy import copy

import pytest
import torch
from peft import load_peft_weights
from torch.special import entr
from torch.testing import assert_close
from torch.utils.data import DataLoader

from laplace_lora_ext import GridSearch, LaplaceMixture
from laplace_lora_ext.predictive.links import shared_noise, softmax_samples
from tests.support.cases import Gaussian, Softmax
from tests.support.models import lora_model
from tests.support.posteriors import (
    PRIORS_ALONE,
    fitted,
    generator,
    make,
    plain_regression,
)
from tests.support.ranks import Texts
from tests.support.tasks import TASKS, add_second, two
from tests.support.texts import fitted_text, text_batches

MEAN_FIELD = {"link_approx": "mean_field"}


# --- predictions ----------------------------------------------------------------------


def test_numbers_have_the_mixtures_joint_and_own_variances():
    both = two("numbers")
    m, S = both.first(both.batch, joint=True)
    n, T = both.second(both.batch, joint=True)
    mean, covariance = both.mixture()(both.batch, joint=True)
    assert_close(mean, (m + n) / 2)
    # E[x xᵀ] = Cov[x] + E[x] E[x]ᵀ is the members' mean too.
    expected = (S + m.outer(m) + T + n.outer(n)) / 2
    assert_close(covariance + mean.outer(mean), expected)
    mean, variances = both.mixture()(both.batch, diagonal_output=True)
    of_joint = covariance.diagonal().view_as(mean)
    assert_close(variances, of_joint)


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


def test_members_pass_over_the_same_rows_of_a_loader_that_shuffles():
    mixture = two().mixture()
    texts = list(Texts())
    # Of an order that is not the texts' own, as is checked below.
    torch.manual_seed(0)
    shuffled = DataLoader(texts, batch_size=3, shuffle=True)
    statistics = mixture.predictive_statistics(shuffled, dtype=torch.float64)
    by_member = zip(mixture.members, statistics.members, strict=True)
    moments = [(la, own.moments(la.prior_precision)) for la, own in by_member]
    found = torch.stack([la(own, **MEAN_FIELD) for la, own in moments]).mean(0)
    expected = torch.cat([mixture(text, **MEAN_FIELD) for text in DataLoader(texts)])
    # Each prediction is nearest to that of its own text.
    order = torch.cdist(found, expected).argmin(1)
    assert_close(found, expected[order])
    assert sorted(order.tolist()) == list(range(len(texts))) != order.tolist()


# --- priors ---------------------------------------------------------------------------


def priors_of(*posteriors):
    return [la.prior_precision.item() for la in posteriors]


def loss_by_hand(both, target):
    """Compute the mean negative log-likelihood of what a mixture predicts."""
    losses = []
    for batch in both.batches:
        predicted = both.mixture()(batch, **MEAN_FIELD, fitting=True)
        if isinstance(target, Gaussian):  # these are moments, and else probabilities
            # By the law of total variance, that of noise is the members' mean.
            noises = torch.stack([la.sigma_noise for la in both.members])
            target.noise = noises.square().mean().sqrt()
        else:
            predicted = (predicted,)
        losses.append(target.nll(predicted, batch["labels"]))
    return torch.cat(losses).mean().item()


@pytest.mark.parametrize(
    "kind", ["diagonal", "classes", "numbers", "rewards", "several labels"]
)
def test_a_factor_of_the_members_priors_is_chosen_for_the_mixture(kind):
    both = two(kind)
    target = copy(TASKS[kind].dense.get("target", Softmax()))
    # A mixture keeps the noise of its members, and is asked for a scale of no others.
    grid = PRIORS_ALONE | {"optimize_scale": kind == "numbers"}
    if kind == "classes":
        both.first.logit_scale = 1.5
    if kind == "numbers":
        both.second.sigma_noise = 0.7
    mixture = both.mixture()
    history = mixture.optimize_prior_precision(val_loader=both.batches, **grid)
    if kind != "diagonal":  # which has no statistics
        given = mixture.predictive_statistics(both.batches)
        method = GridSearch(val_loader=given, **MEAN_FIELD, **grid)
        assert_close(method(mixture).objective, history.objective)
    losses = []
    for factor in torch.logspace(-2, 2, 7).tolist():
        both.first.prior_precision = 2.0 * factor
        both.second.prior_precision = 0.5 * factor
        losses.append(loss_by_hand(both, target))
    # Where the search keeps statistics, they are of float32.
    assert history.objective.tolist() == pytest.approx(losses, rel=1e-5)
    factor = history.chosen.prior_precision.item()
    priors = priors_of(mixture, *mixture.members)
    assert priors == pytest.approx([factor, 2 * factor, 0.5 * factor])


def test_a_mixture_keeps_what_its_posteriors_were_when_they_were_given():
    both = two()
    mixture = both.mixture()
    assert mixture.prior_precision == mixture.logit_scale == 1
    # The mixture's is a factor of its members' own.
    mixture.prior_precision = 10
    assert priors_of(*both.members) == [2, 0.5]
    both.first.prior_precision = 7
    # One batch is fewer than the eight texts that it was fitted to.
    both.first.fit([both.batch])
    assert mixture.members[0].n_data == 8
    assert priors_of(*mixture.members) == [20, 5]


def test_a_search_that_only_chooses_leaves_the_priors():
    both = two()
    with torch.inference_mode():
        mixture = both.mixture()
        mixture.prior_precision = 10
    assert not mixture.members[1].prior_precision.is_inference()
    mixture.logit_scale = 3.0
    search = GridSearch(val_loader=both.batches, grid_size=3)
    history = search.choose(mixture)
    assert priors_of(mixture, *mixture.members) == [10, 20, 5]
    assert mixture.logit_scale == 3
    # Nor does what is chosen depend on the factors that the mixture has.
    expected = search.choose(both.mixture())
    assert_close(history.objective, expected.objective, rtol=0, atol=0)


def test_a_prediction_is_of_one_factor_whatever_other_threads_do(monkeypatch):
    both = two()
    mixture = both.mixture()
    changes = []

    def unlabelled(batch):
        # The first member, or batch, is predicted, and the second has not begun.
        changes.append(pool.submit(setattr, mixture, "prior_precision", 100.0))
        # Without a lock it would be done by then.
        assert not wait(changes[-1:], timeout=0.2).done
        return batch

    def loader():
        yield both.batch
        yield unlabelled(both.batch)

    with ThreadPoolExecutor(1) as pool:
        mixture.predict(loader())
    monkeypatch.setattr(mixture.members[1].model, "unlabelled", unlabelled)
    with ThreadPoolExecutor(1) as pool:
        mixture(both.batch)
    assert mixture.prior_precision == 100


# --- files ----------------------------------------------------------------------------


def test_it_is_loaded_beside_an_adapter_and_a_damaged_one_leaves_none(tmp_path):
    both = two(target_modules=["key"], task_type="SEQ_CLS")
    mixture = both.mixture()
    mixture.prior_precision = 3
    for learnt in mixture.amortize(both.batches, unlabelled=None):
        assert learnt.n_examples == 8
    mixture.save_pretrained(tmp_path)
    model = lora_model("bert")

    def trainable() -> list[str]:
        return [name for name, w in model.named_parameters() if w.requires_grad]

    before = trainable()
    loaded = LaplaceMixture.from_pretrained(model, tmp_path, dict_key_y="labels_")
    assert loaded.members[1].dict_key_y == "labels_"
    assert repr(loaded) == repr(mixture)
    for options in ({}, {"pred_type": "amortized"}):
        assert_close(loaded(both.batch, **options), mixture(both.batch, **options))
    found, expected = (each.members[0].learnt_variance for each in (loaded, mixture))
    assert found.r_squared == expected.r_squared
    assert model.active_adapter == "default"
    model.delete_adapter("second")
    assert trainable() == before
    (tmp_path / "second" / "laplace_posterior.safetensors").write_text("{")
    with pytest.raises(ValueError, match="second"):
        LaplaceMixture.from_pretrained(model, tmp_path)
    assert trainable() == before
    assert list(model.peft_config) == ["default"]


def test_an_interrupted_save_leaves_no_mixture_of_old_and_new(tmp_path, monkeypatch):
    both = two()
    both.mixture().save_pretrained(tmp_path)
    monkeypatch.setattr(type(both.second), "state_dict", None)
    with pytest.raises(TypeError):
        both.mixture().save_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError):
        LaplaceMixture.from_pretrained(both.first.model.model, tmp_path)


def test_adapters_are_drawn_from_each_member(tmp_path):
    both = two()
    mixture = both.mixture()
    folder = tmp_path / "mixed"
    drawn = mixture.sample_adapters(3, folder, generator(2))
    names = ["sample_0", "sample_1", "sample_2/second"]
    assert drawn == [folder / name for name in names]

    # Of three draws the first member gives two.
    shared = generator(2)
    of_first = both.first.sample_adapters(2, tmp_path / "first", shared)
    of_second = both.second.sample_adapters(1, tmp_path / "second", shared)
    for found, expected in zip(drawn, [*of_first, *of_second], strict=True):
        weights = load_peft_weights(str(found))
        for name, weight in load_peft_weights(str(expected)).items():
            assert torch.equal(weights[name], weight), name


# --- free text ------------------------------------------------------------------------


def test_members_score_texts_together():
    model = lora_model("gpt2").eval()
    one = fitted_text(model)
    add_second(model)
    # Once more, since layers that were added are in training mode.
    other = fitted_text(model.eval())
    (batch, *_) = text_batches()
    mixed = LaplaceMixture([one, other]).score(batch, 3, generator())
    # Of three draws the first member gives two.
    shared = generator()
    first = one.score(batch, 2, shared).tokens
    second = other.score(batch, 1, shared).tokens
    total = 2 * first.log_prob.exp() + second.log_prob.exp()
    assert_close(mixed.tokens.log_prob.exp(), total / 3)


# --- what cannot be mixed -------------------------------------------------------------


def answering(*tokens):
    return fitted("gpt2", class_token_ids=tokens)


def with_other_weights():
    both = two()
    both.second.blocks[0].weight.data.mul_(2)
    return both.members


@pytest.mark.parametrize(
    ("make_members", "error", "message"),
    [
        (lambda: [fitted(), make(lora_model("bert"))], AttributeError, "not fitted"),
        (lambda: [plain_regression(3)[0], fitted()], ValueError, "likelihood"),
        (lambda: [answering(1, 2, 3), answering(3, 2, 1)], ValueError, "3, 2, 1"),
        (with_other_weights, RuntimeError, "have changed"),
    ],
)
def test_what_cannot_be_mixed_is_refused(make_members, error, message):
    members = make_members()
    with pytest.raises(error, match=message):
        LaplaceMixture(members)


def test_what_a_mixture_can_not_do_is_refused(tmp_path):
    both = two()
    mixture = both.mixture()
    with pytest.raises(ValueError, match="GridSearch"):
        mixture.optimize_prior_precision("marglik")
    given = mixture.predictive_statistics(both.batches)
    in_other_order = LaplaceMixture([both.second, both.first])
    with pytest.raises(ValueError, match="another fit"):
        in_other_order.optimize_prior_precision(val_loader=given)
    for members in ([fitted(), fitted()], [both.first] * 2):
        with pytest.raises(ValueError, match="one PeftModel"):
            LaplaceMixture(members).save_pretrained(tmp_path)
