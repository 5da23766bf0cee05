"""Factors against code that is not ours: BackPACK, ASDL and curvlinops."""

from functools import partial

import pytest
import torch
from laplace.curvature.asdl import AsdlGGN
from laplace.curvature.backpack import BackPackEF, BackPackGGN
from laplace.curvature.curvlinops import CurvlinopsEF, CurvlinopsGGN
from torch import Tensor, nn
from torch.testing import assert_close

from laplace_lora_ext.curvature.backend import LowRankKronEF, LowRankKronGGN
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.weights import Block, LinearRows
from laplace_lora_ext.passes.recorder import Recorder
from tests.support.posteriors import normal

# Our factors have gone through an eigendecomposition, theirs have not.
assert_near = partial(assert_close, rtol=1e-6, atol=1e-9)


class LinearNet(nn.Module):
    """The shape of a LoRA layer, down to the rank and up again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.down = nn.Linear(5, 2, bias=False)
        self.up = nn.Linear(2, 3, bias=False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x))


def flat_net() -> nn.Sequential:
    """Make the same without positions, as a sequence of layers for BackPACK."""
    net = LinearNet()
    return nn.Sequential(net.down, net.up)


def ours(
    backend: type,
    X: Tensor,
    y: Tensor,
    likelihood: str = "classification",
):
    """Compute a loss and low-rank Kronecker factors of a batch."""
    net = LinearNet()
    # Blocks as they are found in a model, of layers that no adapter has made.
    down = Block(
        "down.weight",
        "own",
        net.down,
        small_output=True,
        rows=LinearRows(net.down, site="down"),
    )
    up = Block(
        "up.weight",
        "own",
        net.up,
        small_output=False,
        rows=LinearRows(net.up, site="up"),
    )
    recorder = Recorder(LogitsModel(net), [down, up])
    curvature = backend(
        net,
        likelihood,
        recorder=recorder,
        # More columns than any factor has: nothing is left out.
        rank=10,
        # As the others count positions.
        kfac_approx="expand",
    )
    return curvature.kron(X, y, N=len(X))


def data(likelihood: str = "classification"):
    """Draw eight inputs, and labels of three classes or three real targets."""
    n = 8
    X = normal(n, 5, seed=1)
    if likelihood == "regression":
        return X, normal(n, 3, seed=2)
    return X, torch.arange(n) % 3


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
    theirs = rival(flat_net(), likelihood)
    their_loss, their_H = theirs.kron(X, y, N=len(X))
    loss, H = ours(LowRankKronGGN, X, y, likelihood)
    assert_near(loss, their_loss)
    found = H.decompose().to_matrix()
    assert_near(found, their_H.to_matrix())


def test_empirical_fisher_of_a_linear_net():
    X, y = data()
    theirs = CurvlinopsEF(flat_net(), "classification")
    _, their_H = theirs.kron(X, y, N=len(X))
    _, H = ours(LowRankKronEF, X, y)
    found = H.decompose().to_matrix()
    assert_near(found, their_H.to_matrix())


def test_empirical_fisher_of_one_example():
    """Its Kronecker form is exact, so that its diagonal is BackPACK's."""
    X, y = data()
    x = X[:1]
    label = y[:1]
    theirs = BackPackEF(flat_net(), "classification")
    _, diagonal = theirs.diag(x, label)
    _, H = ours(LowRankKronEF, x, label)
    found = H.decompose().diag()
    assert_near(found, diagonal)
