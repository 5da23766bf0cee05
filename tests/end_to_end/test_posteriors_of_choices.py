"""Posteriors over answers of several tokens: what other answers have none of."""

import pytest
from torch.testing import assert_close

import laplace_lora_ext
from laplace_lora_ext import LaplaceMixture
from tests.support.choices import ANSWERS, choices_batch, prompts_of
from tests.support.dense import EXACT
from tests.support.models import lora_model
from tests.support.posteriors import GRID, another_training, make
from tests.support.tasks import CHOICES, OF_TARGETS

# The models are not trained.
pytestmark = pytest.mark.filterwarnings("ignore:.*(have only|no better than guessing)")


def test_padding_changes_nothing():
    # It counts positions, and would count padding where it is not masked.
    settings = {"kfac_approx": "expand"}
    right = CHOICES.fitted(backend_kwargs=settings)
    left = OF_TARGETS["means of choices"].fitted(backend_kwargs=settings)
    found = right.log_marginal_likelihood()
    assert_close(found, left.log_marginal_likelihood(), **EXACT)


def test_means_and_sums_are_neither_mixed_nor_read_for_each_other(tmp_path):
    model = CHOICES.model().eval()
    of_means = CHOICES.fitted(model)
    of_means.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="normalised"):
        laplace_lora_ext.from_pretrained(model, tmp_path, normalised=False)
    # As another training's member.
    assert of_means.for_model(another_training("gpt2")).model.normalised
    of_sums = CHOICES.fitted(another_training("gpt2").eval(), normalised=False)
    with pytest.raises(ValueError, match="normalised"):
        LaplaceMixture([of_means, of_sums])


def test_unequal_numbers_of_choices_are_fitted_and_not_compared(eight_texts):
    prompts = prompts_of(eight_texts)
    labels = eight_texts["labels"]
    # In batches of their own, since within one the numbers can't differ.
    of_four = choices_batch(prompts[:4], [ANSWERS] * 4)
    of_three = choices_batch(prompts[4:], [ANSWERS[:3]] * 4)
    loader = [of_four | {"labels": labels[:4]}, of_three | {"labels": labels[4:]}]
    la = make(lora_model("gpt2"))
    la.fit(loader)
    assert la.n_outputs == 4
    assert la(of_four).shape == (4, 4)
    assert la(of_three).shape == (4, 3)
    with pytest.raises(ValueError, match="unequal numbers of choices"):
        la.optimize_prior_precision(method="gridsearch", val_loader=loader, **GRID)
