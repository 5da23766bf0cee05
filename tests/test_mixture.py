"""A mean of several posteriors' predictions."""

from __future__ import annotations

import pytest
import torch
from peft import load_peft_weights
from torch.utils.data import DataLoader

from laplace_lora_ext import GridSearch, LaplaceMixture
from laplace_lora_ext.models.adapters import add_fresh_adapter
from laplace_lora_ext.predictive.links import shared_noise, softmax_samples
from tests.support.models import base_model, lora_model, ragged_batches, real_targets
from tests.support.posteriors import (
    count_forward_passes,
    fitted,
    generator,
    make,
    plain_regression,
    validation_loss,
)
from tests.support.ranks import Texts

GRID = {"log_prior_prec_min": -1, "log_prior_prec_max": 1, "grid_size": 3}


def numbers():
    (batch,) = ragged_batches(batch_size=8)
    return [batch | {"labels": real_targets(8, 2)}]


def preferences():
    batches = ragged_batches(n_classes=2)
    return [
        {
            "input_ids": torch.stack([b["input_ids"], b["input_ids"].flip(0)], 1),
            "attention_mask": torch.stack([b["attention_mask"], b["attention_mask"].flip(0)], 1),
            "labels": b["labels"],
        }
        for b in batches
    ]


KINDS = {
    "classes": ("bert", {}, ragged_batches),
    "answers": ("gpt2", {}, ragged_batches),
    "numbers": ("bert", {"n_labels": 2}, numbers),
    "rewards": ("bert", {"n_labels": 1}, preferences),
}
LIKELIHOODS = {"numbers": "regression", "rewards": "reward_modeling"}


def two(kind: str = "classes", structure: str = "lowrank_kron", **other):
    """Posteriors around two adapters of one model, the first of which is active; their data."""
    base, options, data = KINDS[kind]
    model, batches = lora_model(base, **options), data()
    keywords = {"likelihood": LIKELIHOODS.get(kind, "classification"), "structure": structure}
    first = fitted(base, batches, model=model, prior_precision=2.0, **keywords)
    if other:
        model.add_adapter("second", type(model.peft_config["default"])(r=2, **other))
        model.set_adapter("second")
    else:
        add_fresh_adapter(model, "second")
    model.double()
    for name, weight in model.named_parameters():
        if ".second" in name:
            torch.nn.init.normal_(weight, std=0.4)
    second = fitted(base, batches, model=model, prior_precision=0.5, **keywords)
    model.set_adapter("default")
    return first, second, batches


CALLS = [
    *({"link_approx": link} for link in ("probit", "mean_field", "bridge", "bridge_norm")),
    {"pred_type": "nn", "link_approx": "mc", "n_samples": 3},
    {"link_approx": "mc", "n_samples": 50},
]


@pytest.mark.parametrize("kind", ["classes", "answers"])
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_probabilities_are_the_members_mean(kind, call):
    first, second, batches = two(kind)
    shared = generator()
    expected = sum(la(batches[0], generator=shared, **call) for la in (first, second)) / 2
    mixture = LaplaceMixture([first, second])
    torch.testing.assert_close(mixture(batches[0], generator=generator(), **call), expected)


@pytest.mark.parametrize("kind", ["numbers", "rewards"])
def test_numbers_have_the_mixtures_moments(kind):
    first, second, batches = two(kind)
    mixture, (batch, *_) = LaplaceMixture([first, second]), batches
    for options in ({}, {"joint": True}, {"diagonal_output": True}):
        found = mixture(batch, **options)
        means, covariances = zip(*(la(batch, **options) for la in (first, second)), strict=True)
        second_moment = sum(
            S + (m**2 if S.ndim == m.ndim else m[..., None] * m[..., None, :])
            for m, S in zip(means, covariances, strict=True)
        )
        mean = sum(means) / 2
        square = mean**2 if found[1].ndim == mean.ndim else mean[..., None] * mean[..., None, :]
        torch.testing.assert_close(found[0], mean)
        torch.testing.assert_close(found[1], second_moment / 2 - square)
    for predict in (mixture.predict, mixture.predict_proba):
        with pytest.raises(ValueError, match="predicts numbers"):
            predict(batch)
    if kind == "rewards":
        preferred = [la(batch, fitting=True) for la in (first, second)]
        torch.testing.assert_close(mixture(batch, fitting=True), sum(preferred) / 2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_factor_of_the_members_priors_is_chosen_for_the_mixture(kind):
    first, second, batches = two(kind)
    mixture = LaplaceMixture([first, second])
    history = mixture.optimize_prior_precision(val_loader=batches, **GRID)
    losses, factors = [], torch.logspace(-1, 1, 3)
    for factor in factors.tolist():
        first.prior_precision, second.prior_precision = 2 * factor, 0.5 * factor
        by_hand = LaplaceMixture([first, second])
        metric = first.trained_likelihood.metric(first.sigma_noise)
        for batch in batches:
            found = by_hand(batch, link_approx="mean_field", fitting=True)
            targets = batch["labels"]
            metric.update(*(found if isinstance(found, tuple) else (found,)), targets)
        losses.append(metric.compute().item())
    assert history.objective.tolist() == pytest.approx(losses, rel=1e-5)
    best = factors[losses.index(min(losses))]
    assert mixture.prior_precision.item() == pytest.approx(best.item())
    priors = [la.prior_precision.item() for la in mixture.members]
    assert priors == pytest.approx([2 * best.item(), 0.5 * best.item()])
    given = mixture.predictive_statistics(batches)
    again = mixture.optimize_prior_precision(GridSearch(val_loader=given, **GRID))
    assert len(given) == sum(len(batch["labels"]) for batch in batches)
    assert torch.equal(again.prior_precision, history.prior_precision)


def test_other_structures_predict_at_each_factor_anew():
    first, second, batches = two(structure="diag")
    mixture = LaplaceMixture([first, second])
    history = mixture.optimize_prior_precision(val_loader=batches, **GRID)
    best = history.objective.argmin()
    found = validation_loss(mixture, mixture.prior_precision, batches, link_approx="mean_field")
    assert history.objective[best].item() == pytest.approx(found, rel=1e-5)


def test_given_posteriors_keep_their_priors_and_the_mixture_its_own():
    first, second, batches = two()
    mixture, before = LaplaceMixture([first, second]), first(batches[0])
    mixture.prior_precision = 10
    assert [la.prior_precision.item() for la in (first, second)] == [2, 0.5]
    assert torch.equal(first(batches[0]), before)
    first.prior_precision = 7
    first.fit(batches[:1])
    assert [la.prior_precision.item() for la in mixture.members] == [20, 5]
    assert mixture.n_data == 8
    with pytest.raises(ZeroDivisionError):
        mixture.optimize_prior_precision(val_loader=batches, loss=lambda *_: 1 / 0)
    assert mixture.prior_precision.item() == 10
    assert [la.prior_precision.item() for la in mixture.members] == [20, 5]


def test_entropies_are_those_of_all_members_draws():
    first, second, batches = two()
    mixture = LaplaceMixture([first, second])
    passes = [count_forward_passes(la) for la in mixture.members]
    found = mixture.predict(batches[0], "probit", n_samples=40, generator=generator(5))
    assert passes == [[1], [1]]
    shared, drawn = generator(5), []
    for la in (first, second):
        moments = la.predictive_moments(batches[0])
        noise = shared_noise(moments.f_mu, 40, shared)
        drawn.append(softmax_samples(*moments, noise).exp())
    drawn = torch.cat(drawn)
    total, aleatoric = (torch.special.entr(p).sum(-1) for p in (drawn.mean(0), drawn))
    probabilities = mixture(batches[0], link_approx="probit")
    torch.testing.assert_close(found.probabilities, probabilities)
    assert torch.equal(found.labels, probabilities.argmax(-1))
    torch.testing.assert_close(found.total_entropy, total)
    torch.testing.assert_close(found.aleatoric_entropy, aleatoric.mean(0))
    torch.testing.assert_close(found.epistemic_entropy, total - aleatoric.mean(0))
    of_label = drawn[:, range(3), found.labels]
    torch.testing.assert_close(found.label_variance, of_label.var(0, correction=0))
    expected = mixture(batches[0], link_approx="mean_field").numpy()
    assert mixture.predict_proba(batches[0]) == pytest.approx(expected)


def trainable(model):
    return [name for name, weight in model.named_parameters() if weight.requires_grad]


@pytest.mark.parametrize("targets", [{}, {"target_modules": ["key"], "task_type": "SEQ_CLS"}])
def test_it_is_saved_and_loaded_with_its_adapters_and_heads(targets, tmp_path):
    first, second, batches = two(**targets)
    mixture = LaplaceMixture([first, second])
    mixture.prior_precision = 3
    mixture.save_pretrained(tmp_path)
    torch.manual_seed(0)
    bare = base_model("bert").double()
    expected = mixture(batches[0])
    torch.testing.assert_close(LaplaceMixture.from_pretrained(bare, tmp_path)(batches[0]), expected)
    model = lora_model("bert")  # which has the first adapter
    before = trainable(model)
    loaded = LaplaceMixture.from_pretrained(model, tmp_path)
    torch.testing.assert_close(loaded(batches[0]), expected)
    assert model.active_adapter == "default"
    assert trainable(model) == before


def test_a_damaged_folder_leaves_no_adapter_behind(tmp_path):
    first, second, _ = two()
    LaplaceMixture([first, second]).save_pretrained(tmp_path)
    (tmp_path / "second" / "laplace_posterior.json").write_text("{")
    model = lora_model("bert")
    with pytest.raises(ValueError, match="second"):
        LaplaceMixture.from_pretrained(model, tmp_path)
    assert list(model.peft_config) == ["default"]
    with pytest.raises(FileNotFoundError):
        LaplaceMixture.from_pretrained(model, tmp_path / "second")


def test_adapters_are_drawn_from_each_member(tmp_path):
    first, second, _ = two()
    folders = LaplaceMixture([first, second]).sample_adapters(3, tmp_path / "m", generator(2))
    shared = generator(2)
    own = first.sample_adapters(2, tmp_path / "a", shared)
    own += second.sample_adapters(1, tmp_path / "b", shared)
    parts = [folder.relative_to(tmp_path / "m").as_posix() for folder in folders]
    assert parts == ["sample_0", "sample_1", "sample_2/second"]
    for found, expected in zip(folders, own, strict=True):
        found, expected = (load_peft_weights(str(folder)) for folder in (found, expected))
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert any("classifier" in name for name in expected)


def other_base():
    model = lora_model("bert")
    model.get_base_model().bert.pooler.dense.bias.data += 0.1
    return fitted(model=model)


def other_answers():
    model = lora_model("gpt2")
    la = make(model, class_token_ids=[1, 2, 3])
    la.fit(ragged_batches())
    return [fitted("gpt2", model=model), la]


def deleted():
    first, second, _ = two()
    second.model.model.delete_adapter("second")
    return [first, second]


def changed():
    first, second, _ = two()
    second.blocks[0].weight.data.mul_(2)
    return [first, second]


REFUSED = {
    "one": (lambda: [fitted()], ValueError, "needs two posteriors"),
    "no fit": (lambda: [fitted(), make(lora_model("bert"))], ValueError, "Member 1 has no fit"),
    "outputs": (
        lambda: [fitted(), fitted(model=lora_model("bert", n_labels=4))],
        ValueError,
        "Members 0 and 1 differ in n_outputs: 3 and 4",
    ),
    "likelihood": (
        lambda: [plain_regression(3)[0], fitted()],
        ValueError,
        "differ in likelihood: regression and classification",
    ),
    "base": (lambda: [fitted(), other_base()], ValueError, "other base models, as .*pooler"),
    "answers": (other_answers, ValueError, "answer with other class_token_ids"),
    "deleted": (deleted, RuntimeError, "no longer in the model"),
    "changed": (changed, RuntimeError, "have changed since the fit"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_mixed_is_refused(case):
    members, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        LaplaceMixture(members())


def test_an_adapter_that_goes_later_is_named():
    first, second, batches = two()
    mixture = LaplaceMixture([first, second])
    first.model.model.delete_adapter("second")
    with pytest.raises(RuntimeError, match=r"no longer in the model: .*second"):
        mixture(batches[0])


def test_what_a_mixture_lacks_is_said(tmp_path):
    first, second, batches = two()
    mixture = LaplaceMixture([first, second])
    with pytest.raises(ValueError, match="method must be"):
        mixture.optimize_prior_precision("marglik")
    with pytest.raises(ValueError, match="one factor"):
        mixture.prior_precision = torch.ones(8)
    statistics = mixture.predictive_statistics(batches)
    with pytest.raises(ValueError, match="belong to another fit"):
        LaplaceMixture([second, first]).optimize_prior_precision(val_loader=statistics)
    torch.manual_seed(0)
    shuffled = DataLoader(Texts(), batch_size=3, shuffle=True)
    with pytest.raises(ValueError, match="does not shuffle"):
        mixture.optimize_prior_precision(val_loader=shuffled)
    with pytest.raises(ValueError, match="one PeftModel"):
        LaplaceMixture([first, fitted()]).save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
