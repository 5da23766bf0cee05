"""A mean of several posteriors' predictions."""

from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import torch
from peft import load_peft_weights
from torch.utils.data import DataLoader

from laplace_lora_ext import GridSearch, LaplaceMixture
from laplace_lora_ext.models.adapters import add_fresh_adapter
from laplace_lora_ext.predictive.links import shared_noise, softmax_samples
from tests.support.models import base_model, lora_model, ragged_batches, real_targets
from tests.support.posteriors import count_forward_passes, fitted, generator, make, plain_regression
from tests.support.ranks import Texts
from tests.support.texts import fitted_text, text_batches

GRID = {"log_prior_prec_min": -1, "log_prior_prec_max": 1, "grid_size": 3}


def numbers():
    (batch,) = ragged_batches(batch_size=8)
    return [batch | {"labels": real_targets(8, 2)}]


def preferences():
    batch, *_ = ragged_batches(n_classes=2)
    texts = {key: value for key, value in batch.items() if key != "labels"}
    pairs = {key: torch.stack([value, value.flip(0)], 1) for key, value in texts.items()}
    return [pairs | {"labels": batch["labels"]}]


KINDS = {
    "classes": ("bert", {}, ragged_batches, {}),
    "diagonal": ("bert", {}, ragged_batches, {"structure": "diag"}),
    "answers": ("gpt2", {}, ragged_batches, {}),
    "numbers": ("bert", {"n_labels": 2}, numbers, {"likelihood": "regression"}),
    "rewards": ("bert", {"n_labels": 1}, preferences, {"likelihood": "reward_modeling"}),
}


def add_second(model, **other):
    """A second adapter, which is active then, with random weights."""
    if other:
        model.add_adapter("second", type(model.peft_config["default"])(r=2, **other))
        model.set_adapter("second")
    else:
        add_fresh_adapter(model, "second")
    for name, weight in model.double().named_parameters():
        if ".second" in name:
            torch.nn.init.normal_(weight, std=0.4)


def two(kind: str = "classes", **other):
    """Posteriors around two adapters of one model, the first of which is active; their data."""
    base, options, data, keywords = KINDS[kind]
    model, batches = lora_model(base, **options), data()
    first = fitted(base, batches, model=model, prior_precision=2.0, **keywords)
    add_second(model, **other)
    second = fitted(base, batches, model=model, prior_precision=0.5, **keywords)
    model.set_adapter("default")
    return first, second, batches


CALLS = [
    *({"link_approx": link} for link in ("probit", "mean_field", "bridge", "bridge_norm", "mc")),
    {"pred_type": "nn", "link_approx": "mc", "n_samples": 3},
]


@pytest.mark.parametrize("kind", ["classes", "answers"])
def test_probabilities_are_the_members_mean(kind):
    first, second, (batch, *_) = two(kind)
    mixture = LaplaceMixture([first, second])
    for call in CALLS:
        shared = generator()
        expected = sum(la(batch, generator=shared, **call) for la in (first, second)) / 2
        torch.testing.assert_close(mixture(batch, generator=generator(), **call), expected)


@pytest.mark.parametrize("kind", ["numbers", "rewards"])
def test_numbers_have_the_mixtures_moments(kind):
    first, second, (batch,) = two(kind)
    mixture = LaplaceMixture([first, second])

    def squared(mean, like):
        return mean**2 if like.ndim == mean.ndim else mean[..., None] * mean[..., None, :]

    for options in ({}, {"joint": True}, {"diagonal_output": True}):
        (m, S), (n, T) = (la(batch, **options) for la in (first, second))
        mean, covariance = mixture(batch, **options)
        torch.testing.assert_close(mean, (m + n) / 2)
        second_moment = (S + squared(m, S) + T + squared(n, T)) / 2
        torch.testing.assert_close(covariance + squared(mean, S), second_moment)
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
    losses, factors = [], [0.1, 1, 10]
    for factor in factors:
        first.prior_precision, second.prior_precision = 2 * factor, 0.5 * factor
        by_hand = LaplaceMixture([first, second])
        found = [by_hand(batch, link_approx="mean_field", fitting=True) for batch in batches]
        found = [one if isinstance(one, tuple) else (one,) for one in found]
        outputs = [torch.cat(parts) for parts in zip(*found, strict=True)]
        labels = torch.cat([batch["labels"] for batch in batches])
        likelihood = first.trained_likelihood
        outputs = outputs if likelihood.is_gaussian else [outputs[0].log()]
        losses.append(likelihood.nll(outputs, labels, first.sigma_noise).mean().item())
    assert history.objective.tolist() == pytest.approx(losses, rel=1e-5)
    best = factors[losses.index(min(losses))]
    assert mixture.prior_precision.item() == pytest.approx(best)
    priors = [la.prior_precision.item() for la in mixture.members]
    assert priors == pytest.approx([2 * best, 0.5 * best])
    if kind != "diagonal":
        given = mixture.predictive_statistics(batches)
        search = GridSearch(val_loader=given, link_approx="mean_field", **GRID)
        assert torch.equal(search(mixture).objective, history.objective)


@pytest.mark.parametrize("labelled", [True, False])
def test_members_pass_over_the_same_rows_of_a_loader_that_shuffles(labelled):
    mixture = LaplaceMixture(two()[:2])
    texts = [Texts()[place] for place in range(11)]
    if not labelled:
        texts = [{key: row[key] for key in row.keys() - {"labels"}} for row in texts]
    torch.manual_seed(0)
    shuffled = DataLoader(texts, batch_size=3, shuffle=True)
    statistics = mixture.predictive_statistics(shuffled, dtype=torch.float64)
    found = mixture(statistics.moments(1.0), link_approx="mean_field")
    in_order = [mixture(batch, link_approx="mean_field") for batch in DataLoader(texts)]
    expected = torch.cat(in_order)
    order = (found[:, None] - expected).abs().sum(-1).argmin(1)
    assert order.tolist() != list(range(11))
    assert sorted(order.tolist()) == list(range(11))
    torch.testing.assert_close(found, expected[order])
    assert (statistics.members[0].targets is not None) == labelled


def test_given_posteriors_keep_their_priors_and_the_mixture_its_own():
    first, second, batches = two()
    mixture, before = LaplaceMixture([first, second]), first(batches[0])
    mixture.prior_precision = 10
    assert [la.prior_precision.item() for la in (first, second)] == [2, 0.5]
    assert torch.equal(first(batches[0]), before)
    first.prior_precision = 7
    first.fit(batches[:1])
    assert mixture.n_data == 8
    mixture.members[1].prior_precision = 6.0
    with pytest.raises(ZeroDivisionError):
        mixture.optimize_prior_precision(val_loader=batches, loss=lambda *_: 1 / 0)
    assert mixture.prior_precision.item() == 10
    assert [la.prior_precision.item() for la in mixture.members] == [20, 6]


def test_a_search_in_inference_mode_keeps_ordinary_numbers():
    first, second, batches = two()
    with torch.inference_mode():
        mixture = LaplaceMixture([first, second])
        mixture.optimize_prior_precision(val_loader=batches, **GRID)
        mixture.prior_precision = 2 * mixture.prior_precision
    kept = [mixture, *mixture.members]
    assert not any(each.prior_precision.is_inference() for each in kept)


def test_a_prediction_is_of_one_factor_whatever_other_threads_do():
    first, second, (batch, *_) = two()
    mixture, futures = LaplaceMixture([first, second]), []
    expected = mixture(batch)

    with ThreadPoolExecutor(1) as pool:

        def change_prior(*_):
            if not futures:
                futures.append(pool.submit(setattr, mixture, "prior_precision", 100.0))
                wait(futures, timeout=1)  # without a lock it would be done by now

        handle = first.model.model.register_forward_hook(change_prior)
        found = mixture(batch)
        handle.remove()
    assert torch.equal(found, expected)
    assert mixture.prior_precision.item() == 100
    assert not torch.equal(mixture(batch), expected)


def test_entropies_are_those_of_all_members_draws():
    first, second, (batch, *_) = two()
    mixture = LaplaceMixture([first, second])
    passes = [count_forward_passes(la) for la in mixture.members]
    found = mixture.predict(batch, "probit", n_samples=40, generator=generator(5))
    assert passes == [[1], [1]]
    shared, drawn = generator(5), []
    for la in (first, second):
        moments = la.predictive_moments(batch)
        noise = shared_noise(moments.f_mu, 40, shared)
        drawn.append(softmax_samples(*moments, noise).exp())
    drawn = torch.cat(drawn)
    total, aleatoric = (torch.special.entr(p).sum(-1) for p in (drawn.mean(0), drawn))
    torch.testing.assert_close(found.probabilities, mixture(batch, link_approx="probit"))
    torch.testing.assert_close(found.total_entropy, total)
    torch.testing.assert_close(found.epistemic_entropy, total - aleatoric.mean(0))
    of_label = drawn[:, range(3), found.labels]
    torch.testing.assert_close(found.label_variance, of_label.var(0, correction=0))
    expected = mixture(batch, link_approx="mean_field").numpy()
    assert mixture.predict_proba(batch) == pytest.approx(expected)


@pytest.mark.parametrize("targets", [{}, {"target_modules": ["key"], "task_type": "SEQ_CLS"}])
def test_it_is_saved_and_loaded_with_its_adapters_and_heads(targets, tmp_path):
    first, second, (batch, *_) = two(**targets)
    mixture = LaplaceMixture([first, second])
    mixture.prior_precision = 3
    mixture.save_pretrained(tmp_path)
    torch.manual_seed(0)
    bare, model = base_model("bert").double(), lora_model("bert")  # which has the first adapter
    trainable = [name for name, weight in model.named_parameters() if weight.requires_grad]
    for given in (bare, model):
        loaded = LaplaceMixture.from_pretrained(given, tmp_path)
        torch.testing.assert_close(loaded(batch), mixture(batch))
    assert model.active_adapter == "default"
    assert trainable == [name for name, weight in model.named_parameters() if weight.requires_grad]
    description = tmp_path / "laplace_mixture.json"
    content = description.read_text()
    for damaged in (content.replace("second", "default"), content[:-1], '{"members":["second"]}'):
        description.write_text(damaged)
        with pytest.raises(ValueError, match=r"laplace_mixture.json (is damaged|holds no mixture)"):
            LaplaceMixture.from_pretrained(model, tmp_path)
    description.write_text(content)
    (tmp_path / "second" / "laplace_posterior.safetensors").write_text("{")
    with pytest.raises(ValueError, match="second"):
        LaplaceMixture.from_pretrained(model := lora_model("bert"), tmp_path)
    assert list(model.peft_config) == ["default"]


def test_adapters_are_drawn_from_each_member(tmp_path):
    first, second, _ = two()
    folders = LaplaceMixture([first, second]).sample_adapters(3, tmp_path / "m", generator(2))
    shared = generator(2)
    own = first.sample_adapters(2, tmp_path / "a", shared)
    own += second.sample_adapters(1, tmp_path / "b", shared)
    parts = [folder.relative_to(tmp_path / "m").as_posix() for folder in folders]
    assert parts == ["sample_0", "sample_1", "sample_2/second"]
    for folder, other in zip(folders, own, strict=True):
        found, expected = (load_peft_weights(str(path)) for path in (folder, other))
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_members_score_and_write_texts_together():
    model, (batch, *_) = lora_model("gpt2").eval(), text_batches()
    first = fitted_text(model)
    add_second(model)
    second = fitted_text(model.eval())
    mixture, shared = LaplaceMixture([first, second]), generator()
    found = mixture.score(batch, 3, generator()).tokens
    one, other = first.score(batch, 2, shared).tokens, second.score(batch, 1, shared).tokens
    expected = (2 * one.log_prob.exp() + other.log_prob.exp()) / 3
    torch.testing.assert_close(found.log_prob.exp(), expected)
    expected = (one.map_log_prob.exp() + other.map_log_prob.exp()) / 2
    torch.testing.assert_close(found.map_log_prob.exp(), expected)
    text = batch["input_ids"][:1, :4]
    options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    found = mixture.generate(input_ids=text, n_samples=0, **options).sequences
    for _ in range(3):
        p = 0
        for adapter in ("default", "second"):
            model.set_adapter(adapter)
            p = p + model(input_ids=text).logits[:, -1].softmax(-1)
        text = torch.cat([text, p.argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(found, text)
    with pytest.raises(ValueError, match="adapters of one model"):
        LaplaceMixture([second, fitted_text()]).generate(input_ids=text, **options)


def with_other(change):
    """Two posteriors, after a change of the second one's model."""
    first, second, _ = two()
    change(second)
    return [first, second]


def other_base():
    model = lora_model("bert")
    model.get_base_model().bert.pooler.dense.bias.data += 0.1
    return fitted(model=model)


def answering(*tokens):
    la = make(lora_model("gpt2"), class_token_ids=tokens)
    la.fit(ragged_batches())
    return la


REFUSED = {
    "needs two posteriors": lambda: [fitted()],
    "not fitted": lambda: [fitted(), make(lora_model("bert"))],
    "n_outputs.* 3,.* 4,": lambda: [fitted(), fitted(model=lora_model("bert", n_labels=4))],
    "differ in likelihood": lambda: [plain_regression(3)[0], fitted()],
    r"1, 2, 3.*3, 2, 1": lambda: [answering(1, 2, 3), answering(3, 2, 1)],
    "different base models .*pooler": lambda: [fitted(), other_base()],
    "lost LoRA weights of the posterior: .*second": lambda: with_other(
        lambda la: la.model.model.delete_adapter("second")
    ),
    "have changed since the fit": lambda: with_other(lambda la: la.blocks[0].weight.data.mul_(2)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_mixed_is_refused(message):
    with pytest.raises((ValueError, RuntimeError, AttributeError), match=message):
        LaplaceMixture(REFUSED[message]())


def test_what_a_mixture_lacks_is_said(tmp_path):
    first, second, batches = two()
    mixture = LaplaceMixture([first, second])
    assert repr(mixture).count("fitted to 8 examples; prior precision") == 2
    with pytest.raises(ValueError, match=r"gridsearch. or a GridSearch"):
        mixture.optimize_prior_precision("marglik")
    given = mixture.predictive_statistics(batches)
    with pytest.raises(ValueError, match="belong to another fit"):
        LaplaceMixture([second, first]).optimize_prior_precision(val_loader=given)
    with pytest.raises(ValueError, match="one PeftModel"):
        LaplaceMixture([first, fitted()]).save_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError):
        LaplaceMixture.from_pretrained(lora_model("bert"), tmp_path)
