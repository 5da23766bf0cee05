"""Several labels an example, or one logit: independent Bernoullis."""

import math
import re
import warnings

import pytest
import torch
from torch.distributions import Bernoulli, kl_divergence
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.testing import assert_close

import laplace_lora_ext
from laplace_lora_ext.likelihoods import LIKELIHOODS, MULTI_LABEL
from laplace_lora_ext.metrics import compare
from laplace_lora_ext.plots import outcomes
from tests.support.dense import (
    EXACT,
    assert_exact,
    evidence,
    exact_ggn,
    jacobians,
)
from tests.support.models import (
    OfMapping,
    lora_model,
    pairs,
    plain_model,
    ragged_batches,
    without_labels,
)
from tests.support.posteriors import generator, make
from tests.support.trainers import trainer_of
from tests.test_several_labels import (
    LABELS,
    InTwoColumns,
    in_two_classes,
    options_of,
    several_labels,
)

SAME = {"rtol": 1e-10, "atol": 1e-10}
LINKS = ["probit", "mean_field", "mc"]
N_TEXTS = 16


def bernoulli_fisher(logits: torch.Tensor) -> torch.Tensor:
    """Compute `diag(p (1 - p))` of `(..., K)` logits in float64."""
    f = logits.double()
    # 1 - p cancels where p is near 1: the sigmoid of -f does not.
    return torch.diag_embed(f.sigmoid() * (-f).sigmoid())


def batches(n_labels=3, **keywords):
    """Ragged texts, whose labels are numbers 0 and 1."""
    found = ragged_batches(**keywords)
    for number, batch in enumerate(found):
        labels = several_labels(batch, n_labels)
        # Rolled, since each batch is given the same labels.
        batch["labels"] = labels.roll(number, 0)
    return found


def fitted(
    structure="lowrank_kron",
    n_labels=3,
    model=None,
    **keywords,
):
    model = model or lora_model("bert", n_labels=n_labels)
    la = make(model, structure, MULTI_LABEL, **options_of(structure) | keywords)
    la.fit(batches(n_labels))
    return la


def both(structure="lowrank_kron", n_labels=3):
    """Fit the labels' posterior, and a wrapper's with classes "not" and "yes"."""
    model = lora_model("bert", n_labels=n_labels).eval()
    la = fitted(structure, n_labels, model)
    wrapped = make(OfMapping(InTwoColumns(model)), structure, **options_of(structure))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The trained model is no better")
        wrapped.fit(in_two_classes(batches(n_labels)))
    return la, wrapped


def as_matrix(la):
    if isinstance(la.H, torch.Tensor):
        return la.H
    return la.H.to_matrix()


# --- exactness ------------------------------------------------------------------------


@pytest.mark.parametrize("n_labels", [1, 3])
@pytest.mark.parametrize("structure", ["lowrank_kron", "diag", "full"])
def test_curvature_evidence_and_moments_are_the_dense_ones(structure, n_labels):
    model = lora_model("bert", n_labels=n_labels).eval()
    (batch,) = batches(n_labels, lengths=(7, 7, 7), padded_to=7)
    X = without_labels(batch)
    la = make(model, structure, MULTI_LABEL, **options_of(structure))
    la.fit([batch])
    logits = model(**X).logits.detach()
    loss = binary_cross_entropy_with_logits(logits, batch["labels"], reduction="sum")
    assert_close(la.loss, loss, **EXACT)
    plain = OfMapping(InOneColumn(model)).eval()
    assert_exact(la, plain, [X], bernoulli_fisher)
    if structure == "full":
        H = exact_ggn(jacobians(plain, X), bernoulli_fisher(logits))
        prior = torch.full_like(la.mean, 0.25)
        expected = evidence(H, -loss, la.mean, prior)
        found = la.log_marginal_likelihood(torch.tensor([0.25]))
        assert_close(found, expected, rtol=1e-9, atol=0)


class InOneColumn(torch.nn.Module):
    """Takes a batch as one argument, as `assert_exact` hands it over."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batch):
        return self.model(**batch).logits


@pytest.mark.parametrize("n_labels", [1, 3])
@pytest.mark.parametrize("structure", ["lowrank_kron", "diag", "full"])
def test_a_label_is_a_classification_into_two_classes(structure, n_labels):
    la, wrapped = both(structure, n_labels)
    assert_close(la.loss, wrapped.loss, **SAME)
    assert_close(as_matrix(la), as_matrix(wrapped), **SAME)
    batch, *_ = batches(n_labels)
    X = without_labels(batch)
    for prior in (0.1, 10.0):
        la.prior_precision = prior
        wrapped.prior_precision = prior
        found = la.log_marginal_likelihood()
        assert_close(found, wrapped.log_marginal_likelihood(), **SAME)
        for link in LINKS:
            p = la(X, link_approx=link, generator=generator())
            assert p.shape == batch["labels"].shape
            of_classes = wrapped(X, link_approx=link, generator=generator())
            of_yes = of_classes[:, 1]
            assert_close(p.flatten(), of_yes, **SAME)


@pytest.mark.parametrize("n_labels", [1, 3])
def test_the_hosts_kron_is_expand(n_labels):
    """The host adds up gradients of the wrapper's rows, which share positions."""
    # Without padding, which the host would count.
    (batch,) = batches(n_labels, lengths=(7, 7, 7), padded_to=7)
    model = lora_model("bert", n_labels=n_labels).eval()
    kron = make(model, "kron", MULTI_LABEL)
    expand = {"rank": 200, "kfac_approx": "expand"}
    lowrank = make(model, "lowrank_kron", MULTI_LABEL, backend_kwargs=expand)
    for la in (kron, lowrank):
        la.fit([batch])
        la.prior_precision = 0.5
    assert_close(kron(batch), lowrank(batch), **SAME)
    found = kron.log_marginal_likelihood()
    assert_close(found, lowrank.log_marginal_likelihood(), **SAME)


def test_decisions_are_those_of_two_classes():
    la, wrapped = both()
    texts = batches()
    found = la.predict(texts, generator=generator())
    of_classes = wrapped.predict(in_two_classes(texts), generator=generator())
    expected = of_classes._replace(probabilities=of_classes.probabilities[:, 1])
    assert found.probabilities.shape == (8, 3)
    # The wrapper's examples are the labels, text by text.
    as_examples = [column.flatten() for column in found]
    assert_close(as_examples, list(expected), **SAME)
    is_yes = found.probabilities > 0.5
    assert torch.equal(found.labels, is_yes.long())
    assert la.predict_proba(texts).shape == (8, 3)


def test_figures_are_those_of_two_classes():
    la, wrapped = both()
    found = compare(la, batches())
    expected = compare(wrapped, in_two_classes(batches()))
    assert found.trained == pytest.approx(expected.trained, rel=1e-9)
    assert found.posterior == pytest.approx(expected.posterior, rel=1e-9)


def test_pictures_show_each_label_as_an_example_of_two_classes():
    drawn = outcomes(fitted(), batches())
    n_examples = 8 * 3
    assert drawn.trained.shape == (n_examples, 2)
    assert drawn.prediction.probabilities.shape == (n_examples, 2)
    assert drawn.labels.shape == (n_examples,)
    assert drawn.prediction.labels.shape == (n_examples,)


@pytest.mark.parametrize("n_labels", [1, 3])
@pytest.mark.parametrize("pred_type", ["glm", "nn"])
def test_drawn_weights_give_sigmoids(n_labels, pred_type):
    la = fitted(n_labels=n_labels)
    X = without_labels(batches(n_labels)[0])
    drawn = {"pred_type": pred_type, "n_samples": 5}
    logits = la.functional_samples(X, generator=generator(), **drawn)
    samples = la.predictive_samples(X, generator=generator(), **drawn)
    assert_close(samples, logits.sigmoid())
    if pred_type == "nn":
        p = la(X, link_approx="mc", generator=generator(), **drawn)
        assert_close(p, samples.mean(0))


def test_one_logit_takes_labels_with_and_without_a_column():
    la = fitted(n_labels=1)
    flat = batches(n_labels=1)
    for batch in flat:
        batch["labels"] = batch["labels"][:, 0].long()
    other = make(la.model.model, likelihood=MULTI_LABEL, **options_of("lowrank_kron"))
    other.fit(flat)
    assert_close(other.loss, la.loss, **SAME)
    assert_close(as_matrix(other), as_matrix(la), **SAME)


def test_many_labels_are_drawn():
    la = make(plain_model(30), likelihood=MULTI_LABEL)
    ((X, _),) = pairs()
    la.fit([(X, torch.zeros(4, 30))])
    assert math.isfinite(la.log_marginal_likelihood().item())


# --- everything that users do ---------------------------------------------------------


@pytest.mark.parametrize("scale", [1, 30])
def test_exact_seeds_have_the_fisher_for_their_products(scale):
    # At a scale of 30, 1 - p is 0 in float32.
    logits = scale * torch.tensor([[1.0, 0.0, -0.5]])
    columns = LIKELIHOODS[MULTI_LABEL].exact_seeds(logits).dense().double()
    fisher = torch.einsum("sbi,sbj->bij", columns, columns)
    assert_close(fisher, bernoulli_fisher(logits), rtol=1e-5, atol=0)


def test_sampled_seeds_are_unbiased():
    logits = torch.tensor([[1.0, 0.0, -0.5]])
    seeds = LIKELIHOODS[MULTI_LABEL].sampled_seeds(logits, 40_000, generator())
    of_example = seeds.dense()[:, 0].double()
    fisher = of_example.T @ of_example
    # Four standard errors.
    assert_close(fisher, bernoulli_fisher(logits)[0], rtol=0, atol=0.005)


@pytest.mark.parametrize("scale", [1, 30])
def test_empirical_seeds_are_slopes_of_the_loss(scale):
    logits = scale * torch.tensor([[1.0, 0.0, -0.5]])
    y = torch.tensor([[1.0, 0.0, 1.0]])
    (slopes,) = LIKELIHOODS[MULTI_LABEL].empirical_seeds(logits, y).dense()
    expected = logits.double().sigmoid() - y
    assert_close(slopes, expected.float(), rtol=1e-5, atol=1e-7)


@pytest.mark.filterwarnings("ignore:The best prior precision of the grid")
@pytest.mark.parametrize("method", ["agreement", "gridsearch", "val_gd", "marglik"])
def test_methods_choose_as_for_two_classes(method):
    la, wrapped = both()
    texts = batches()
    examples = in_two_classes(texts)
    own = {}
    of_classes = {}
    if method == "agreement":
        own["train_loader"] = texts
        of_classes["train_loader"] = examples
    elif method != "marglik":
        own["val_loader"] = texts
        of_classes["val_loader"] = examples
    if method == "val_gd":
        # All there is in one batch, which is three times as many examples.
        own |= {"n_steps": 3, "batch_size": 8}
        of_classes |= {"n_steps": 3, "batch_size": 24}
    history = la.optimize_prior_precision(method=method, **own)
    expected = wrapped.optimize_prior_precision(method=method, **of_classes)
    # A text's loss is the sum of its labels', each of which is an example of the
    # wrapper.
    sums = 3 * expected.objective
    if method == "val_gd":  # Adam's steps are those of a loss of any scale
        assert_close(history.objective[0], sums[0], rtol=1e-6, atol=0)
    elif method == "gridsearch":
        assert_close(history.objective, sums, rtol=1e-5, atol=1e-8)
    else:
        assert_close(history.objective, expected.objective, rtol=1e-5, atol=1e-8)
    assert_close(la.prior_precision, wrapped.prior_precision, rtol=1e-3, atol=0)


@pytest.mark.filterwarnings("ignore:The best prior precision of the grid")
def test_other_structures_and_own_losses_are_searched():
    la = fitted("diag")
    shapes = []

    def loss(probabilities, targets):
        shapes.append(probabilities.shape)
        return (probabilities - targets).square().mean()

    search = {"method": "gridsearch", "val_loader": batches(), "grid_size": 3}
    la.optimize_prior_precision(loss=loss, **search)
    # Once for each prior, of all texts together.
    assert shapes == [(8, 3)] * 3
    la.optimize_prior_precision(**search)
    la.optimize_prior_precision(pred_type="nn", n_samples=2, **search)


def test_variances_are_learnt():
    la = fitted()
    texts = batches(lengths=(7, 4, 5, 6) * 8, batch_size=8)
    la.amortize(texts)
    assert la.learnt_variance.r_squared > 0.5
    X = without_labels(texts[0])
    exact = la(X, link_approx="mean_field")
    learnt = la(X, pred_type="amortized", link_approx="mean_field")
    assert learnt.shape == exact.shape == (8, 3)
    assert (learnt - exact).abs().max() < 0.1
    prediction = la.predict(texts, pred_type="amortized")
    assert_close(prediction.probabilities[:8], learnt)


@pytest.mark.parametrize("structure", ["lowrank_kron", "kron"])
def test_files_keep_the_likelihood(structure, tmp_path):
    la = fitted(structure)
    la.prior_precision = 3.0
    la.save_pretrained(tmp_path)
    again = laplace_lora_ext.from_pretrained(la.model.model, tmp_path)
    assert again.likelihood == MULTI_LABEL
    X = without_labels(batches()[0])
    assert_close(again(X), la(X), **SAME)


def test_adapters_are_drawn(tmp_path):
    la = fitted()
    assert len(la.sample_adapters(2, tmp_path, generator())) == 2


@pytest.mark.filterwarnings("ignore:The best prior precision of the grid")
def test_a_mixture_averages_each_labels_probability():
    la = fitted()
    la.prior_precision = 3.0
    other = fitted()
    mixture = laplace_lora_ext.LaplaceMixture([la, other])
    X = without_labels(batches()[0])
    mean = (la(X) + other(X)) / 2
    assert_close(mixture(X), mean, **SAME)
    assert mixture.predict(batches()).probabilities.shape == (8, 3)
    mixture.optimize_prior_precision(val_loader=batches(), grid_size=3)


def trained_by(folder, **keywords):
    """A trainer of a model with three labels, whose loss is transformers' own."""
    model = lora_model("bert", torch.float32)
    model.config.problem_type = MULTI_LABEL
    (batch,) = batches(lengths=(7, 4, 5, 6) * 4, batch_size=N_TEXTS)
    batch["labels"] = batch["labels"].float()
    texts = []
    for row in range(N_TEXTS):
        text = {key: column[row] for key, column in batch.items()}
        texts.append(text)
    settings = {"save_strategy": "no", "logging_strategy": "no"} | keywords
    trainer = trainer_of(folder, model=model, data=texts, **settings)
    return trainer, batch


@pytest.mark.filterwarnings("ignore:The posterior is over")
def test_a_student_learns_each_labels_probability(tmp_path):
    trainer, batch = trained_by(
        tmp_path,
        max_steps=300,
        learning_rate=5e-3,
        per_device_train_batch_size=8,
    )
    model = trainer.model
    # So sure a model that its posterior predicts quite otherwise.
    classifier = model.base_model.model.classifier.modules_to_save["default"]
    classifier.weight.data *= 8
    la = laplace_lora_ext.Laplace(model)
    assert la.likelihood == MULTI_LABEL
    la.fit([batch])
    la.prior_precision = 1e-3
    X = without_labels(batch)
    targets = la(X, link_approx="mean_field")
    of_map = model.eval()(**X).logits.sigmoid()
    student = la.distill(trainer, unlabelled=None)
    model.set_adapter(student)
    of_student = model.eval()(**X).logits.sigmoid()
    before = divergence(targets, of_map)
    assert before > 0.05
    assert divergence(targets, of_student) < 0.1 * before


@pytest.mark.parametrize("by", ["bald", "entropy", "margin"])
def test_texts_are_acquired_by_what_all_their_labels_tell(by):
    la = fitted()
    places = la.acquire(batches(), 8, by=by)
    assert sorted(places.tolist()) == list(range(8))
    if by == "bald":
        prediction = la.predict(batches(), generator=generator())
        assert places[0] == prediction.epistemic_entropy.sum(1).argmax()
    with pytest.raises(ValueError, match='use "bald"'):
        la.acquire(batches(), 1, by="batch_bald")


def divergence(targets, p):
    """Average texts' Kullback-Leibler divergences, summed over their labels."""
    of_labels = kl_divergence(Bernoulli(targets), Bernoulli(p))
    return of_labels.sum(-1).mean().item()


def test_trained_in_stages_by_a_trainer(tmp_path):
    trainer, batch = trained_by(tmp_path)
    for name, weight in trainer.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.zeros_(weight)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        la = laplace_lora_ext.train_in_stages(trainer, held_out=0.25)
    assert la.likelihood == MULTI_LABEL
    assert la.n_data == N_TEXTS
    assert la(without_labels(batch)).shape == (N_TEXTS, 3)


def test_held_out_texts_have_each_label():
    likelihood = LIKELIHOODS[MULTI_LABEL]
    y = torch.tensor(
        [
            [1, 0, 0],
            [1, 1, 0],
            [1, 0, 1],
            [0, 0, 0],
            [1, 1, 0],
        ]
    )
    groups = likelihood.groups(y, 0.2)
    assert groups.tolist() == [0, 1, 2, 3, 1]
    of_one_label = likelihood.groups(y[:, 0], 0.2)
    assert of_one_label.tolist() == [0, 0, 0, 1, 0]


# --- what is refused ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (LABELS[:3], "must be (4, 3), 0 or 1 each, not (3, 3)"),
        (LABELS[:, :2], "must be (4, 3), 0 or 1 each, not (4, 2)"),
        (
            LABELS[:, 0],
            'not (4,): class indices are for the likelihood "classification"',
        ),
        (
            LABELS.double() / 2,
            'range from 0 to 0.5: classes are for the likelihood "class',
        ),
        (
            2 * LABELS,
            'range from 0 to 2: classes are for the likelihood "classification"',
        ),
        (-100 * LABELS, "range from -100 to 0"),
        (LABELS.double().log(), "range from -inf to 0"),
    ],
)
def test_labels_that_are_no_labels_are_refused(y, message):
    ((X, _),) = pairs()
    la = make(plain_model(), likelihood=MULTI_LABEL)
    with pytest.raises(ValueError, match=r"batch 1: .*" + re.escape(message)):
        la.fit([(X, LABELS), (X, y)])


def test_bridges_and_other_backends_are_refused():
    la = fitted()
    with pytest.raises(ValueError, match="'bridge' is none of"):
        la(without_labels(batches()[0]), link_approx="bridge")
    from laplace.curvature import CurvlinopsEF

    with pytest.raises(ValueError, match="CurvlinopsEF has no likelihood"):
        make(lora_model("bert"), "kron", MULTI_LABEL, backend=CurvlinopsEF)


def test_sigmoids_in_place_of_logits_are_warned_of():
    likelihood = LIKELIHOODS[MULTI_LABEL]
    logits = torch.randn(8, 3, generator=generator())
    y = torch.zeros(8, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        likelihood.check_targets(y, logits)
    with pytest.warns(UserWarning, match="leave the sigmoid"):
        likelihood.check_targets(y, logits.sigmoid())
