"""What must not matter: batch size, padding, the order of modules, one run or two."""

import laplace
import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from tests.tiny_models import laplace_keywords, lora_model, ragged_batches

CLOSE = {"rtol": 1e-8, "atol": 1e-10}
SETTINGS = ["gradient", "expand", "reduce"]


def fitted(kind, batches, model=None, rank=100, **backend_kwargs):
    la = laplace.Laplace(
        lora_model(kind) if model is None else model,
        "classification",
        subset_of_weights="lora",
        hessian_structure="lowrank_kron",
        backend_kwargs={"rank": rank, **backend_kwargs},
        **laplace_keywords(kind),
    )
    la.fit(batches)
    return la


def assert_same_posterior(first, second):
    torch.testing.assert_close(first.H.to_matrix(), second.H.to_matrix(), **CLOSE)
    torch.testing.assert_close(
        first.log_marginal_likelihood(), second.log_marginal_likelihood(), **CLOSE
    )
    assert first.n_data == second.n_data


@pytest.mark.parametrize("kfac_approx", SETTINGS)
@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_batch_size_and_a_partial_last_batch(kfac_approx, batch_size):
    reference = fitted("gpt2", ragged_batches(batch_size=3), kfac_approx=kfac_approx)
    other = fitted("gpt2", ragged_batches(batch_size=batch_size), kfac_approx=kfac_approx)
    assert_same_posterior(reference, other)


@pytest.mark.parametrize("kfac_approx", SETTINGS)
@pytest.mark.parametrize(
    ("kind", "side", "padded_to"),
    [
        ("gpt2", "left", 7),
        ("gpt2", "right", 20),
        ("gpt2", "left", 20),
        ("gpt_neox", "left", 12),
        ("gpt_neox", "right", 9),
        ("bert", "right", 20),
    ],
)
def test_padding_side_and_amount(kind, side, padded_to, kfac_approx):
    reference = fitted(kind, ragged_batches(), kfac_approx=kfac_approx)
    batches = ragged_batches(padding_side=side, padded_to=padded_to)
    other = fitted(kind, batches, kfac_approx=kfac_approx)
    assert_same_posterior(reference, other)
    for mine, others in zip(ragged_batches(), batches, strict=True):
        torch.testing.assert_close(reference(mine), other(others), **CLOSE)


@pytest.mark.parametrize("kfac_approx", SETTINGS)
def test_two_runs_are_one(kfac_approx):
    batches = ragged_batches()
    once = fitted("bert", batches, kfac_approx=kfac_approx)
    twice = fitted("bert", batches[:1], kfac_approx=kfac_approx)
    twice.fit(batches[1:], override=False)
    assert_same_posterior(once, twice)


@pytest.mark.parametrize("structure", ["diag", "full", "kron"])
def test_two_runs_are_one_with_the_hosts_structures(structure):
    def build():
        return laplace.Laplace(lora_model("bert"), "classification", "lora", structure)

    batches = ragged_batches(lengths=[5] * 6, padded_to=5)
    once, twice = build(), build()
    once.fit(batches)
    twice.fit(batches[:1])
    twice.fit(batches[1:], override=False)
    for la in (once, twice):
        assert la.n_data == 6
    torch.testing.assert_close(
        once.log_marginal_likelihood(), twice.log_marginal_likelihood(), **CLOSE
    )
    torch.testing.assert_close(once(batches[0]), twice(batches[0]), **CLOSE)


def test_refitting_starts_afresh():
    la = fitted("bert", ragged_batches())
    la.fit(ragged_batches())
    assert_same_posterior(la, fitted("bert", ragged_batches()))


class Parallel(nn.Module):
    """Two LoRA layers side by side, defined in either order."""

    def __init__(self, names: tuple[str, str]) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(5, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.left(x).tanh() + self.right(x).sigmoid()).sum(1)


def test_order_of_modules():
    results = []
    for names in (("left", "right"), ("right", "left")):
        model = Parallel(names)
        inject_adapter_in_model(LoraConfig(target_modules=["left", "right"], r=2), model)
        with torch.no_grad():
            for name, parameter in sorted(model.named_parameters()):
                generator = torch.Generator().manual_seed(len(name) + ord(name[0]))
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        model.requires_grad_(False)
        generator = torch.Generator().manual_seed(0)
        X, y = torch.randn(6, 4, 5, generator=generator), torch.arange(6) % 3
        la = fitted("bert", [(X.double(), y)], model=model.double(), rank=2)
        la.optimize_prior_precision(prior_structure="layerwise", n_steps=10)
        precisions = dict(zip([b.name for b in la.blocks], la.prior_precision, strict=True))
        results.append((la.log_marginal_likelihood(), precisions, la(X.double())))
    (first, first_precisions, first_probs), (second, second_precisions, second_probs) = results
    torch.testing.assert_close(first, second, **CLOSE)
    torch.testing.assert_close(first_precisions, second_precisions, **CLOSE)
    torch.testing.assert_close(first_probs, second_probs, **CLOSE)


def test_dropout_plays_no_part():
    model = lora_model("bert", lora_dropout=0.5).train()
    assert_same_posterior(
        fitted("bert", ragged_batches(), model=model), fitted("bert", ragged_batches())
    )


def test_monte_carlo_fisher_follows_the_seed_and_approaches_the_exact_one():
    batches = ragged_batches()

    def sampled(num_samples):
        torch.manual_seed(0)
        return fitted("bert", batches, stochastic=True, num_samples=num_samples).H.to_matrix()

    exact = fitted("bert", batches).H.to_matrix()
    assert torch.equal(sampled(2), sampled(2))
    errors = [(sampled(n) - exact).norm() / exact.norm() for n in (1, 64)]
    assert errors[1] < errors[0] / 3  # 1 / √64 of it in the mean
