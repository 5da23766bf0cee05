"""Statistics of the paper against stock Kron."""

from functools import partial

from torch.testing import assert_close

import laplace_lora_ext
from tests.support.dense import full_rank
from tests.support.matrices import PARTS
from tests.support.models import lora_model, ragged_batches
from tests.support.posteriors import fitted, make, stock

# Many entries of a Kronecker product are near 0, sums of larger ones that cancel.
assert_exact = partial(assert_close, rtol=1e-9, atol=1e-9)
# At this rank only the Kronecker form approximates.
EXPAND = full_rank(kfac_approx="expand")


def test_padding_and_batches_change_nothing():
    model = lora_model("gpt2")
    expected = fitted("gpt2", model=model, **EXPAND)
    padded = ragged_batches(batch_size=4, padding_side="left", padded_to=20)
    other = fitted("gpt2", padded, model=model, **EXPAND)
    assert_exact(other.H.to_matrix(), expected.H.to_matrix())


def test_expand_on_one_unpadded_batch_equals_stock_kron():
    model = lora_model("bert")
    # In one batch of texts of one length there is no padding that the host would count,
    # nor a mean over batches of other lengths.
    batches = ragged_batches(lengths=[6] * 5, batch_size=5, padded_to=6)
    ours = fitted(batches=batches, model=model, modules_to_save=True, **EXPAND)
    theirs = stock(model, batches, PARTS)
    found = ours.posterior_precision.to_matrix()
    # Inputs without padding are views of what a pass has a graph of.
    assert not found.requires_grad
    assert_exact(found, theirs.posterior_precision.to_matrix())
    assert_exact(ours.log_marginal_likelihood(), theirs.log_marginal_likelihood())
    (batch,) = batches
    # The host's links that need no draws.
    for link_approx in ("probit", "bridge", "bridge_norm"):
        found = ours(batch, link_approx=link_approx)
        assert_exact(found, theirs(batch, link_approx=link_approx))


def test_paper_settings_are_those_of_the_paper():
    # Wider than the ten columns that the paper keeps.
    model = lora_model("bert", hidden_size=16)
    batches = ragged_batches()
    la = make(model, backend_kwargs=laplace_lora_ext.PAPER_SETTINGS)
    la.fit(batches)
    for block in la.H.blocks:
        assert block.large.shape == (10,)
        assert block.tail == 0
    # KFAC-expand counts positions, "gradient" the energy of gradients.
    n_positions = sum(batch["attention_mask"].sum() for batch in batches)
    for block in la.H_facs:
        assert block.normalizer == n_positions
