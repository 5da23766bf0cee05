"""The broadest posterior whose draws agree with the model, against draws at the chosen one."""

from functools import partial

import pytest
import torch

from laplace_lora_ext import TokenAgreement
from laplace_lora_ext.models.weights import LoRAWeights
from laplace_lora_ext.text.draws import Noise
from laplace_lora_ext.text.perturbations import ForwardMode, drawn_logits
from laplace_lora_ext.tuning.loss_search import draw_seed
from tests.support.posteriors import generator
from tests.support.texts import fitted_text, text_batches

SETTINGS = {"n_samples": 3, "grid_size": 25, "log_prior_prec_min": -1, "log_prior_prec_max": 4}


def change(la):
    """Mean total variation distance of the draws from the model, by direct products."""
    (batch,) = text_batches(batch_size=6)
    weights = LoRAWeights(la.model, la.blocks)
    noise = Noise(3, draw_seed(generator()))
    directions = noise.directions(la.posterior_precision, la.blocks)
    with torch.no_grad():
        f = la.model(batch)
        drawn = drawn_logits(
            ForwardMode(), weights.values, directions, partial(map, partial(weights.run, batch)), f
        )
        distances = [(p.softmax(-1) - f.softmax(-1)).abs().sum(-1).mean() / 2 for p in drawn]
    return (sum(distances) / 3).item()


@pytest.mark.parametrize("max_change", [0.05, 0.2])
@pytest.mark.parametrize("layerwise", [False, True])
def test_the_chosen_posterior_changes_tokens_as_much_as_is_allowed(layerwise, max_change):
    la = fitted_text(products=ForwardMode())
    base = torch.linspace(0.5, 2, len(la.blocks)).double()
    start = {"init_prior_prec": base} if layerwise else {}
    la.optimize_prior_precision(
        "agreement",
        train_loader=text_batches(),
        max_change=max_change,
        generator=generator(),
        **SETTINGS,
        **start,
    )
    assert change(la) == pytest.approx(max_change, rel=0.02)
    if layerwise:
        ratios = la.prior_precision / base
        torch.testing.assert_close(ratios, ratios[:1].expand_as(ratios), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("max_change", "end"), [(0.999, 0.1), (1e-6, 1e4)])
def test_a_change_that_no_point_has_is_warned_of(max_change, end):
    la = fitted_text(products=ForwardMode())
    with pytest.warns(UserWarning, match="No prior precision of the grid"):
        TokenAgreement(train_loader=text_batches(), max_change=max_change, **SETTINGS)(la)
    assert la.prior_precision.item() == pytest.approx(end)


@pytest.mark.parametrize("max_change", [0, 1])
def test_a_change_that_is_no_share_is_refused(max_change):
    with pytest.raises(ValueError, match="between 0 and 1"):
        TokenAgreement(train_loader=[], max_change=max_change)


def test_of_many_texts_some_batches_choose_and_the_history_says_so():
    la = fitted_text(products=ForwardMode())
    batches = text_batches(batch_size=1)
    data = {"generator": generator(), **SETTINGS}
    some = TokenAgreement(train_loader=batches, max_examples=3, **data)(la)
    chosen = la.prior_precision.clone()
    alone = TokenAgreement(train_loader=batches[::2], **data | {"generator": generator()})(la)
    assert (some.n_examples, alone.n_examples) == (3, 3)
    assert torch.equal(chosen, la.prior_precision)


def test_no_example_at_all_is_refused():
    with pytest.raises(ValueError, match="max_examples must be at least 1"):
        TokenAgreement(train_loader=[], max_examples=0)
