"""What inputs and gradients add to the factors."""

import torch

from laplace_lora_ext.curvature.factors import LowRankFactor
from laplace_lora_ext.models.lora_layers import find_blocks
from laplace_lora_ext.passes import graph
from tests.support.models import N_CLASSES, lora_model, ragged_batches
from tests.support.posteriors import make


def test_an_input_that_projections_share_is_summed_once(monkeypatch):
    model = lora_model("bert", torch.float32)
    batches = ragged_batches()
    monkeypatch.setattr(graph, "_ROWS", 1)
    counts = []
    add_energy = LowRankFactor.add_energy
    monkeypatch.setattr(
        LowRankFactor,
        "add_energy",
        lambda self, rows: counts.append(len(rows)) or add_energy(self, rows),
    )
    la = make(model, backend_kwargs={"kfac_approx": "expand"})
    la.fit(batches)
    n_blocks = len(find_blocks(model))
    of_gradients = n_blocks // 2 * (N_CLASSES - 1)
    assert len(counts) == len(batches) * (n_blocks // 4 + of_gradients)
    query, value = la.H_facs.blocks[0], la.H_facs.blocks[2]
    torch.testing.assert_close(query.input_factor.to_matrix(), value.input_factor.to_matrix())
    other = la.H_facs.blocks[4]
    assert not torch.allclose(query.input_factor.to_matrix(), other.input_factor.to_matrix())
