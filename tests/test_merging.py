"""Adapters that are merged by their posteriors."""

from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor
from torch.testing import assert_close

from laplace_lora_ext import merge, merging
from laplace_lora_ext.models.weights import flatten_weights
from tests.support.models import head_of, lora_model, ragged_batches
from tests.support.posteriors import STRUCTURES, another_training, fitted, make
from tests.support.snapshots import Snapshot
from tests.support.tasks import add_second

# So that the prior is a small part of each precision, as it should be for merging.
PRIOR = 0.3


def two_posteriors(structure: str = "lowrank_kron") -> list[Any]:
    """Fit posteriors of two trainings, each in its own model, to other texts."""
    first, *others = ragged_batches()
    one = fitted(structure=structure, batches=[first])
    two = fitted(structure=structure, batches=others, model=another_training())
    one.prior_precision = PRIOR
    # Another, so that none can pass for the other's.
    two.prior_precision = 2 * PRIOR
    return [one, two]


def dense_mode(posteriors: list[Any]) -> Tensor:
    """Compute the mode of a product by dense matrices."""
    total, weighted = 0, 0
    for la in posteriors:
        P = la.posterior_precision
        if not isinstance(P, Tensor):
            P = P.to_matrix()
        P = P.diag() if P.ndim == 1 else P
        total, weighted = total + P, weighted + P @ la.mean
    return torch.linalg.solve(total, weighted)


def merged_weights(posteriors: list[Any], **keywords: Any) -> Tensor:
    """Merge, and read the weights of the new adapter in one vector."""
    model = posteriors[0].model.model
    model.set_adapter(merge(posteriors))
    return flatten_weights(make(model, **keywords).blocks, torch.device("cpu"))


# --- the mode -------------------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
def test_merged_weights_are_the_mode_of_the_product(structure):
    posteriors = two_posteriors(structure)
    posteriors.append(fitted(structure=structure, model=another_training()))
    merged = merged_weights(posteriors)
    # The residual ends at 2e-12 of what is wanted, and the precisions' eigenvalues
    # lie within a factor of a thousand.
    assert_close(merged, dense_mode(posteriors), rtol=1e-8, atol=1e-9)


def test_single_precision_converges():
    posteriors = two_posteriors()
    for la in posteriors:
        la.model.float()
    expected = dense_mode(two_posteriors()).float()
    # As far as the precisions themselves are rounded.
    assert_close(merged_weights(posteriors), expected, rtol=1e-3, atol=1e-4)


def test_two_adapters_of_one_model_are_merged_with_their_heads():
    model = lora_model("bert")
    one = fitted(model=model, modules_to_save=True)
    add_second(model)
    other = fitted(model=model, modules_to_save=True)
    # Whatever is active.
    model.add_adapter("third", LoraConfig(r=1, target_modules=["query"]))
    model.set_adapter("third")
    merged = merged_weights([one, other], modules_to_save=True)
    assert set(model.peft_config) == {"default", "second", "third", "merged"}
    assert_close(merged, dense_mode([one, other]), rtol=1e-8, atol=1e-9)


# --- the adapter ----------------------------------------------------------------------


def test_all_else_is_left_as_it_was(monkeypatch):
    posteriors = two_posteriors()
    model = posteriors[0].model.model
    before = Snapshot(model)
    with torch.inference_mode():
        merge(posteriors)
    assert not any(weight.is_inference() for weight in model.parameters())
    assert model.active_adapter == "default"
    model.delete_adapter("merged")
    before.assert_equal(model)
    monkeypatch.setattr(merging, "_MOST_STEPS", 1)
    with pytest.raises(RuntimeError, match="have not converged after 1 step"):
        merge(posteriors)
    before.assert_equal(model)


# --- errors ---------------------------------------------------------------------------


def of_another_head():
    model = another_training()
    head_of(model).weight.data += 0.1
    return fitted(model=model)


def trained_on():
    la = fitted(model=another_training())
    la.blocks[0].weight.data += 1
    return la


def test_posteriors_that_do_not_belong_together_are_refused(la):
    for second, error, message in (
        (fitted(model=lora_model("bert", r=4)), ValueError, "Posterior 1"),
        (fitted(model=lora_model("bert", lora_alpha=8)), ValueError, "scaling"),
        (of_another_head(), ValueError, "modules_to_save=True"),
        (trained_on(), RuntimeError, "have changed"),
        (make(another_training()), AttributeError, "fit"),
    ):
        with pytest.raises(error, match=message):
            merge([la, second])
    assert list(la.model.model.peft_config) == ["default"]
