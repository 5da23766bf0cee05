"""A noise for each output of a regression: as if outputs and targets had one unit."""

import copy
import math
from itertools import product

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

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
from tests.support.models import base_model
from tests.support.posteriors import generator, make, plain_model
from tests.support.ranks import Texts
from tests.support.trainers import trainer_of

SCALES = torch.tensor([10.0, 0.05], dtype=torch.float64)
N_TRAIN = 12
N_HELD_OUT = 20


class InUnits(nn.Module):
    """A model whose outputs are divided by their scales, so that they have one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.model = plain_model(2).requires_grad_(False)

    def forward(self, x):
        return self.model(x) / SCALES


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(seed)).double()


def loader(X, y) -> DataLoader:
    return DataLoader(TensorDataset(X, y), batch_size=5)


def both(structure: str, **options):
    """Fit with scales, and in one unit to the same data; return training inputs too."""
    X = normal(0, N_TRAIN, 5)
    y = SCALES * normal(1, N_TRAIN, 2)
    scaled = make(
        plain_model(2).requires_grad_(False),
        structure,
        "regression",
        sigma_noise=0.5,
        output_scales=SCALES,
        **options,
    )
    scaled.fit(loader(X, y))
    in_units = make(InUnits(), structure, "regression", sigma_noise=0.5, **options)
    in_units.fit(loader(X, y / SCALES))
    return scaled, in_units, X


def assert_same_posterior(scaled, in_units) -> None:
    """Compare predictions, evidence and densities, which differ by the unit alone."""
    X = normal(5, N_HELD_OUT, 5)
    f_mu, f_var = scaled(X)
    expected_mu, expected_var = in_units(X)
    assert_close(f_mu / SCALES, expected_mu)
    assert_close(f_var / torch.outer(SCALES, SCALES), expected_var)

    log_unit = SCALES.log().sum()
    of_targets = scaled.log_marginal_likelihood() + N_TRAIN * log_unit
    assert_close(of_targets, in_units.log_marginal_likelihood())

    y = f_mu + SCALES * normal(6, N_HELD_OUT, 2)
    prediction, expected = scaled.predict(X), in_units.predict(X)
    assert_close(prediction.total_std / SCALES, expected.total_std)
    densities = prediction.log_density(y) + log_unit
    assert_close(densities, expected.log_density(y / SCALES))


@pytest.mark.parametrize(
    ("structure", "options"),
    [
        pytest.param("lowrank_kron", {}, id="lowrank_kron"),
        pytest.param(
            "lowrank_kron",
            {"backend_kwargs": laplace_lora_ext.PAPER_SETTINGS},
            id="paper",
        ),
        pytest.param("lowrank_kron", {"backend": LowRankKronEF}, id="empirical"),
        pytest.param(
            "lowrank_kron", {"backend_kwargs": {"stochastic": True}}, id="drawn"
        ),
        pytest.param("diag", {}, id="diag"),
        pytest.param("full", {}, id="full"),
        pytest.param("full", {"backend": LowRankKronEF}, id="full, empirical"),
    ],
)
def test_scales_are_a_change_of_unit(structure, options):
    scaled, in_units, _ = both(structure, **options)
    assert_close(scaled.loss, in_units.loss)
    assert_same_posterior(scaled, in_units)
    assert_close(scaled.output_noise, 0.5 * SCALES)


OF_ALL_STRUCTURES = ["gridsearch", "agreement", "marglik"]


@pytest.mark.parametrize(
    ("structure", "method"),
    [
        ("lowrank_kron", "val_gd"),
        *product(["lowrank_kron", "diag", "full"], OF_ALL_STRUCTURES),
    ],
)
def test_searches_prefer_no_unit(structure, method):
    scaled, in_units, X = both(structure)
    inputs = normal(5, N_HELD_OUT, 5)
    f_mu = scaled.predictive_moments(inputs).f_mu
    targets = f_mu + SCALES * normal(6, N_HELD_OUT, 2)

    def search(y):
        if method == "agreement":
            return Agreement(train_loader=[X])
        if method == "marglik":
            return Marglik(optimize_sigma_noise=True, n_steps=30)
        val_loader = [(inputs, y)]
        if method == "gridsearch":
            return GridSearch(val_loader=val_loader, grid_size=7)
        return ValGD(val_loader=val_loader, n_steps=30, generator=generator())

    search(targets)(scaled)
    search(targets / SCALES)(in_units)
    # Prior precisions are float32, and descents add up their rounding.
    assert_close(scaled.sigma_noise, in_units.sigma_noise, rtol=1e-5, atol=0)
    assert_close(scaled.prior_precision, in_units.prior_precision, rtol=1e-5, atol=0)
    scaled.hyperparameters = in_units.hyperparameters
    assert_same_posterior(scaled, in_units)


def test_the_loss_of_a_search_is_that_of_the_targets_in_their_own_units():
    la, _, _ = both("lowrank_kron")
    X = normal(5, N_HELD_OUT, 5)
    y = la.predictive_moments(X).f_mu + SCALES * normal(6, N_HELD_OUT, 2)
    history = GridSearch(val_loader=[(X, y)], grid_size=7)(la)
    found = -la.predict(X).log_density(y).mean().item()
    assert history.objective.min().item() == pytest.approx(found, rel=1e-6)


@pytest.mark.parametrize("scales", [[10, 0.05], np.array([10, 0.05]), SCALES])
def test_scales_of_every_kind_are_saved(tmp_path, scales):
    model = plain_model(2).requires_grad_(False)
    la = make(model, "lowrank_kron", "regression", output_scales=scales)
    la.fit(loader(normal(0, N_TRAIN, 5), SCALES * normal(1, N_TRAIN, 2)))
    la.save_pretrained(tmp_path)
    loaded = laplace_lora_ext.from_pretrained(model, tmp_path)
    assert_close(loaded.output_noise, SCALES)


def test_files_keep_the_scales(tmp_path):
    la, _, _ = both("lowrank_kron")
    la.save_pretrained(tmp_path)
    model = copy.deepcopy(la.model.model)
    loaded = laplace_lora_ext.from_pretrained(model, tmp_path)
    X = normal(5, N_HELD_OUT, 5)
    assert_close(loaded.predict(X).total_std, la.predict(X).total_std)
    without = make(model, "lowrank_kron", "regression")
    with pytest.raises(
        ValueError, match=r"fitted with output_scales=\[10\.0, 0\.05\], not None"
    ):
        without.load_state_dict(la.state_dict())


def test_other_trainings_have_the_same_scales():
    la, _, _ = both("lowrank_kron")
    other = la.for_model(plain_model(2))
    X = normal(0, N_TRAIN, 5)
    other.fit(loader(X, SCALES * normal(1, N_TRAIN, 2)))
    assert_close(other.output_noise, 0.5 * SCALES)


# --- where scales are missing, or wrong -----------------------------------------------


def test_residuals_of_different_sizes_are_warned_of_with_the_scales_to_pass():
    model = plain_model(2).requires_grad_(False)
    X = normal(0, N_TRAIN, 5)
    y = SCALES * normal(1, N_TRAIN, 2)
    la = make(model, "lowrank_kron", "regression")
    la.fit(loader(X, y))
    held_out = la.predictive_moments(X).f_mu + SCALES
    with pytest.warns(UserWarning, match=r"output_scales=\[10, 0\.05\]"):
        GridSearch(val_loader=[(X, held_out)], grid_size=7)(la)

    la = make(model, "lowrank_kron", "regression", output_scales=[10, 0.05])
    la.fit(loader(X, y))
    GridSearch(val_loader=[(X, held_out)], grid_size=7)(la)  # warnings are errors here


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output_scales": [1.0, 0.0]}, "output_scales must be positive"),
        ({"output_scales": 2.0}, "a number for each output"),
        (
            {"output_scales": [1.0, 2.0], "likelihood": "classification"},
            "leave them out",
        ),
        ({"sigma_noise": torch.tensor([1.0, 2.0])}, r"pass output_scales=\[\.\.\.\]"),
    ],
)
def test_what_is_no_scale_is_refused(options, message):
    options = {"likelihood": "regression"} | options
    with pytest.raises(ValueError, match=message):
        make(plain_model(2), "lowrank_kron", **options)


def test_a_scale_for_another_number_of_outputs_is_refused_by_the_fit():
    la = make(plain_model(2), "lowrank_kron", "regression", output_scales=[1, 2, 3])
    batches = loader(normal(0, N_TRAIN, 5), normal(1, N_TRAIN, 2))
    with pytest.raises(ValueError, match="has 3 numbers, and the model 2 outputs"):
        la.fit(batches)


def test_members_of_a_mixture_share_their_scales():
    scaled, in_units, _ = both("lowrank_kron")
    with pytest.raises(ValueError, match="or output_scales"):
        laplace_lora_ext.LaplaceMixture([scaled, in_units])


def test_backends_of_the_host_have_one_noise():
    with pytest.raises(NotImplementedError, match='hessian_structure="lowrank_kron"'):
        make(plain_model(2), "kron", "regression", output_scales=[1, 2])


# --- in stages ------------------------------------------------------------------------


MEANS = torch.tensor([50.0, 0.0])
DEVIATIONS = torch.tensor([10.0, 0.05])
N_TESTS = 200


def texts_that_tell_nothing(n: int) -> list[dict[str, torch.Tensor]]:
    """Give texts two targets, whose units have nothing in common."""
    noise = torch.randn(n, 2, generator=generator())
    targets = MEANS + DEVIATIONS * noise
    pairs = zip(Texts(n), targets, strict=True)
    return [text | {"labels": target} for text, target in pairs]


def trainer_of_numbers(folder, texts, max_steps=20):
    torch.manual_seed(0)
    base = base_model("bert", n_labels=2)
    base.config.problem_type = "regression"
    # Small steps would take long to get to the means, and make large slopes.
    base.classifier.bias.data.copy_(MEANS)
    base.classifier.weight.data.zero_()
    config = LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS")
    return trainer_of(
        folder,
        model=get_peft_model(base, config),
        data=texts,
        max_steps=max_steps,
        per_device_train_batch_size=20,
        save_strategy="no",
        logging_strategy="no",
        learning_rate=1e-5,
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("members", [1, 2])
def test_stages_find_the_noise_of_each_output(tmp_path, members):
    texts = texts_that_tell_nothing(60 + N_TESTS)
    trainer = trainer_of_numbers(tmp_path, texts[:60])
    la = train_in_stages(trainer, members=members)

    for member in la.members:
        found = member.output_noise / DEVIATIONS
        # Four standard errors of a deviation, which twelve held-out texts tell.
        assert_close(found, torch.ones(2).to(found), rtol=4 / math.sqrt(24), atol=0)
    tests = DataLoader(texts[60:], batch_size=50)
    nll = compare(la, tests).posterior["nll"]
    entropy = DEVIATIONS.log().sum().item() + 1 + math.log(2 * math.pi)  # 2.14
    # As for one output, but of two: what test texts and held-out texts say vary.
    error = 2 * (math.sqrt(2 / N_TESTS) / 2 + math.sqrt(2 / 12) / 2)
    assert abs(nll - entropy) < 2 * error


@pytest.mark.filterwarnings("ignore")
def test_stages_with_a_backend_of_the_host_have_one_noise(tmp_path):
    """The refusal of scales must not come after hours of training."""
    texts = texts_that_tell_nothing(20)
    trainer = trainer_of_numbers(tmp_path, texts, max_steps=2)
    la = train_in_stages(trainer, hessian_structure="kron")
    noise = la.output_noise
    assert noise[0] == noise[1]


@pytest.mark.filterwarnings("ignore")
def test_stages_keep_given_scales(tmp_path):
    texts = texts_that_tell_nothing(20)
    trainer = trainer_of_numbers(tmp_path, texts, max_steps=2)
    la = train_in_stages(trainer, output_scales=[1.0, 2.0])
    first, second = la.output_noise.tolist()
    assert second == pytest.approx(2 * first)
