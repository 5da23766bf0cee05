"""What priors predict: from statistics, by passes, and by TFB's rule."""

from itertools import combinations, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from benchmarks.methods.priors import GRID, LINKS, by_tfb_rule, data_of, predicted
from laplace_lora_ext import Moments
from tests.support.models import generator, lora_model, ragged_batches, without_labels
from tests.support.posteriors import fitted

# By default, from ten on not all are compared, and "probit" reads them all.
N_CLASSES = 10


@pytest.mark.parametrize("structure", ["lowrank_kron", "diag"])
def test_several_priors_and_links_predict_many_classes_as_each_does_alone(structure):
    batches = ragged_batches(n_classes=N_CLASSES)
    la = fitted(
        model=lora_model("bert", n_labels=N_CLASSES),
        batches=batches,
        structure=structure,
    )
    tried = [torch.tensor([value]) for value in (1e-4, 1e-3)]
    data = data_of(la, {"texts": batches}, LINKS)
    several = predicted(la, data["texts"], tried, LINKS)
    la.n_contrasts = N_CLASSES - 1
    for (prior_precision, link), found in zip(
        product(tried, LINKS), several, strict=True
    ):
        la.prior_precision = prior_precision
        of_batches = [la(without_labels(each), link_approx=link) for each in batches]
        # Statistics are kept in float32.
        expected = torch.cat(of_batches).detach().double()
        assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
    # Otherwise any of them would do.
    for one, other in combinations(several, 2):
        assert not torch.allclose(one, other, rtol=1e-4, atol=1e-5)


def test_tfbs_rule_takes_the_smallest_prior_precision_that_changes_few_classes():
    # The variance is that of the prior alone.
    f_mu = torch.randn(200, 3, generator=generator(1))

    def moments(prior_precision: Tensor) -> Moments:
        variance = torch.eye(3) / prior_precision
        return Moments(f_mu, variance.expand(200, 3, 3))

    statistics: Any = SimpleNamespace(moments=moments)
    chosen = by_tfb_rule(None, statistics)
    # Texts whose class ten draws of the logits change.
    noise = torch.randn((10, 200, 3), generator=generator(0))
    n_changed = []
    for prior_precision in GRID[chosen >= GRID]:
        p = (f_mu + noise / prior_precision.sqrt()).softmax(-1).mean(0)
        n_changed.append(int((p.argmax(-1) != f_mu.argmax(-1)).sum()))
    *before, last = n_changed
    # 1 % of them.
    assert last <= 2 < min(before)
