"""How the variance of predictions divides among the layers."""

import pytest
import torch

from tests.support.models import Detour, ragged_batches, with_lora
from tests.support.posteriors import PRIORS, fitted, make, some_precision


@pytest.mark.parametrize("structure", PRIORS)
def test_variances_of_the_blocks_add_up_to_the_trace(structure):
    la = fitted("gpt2")
    la.prior_precision = some_precision(la, structure)
    batches = ragged_batches()
    statistics = la.predictive_statistics(batches, dtype=torch.float64)
    variances = statistics.variance_by_block(la.prior_precision)
    trace = statistics.moments(la.prior_precision).f_var.diagonal(dim1=1, dim2=2).sum(-1)
    torch.testing.assert_close(variances.sum(1), trace)
    for index in range(len(la.blocks)):
        alone = torch.full((len(la.blocks),), torch.inf).double()
        alone[index] = la.prior_precision.expand(len(la.blocks))[index]
        expected = statistics.moments(alone).f_var.diagonal(dim1=1, dim2=2).sum(-1)
        torch.testing.assert_close(variances[:, index], expected)

    first = torch.tensor([".h.0." in block.name for block in la.blocks])
    share = (variances[:, first].sum() / variances.sum()).item()
    expected = {"transformer.h.0": share, "transformer.h.1": 1 - share}
    assert la.variance_by_layer(statistics) == pytest.approx(expected)
    one = la.predictive_statistics(batches[:1], dtype=torch.float64)
    assert la.variance_by_layer(batches[0]) == pytest.approx(la.variance_by_layer(one))


def test_layers_that_the_logits_do_not_depend_on_have_no_share():
    la = make(with_lora(Detour(), "used", "unused"))
    X = torch.randn(6, 5).double()
    la.fit([(X, torch.arange(6) % 3)])
    assert la.variance_by_layer(X) == {"used": pytest.approx(1), "unused": 0}
