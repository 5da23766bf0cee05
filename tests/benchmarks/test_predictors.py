"""What the lab predicts from statistics, and by passes."""

import pytest
import torch
from torch.testing import assert_close

from benchmarks.methods.priors import LINKS, predictor_of
from tests.support.models import lora_model, ragged_batches, without_labels
from tests.support.posteriors import fitted

# By default, from ten on not all are compared, and "probit" reads them all.
N_CLASSES = 10


@pytest.mark.parametrize("structure", ["lowrank_kron", "diag"])
@pytest.mark.parametrize("link", LINKS)
def test_many_classes_are_predicted_by_every_link(structure, link):
    batches = ragged_batches(n_classes=N_CLASSES)
    la = fitted(
        model=lora_model("bert", n_labels=N_CLASSES),
        batches=batches,
        structure=structure,
    )
    prior = torch.tensor([3.0])
    predicts = predictor_of(la, {"texts": batches}, LINKS)
    probabilities = predicts.probabilities(prior, link)
    found = probabilities["texts"]

    la.prior_precision = prior
    la.n_contrasts = N_CLASSES - 1
    of_batches = []
    for batch in batches:
        of_batch = la(without_labels(batch), link_approx=link)
        of_batches.append(of_batch)
    expected = torch.cat(of_batches)
    # Statistics are kept in float32.
    assert_close(found.double(), expected.double(), rtol=1e-4, atol=1e-5)
