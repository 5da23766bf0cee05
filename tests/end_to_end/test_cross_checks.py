"""Factors against code that is not ours: BackPACK, ASDL and curvlinops."""

import pytest
import torch
from laplace.curvature.asdl import AsdlGGN
from laplace.curvature.backpack import BackPackGGN
from laplace.curvature.curvlinops import CurvlinopsGGN
from torch import Tensor, nn
from torch.testing import assert_close

from laplace_lora_ext.curvature.accumulation import LowRankKronStructure
from laplace_lora_ext.curvature.backend import LowRankKronGGN
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.weights import Block, LinearRows
from laplace_lora_ext.passes.recorder import Recorder
from laplace_lora_ext.tasks import task_of
from tests.support.posteriors import normal


def linear_net() -> nn.Sequential:
    """Make the shape of a LoRA layer, down to the rank and up again."""
    torch.manual_seed(0)
    layers = nn.Linear(5, 2, bias=False), nn.Linear(2, 3, bias=False)
    return nn.Sequential(*layers).double()


def ours(X: Tensor, y: Tensor, likelihood: str) -> tuple[Tensor, Tensor]:
    """Compute a batch's loss, and its curvature as a matrix."""
    net = linear_net()
    # Blocks as they are found in a model, of layers that no adapter has made.
    blocks = [
        Block(
            f"{site}.weight",
            "own",
            layer,
            small_output=site == "down",
            rows=LinearRows(layer, site=site),
        )
        for site, layer in zip(("down", "up"), net, strict=True)
    ]
    model = LogitsModel(net)
    recorder = Recorder(model, blocks)
    # More columns than any factor has, and positions counted as the others do.
    options = {"rank": 10, "kfac_approx": "expand"}
    backend = LowRankKronGGN(model, likelihood, recorder=recorder, **options)
    structure = LowRankKronStructure(recorder, task_of(likelihood), backend)
    loss, sums = structure.add(structure.zeros(), X, y, torch.arange(len(X)))
    return loss, structure.decompose(sums, len(X)).to_matrix()


@pytest.mark.parametrize(
    ("rival", "likelihood"),
    [
        (BackPackGGN, "classification"),
        (BackPackGGN, "regression"),
        (CurvlinopsGGN, "classification"),
        (AsdlGGN, "classification"),
    ],
)
def test_ggn_of_a_linear_net_without_positions(rival, likelihood):
    X = normal(8, 5, seed=1)
    y = normal(8, 3, seed=2) if likelihood == "regression" else torch.arange(8) % 3
    loss, H = rival(linear_net(), likelihood).kron(X, y, N=len(X))
    # Our factors have gone through an eigendecomposition, theirs have not.
    assert_close(ours(X, y, likelihood), (loss, H.to_matrix()), rtol=1e-6, atol=1e-9)
