"""With rank >= d nothing is approximated but the Kronecker form: equality with dense formulas."""

import pytest
import torch
from torch.nn.functional import cross_entropy

import laplace_lora_ext
from tests.support.dense import (
    as_padded,
    blocks,
    evidence,
    jacobian,
    logits_of,
    lora_layers,
    softmax_fisher,
    unpadded,
)
from tests.support.models import lora_model, ragged_batches
from tests.support.posteriors import KFAC_APPROX, fitted, make, sizes, stock

EXACT = {"rtol": 1e-6, "atol": 1e-9}


def dense_examples(model, kind, side, batches):
    """Each example without padding, where that is the same function.

    A BERT that is padded on the left counts positions, and pools, from the padding on.
    """
    for batch in batches:
        for row in range(len(batch["labels"])):
            if kind == "bert" and side == "left":
                mask = batch["attention_mask"][row].bool()
                yield as_padded(batch, row), mask, batch["labels"][row]
            else:
                inputs = unpadded(batch, row)
                yield inputs, torch.ones(inputs["input_ids"].shape[1]).bool(), batch["labels"][row]


@pytest.mark.parametrize("kfac_approx", KFAC_APPROX)
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("kind", ["bert", "gpt2", "gpt_neox"])
def test_covariance_and_evidence_equal_dense_formulas(kind, side, kfac_approx):
    model = lora_model(kind).eval()
    batches = ragged_batches(padding_side=side)
    n_blocks = len(lora_layers(model))
    prior_precision = torch.linspace(0.3, 2.0, n_blocks).double()
    la = fitted(
        kind,
        batches,
        model=model,
        rank=100,
        kfac_approx=kfac_approx,
        prior_precision=prior_precision,
    )

    examples = list(dense_examples(model, kind, side, batches))
    dense_blocks = blocks(model, [e[:2] for e in examples], kfac_approx)
    H = torch.block_diag(*dense_blocks)
    torch.testing.assert_close(la.H.to_matrix(), H, **EXACT)

    sizes = torch.tensor([len(block) for block in dense_blocks])
    prior = prior_precision.repeat_interleave(sizes)
    Js = torch.stack([jacobian(model, inputs) for inputs, _, _ in examples])
    logits = torch.stack([logits_of(model, inputs) for inputs, _, _ in examples])
    labels = torch.stack([label for _, _, label in examples])
    covariance = Js @ torch.linalg.inv(H + prior.diag()) @ Js.mT
    moments = [la.predictive_moments(batch) for batch in batches]
    torch.testing.assert_close(torch.cat([f_mu for f_mu, _ in moments]), logits, **EXACT)
    torch.testing.assert_close(torch.cat([f_var for _, f_var in moments]), covariance, **EXACT)
    torch.testing.assert_close(la.functional_variance(Js), covariance, **EXACT)

    log_likelihood = -cross_entropy(logits, labels, reduction="sum")
    weights = torch.cat([p.detach().flatten() for n, p in model.named_parameters() if "lora_" in n])
    expected = evidence(H, log_likelihood, weights, prior)
    torch.testing.assert_close(la.log_marginal_likelihood(), expected, **EXACT)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_expand_on_one_unpadded_batch_equals_stock_kron(kind):
    model = lora_model(kind)
    batch = ragged_batches(lengths=[6] * 5, batch_size=5, padded_to=6)
    ours = fitted(kind, batch, model=model, rank=100, kfac_approx="expand")
    theirs = stock(model, kind, "kron", batch)
    torch.testing.assert_close(
        ours.posterior_precision.to_matrix(), theirs.posterior_precision.to_matrix(), **EXACT
    )
    torch.testing.assert_close(
        ours.log_marginal_likelihood(), theirs.log_marginal_likelihood(), **EXACT
    )
    for link_approx in ("probit", "bridge", "bridge_norm"):
        torch.testing.assert_close(
            ours(batch[0], link_approx=link_approx),
            theirs(batch[0], link_approx=link_approx),
            **EXACT,
        )


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_a_tail_keeps_the_trace_of_each_block_and_its_absence_loses_it(kind):
    model, batches = lora_model(kind).eval(), ragged_batches()
    rows = [unpadded(batch, row) for batch in batches for row in range(len(batch["labels"]))]
    Js = torch.stack([jacobian(model, inputs) for inputs in rows])
    logits = torch.stack([logits_of(model, inputs) for inputs in rows]).detach()
    diagonal = torch.einsum("bcp,bcd,bdp->p", Js, softmax_fisher(logits), Js)
    with_tail, without = (fitted(kind, model=model, rank=1, tail=tail) for tail in (True, False))
    traces, kept, cut = (
        torch.stack([part.sum() for part in of_weights.split(sizes(with_tail))])
        for of_weights in (diagonal, with_tail.H.diag(), without.H.diag())
    )
    torch.testing.assert_close(kept, traces, **EXACT)
    assert (cut < traces).all()


def test_paper_settings_are_those_of_the_paper():
    la = make(lora_model("bert", hidden_size=16), backend_kwargs=laplace_lora_ext.PAPER_SETTINGS)
    la.fit(ragged_batches())
    for block in la.H.blocks:
        assert block.large.values.shape == (10,)
        assert block.large.tail == 0
    # KFAC-expand counts positions, "gradient" the energy of gradients.
    n_positions = sum(batch["attention_mask"].sum() for batch in ragged_batches())
    assert all(block.normalizer == n_positions for block in la.H_facs.blocks)
