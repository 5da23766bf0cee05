"""Curvature by the host's own passes."""

from __future__ import annotations

import pytest
import torch

from laplace_lora_ext.fitting.hosts_pass import curvature_of
from tests.support.models import lora_model, ragged_batches
from tests.support.posteriors import make


@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
def test_curvature_that_is_not_finite_names_the_layer(structure, monkeypatch):
    la, batch = make(lora_model("bert"), structure), ragged_batches()[0]
    compute = la._curv_closure
    index = 2

    def broken(*args, **kwargs):
        loss, H = compute(*args, **kwargs)
        if structure == "kron":
            H.kfacs[index][0][0, 0] = torch.inf
        else:
            H[(sum(la._sizes[:index]),) * H.ndim] = torch.nan
        return loss, H

    monkeypatch.setattr(la, "_curv_closure", broken)
    with pytest.raises(ValueError, match=rf"LoRA layer {la.blocks[index].name}: non-finite"):
        curvature_of(la, batch, batch["labels"])


def test_the_users_labels_are_not_changed():
    la, batch = make(lora_model("bert"), "diag"), ragged_batches()[0]
    labels = batch["labels"].clone()
    loss, H = curvature_of(la, batch, batch["labels"])
    assert torch.equal(batch["labels"], labels)
    with la._prepared():
        logits = la.model(batch)
    torch.testing.assert_close(
        loss, torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    )
    assert H.shape == (la.n_params,)
