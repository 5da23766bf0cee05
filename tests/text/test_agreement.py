"""The broadest posterior whose draws agree with the model, against draws at the chosen one."""

import pytest
import torch

from laplace_lora_ext import TokenAgreement
from laplace_lora_ext.tuning.method import draw_seed
from tests.support.posteriors import generator
from tests.support.ranks import on_ranks
from tests.support.texts import drawn_models, fitted_text, text_batches

FEW = {"n_samples": 2, "max_change": 0.01}


def change(la):
    """Mean total variation distance of the draws from the model, by copies with drawn weights."""
    (batch,) = text_batches(batch_size=6)
    places = la.model.targets(batch) != -100
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    with torch.no_grad():
        own, *drawn = (
            model(**inputs).logits[places].softmax(-1)
            for model in (la.model.model, *drawn_models(la, 3, generator()))
        )
    return (sum((p - own).abs().sum(-1).mean() / 2 for p in drawn) / 3).item()


@pytest.mark.parametrize("max_change", [0.005, 0.02])
@pytest.mark.parametrize("layerwise", [False, True])
def test_the_chosen_posterior_changes_tokens_as_much_as_is_allowed(layerwise, max_change):
    la = fitted_text()
    base = torch.linspace(0.5, 2, len(la.blocks)).double()
    start = {"init_prior_prec": base} if layerwise else {}
    start |= {"max_change": max_change, "n_samples": 3}
    data = {"train_loader": text_batches(), "generator": generator()}
    la.optimize_prior_precision(method="agreement", **data, **start)
    assert change(la) == pytest.approx(max_change, rel=0.02)
    if layerwise:
        ratios = la.prior_precision / base
        torch.testing.assert_close(ratios, ratios[:1].expand_as(ratios), rtol=1e-6, atol=0)


def test_of_many_texts_some_batches_choose_and_the_history_says_so():
    la = fitted_text()
    batches = text_batches(batch_size=1)
    some = TokenAgreement(train_loader=batches, max_examples=3, generator=generator(), **FEW)(la)
    chosen = la.prior_precision.clone()
    alone = TokenAgreement(train_loader=batches[::2], generator=generator(), **FEW)(la)
    assert (some.n_examples, alone.n_examples) == (3, 3)
    assert torch.equal(chosen, la.prior_precision)


def test_ranks_choose_by_the_texts_of_all_of_them():
    la, batches = fitted_text(), text_batches(batch_size=2)

    def choose(texts, draws):
        history = TokenAgreement(train_loader=texts, generator=draws, **FEW)(la)
        return history.objective, la.prior_precision, torch.tensor(history.n_examples)

    expected = choose(batches, generator(draw_seed(generator())))
    for result in on_ranks(lambda rank: choose(batches[rank::2], generator(rank)), 2):
        assert not isinstance(result, Exception), result
        torch.testing.assert_close(result, expected)
