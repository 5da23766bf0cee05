"""Predictions of networks with drawn LoRA weights."""

from __future__ import annotations

import torch

from tests.support.models import ragged_batches
from tests.support.posteriors import fitted, generator, plain_regression


def test_nn_predictions_are_those_of_models_with_sampled_weights():
    la, batches = fitted(), ragged_batches()
    names = [n for n, _ in la.model.model.named_parameters() if "lora_" in n]
    draws = generator()
    expected = []
    for _ in range(3):
        sample = la.sample(1, draws)[0]
        parts = sample.split([b.weight.numel() for b in la.blocks])
        weights = {
            name: part.reshape(block.weight.shape)
            for name, part, block in zip(names, parts, la.blocks, strict=True)
        }
        inputs = {k: v for k, v in batches[0].items() if k != "labels"}
        la.model.model.eval()
        output = torch.func.functional_call(la.model.model, weights, (), inputs)
        expected.append(output.logits)
    samples = la.functional_samples(batches[0], "nn", n_samples=3, generator=generator())
    torch.testing.assert_close(samples, torch.stack(expected))
    probs = la(batches[0], "nn", link_approx="mc", n_samples=3, generator=generator())
    torch.testing.assert_close(probs, torch.stack(expected).softmax(-1).mean(0))


def test_regression_in_the_weights():
    la, X = plain_regression()
    mean, variance = la(X, "nn", link_approx="mc", n_samples=4, generator=generator())
    samples = la.functional_samples(X, "nn", n_samples=4, generator=generator())
    torch.testing.assert_close(mean, samples.mean(0))
    torch.testing.assert_close(variance, samples.var(0))
