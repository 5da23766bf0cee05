"""With rank >= d nothing is approximated but the Kronecker form: equality with dense formulas."""

import laplace
import pytest
import torch
from torch.nn.functional import cross_entropy

import laplace_lora_ext
from laplace_lora_ext.models.logits_model import LogitsModel
from tests import dense_oracle
from tests.tiny_models import laplace_keywords, lora_model, ragged_batches

EXACT = {"rtol": 1e-6, "atol": 1e-9}


def lora(model, kind, structure, **keywords):
    return laplace.Laplace(
        model,
        "classification",
        subset_of_weights="lora",
        hessian_structure=structure,
        **laplace_keywords(kind),
        **keywords,
    )


def stock(model, kind, structure, **keywords):
    """The host's own class over the same parameters, which alone require grad."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    wrapper = LogitsModel(model, **laplace_keywords(kind))
    return laplace.Laplace(wrapper, "classification", "all", structure, **keywords)


def dense_examples(model, kind, side, batches):
    """Each example without padding, where that is the same function.

    A BERT that is padded on the left counts positions, and pools, from the padding on.
    """
    for batch in batches:
        for row in range(len(batch["labels"])):
            if kind == "bert" and side == "left":
                mask = batch["attention_mask"][row].bool()
                yield dense_oracle.as_padded(batch, row), mask, batch["labels"][row]
            else:
                inputs = dense_oracle.unpadded(batch, row)
                yield inputs, torch.ones(inputs["input_ids"].shape[1]).bool(), batch["labels"][row]


@pytest.mark.parametrize("kfac_approx", ["gradient", "expand", "reduce"])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("kind", ["bert", "gpt2", "gpt_neox"])
def test_covariance_and_evidence_equal_dense_formulas(kind, side, kfac_approx):
    model = lora_model(kind).eval()
    batches = ragged_batches(padding_side=side)
    n_blocks = len(dense_oracle.lora_layers(model))
    prior_precision = torch.linspace(0.3, 2.0, n_blocks).double()
    la = lora(
        model,
        kind,
        "lowrank_kron",
        prior_precision=prior_precision,
        backend_kwargs={"rank": 100, "kfac_approx": kfac_approx},
    )
    la.fit(batches)

    examples = list(dense_examples(model, kind, side, batches))
    dense_blocks = dense_oracle.blocks(model, [e[:2] for e in examples], kfac_approx)
    H = torch.block_diag(*dense_blocks)
    torch.testing.assert_close(la.H.to_matrix(), H, **EXACT)

    sizes = torch.tensor([len(block) for block in dense_blocks])
    prior = prior_precision.repeat_interleave(sizes)
    Js = torch.stack([dense_oracle.jacobian(model, inputs) for inputs, _, _ in examples])
    logits = torch.stack([dense_oracle.logits_of(model, inputs) for inputs, _, _ in examples])
    labels = torch.stack([label for _, _, label in examples])
    covariance = Js @ torch.linalg.inv(H + prior.diag()) @ Js.mT
    moments = [la._glm_predictive_distribution(batch) for batch in batches]
    torch.testing.assert_close(torch.cat([f_mu for f_mu, _ in moments]), logits, **EXACT)
    torch.testing.assert_close(torch.cat([f_var for _, f_var in moments]), covariance, **EXACT)
    torch.testing.assert_close(la.functional_variance(Js), covariance, **EXACT)

    log_likelihood = -cross_entropy(logits, labels, reduction="sum")
    weights = torch.cat([p.detach().flatten() for n, p in model.named_parameters() if "lora_" in n])
    expected = dense_oracle.evidence(H, log_likelihood, weights, prior)
    torch.testing.assert_close(la.log_marginal_likelihood(), expected, **EXACT)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_expand_on_one_unpadded_batch_equals_stock_kron(kind):
    model = lora_model(kind)
    batch = ragged_batches(lengths=[6] * 5, batch_size=5, padded_to=6)
    ours = lora(model, kind, "lowrank_kron", backend_kwargs={"rank": 100, "kfac_approx": "expand"})
    ours.fit(batch)
    theirs = stock(model, kind, "kron")
    theirs.fit(_Loader(batch))
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


@pytest.mark.parametrize("structure", ["diag", "kron", "full"])
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_host_structures_equal_the_stock_classes(kind, structure):
    model = lora_model(kind, torch.float32 if structure == "full" else torch.float64)
    batches = ragged_batches()
    ours = lora(model, kind, structure)
    ours.fit(batches)
    theirs = stock(model, kind, structure)
    theirs.fit(_Loader(batches))
    # The host's full curvature is computed in float32, whatever the model's dtype.
    close = {"rtol": 1e-4, "atol": 1e-4} if structure == "full" else EXACT
    for mine, stocks in [
        (ours.log_marginal_likelihood(), theirs.log_marginal_likelihood()),
        (ours(batches[0]), theirs(batches[0])),
        (ours.mean, theirs.mean),
        (
            ours.square_norm(ours.mean + 1).double(),
            theirs.square_norm(theirs.mean + 1).double(),
        ),
    ]:
        torch.testing.assert_close(mine, stocks.to(mine), **close)


class _Loader:
    """What the host needs of a DataLoader."""

    def __init__(self, batches):
        self.batches = batches
        self.dataset = range(sum(len(batch["labels"]) for batch in batches))

    def __iter__(self):
        return iter(self.batches)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_predictive_equals_that_of_the_hosts_jacobians(kind):
    model = lora_model(kind)
    batches = ragged_batches()
    la = lora(model, kind, "lowrank_kron")
    la.fit(batches)
    with la._prepared():
        Js, f = laplace.curvature.CurvatureInterface(la.model, "classification").jacobians(
            batches[0]
        )
    f_mu, f_var = la._glm_predictive_distribution(batches[0])
    torch.testing.assert_close(f_mu, f, **EXACT)
    torch.testing.assert_close(f_var, la.functional_variance(Js), **EXACT)
    torch.testing.assert_close(la.backend.jacobians(batches[0])[0], Js, **EXACT)


def test_the_exact_fisher_and_the_empirical_fisher_of_one_example():
    """At T = 1 and one datum the Kronecker form of "gradient" is exact for a rank-one Fisher."""
    model = lora_model("bert", n_labels=2)
    batch = ragged_batches(lengths=[1], batch_size=1, padded_to=1, n_classes=2)[0]
    inputs = dense_oracle.unpadded(batch, 0)
    J = dense_oracle.jacobian(model.eval(), inputs)
    logits = dense_oracle.logits_of(model, inputs).detach()
    gradient = (logits.softmax(-1) - torch.eye(2).double()[batch["labels"][0]]) @ J
    fisher = J.T @ dense_oracle.softmax_fisher(logits) @ J
    sizes = [layer.weight.numel() for _, layer in dense_oracle.lora_layers(model)]
    for backend, dense in [
        (laplace_lora_ext.LowRankKronGGN, fisher),
        (laplace_lora_ext.LowRankKronEF, torch.outer(gradient, gradient)),
    ]:
        la = lora(model, "bert", "lowrank_kron", backend=backend, backend_kwargs={"rank": 100})
        la.fit([batch])
        # A rank-one block vec(G) vec(G)ᵀ of a rank-one G is a Kronecker product: lora_A, lora_B
        # at a single position.
        start = 0
        H = la.H.to_matrix()
        for size in sizes:
            here = slice(start, start + size)
            torch.testing.assert_close(H[here, here], dense[here, here], **EXACT)
            start += size
