"""Several labels an example, or one logit: independent Bernoullis."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from laplace_lora_ext.metrics import compare
from laplace_lora_ext.plots import outcomes
from laplace_lora_ext.tasks import TASKS
from tests.support.dense import full_rank
from tests.support.models import Batch, OfBatches, OfMapping, lora_model, without_labels
from tests.support.posteriors import generator, make
from tests.support.tasks import LABELS
from tests.support.tasks import texts_of_several_labels as batches

MULTI_LABEL = "multi_label_classification"
BERNOULLIS = TASKS[MULTI_LABEL]
# A label's sums and its two classes' differ by the order of additions.
SAME = {"rtol": 1e-10, "atol": 1e-10}
# What a search has minimised, near its optimum.
SAME_OBJECTIVE = {"rtol": 1e-5, "atol": 1e-8}
N_LABELS = 3  # as many as `lora_model` has outputs
N_TEXTS = 8


class InTwoColumns(OfBatches):
    """Makes rows `[0, f]` of each logit f, whose softmax is f's sigmoid."""

    def forward(self, batch: Batch) -> Tensor:
        f = super().forward(batch)
        rows = torch.stack([torch.zeros_like(f), f], dim=-1)
        # Each label of each text is an example.
        return rows.flatten(0, 1)


def in_two_classes(batches: list[Batch]) -> list[tuple[Any, Tensor]]:
    """Make pairs for `InTwoColumns`: each label of each text is an example."""
    return [
        (without_labels(batch), batch["labels"].long().flatten()) for batch in batches
    ]


def fitted(model: nn.Module | None = None):
    settings = full_rank(stochastic=False)
    model = model or lora_model("bert").eval()
    la = make(model, likelihood=MULTI_LABEL, **settings)
    la.fit(batches())
    return la


def both():
    """Fit the labels' posterior, and a wrapper's with classes "not" and "yes"."""
    model = lora_model("bert").eval()
    wrapped = make(OfMapping(InTwoColumns(model)), **full_rank())
    with warnings.catch_warnings():
        # Nothing was trained: the weights are random.
        warnings.filterwarnings("ignore", "The trained model is no better")
        wrapped.fit(in_two_classes(batches()))
    return fitted(model), wrapped


# --- as two classes -------------------------------------------------------------------


def test_decisions_and_their_figures_are_those_of_two_classes():
    la, wrapped = both()
    texts = batches()
    as_classes = in_two_classes(texts)
    found = la.predict(texts, generator=generator())
    of_classes = wrapped.predict(as_classes, generator=generator())
    of_yes = of_classes.probabilities[:, 1]
    # Everything else is a number an example.
    expected = of_classes._replace(probabilities=of_yes)
    p = found.probabilities
    assert p.shape == (N_TEXTS, N_LABELS)
    # The wrapper's examples are the labels, text by text.
    as_examples = [column.flatten() for column in found]
    assert_close(as_examples, list(expected), **SAME)
    is_yes = p > 0.5
    assert torch.equal(found.labels, is_yes.long())
    found, expected = compare(la, texts), compare(wrapped, as_classes)
    assert found.trained == pytest.approx(expected.trained, rel=1e-9)
    assert found.posterior == pytest.approx(expected.posterior, rel=1e-9)


def test_pictures_show_each_label_as_an_example_of_two_classes():
    la = fitted()
    drawn = outcomes(la, batches())
    prediction = drawn.prediction
    n_examples = N_TEXTS * N_LABELS
    assert drawn.trained.shape == (n_examples, 2)
    assert drawn.labels.shape == (n_examples,)
    # All batches have the same draws.
    expected = la.predict(batches(), generator=generator())
    assert_close(prediction.epistemic_entropy, expected.epistemic_entropy.flatten())
    assert_close(prediction.probabilities[:, 1], expected.probabilities.flatten())


def test_drawn_weights_give_sigmoids():
    la = fitted()
    X, *_ = map(without_labels, batches())
    drawn = {"pred_type": "nn", "n_samples": 5}
    logits = la.functional_samples(X, generator=generator(), **drawn)
    samples = la.predictive_samples(X, generator=generator(), **drawn)
    assert_close(samples, logits.sigmoid())
    # A prediction by drawn weights is the mean of what they predict.
    p = la(X, link_approx="mc", generator=generator(), **drawn)
    assert_close(p, samples.mean(0))
    # The host's bridges know a softmax alone.
    with pytest.raises(ValueError, match="'bridge' is none of"):
        la(X, link_approx="bridge")


# --- choices of a prior ---------------------------------------------------------------


def chosen_by_both(method: str, loader: str, **options: Any):
    """Choose priors of both posteriors; return their objectives, and the priors."""
    objectives, priors = [], []
    for la, data in zip(both(), (batches(), in_two_classes(batches())), strict=True):
        history = la.optimize_prior_precision(
            method=method, **{loader: data}, **options
        )
        objectives.append(history.objective)
        priors.append(la.prior_precision)
    # Near an optimum, rounding moves the place more than the height.
    assert_close(*priors, rtol=1e-3, atol=0)
    return objectives


def test_agreement_chooses_as_for_two_classes():
    assert_close(*chosen_by_both("agreement", "train_loader"), **SAME_OBJECTIVE)


def test_a_descent_starts_from_the_sum_of_a_texts_labels():
    # All there is in one batch, so that no draw decides what is in it.
    options = {"n_steps": 3, "batch_size": N_TEXTS * N_LABELS}
    of_texts, of_labels = chosen_by_both("val_gd", "val_loader", **options)
    # Only the first, since Adam's steps are those of a loss of any scale.
    assert_close(of_texts[0], N_LABELS * of_labels[0], **SAME_OBJECTIVE)


# --- trainings ------------------------------------------------------------------------


def test_held_out_texts_have_each_label():
    y = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1], [0, 0, 0], [1, 1, 0]])
    # A group a label, the first that a text has; the last are texts without any.
    groups = BERNOULLIS.groups(y.flip(1))
    assert groups.tolist() == [2, 1, 0, 3, 1]
    first_labels = y[:, 0]
    groups = BERNOULLIS.groups(first_labels)
    assert groups.tolist() == [0, 0, 0, 1, 0]


# --- what is refused ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("y", "message"), [(LABELS / 2, "from 0 to 0.5"), (LABELS.log(), "non-finite")]
)
def test_labels_that_are_no_labels_are_refused(y, message):
    with pytest.raises(ValueError, match=message):
        BERNOULLIS.check_targets(y, torch.randn(4, 3))
