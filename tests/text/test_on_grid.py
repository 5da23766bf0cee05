"""Grids of prior precisions: the points, the model's mode, and what is refused."""

import pytest
import torch

from laplace_lora_ext import TokenAgreement, TokenGridSearch
from laplace_lora_ext.text.on_grid import relative_eigenvalues
from laplace_lora_ext.text.perturbations import ForwardMode
from laplace_lora_ext.tuning.loss_search import draw_seed
from tests.support.models import lora_model
from tests.support.posteriors import generator
from tests.support.ranks import on_ranks
from tests.support.texts import fitted_text, text_batches

GRID = {"grid_size": 5, "n_samples": 2}


def test_a_model_in_training_mode_is_not_sampled_by_its_dropout():
    model = lora_model("gpt2")
    la = fitted_text(model, products=ForwardMode())
    losses = []
    for mode in (False, True):
        model.train(mode)
        method = TokenGridSearch(val_loader=text_batches(), generator=generator(), **GRID)
        losses.append(method(la).objective)
        assert model.training == mode
    assert torch.equal(*losses)


def test_a_grid_has_the_hosts_options():
    la = fitted_text(products=ForwardMode())
    history = la.optimize_prior_precision(
        "gridsearch",
        val_loader=text_batches(),
        log_prior_prec_min=0,
        log_prior_prec_max=4,
        log_prior_prec_base=2.0,
        **GRID,
    )
    assert history.prior_precision.flatten().tolist() == [1, 2, 4, 8, 16]


@pytest.mark.parametrize("method", [TokenGridSearch, TokenAgreement])
@pytest.mark.parametrize("wrong", [{"n_samples": 0}, {"grid_size": 0}])
def test_numbers_below_one_are_refused(method, wrong):
    data = {"val_loader" if method is TokenGridSearch else "train_loader": []}
    with pytest.raises(ValueError, match="at least 1"):
        method(**data, **wrong)


def test_eigenvalues_are_relative_to_the_base_of_their_block():
    la = fitted_text(temperature=0.5)
    base = torch.logspace(-2, 2, len(la.blocks)).double()
    found = relative_eigenvalues(la, base)
    zero = torch.zeros(()).double()
    for block, of_block in zip(la.H.blocks, base, strict=True):
        exact = 2 * torch.linalg.eigvalsh(block.to_matrix(zero, 1)) / of_block
        nearest = (found - exact[:, None]).abs().amin(1)
        assert (nearest < 1e-8 * exact.max() + 1e-12).all()
    assert len(found) == len(la.H.spectrum.leading) + len(la.H.spectrum.remaining)


@pytest.mark.parametrize("method", [TokenGridSearch, TokenAgreement])
def test_ranks_choose_by_the_texts_of_all_of_them(method):
    la = fitted_text(products=ForwardMode())
    key = "val_loader" if method is TokenGridSearch else "train_loader"
    batches = text_batches(batch_size=2)

    def choose(texts, draws):
        history = method(**{key: texts}, generator=draws, **GRID)(la)
        return history.objective, la.prior_precision, torch.tensor(history.n_examples)

    # The draws of all ranks are those of a seed that the first one draws.
    expected = choose(batches, generator(draw_seed(generator())))
    for result in on_ranks(lambda rank: choose(batches[rank::2], generator(rank)), 2):
        assert not isinstance(result, Exception), result
        torch.testing.assert_close(result, expected)
