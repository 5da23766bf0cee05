"""Adapters that are merged by their posteriors."""

from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.testing import assert_close

from laplace_lora_ext import merge, merging
from laplace_lora_ext.models.weights import flatten_weights
from tests.support.models import base_model, first_batch, lora_model, ragged_batches
from tests.support.posteriors import (
    STRUCTURES,
    another_training,
    count_forward_passes,
    fitted,
    generator,
    make,
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


def dense_mode(posteriors: list[Any]) -> Tensor:
    """Compute the mode of a product by dense matrices."""
    total = sum(dense_precision(la) for la in posteriors)
    weighted = sum(dense_precision(la) @ la.mean for la in posteriors)
    assert isinstance(total, Tensor)
    return torch.linalg.solve(total, weighted)


def blocks_of(model: nn.Module, name: str, **keywords: Any) -> list[Any]:
    """Activate an adapter, and list what a posterior would be over."""
    model.set_adapter(name)
    return make(model, **keywords).blocks


def merged_weights(posteriors: list[Any], **keywords: Any) -> Tensor:
    """Merge, and read the weights of the new adapter in one vector."""
    model = posteriors[0].model.model
    name = merge(posteriors)
    return flatten_weights(
        blocks_of(model, name, **keywords), posteriors[0].model.device
    )


# --- the mode -------------------------------------------------------------------------


def test_merged_weights_are_the_mode_of_the_product(structure):
    posteriors = two_posteriors(structure)
    posteriors.append(fitted(structure=structure, model=another_training()))
    merged = merged_weights(posteriors)
    # The residual ends at 2e-12 of what is wanted, and the precisions' eigenvalues
    # lie within a factor of a thousand.
    assert_close(merged, dense_mode(posteriors), rtol=1e-8, atol=1e-9)
    # It is far from what PEFT's linear merging would give.
    halfway = torch.stack([la.mean for la in posteriors]).mean(0)
    assert (merged - halfway).norm() > 0.01 * halfway.norm()


def test_single_precision_converges():
    posteriors = two_posteriors()
    for la in posteriors:
        la.model.float()
    # As far as the precisions themselves are rounded.
    expected = dense_mode(two_posteriors()).float()
    assert_close(merged_weights(posteriors), expected, rtol=1e-3, atol=1e-4)


def test_weights_in_half_precision_have_eight_bits():
    posteriors = two_posteriors()
    for la in posteriors:
        la.model.bfloat16()
    expected = dense_mode(two_posteriors()).float()
    assert_close(merged_weights(posteriors), expected, rtol=2**-6, atol=0.01)


def test_merging_takes_no_pass_of_the_model():
    posteriors = two_posteriors()
    calls = [count_forward_passes(la) for la in posteriors]
    merge(posteriors)
    assert calls == [[], []]


def test_what_has_not_converged_is_refused(monkeypatch):
    monkeypatch.setattr(merging, "_MOST_STEPS", 1)
    posteriors = two_posteriors()
    with pytest.raises(RuntimeError, match="have not converged after 1 step"):
        merge(posteriors)
    assert list(posteriors[0].model.model.peft_config) == ["default"]


# --- the adapter ----------------------------------------------------------------------


def test_the_adapter_is_an_ordinary_one(tmp_path):
    posteriors = two_posteriors()
    model = posteriors[0].model.model
    assert merge(posteriors, adapter_name="both") == "both"
    model.set_adapter("both")
    model.eval()
    batch = first_batch()
    del batch["labels"]
    logits = model(**batch).logits
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
    merge([one, two])
    assert model.active_adapter == "default"
    assert set(model.peft_config) == {"default", "second", "merged"}
    merged = flatten_weights(blocks_of(model, "merged"), torch.device("cpu"))
    assert_close(merged, dense_mode([one, two]), rtol=1e-8, atol=1e-9)


def test_a_head_is_merged_with_the_rest():
    posteriors = two_posteriors(modules_to_save=True)
    # Trained too, and so no longer the same.
    two = posteriors[1]
    for block in two.blocks:
        if block.kind != "lora":
            noise = torch.randn(block.weight.shape, generator=generator(5))
            block.weight.data += 0.1 * noise.to(block.weight)
    two.fit(ragged_batches(seed=3))
    merged = merged_weights(posteriors, modules_to_save=True)
    assert_close(merged, dense_mode(posteriors), rtol=1e-8, atol=1e-9)


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
        (of_an_adapter_of_another_rank, ValueError, "Posterior 1 .*shape"),
        (of_another_scaling, ValueError, "scaling"),
        (of_another_base_model, ValueError, "word_embeddings"),
        (of_another_head, ValueError, "classifier.* modules_to_save=True"),
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


def test_a_name_that_is_taken_is_refused():
    posteriors = two_posteriors()
    with pytest.raises(ValueError, match="has an adapter 'default' already"):
        merge(posteriors, adapter_name="default")
