"""Laplace-LoRA of language models that write: the fit, and what the class offers and refuses."""

import copy
import math

import pytest
import torch
from torch.nn.functional import cross_entropy

import laplace_lora_ext
import tests.support.dense as dense
from laplace_lora_ext.curvature.backend import LowRankKronEF
from laplace_lora_ext.language_model import LanguageModelLaplace
from tests.support.models import VOCABULARY, lora_model
from tests.support.posteriors import (
    count_forward_passes,
    generator,
    make,
)
from tests.support.texts import (
    drawn_models,
    fitted_text,
    text_batches,
    token_jacobians,
    token_logits,
)

FULL_RANK = 60


def test_the_error_of_the_sampled_factors_falls_with_the_root_of_the_number_of_draws():
    model = lora_model("gpt2").eval()
    J, logits, _ = token_jacobians(model, text_batches())
    exact = dense.gradient_curvature(model, J, dense.softmax_fisher(logits))
    numbers, errors = (8, 512), []
    for number in numbers:
        of_seeds = [
            fitted_text(
                model,
                num_samples=number,
                rank=FULL_RANK,
                seed=seed,
            ).H.to_matrix()
            for seed in range(12)
        ]
        errors.append(sum((H - exact).norm() for H in of_seeds) / len(of_seeds) / exact.norm())
    slope = math.log(errors[-1] / errors[0]) / math.log(numbers[-1] / numbers[0])
    assert slope == pytest.approx(-0.5, abs=0.1)
    assert errors[-1] < 0.1


def test_the_empirical_fisher_has_a_texts_whole_gradient():
    model = lora_model("gpt2").eval()
    settings = {
        "backend": LowRankKronEF,
        "backend_kwargs": {"rank": FULL_RANK},
    }
    la = make(model, likelihood="language_modeling", **settings)
    la.fit(text_batches())
    J, logits, labels = token_jacobians(model, text_batches())
    slopes = logits.softmax(-1) - torch.nn.functional.one_hot(labels, VOCABULARY)
    of_token = torch.einsum("nv,nvp->np", slopes, J)
    counts = torch.cat([(b["labels"] != -100).sum(1) for b in text_batches()]).tolist()
    of_text = torch.stack([part.sum(0) for part in of_token.split(counts)])[:, None]
    expected = dense.gradient_curvature(model, of_text, torch.ones(len(of_text), 1, 1).double())
    torch.testing.assert_close(la.H.to_matrix(), expected, rtol=1e-8, atol=1e-10)


def test_the_loss_and_the_evidence_are_those_of_all_labelled_tokens():
    model = lora_model("gpt2").eval()
    la = fitted_text(model)
    _, logits, labels = token_jacobians(model, text_batches())
    loss = cross_entropy(logits, labels, reduction="sum")
    torch.testing.assert_close(la.loss, loss)
    assert la.n_data == 6
    expected = dense.evidence(
        la.H.to_matrix(),
        -loss,
        la.mean,
        torch.full_like(la.mean, 2.0),
    )
    torch.testing.assert_close(la.log_marginal_likelihood(torch.tensor([2.0])), expected)


def test_a_posterior_on_disk_is_that_of_texts_again_and_of_no_classifier(
    tmp_path,
):
    model = lora_model("gpt2").eval()
    la = fitted_text(model, prior_precision=20.0)
    la.save_pretrained(tmp_path)
    again = laplace_lora_ext.from_pretrained(model, tmp_path)
    assert type(again) is LanguageModelLaplace
    batch = text_batches()[0]
    expected, found = (one.score(batch, 2, generator()) for one in (la, again))
    torch.testing.assert_close(found.tokens.total, expected.tokens.total)
    classifier = make(model, class_token_ids=[1, 2, 3])
    with pytest.raises(ValueError, match="cls_name='LanguageModelLaplace', not"):
        classifier.load_state_dict(la.state_dict())
    assert copy.deepcopy(la).likelihood == "language_modeling"


def test_what_needs_jacobians_of_the_vocabulary_is_refused():
    la = fitted_text()
    batch = text_batches()[0]
    for refused in (
        lambda: la(batch),
        lambda: la(batch, pred_type="nn"),
        lambda: la.predictive_moments(batch),
        lambda: la.predictive_statistics([batch]),
    ):
        with pytest.raises(NotImplementedError, match=r"la\.score"):
            refused()


def scored(la, n_samples=4, **ragged):
    """Scores of six texts, those of each token where the labels of the unpadded texts are."""
    found = [la.score(batch, n_samples, generator()) for batch in text_batches(**ragged)]
    return {
        name: torch.cat([getattr(one.tokens, name)[one.labelled] for one in found])
        for name in found[0].tokens._fields
    } | {"text": torch.cat([one.log_prob for one in found])}


def test_scores_are_those_of_a_mixture_of_drawn_models():
    la = fitted_text(prior_precision=3.0)
    found = scored(la)
    with torch.no_grad():
        logits, labels = token_logits(la.model.model, text_batches())
        drawn = [token_logits(m, text_batches())[0] for m in drawn_models(la, 4, generator())]
    own, p = logits.softmax(-1), torch.stack(drawn).softmax(-1)
    of_label = p[:, torch.arange(len(labels)), labels]
    expected = {  # `tests/text/test_scores.py` has the others
        "log_prob": of_label.mean(0).log(),
        "map_log_prob": own[torch.arange(len(labels)), labels].log(),
        "total": -torch.xlogy(p.mean(0), p.mean(0)).sum(-1),
    }
    for name, numbers in expected.items():
        torch.testing.assert_close(found[name], numbers, rtol=1e-8, atol=1e-10)


PADDINGS = [
    {"batch_size": 1},
    {"batch_size": 6, "padded_to": 12},
    {"batch_size": 4, "padding_side": "left", "padded_to": 9},
]


@pytest.mark.parametrize("ragged", PADDINGS)
def test_batch_size_and_padding_change_neither_fit_nor_score(
    ragged,
):
    model, found = lora_model("gpt2").eval(), []
    settings = {
        "backend": LowRankKronEF,
        "backend_kwargs": {"rank": FULL_RANK},
    }  # draws nothing
    for each in ({}, ragged):
        la = make(model, likelihood="language_modeling", **settings)
        la.fit(text_batches(**each))
        found.append(
            {
                "H": la.H.to_matrix(),
                "loss": la.loss,
                **scored(la, **each),
            }
        )
    torch.testing.assert_close(*found, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("n_samples", [0, 3])
def test_a_score_takes_a_pass_a_draw_and_one_more(n_samples):
    la = fitted_text()
    passes = count_forward_passes(la)
    found = la.score(text_batches()[0], n_samples)
    assert len(passes) == 1 + n_samples
    if not n_samples:
        assert torch.equal(found.tokens.log_prob, found.tokens.map_log_prob)
        assert not found.tokens.epistemic.any()


def test_settings_that_do_not_fit_are_refused():
    model = lora_model("gpt2")
    with pytest.raises(NotImplementedError, match="gradient"):
        make(
            model,
            likelihood="language_modeling",
            backend_kwargs={"kfac_approx": "expand"},
        )
    la = make(
        model,
        likelihood="language_modeling",
        backend_kwargs={"stochastic": False},
    )
    with pytest.raises(NotImplementedError, match="59 backward passes a token"):
        la.fit(text_batches())
    with pytest.raises(ValueError, match="language_modeling"):
        make(model)
    with pytest.raises(ValueError, match="whole vocabulary"):
        make(
            model,
            likelihood="language_modeling",
            class_token_ids=[1, 2],
        )
    with pytest.raises(ValueError, match="'marginal' is none of"):
        fitted_text().optimize_prior_precision(method="marginal")


@pytest.mark.parametrize(
    "use",
    [
        lambda la, texts: la.score(texts[0], n_samples=2),
        lambda la, texts: la.optimize_prior_precision(method="agreement", train_loader=texts),
        lambda la, texts: la.optimize_prior_precision(method="gridsearch", val_loader=texts),
    ],
    ids=["score", "agreement", "gridsearch"],
)
def test_a_model_that_has_changed_is_refused(use):
    la = fitted_text()
    la.blocks[1].weight.data.mul_(1.01)
    with pytest.raises(RuntimeError, match="have changed since the fit"):
        use(la, text_batches())
    assert la.prior_precision.item() == 1
