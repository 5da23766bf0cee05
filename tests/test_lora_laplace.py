"""The host's API on top of a posterior over LoRA weights."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.distributions import MultivariateNormal
from torch.testing import assert_close

from laplace_lora_ext import from_pretrained
from tests.support.models import (
    CLASS_TOKEN_IDS,
    built,
    lora_model,
    ragged_batches,
    with_lora,
)
from tests.support.posteriors import (
    another_training,
    fitted,
    make,
    plain_regression,
    priors_of_blocks,
    sizes,
)


def test_log_prob_is_that_of_the_gaussian(la):
    value = la.mean + 0.1
    P = la.posterior_precision.to_matrix()
    gaussian = MultivariateNormal(la.mean, precision_matrix=P)
    assert_close(la.log_prob(value), gaussian.log_prob(value))
    difference = value - la.mean
    expected = -0.5 * difference @ P @ difference
    assert_close(la.log_prob(value, normalized=False), expected)


@pytest.mark.parametrize("structure", ["lowrank_kron", "full"])
@pytest.mark.parametrize("name", ["prior_precision", "sigma_noise"])
def test_numbers_changed_in_place_are_read_anew(structure, name):
    la, x = plain_regression(structure=structure)
    before = la.predictive_moments(x).f_var
    getattr(la, name).mul_(100)
    found = la.predictive_moments(x).f_var
    assert not torch.allclose(found, before)
    setattr(la, name, getattr(la, name).clone())
    assert torch.equal(found, la.predictive_moments(x).f_var)


def test_evidence_is_differentiable_in_the_noise():
    la, _ = plain_regression()

    def evidence(sigma_noise: Tensor) -> Tensor:
        return la.log_marginal_likelihood(sigma_noise=sigma_noise)

    assert gradcheck(evidence, torch.tensor(0.7).double().requires_grad_())


def test_another_posterior_of_the_same_kind_has_the_same_options():
    # None is what it is by default.
    options = {
        "prior_mean": 0.3,
        "temperature": 2.0,
        "target_modules": ["value"],
        "backend_kwargs": {"rank": 2, "tail": False, "kfac_approx": "expand"},
    }
    la = fitted(**options)
    other, same = la.for_model(another_training()), make(another_training(), **options)
    assert other.H is None
    for posterior in (other, same):
        posterior.fit(ragged_batches())
    assert [each.name for each in other.blocks] == [each.name for each in la.blocks]
    assert other.log_marginal_likelihood() == same.log_marginal_likelihood()


def test_a_posterior_made_or_read_finds_answers_as_the_first(tmp_path):
    model = with_lora(built("BertForMaskedLM"), "query")
    answers = {"class_token_ids": CLASS_TOKEN_IDS, "mask_token_id": 7}
    la = make(model, dict_key_y="answer", **answers)
    texts = [{"input_ids": torch.tensor([[3, 7]]), "answer": torch.tensor([1])}]
    la.fit(texts)
    la.save_pretrained(tmp_path)
    read = from_pretrained(model, tmp_path, dict_key_y="answer")
    for other in (read, la.for_model(model)):
        other.fit(texts)
        assert other.log_likelihood == la.log_likelihood
    with pytest.raises(ValueError, match=r"mask_token_id was 7 .* 3"):
        from_pretrained(model, tmp_path, mask_token_id=3)


def test_a_decoder_that_reads_another_padding_token_is_another_model(tmp_path):
    base = built("GPT2ForSequenceClassification")
    model = with_lora(base, "c_attn")
    la = fitted(model=model)
    la.save_pretrained(tmp_path)
    from_pretrained(model, tmp_path)
    base.config.pad_token_id += 1
    with pytest.raises(ValueError, match="pad_token_id was 0 at the fit, and now is 1"):
        from_pretrained(model, tmp_path)


# Numbers of Python, of numpy and of torch, which are read in different ways.
IMPOSSIBLE = [0.0, -1, float("nan"), float("inf"), np.float32(-1), torch.tensor(-1.0)]


def test_what_makes_no_gaussian_is_refused_and_changes_nothing(la):
    for name in ("prior_precision", "temperature", "sigma_noise", "logit_scale"):
        before = getattr(la, name)
        for value in IMPOSSIBLE:
            with pytest.raises(ValueError, match=f"{name} must be positive and finite"):
                setattr(la, name, value)
        assert getattr(la, name) is before


def test_it_says_what_it_is_of_and_whether_it_is_fitted():
    la = make(lora_model("bert"))
    kind = "LowRankKronLoRALaplace(classification by BertForSequenceClassification"
    size = f"8 weights of {la.n_params:,} parameters"
    assert repr(la) == f"{kind}; {size}; not fitted; prior precision 1)"
    la.logit_scale = 2.5
    la.fit(ragged_batches())
    la.prior_precision = torch.tensor([1.0, 4.0]).repeat(4)
    said = "; fitted to 8 examples; prior precision 2; logit scale 2.5)"
    assert repr(la).endswith(said)


def test_a_summary_counts_the_parameters_that_the_data_determine():
    la = fitted("gpt2")
    la.temperature = 0.01
    la.prior_precision = priors_of_blocks(la)
    _, *lines = la.summary().splitlines()
    names, n_params, precisions, n_determined = zip(
        *(line.split() for line in lines), strict=True
    )
    assert names[-1] == "transformer.h.1.mlp.c_proj.lora_B.default.weight"
    assert [*map(int, n_params)] == sizes(la)
    # The share of each parameter's posterior precision that the data bring.
    H = la.H.to_matrix() / la.temperature
    shares = (H @ torch.linalg.inv(H + la.prior_precision_diag.diag())).diagonal()
    expected = [of_block.sum().item() for of_block in shares.split(sizes(la))]
    # As many digits as are printed.
    printed = {"rel": 1e-3, "abs": 0.05}
    priors = la.prior_precision.tolist()
    assert [*map(float, precisions)] == pytest.approx(priors, **printed)
    assert [*map(float, n_determined)] == pytest.approx(expected, **printed)


def test_predictions_by_no_draw_are_refused(la, batch):
    for options in ({"pred_type": "nn"}, {"link_approx": "mc"}):
        with pytest.raises(ValueError, match="n_samples"):
            la(batch, n_samples=0, **options)
