"""A PEFT sequence classifier with one output, on pairs of texts."""

import laplace
import pytest
import torch
from torch import nn

from tests.tiny_models import lora_model, ragged_batches


def preferences():
    """Pairs `(B, 2, T)` with the index of the text that is preferred."""
    (batch,) = ragged_batches(lengths=(7, 4, 5, 7, 3, 6, 2, 7, 5, 5), batch_size=10)
    pairs = {key: batch[key].unflatten(0, (5, 2)) for key in ("input_ids", "attention_mask")}
    return {**pairs, "labels": torch.tensor([0, 1, 1, 0, 0])}


class Wrapped(nn.Module):
    """What a user writes for the host: it takes pairs apart by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = lora_model("bert", n_labels=1)

    def forward(self, batch):
        ids, mask = batch["input_ids"], batch["attention_mask"]
        flat = {"input_ids": ids.flatten(0, -2), "attention_mask": mask.flatten(0, -2)}
        return self.inner(**flat).logits.reshape(len(ids), -1)


def make(model, structure="lowrank_kron"):
    la = laplace.Laplace(model, "reward_modeling", "lora", structure, prior_precision=0.5)
    la.fit([preferences()])
    return la


@pytest.mark.parametrize("structure", ["lowrank_kron", "kron", "diag", "full"])
def test_a_classifier_is_treated_as_a_wrapper_that_takes_pairs(structure):
    pairs = preferences()
    first = {key: pairs[key][:, 0] for key in ("input_ids", "attention_mask")}
    plain, wrapped = make(lora_model("bert", n_labels=1), structure), make(Wrapped(), structure)
    torch.testing.assert_close(plain.loss, wrapped.loss)
    torch.testing.assert_close(plain.log_marginal_likelihood(), wrapped.log_marginal_likelihood())
    torch.testing.assert_close(plain(first), wrapped(first))
    torch.testing.assert_close(plain(pairs, fitting=True), wrapped(pairs, fitting=True))


def test_rewards_are_those_of_the_model():
    model = lora_model("bert", n_labels=1)
    la, pairs = make(model), preferences()
    first = {key: pairs[key][:, 0] for key in ("input_ids", "attention_mask")}
    mean, variance = la(first)
    torch.testing.assert_close(mean, model.eval()(**first).logits.detach())
    assert variance.shape == (5, 1, 1)
    assert (variance > 0).all()
    for draw in (la.functional_samples, la.predictive_samples):
        samples = draw(first, n_samples=4000, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(samples.mean(0), mean, atol=0.2, rtol=0.1)
        torch.testing.assert_close(samples.var(0), variance[..., 0], atol=0, rtol=0.1)


@pytest.mark.parametrize(
    "method", ["marglik", "linearized_marglik", "linearized_loo", "gridsearch", "val_gd"]
)
def test_the_prior_precision_is_tuned_on_preferences(method):
    la = make(lora_model("bert", n_labels=1))
    data = {} if method == "marglik" else {"val_loader": [preferences()]}
    if method.startswith("linearized"):
        data = {"train_loader": [preferences()]}
    steps = {} if method == "gridsearch" else {"n_steps": 200}
    history = la.optimize_prior_precision(method=method, **data, **steps)
    assert torch.isfinite(history.objective).all()
    assert la.prior_precision.item() != 0.5


def test_a_classifier_of_two_classes_is_no_reward_model():
    la = laplace.Laplace(lora_model("bert", n_labels=2), "reward_modeling", "lora", "lowrank_kron")
    with pytest.raises(ValueError, match="num_labels=1"):
        la.fit([preferences()])
