"""The pretrained encoder's own embeddings, for rivals that train none of it."""

import math
import warnings
from typing import Any

import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.fine_tuning import Pretrained
from benchmarks.training import Records
from laplace_lora_ext.predictive.moments import Moments
from laplace_lora_ext.predictive.numbers import NumberPrediction

# Of the search for the Gaussian process's kernel: its evidence has several maxima, and
# a rival should not lose by a bad one.
RESTARTS = 5


@torch.no_grad()
def frozen_features(pretrained: Pretrained, records: Records) -> Tensor:
    """Compute the pretrained encoder's embeddings `(N, D)`, of norm 1, in float64.

    They are means over tokens of the last hidden states.
    """
    model = pretrained.load().base_model.eval()
    embeddings = []
    for batch in pretrained.prediction_loader(records):
        mask = batch["attention_mask"]
        outputs = model(input_ids=batch["input_ids"], attention_mask=mask)
        is_token = mask[:, :, None]
        # Sums over tokens: at norm 1 they are what means are.
        sums = (outputs.last_hidden_state * is_token).sum(1)
        of_batch = normalize(sums, dim=1)
        embeddings.append(of_batch.double().cpu())
    return torch.cat(embeddings)


def k_centres(
    candidates: Tensor,
    known: Tensor,
    n: int,
) -> list[int]:
    """Choose, one after the other, the candidate farthest from all that is known.

    Parameters
    ----------
    candidates : torch.Tensor
        `(N, D)`
    known : torch.Tensor
        `(M, D)`
    n : int

    Returns
    -------
    list of int
        places of candidates, none of them twice

    References
    ----------
    Sener & Savarese, "Active learning for convolutional neural networks: a core-set
    approach", ICLR 2018, algorithm 1.
    """
    distances = torch.cdist(candidates, known).amin(1)
    places: list[int] = []
    for _ in range(n):
        place = int(distances.argmax())
        places.append(place)
        chosen = candidates[place]
        # Only the new one can be nearer than what was known before.
        to_chosen = torch.cdist(candidates, chosen[None])
        distances = torch.minimum(distances, to_chosen[:, 0])
        # One equal to another known text is at distance 0, and not chosen twice.
        distances[places] = -1
    return places


def gaussian_process(
    known: Tensor,
    targets: Tensor,
    features: Tensor,
    seed: int,
) -> NumberPrediction:
    """Fit a Gaussian process by the evidence, and predict.

    Parameters
    ----------
    known : torch.Tensor
        `(M, D)` features
    targets : torch.Tensor
        `(M, 1)`
    features : torch.Tensor
        `(N, D)`, of what is predicted
    seed : int
        of the search's starting points
    """
    kernel = ConstantKernel() * RBF() + WhiteKernel()
    process: Any = GaussianProcessRegressor(
        kernel, n_restarts_optimizer=RESTARTS, random_state=seed
    )
    with warnings.catch_warnings():
        # Targets that features explain wholly have next to no noise: no cause for
        # alarm.
        warnings.simplefilter("ignore", ConvergenceWarning)
        process.fit(known.numpy(), targets.numpy())
    mean, std = process.predict(features.numpy(), return_std=True)
    # The process predicts targets: its deviation has the noise in it.
    noise_variance = process.kernel_.k2.noise_level
    variance = torch.from_numpy(std.ravel() ** 2 - noise_variance)
    # Rounding may leave less than nothing beside known examples.
    variance = variance.clamp_min(0)
    outputs = torch.from_numpy(mean.ravel())
    moments = Moments(
        f_mu=outputs[:, None],
        f_var=variance[:, None, None],
    )
    return NumberPrediction.of([moments], [math.sqrt(noise_variance)])
