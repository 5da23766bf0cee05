"""A noise for each output of a regression: as if outputs and targets had one unit."""

import copy
import math
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer

import laplace_lora_ext
from laplace_lora_ext import (
    Agreement,
    GridSearch,
    Marglik,
    ValGD,
    train_in_stages,
)
from laplace_lora_ext.curvature.backend import LowRankKronEF
from laplace_lora_ext.metrics import compare
from tests.support.models import (
    Batch,
    base_model,
    plain_model,
)
from tests.support.posteriors import (
    generator,
    make,
    normal,
)
from tests.support.ranks import Texts
from tests.support.trainers import trainer_of

AS_LIST = [10, 0.05]
SCALES = torch.tensor(AS_LIST, dtype=torch.float64)
N_TRAIN = 12
N_HELD_OUT = 20
Data = tuple[Tensor, Tensor]


def regressor() -> nn.Module:
    model = plain_model(2)
    return model.requires_grad_(False)


class InUnits(nn.Module):
    """A model whose outputs are divided by their scales, so that they have one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.model = regressor()

    def forward(self, x):
        return self.model(x) / SCALES


def data_to_fit() -> Data:
    """Draw inputs and targets, each of which is of its own scale."""
    X = normal(N_TRAIN, 5)
    numbers = normal(N_TRAIN, 2, seed=1)
    return X, SCALES * numbers


def held_out_data(la) -> Data:
    """Draw inputs, and targets around their predictions."""
    X = normal(N_HELD_OUT, 5, seed=5)
    moments = la.predictive_moments(X)
    noise = normal(N_HELD_OUT, 2, seed=6)
    return X, moments.f_mu + SCALES * noise


def loader(
    X: Tensor,
    y: Tensor,
) -> DataLoader:
    data = TensorDataset(X, y)
    return DataLoader(data, batch_size=5)


def with_scales(
    structure: str = "lowrank_kron",
    output_scales: Any = SCALES,
    **options: Any,
):
    """Fit a posterior of targets in their own units."""
    la = make(
        regressor(),
        structure,
        "regression",
        output_scales=output_scales,
        **options,
    )
    X, y = data_to_fit()
    la.fit(loader(X, y))
    return la


def in_one_unit(
    structure: str = "lowrank_kron",
    **options: Any,
):
    """Fit the posterior of the same model and targets, in one unit."""
    la = make(InUnits(), structure, "regression", **options)
    X, y = data_to_fit()
    la.fit(loader(X, y / SCALES))
    return la


def both(
    structure: str = "lowrank_kron",
    **options: Any,
):
    """Fit with scales, and in one unit to the same data."""
    # Another noise than 1, which is what is multiplied by scales.
    options = {"sigma_noise": 0.5} | options
    scaled = with_scales(structure, **options)
    in_units = in_one_unit(structure, **options)
    return scaled, in_units


def assert_same_posterior(scaled, in_units) -> None:
    """Compare predictions, evidence and densities, which differ by the unit alone."""
    X, y = held_out_data(scaled)
    f_mu, f_var = scaled(X)
    expected_mu, expected_var = in_units(X)
    assert_close(f_mu / SCALES, expected_mu)
    # Covariances have the units of both outputs.
    of_pairs = torch.outer(SCALES, SCALES)
    assert_close(f_var / of_pairs, expected_var)

    # The density of a number in another unit is another by the unit's factor.
    log_unit = SCALES.log().sum()
    of_data = N_TRAIN * log_unit
    found = scaled.log_marginal_likelihood() + of_data
    expected = in_units.log_marginal_likelihood()
    assert_close(found, expected)

    prediction = scaled.predict(X)
    of_units = in_units.predict(X)
    deviations = prediction.total_std / SCALES
    assert_close(deviations, of_units.total_std)
    found = prediction.log_density(y) + log_unit
    expected = of_units.log_density(y / SCALES)
    assert_close(found, expected)


DEFAULT: dict[str, Any] = {}
PAPER = {"backend_kwargs": laplace_lora_ext.PAPER_SETTINGS}
DRAWN = {"backend_kwargs": {"stochastic": True}}
EMPIRICAL = {"backend": LowRankKronEF}


@pytest.mark.parametrize(
    ("structure", "options"),
    [
        pytest.param("lowrank_kron", DEFAULT, id="lowrank_kron"),
        pytest.param("lowrank_kron", PAPER, id="paper"),
        pytest.param("lowrank_kron", EMPIRICAL, id="empirical"),
        pytest.param("lowrank_kron", DRAWN, id="drawn"),
        pytest.param("diag", DEFAULT, id="diag"),
        pytest.param("full", DEFAULT, id="full"),
        pytest.param("full", EMPIRICAL, id="full, empirical"),
    ],
)
def test_scales_are_a_change_of_unit(structure, options):
    scaled, in_units = both(structure, **options)
    assert_close(scaled.loss, in_units.loss)
    assert_same_posterior(scaled, in_units)
    assert_close(scaled.output_noise, 0.5 * SCALES)


def search_by(
    method: str,
    inputs: Tensor,
    y: Tensor,
) -> Callable[[Any], Any]:
    """Make a method that chooses a prior and the noise."""
    held_out = [(inputs, y)]
    if method == "agreement":
        X, _ = data_to_fit()
        return Agreement(train_loader=[X])
    if method == "gridsearch":
        return GridSearch(val_loader=held_out, grid_size=7)
    # Few steps do: what is compared is the way, and not where it ends.
    n_steps = 30
    if method == "marglik":
        return Marglik(optimize_sigma_noise=True, n_steps=n_steps)
    return ValGD(
        val_loader=held_out,
        n_steps=n_steps,
        generator=generator(),
    )


@pytest.mark.parametrize(
    ("structure", "method"),
    [
        # Gradients are those of statistics, which this structure alone has.
        ("lowrank_kron", "val_gd"),
        *product(
            ["lowrank_kron", "diag", "full"],
            ["gridsearch", "agreement", "marglik"],
        ),
    ],
)
def test_searches_prefer_no_unit(structure, method):
    scaled, in_units = both(structure)
    inputs, y = held_out_data(scaled)
    search = search_by(method, inputs, y)
    search(scaled)
    search_in_units = search_by(method, inputs, y / SCALES)
    search_in_units(in_units)
    found = [scaled.sigma_noise, scaled.prior_precision]
    expected = [in_units.sigma_noise, in_units.prior_precision]
    # Prior precisions are float32, and descents add up their rounding.
    assert_close(found, expected, rtol=1e-5, atol=0)
    # To the same numbers, lest these roundings count.
    scaled.hyperparameters = in_units.hyperparameters
    assert_same_posterior(scaled, in_units)


def test_the_loss_of_a_search_is_that_of_the_targets_in_their_own_units():
    la = with_scales(sigma_noise=0.5)
    X, y = held_out_data(la)
    held_out = [(X, y)]
    search = GridSearch(val_loader=held_out, grid_size=7)
    history = search(la)
    # At the prior that the search has chosen.
    prediction = la.predict(X)
    densities = prediction.log_density(y)
    expected = -densities.mean()
    found = history.objective.min()
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize(
    "scales",
    [
        AS_LIST,
        np.array(AS_LIST),
        SCALES,
    ],
)
def test_scales_of_every_kind_are_saved(tmp_path, scales):
    la = with_scales(output_scales=scales)
    la.save_pretrained(tmp_path)
    model = la.model.model
    loaded = laplace_lora_ext.from_pretrained(model, tmp_path)
    assert_close(loaded.output_noise, SCALES)


def test_files_keep_the_scales(tmp_path):
    la = with_scales(sigma_noise=0.5)
    la.save_pretrained(tmp_path)
    model = copy.deepcopy(la.model.model)
    loaded = laplace_lora_ext.from_pretrained(model, tmp_path)
    X, _ = held_out_data(la)
    found = loaded.predict(X)
    expected = la.predict(X)
    assert_close(found.total_std, expected.total_std)


def test_states_of_other_scales_are_refused():
    state = with_scales().state_dict()
    without = make(regressor(), "lowrank_kron", "regression")
    message = r"fitted with output_scales=\[10\.0, 0\.05\], not None"
    with pytest.raises(ValueError, match=message):
        without.load_state_dict(state)


def test_other_trainings_have_the_same_scales():
    la = with_scales(sigma_noise=0.5)
    other = la.for_model(plain_model(2))
    X, y = data_to_fit()
    other.fit(loader(X, y))
    assert_close(other.output_noise, 0.5 * SCALES)


# --- where scales are missing, or wrong -----------------------------------------------


def search_by_residuals_of_different_sizes(la) -> None:
    """Search by held-out data from which a posterior is off by the scales."""
    X, _ = data_to_fit()
    moments = la.predictive_moments(X)
    held_out = [(X, moments.f_mu + SCALES)]
    search = GridSearch(val_loader=held_out, grid_size=7)
    search(la)


def test_residuals_of_different_sizes_are_warned_of_with_the_scales_to_pass():
    la = make(regressor(), "lowrank_kron", "regression")
    X, y = data_to_fit()
    la.fit(loader(X, y))
    message = r"output_scales=\[10, 0\.05\]"
    with pytest.warns(UserWarning, match=message):
        search_by_residuals_of_different_sizes(la)


def test_the_scales_that_the_warning_names_silence_it():
    la = with_scales(output_scales=[10, 0.05])
    # Warnings are errors here.
    search_by_residuals_of_different_sizes(la)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"output_scales": [1.0, 0.0]},
            "output_scales must be positive",
        ),
        (
            {"output_scales": 2.0},
            "a number for each output",
        ),
        (
            {
                "output_scales": [1.0, 2.0],
                "likelihood": "classification",
            },
            "leave them out",
        ),
        (
            {"sigma_noise": torch.ones(2)},
            r"pass output_scales=\[\.\.\.\]",
        ),
    ],
)
def test_what_is_no_scale_is_refused(options, message):
    settings = {"likelihood": "regression"} | options
    with pytest.raises(ValueError, match=message):
        make(plain_model(2), **settings)


def test_a_scale_for_another_number_of_outputs_is_refused_by_the_fit():
    message = "has 3 numbers, and the model 2 outputs"
    with pytest.raises(ValueError, match=message):
        with_scales(output_scales=[1, 2, 3])


def test_members_of_a_mixture_share_their_scales():
    scaled, in_units = both()
    with pytest.raises(ValueError, match="or output_scales"):
        laplace_lora_ext.LaplaceMixture([scaled, in_units])


def test_backends_of_the_host_have_one_noise():
    model = plain_model(2)
    message = 'hessian_structure="lowrank_kron"'
    with pytest.raises(NotImplementedError, match=message):
        make(model, "kron", "regression", output_scales=[1, 2])


# --- in stages ------------------------------------------------------------------------


MEANS = torch.tensor([50.0, 0.0])
DEVIATIONS = torch.tensor([10.0, 0.05])
N_TESTS = 200


def texts_that_tell_nothing(n: int) -> list[Batch]:
    """Give texts two targets, whose units have nothing in common."""
    noise = torch.randn(n, 2, generator=generator())
    targets = MEANS + DEVIATIONS * noise
    texts = []
    for text, target in zip(Texts(n), targets, strict=True):
        with_target = text | {"labels": target}
        texts.append(with_target)
    return texts


def trainer_of_numbers(
    folder: Path,
    texts: list[Batch],
    max_steps: int = 20,
) -> Trainer:
    torch.manual_seed(0)
    base = base_model("bert", n_labels=2)
    base.config.problem_type = "regression"
    head = base.classifier
    # Small steps would take long to get to the means, and make large slopes.
    head.bias.data.copy_(MEANS)
    head.weight.data.zero_()
    config = LoraConfig(
        task_type="SEQ_CLS",
        r=2,
        target_modules=["query", "value"],
    )
    return trainer_of(
        folder,
        model=get_peft_model(base, config),
        data=texts,
        max_steps=max_steps,
        per_device_train_batch_size=20,
        save_strategy="no",
        logging_strategy="no",
        # So small that the head stays at the means, where it began.
        learning_rate=1e-5,
    )


def entropy_of_targets() -> float:
    """Compute the entropy of two normal numbers, the best NLL that there is: 2.14."""
    of_a_standard_one = 0.5 * math.log(2 * math.pi * math.e)
    of_units = DEVIATIONS.log().sum()
    return 2 * of_a_standard_one + of_units.item()


# A few held-out texts may make a choice at an end of the grid.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("members", [1, 2])
def test_stages_find_the_noise_of_each_output(tmp_path, members):
    n_train = 60
    n_held_out = n_train // 5
    texts = texts_that_tell_nothing(n_train + N_TESTS)
    trainer = trainer_of_numbers(tmp_path, texts[:n_train])
    la = train_in_stages(trainer, members=members)

    # The standard error of a deviation, relative to it, that n numbers tell.
    error_of_deviation = 1 / math.sqrt(2 * n_held_out)
    four_errors = 4 * error_of_deviation
    for member in la.members:
        found = member.output_noise / DEVIATIONS
        ones = torch.ones_like(found)
        assert_close(found, ones, rtol=four_errors, atol=0)
    tests = DataLoader(texts[n_train:], batch_size=50)
    figures = compare(la, tests)
    nll = figures.posterior["nll"]
    # The mean of half a squared normal number varies by √(2 / n) / 2, in test texts and
    # in held-out texts, and that of each of two outputs.
    of_tests = math.sqrt(2 / N_TESTS) / 2
    of_held_out = math.sqrt(2 / n_held_out) / 2
    error = 2 * (of_tests + of_held_out)
    excess = nll - entropy_of_targets()
    assert abs(excess) < 2 * error


@pytest.mark.filterwarnings("ignore")
def test_stages_with_a_backend_of_the_host_have_one_noise(tmp_path):
    """The refusal of scales must not come after hours of training."""
    texts = texts_that_tell_nothing(20)
    trainer = trainer_of_numbers(tmp_path, texts, max_steps=2)
    la = train_in_stages(trainer, hessian_structure="kron")
    first, second = la.output_noise
    assert first == second


@pytest.mark.filterwarnings("ignore")
def test_stages_keep_given_scales(tmp_path):
    texts = texts_that_tell_nothing(20)
    trainer = trainer_of_numbers(tmp_path, texts, max_steps=2)
    la = train_in_stages(trainer, output_scales=[1.0, 2.0])
    first, second = la.output_noise.tolist()
    assert second == pytest.approx(2 * first)
