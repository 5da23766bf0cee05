"""Adapters that are merged by their posteriors, and posteriors around them."""

from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.testing import assert_close

import laplace_lora_ext
from laplace_lora_ext import merge, merging
from tests.support.models import base_model, first_batch, lora_model, ragged_batches
from tests.support.posteriors import (
    STRUCTURES,
    another_training,
    count_forward_passes,
    fitted,
    generator,
    normal,
)

# So that the prior is a small part of each precision, as it should be for merging.
PRIOR = 0.3


@pytest.fixture(params=STRUCTURES)
def structure(request: pytest.FixtureRequest) -> str:
    return request.param


def two_posteriors(structure: str = "lowrank_kron", **keywords: Any) -> list[Any]:
    """Fit posteriors of two trainings, each in its own model, to other texts."""
    first, *others = ragged_batches()
    one = fitted(structure=structure, batches=[first], **keywords)
    two = fitted(
        structure=structure, batches=others, model=another_training(), **keywords
    )
    one.prior_precision = PRIOR
    # Another, so that none can pass for the other's.
    two.prior_precision = 2 * PRIOR
    return [one, two]


def dense_precision(la: Any) -> Tensor:
    """Make the matrix of a posterior's precision, whatever the structure."""
    P = la.posterior_precision
    if not isinstance(P, Tensor):
        return P.to_matrix()
    return P.diag() if P.ndim == 1 else P


def adapter_of(la: Any, name: str) -> PeftModel:
    """Activate an adapter of a posterior's model."""
    model = la.model.model
    model.set_adapter(name)
    return model.eval()


# --- the mode -------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [None, [0.5, 3.0]])
def test_merged_weights_are_the_mode_of_the_product(structure, weights):
    posteriors = two_posteriors(structure)
    merged = merge(posteriors, weights=weights)
    total = 0.0
    weighted = 0.0
    for la, weight in zip(posteriors, weights or [1.0, 1.0], strict=True):
        P = weight * dense_precision(la)
        total = total + P
        weighted = weighted + P @ la.mean
    expected = torch.linalg.solve(total, weighted)
    # The residual ends at 2e-12 of what is wanted, and the precisions' eigenvalues
    # lie within a factor of a thousand.
    assert_close(merged.mean, expected, rtol=1e-8, atol=1e-9)
    # It is far from what PEFT's linear merging would give.
    halfway = (posteriors[0].mean + posteriors[1].mean) / 2
    assert (merged.mean - halfway).norm() > 0.01 * halfway.norm()


def test_the_one_that_counts_far_more_decides():
    one, two = two_posteriors()
    merged = merge([one, two], weights=[1.0, 1e9])
    assert_close(merged.mean, two.mean, rtol=1e-5, atol=1e-5)


def test_three_posteriors_are_merged():
    one, two = two_posteriors("full")
    three = fitted(structure="full", model=another_training())
    posteriors = [one, two, three]
    merged = merge(posteriors)
    total = sum(dense_precision(la) for la in posteriors)
    weighted = sum(dense_precision(la) @ la.mean for la in posteriors)
    expected = torch.linalg.solve(total, weighted)
    assert_close(merged.mean, expected, rtol=1e-8, atol=1e-9)


def test_single_precision_converges():
    posteriors = two_posteriors()
    in_single = two_posteriors()
    for la in in_single:
        la.model.float()
    with_single = merge(in_single)
    # As far as the precisions themselves are rounded.
    expected = merge(posteriors).mean.float()
    assert_close(with_single.mean, expected, rtol=1e-3, atol=1e-4)


def test_weights_in_half_precision_are_those_of_the_posterior():
    posteriors = two_posteriors()
    in_half = two_posteriors()
    for la in in_half:
        la.model.bfloat16()
    merged = merge(in_half)
    merged.check_model()
    # The adapter's weights have eight bits, which are what the posterior is around.
    expected = merge(posteriors).mean.float()
    assert_close(merged.mean, expected, rtol=2**-6, atol=0.01)


def test_merging_takes_no_pass_of_the_model():
    posteriors = two_posteriors()
    calls = [count_forward_passes(la) for la in posteriors]
    merge(posteriors)
    assert calls == [[], []]


def test_what_has_not_converged_is_warned_of(monkeypatch):
    monkeypatch.setattr(merging, "_MOST_ITERATIONS", 1)
    with pytest.warns(UserWarning, match="have not converged after 1 step"):
        merge(two_posteriors())


# --- the posterior around it ----------------------------------------------------------


def test_halves_of_one_training_are_its_whole(structure):
    # Around the same weights, two fits are one of all data.
    first, *others = ragged_batches()
    halves = []
    for batches in ([first], others):
        la = fitted(structure=structure, batches=batches)
        la.prior_precision = PRIOR
        halves.append(la)
    merged = merge(halves)
    whole = fitted(structure=structure)
    whole.prior_precision = 2 * PRIOR
    assert_close(merged.mean, whole.mean)
    assert merged.n_data == whole.n_data
    assert_close(merged.loss, whole.loss)
    # At rank 3, what a fit leaves out depends on where the other has ended.
    assert_close(
        merged.log_marginal_likelihood(),
        whole.log_marginal_likelihood(),
        rtol=1e-6,
        atol=1e-6,
    )


@pytest.mark.parametrize("structure", ["diag", "full"])
def test_precisions_without_factors_add_up(structure):
    posteriors = two_posteriors(structure)
    merged = merge(posteriors)
    expected = sum(dense_precision(la) for la in posteriors)
    assert_close(dense_precision(merged), expected)


def test_each_loss_follows_its_parabola():
    posteriors = two_posteriors("full")
    merged = merge(posteriors)
    expected = 0.0
    for la in posteriors:
        apart = merged.mean - la.mean
        expected = expected + la.loss + apart @ la.H @ apart / 2
    assert_close(merged.loss, expected)


@pytest.mark.parametrize(
    ("of_first", "of_second", "expected"),
    [
        (1.0, 2.0, "one number"),
        (torch.linspace(1, 2, 8), 2.0, "one a block"),
        (torch.linspace(1, 2, 8), torch.linspace(3, 1, 8), "one a block"),
    ],
)
def test_prior_precisions_add_up(of_first, of_second, expected):
    one, two = two_posteriors()
    assert len(one.blocks) == 8
    one.prior_precision = of_first
    two.prior_precision = of_second
    merged = merge([one, two], weights=[1.0, 0.5])
    assert len(merged.prior_precision) == (1 if expected == "one number" else 8)
    total = one.prior_precision + two.prior_precision / 2
    assert_close(merged.prior_precision, total)


def test_prior_precisions_of_numbers_and_blocks_add_up():
    one, two = two_posteriors("diag")
    one.prior_precision = torch.linspace(1, 2, one.n_params)
    two.prior_precision = torch.linspace(1, 2, two.n_layers)
    merged = merge([one, two])
    expected = one.prior_precision_diag + two.prior_precision_diag
    assert_close(merged.prior_precision_diag, expected)


def test_held_out_data_choose_the_prior_precision():
    posteriors = two_posteriors()
    held_out = ragged_batches(seed=4)
    merged = merge(posteriors, val_loader=held_out)
    by_hand = {}
    for prior_precision in merging.PRIOR_PRECISIONS:
        for la in posteriors:
            la.prior_precision = prior_precision
        name = f"by_hand_{len(by_hand)}"
        la = merge(posteriors, adapter_name=name)
        history = la.optimize_prior_precision(method="gridsearch", val_loader=held_out)
        by_hand[history.objective.min().item()] = la
    assert len(by_hand) == len(merging.PRIOR_PRECISIONS)
    best = by_hand[min(by_hand)]
    assert_close(merged.mean, best.mean)
    assert_close(merged.prior_precision, best.prior_precision)
    assert merged.logit_scale == pytest.approx(best.logit_scale)


def test_the_search_leaves_the_posteriors_as_they_are():
    posteriors = two_posteriors()
    merge(posteriors, val_loader=ragged_batches(seed=4))
    one, two = posteriors
    assert one.prior_precision.item() == PRIOR
    assert two.prior_precision.item() == 2 * PRIOR


def test_held_out_data_that_can_be_read_once_are_refused():
    posteriors = two_posteriors()
    with pytest.raises(ValueError, match="a generator can be read once"):
        merge(posteriors, val_loader=iter(ragged_batches()))
    assert list(posteriors[0].model.model.peft_config) == ["default"]


def test_the_merged_posterior_predicts_is_tuned_and_saved(tmp_path):
    merged = merge(two_posteriors())
    batches = ragged_batches(seed=4)
    merged.optimize_prior_precision(
        method="gridsearch", val_loader=batches, pred_type="glm"
    )
    probabilities = merged(batches[0], link_approx="mean_field")
    assert_close(probabilities.sum(-1), torch.ones(len(probabilities)).double())
    merged.save_pretrained(tmp_path)
    model = adapter_of(merged, "merged")
    again = laplace_lora_ext.from_pretrained(model, tmp_path)
    assert_close(again(batches[0], link_approx="mean_field"), probabilities)


# --- the adapter ----------------------------------------------------------------------


def test_the_adapter_is_an_ordinary_one(tmp_path):
    posteriors = two_posteriors()
    merged = merge(posteriors, adapter_name="both")
    model = adapter_of(merged, "both")
    batch = first_batch()
    del batch["labels"]
    logits = model(**batch).logits
    assert_close(logits, merged.model(batch))
    model.save_pretrained(str(tmp_path), selected_adapters=["both"])
    torch.manual_seed(0)  # as `lora_model` makes its base
    saved = PeftModel.from_pretrained(base_model("bert"), str(tmp_path / "both"))
    saved.double().eval()
    assert_close(saved(**batch).logits, logits)


def test_two_adapters_of_one_model_are_merged():
    first, *others = ragged_batches()
    model = lora_model("bert")
    one = fitted(model=model, batches=[first])
    model.add_adapter("second", model.peft_config["default"])
    model.set_adapter("second")
    model.double()
    for name, weight in model.named_parameters():
        if ".second." in name:
            like = model.get_parameter(name.replace(".second.", ".default."))
            weight.data = like.data + 0.1 * normal(*weight.shape) * ("lora_" in name)
    two = fitted(model=model, batches=others)
    model.set_adapter("default")
    for la in (one, two):
        la.prior_precision = PRIOR
    merged = merge([one, two])
    assert model.active_adapter == "default"
    assert set(model.peft_config) == {"default", "second", "merged"}
    P_one, P_two = dense_precision(one), dense_precision(two)
    expected = torch.linalg.solve(P_one + P_two, P_one @ one.mean + P_two @ two.mean)
    assert_close(merged.mean, expected, rtol=1e-8, atol=1e-9)


def test_a_head_is_merged_with_the_rest():
    posteriors = two_posteriors(modules_to_save=True)
    # Trained too, and so no longer the same.
    two = posteriors[1]
    for block in two.blocks:
        if block.kind != "lora":
            noise = torch.randn(block.weight.shape, generator=generator(5))
            block.weight.data += 0.1 * noise.to(block.weight)
    two.fit(ragged_batches(seed=3))
    merged = merge(posteriors)
    P_one, P_two = (dense_precision(la) for la in posteriors)
    one = posteriors[0]
    expected = torch.linalg.solve(P_one + P_two, P_one @ one.mean + P_two @ two.mean)
    assert_close(merged.mean, expected, rtol=1e-8, atol=1e-9)
    in_head = [block for block in merged.blocks if block.kind != "lora"]
    assert in_head
    for block in in_head:
        assert block.adapter == "merged"


def test_all_else_is_left_as_it_was():
    posteriors = two_posteriors()
    model: nn.Module = posteriors[0].model.model
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    trainable = {name: p.requires_grad for name, p in model.named_parameters()}
    mode = model.training
    random_state = torch.get_rng_state()
    merge(posteriors)
    assert model.active_adapter == "default"
    assert model.training == mode
    assert torch.equal(torch.get_rng_state(), random_state)
    state = model.state_dict()
    for name, weight in before.items():
        assert torch.equal(state[name], weight), name
    for name, parameter in model.named_parameters():
        if ".merged." not in name:
            assert parameter.requires_grad == trainable[name], name
    for la in posteriors:
        la.check_model()


# --- errors ---------------------------------------------------------------------------


def of_one_posterior():
    return [fitted()]


def of_another_structure():
    return [fitted(), fitted(structure="diag")]


def of_another_rank_of_factors():
    return [fitted(), fitted(rank=2)]


def of_an_adapter_of_another_rank():
    return [fitted(), fitted(model=lora_model("bert", r=4))]


def of_another_scaling():
    return [fitted(), fitted(model=lora_model("bert", lora_alpha=8))]


def of_another_base_model():
    model = another_training()
    model.base_model.model.bert.embeddings.word_embeddings.weight.data.add_(1)
    return [fitted(), fitted(model=model)]


def of_another_head():
    model = another_training()
    for name, weight in model.named_parameters():
        if "modules_to_save" in name:
            weight.data += 0.1
    return [fitted(), fitted(model=model)]


def of_a_model_that_was_trained_on():
    one, two = two_posteriors()
    two.blocks[0].weight.data += 1
    return [one, two]


@pytest.mark.parametrize(
    ("posteriors_of", "error", "message"),
    [
        (of_one_posterior, ValueError, "pass two fitted posteriors"),
        (of_another_structure, ValueError, "Posterior 1 must have the structure"),
        (of_another_rank_of_factors, ValueError, "Posterior 1 was fitted with"),
        (of_an_adapter_of_another_rank, ValueError, "and the layers of this"),
        (of_another_scaling, ValueError, "neither is over: The weight .*scaling"),
        (of_another_base_model, ValueError, "another base model: .*word_embeddings"),
        (
            of_another_head,
            ValueError,
            "neither is over: .*classifier.* modules_to_save=True",
        ),
        (of_a_model_that_was_trained_on, RuntimeError, "have changed since the fit"),
    ],
)
def test_posteriors_that_do_not_belong_together_are_refused(
    posteriors_of, error, message
):
    posteriors = posteriors_of()
    with pytest.raises(error, match=message):
        merge(posteriors)
    assert list(posteriors[0].model.model.peft_config) == ["default"]


def test_a_posterior_without_a_fit_is_refused():
    one, two = two_posteriors()
    unfitted = two.for_model(two.model.model)
    with pytest.raises(AttributeError, match="fit"):
        merge([one, unfitted])


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0], "There are 1 weights for 2 posteriors"),
        ([1.0, 0.0], "weights must be positive"),
        ([1.0, float("nan")], "weights must be positive"),
    ],
)
def test_weights_that_do_not_fit_are_refused(weights, message):
    with pytest.raises(ValueError, match=message):
        merge(two_posteriors(), weights=weights)


def test_a_name_that_is_taken_is_refused():
    posteriors = two_posteriors()
    with pytest.raises(ValueError, match="has an adapter 'default' already"):
        merge(posteriors, adapter_name="default")
