"""Factors against code that is not ours: BackPACK, ASDL and curvlinops."""

from functools import partial

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
from tests.support.posteriors import normal

# Our factors have gone through an eigendecomposition, theirs have not.
assert_near = partial(assert_close, rtol=1e-6, atol=1e-9)


def linear_net() -> nn.Sequential:
    """Make the shape of a LoRA layer, down to the rank and up again."""
    torch.manual_seed(0)
    layers = nn.Linear(5, 2, bias=False), nn.Linear(2, 3, bias=False)
    return nn.Sequential(*layers).double()


def ours(X: Tensor, y: Tensor, likelihood: str = "classification"):
    """Compute a loss and low-rank Kronecker factors of a batch."""
    net = linear_net()
    # Blocks as they are found in a model, of layers that no adapter has made.
    down, up = (
        Block(
            f"{site}.weight",
            "own",
            layer,
            small_output=site == "down",
            rows=LinearRows(layer, site=site),
        )
        for site, layer in zip(("down", "up"), net, strict=True)
    )
    model = LogitsModel(net)
    recorder = Recorder(model, [down, up])
    backend = LowRankKronGGN(
        model,
        likelihood,
        recorder=recorder,
        # More columns than any factor has: nothing is left out.
        rank=10,
        # As the others count positions.
        kfac_approx="expand",
    )
    structure = LowRankKronStructure(recorder, backend.task, backend)
    loss, sums = structure.add(structure.zeros(), X, y, torch.arange(len(y)))
    return loss, structure.decompose(sums, len(y))


def data(likelihood: str = "classification") -> tuple[Tensor, Tensor]:
    """Draw eight inputs, and labels of three classes or three real targets."""
    X = normal(8, 5, seed=1)
    if likelihood == "regression":
        return X, normal(8, 3, seed=2)
    return X, torch.arange(8) % 3


@pytest.mark.parametrize(
    ("rival", "likelihood"),
    [
        (BackPackGGN, "classification"),
        (BackPackGGN, "regression"),
        (CurvlinopsGGN, "classification"),
        (CurvlinopsGGN, "regression"),
        (AsdlGGN, "classification"),
    ],
)
def test_ggn_of_a_linear_net_without_positions(rival, likelihood):
    X, y = data(likelihood)
    theirs = rival(linear_net(), likelihood)
    their_loss, their_H = theirs.kron(X, y, N=len(X))
    loss, H = ours(X, y, likelihood)
    assert_near(loss, their_loss)
    assert_near(H.to_matrix(), their_H.to_matrix())
