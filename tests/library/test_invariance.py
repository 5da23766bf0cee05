"""What must not matter: batch size, padding, the order of modules, one run or two."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from tests.support.models import laplace_keywords, lora_model, ragged_batches
from tests.support.posteriors import KFAC_APPROX, fitted, make

whole = partial(fitted, rank=100)  # as many columns as there are
CLOSE = {"rtol": 1e-8, "atol": 1e-10}


def assert_same_posterior(first, second):
    torch.testing.assert_close(first.H.to_matrix(), second.H.to_matrix(), **CLOSE)
    torch.testing.assert_close(
        first.log_marginal_likelihood(), second.log_marginal_likelihood(), **CLOSE
    )
    assert first.n_data == second.n_data


@pytest.mark.parametrize("kfac_approx", KFAC_APPROX)
@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("gpt2", {"batch_size": 1}),
        ("gpt2", {"batch_size": 8}),
        ("gpt2", {"padding_side": "left", "batch_size": 2}),
        ("gpt2", {"padded_to": 20}),
        ("gpt2", {"padding_side": "left", "padded_to": 20}),
        ("gpt_neox", {"padding_side": "left", "padded_to": 12}),
        ("gpt_neox", {"padded_to": 9}),
        ("bert", {"padded_to": 20}),
    ],
)
def test_batch_size_padding_side_and_amount(kind, way, kfac_approx):
    reference = whole(kind, ragged_batches(), kfac_approx=kfac_approx)
    batches = ragged_batches(**way)
    other = whole(kind, batches, kfac_approx=kfac_approx)
    assert_same_posterior(reference, other)
    found, expected = (
        torch.cat([la(batch) for batch in data])
        for la, data in ((other, batches), (reference, ragged_batches()))
    )
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("kfac_approx", KFAC_APPROX)
def test_two_runs_are_one_and_refitting_starts_afresh(kfac_approx):
    batches = ragged_batches()
    once = whole("bert", batches, kfac_approx=kfac_approx)
    twice = whole("bert", batches[:1], kfac_approx=kfac_approx)
    twice.fit(batches[1:], override=False)
    assert_same_posterior(once, twice)
    twice.fit(batches)
    assert_same_posterior(once, twice)


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
        la = whole("bert", [(X.double(), y)], model=model.double(), rank=2)
        la.optimize_prior_precision(prior_structure="layerwise", n_steps=10)
        precisions = dict(zip([b.name for b in la.blocks], la.prior_precision, strict=True))
        results.append((la.log_marginal_likelihood(), precisions, la(X.double())))
    (first, first_precisions, first_probs), (second, second_precisions, second_probs) = results
    torch.testing.assert_close(first, second, **CLOSE)
    torch.testing.assert_close(first_precisions, second_precisions, **CLOSE)
    torch.testing.assert_close(first_probs, second_probs, **CLOSE)


@pytest.mark.parametrize("kind", ["bert", "gpt_neox"])
@pytest.mark.parametrize("structure", ["diag", "full"])
def test_batches_of_one_give_the_posterior_of_larger_ones(kind, structure):
    evidences, predictions = [], []
    for batch_size in (1, 3):
        la = make(lora_model(kind), structure, **laplace_keywords(kind))
        la.fit(ragged_batches(batch_size=batch_size))
        evidences.append(la.log_marginal_likelihood())
        batches = ragged_batches(batch_size=batch_size)
        predictions.append(torch.cat([la(batch) for batch in batches]))
    torch.testing.assert_close(*evidences, rtol=1e-7, atol=0)
    torch.testing.assert_close(*predictions, rtol=1e-7, atol=1e-9)
