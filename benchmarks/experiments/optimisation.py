"""Bayesian optimisation: which molecules to measure next, to find the best one."""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from laplace import Laplace
from torch import Tensor
from torch.nn.functional import mse_loss

import laplace_lora_ext
from benchmarks.exact_ggn import exact_ggn, outputs_and_gradients
from benchmarks.experiments.molecules import (
    Unit,
    description_of,
    predicted_numbers,
    prepared,
    read,
    targets_of,
)
from benchmarks.fine_tuning import TEST, TRAIN, Pretrained, fine_tune
from benchmarks.frozen import frozen_features, gaussian_process
from benchmarks.models import AdaptedModel
from benchmarks.options import Optimisation
from benchmarks.report import (
    Result,
    Row,
    over_seeds,
    paired_differences,
    say,
    seeds_of,
    table,
)
from benchmarks.rounds import Rounds
from benchmarks.training import Records, UpperLayers
from laplace_lora_ext import LoRALaplace, LowRankKronLoRALaplace
from laplace_lora_ext.acquisitions import expected_improvement
from laplace_lora_ext.metrics import quality_of_numbers
from laplace_lora_ext.predictive.moments import Moments
from laplace_lora_ext.predictive.numbers import NumberPrediction

# Adam is at the maximum after these: a test finds next to no slope there.
EVIDENCE_STEPS = 100
EVIDENCE_RATE = 0.1
PLAIN = "Gaussian process on frozen features"
FIGURES = ("regret", "nll", "seconds")


class LeastSquares(UpperLayers):
    """Numbers, by LoRA layers in the upper half of the encoder."""

    name = "least squares, upper layers"

    def loss(self, model: torch.nn.Module, batch: Any, labels: Tensor) -> Tensor:
        """Compute the mean squared error of a batch."""
        return mse_loss(model(batch)[:, 0], labels)


@dataclass
class Search(Rounds):
    """Molecules that are measured by rounds, and a model of what is known."""

    model: AdaptedModel | None = None  # some rules have none

    @property
    def best(self) -> float:
        """The largest number that is known."""
        return targets_of(self.known).max().item()

    def trained(self, share: float) -> AdaptedModel:
        """Train on what is known, after the first time from where the weights are."""
        n_layers = self.pretrained.load().config.num_hidden_layers
        recipe = LeastSquares(n_layers)
        if self.model is None:
            self.model = fine_tune(self.pretrained, self.known, self.seed, recipe)
        else:
            self.train(self.model, recipe, share)
        return self.model

    def improvement(self, prediction: NumberPrediction) -> list[int]:
        """Choose by the expected improvement of the outputs, without noise.

        A measurement that happens to come out high is no better molecule. Molecules of
        one round are chosen as if each were measured alone.
        """
        improvement = expected_improvement(
            mean=prediction.mean[:, 0],
            standard_deviation=prediction.epistemic_std[:, 0],
            best=self.best,
        )
        return improvement.topk(self.n).indices.tolist()


class Proposal(NamedTuple):
    """Places in the pool, and what was predicted of it."""

    places: list[int]
    prediction: NumberPrediction | None


def at_random(search: Search, _: float) -> Proposal:
    """Choose without looking."""
    return Proposal(search.at_random(), None)


def by_gaussian_process(search: Search, _: float) -> Proposal:
    """Choose by a Gaussian process, which trains nothing of the encoder."""
    prediction = gaussian_process(
        frozen_features(search.pretrained, search.known),
        targets_of(search.known),
        frozen_features(search.pretrained, search.pool),
        search.seed,
    )
    return Proposal(search.improvement(prediction), prediction)


def by_last_layer(search: Search, share: float) -> Proposal:
    """Choose by the exact posterior of the head alone."""
    model = search.trained(share).model
    everything = laplace_lora_ext.Laplace(model, "regression", modules_to_save=True)
    head = [block.known_as for block in everything.blocks if block.kind == "head"]
    la = laplace_lora_ext.Laplace(
        model,
        "regression",
        modules_to_save=True,
        weight_names=head,
    )
    prediction = predicted(search, la)
    return Proposal(search.improvement(prediction), prediction)


def by_stock_kron(search: Search, share: float) -> Proposal:
    """Choose by laplace-torch's own Kron over LoRA weights and head."""
    model = search.trained(share)
    la = Laplace(
        model.logits_model,
        "regression",
        # All that requires a gradient: LoRA weights and head.
        subset_of_weights="all",
        hessian_structure="kron",
    )
    known = in_columns(search.known)
    la.fit(search.pretrained.loader(known))
    choose_by_evidence(la)
    means = []
    variances = []
    for batch in search.pretrained.prediction_loader(search.pool):
        mean, variance = la(batch, pred_type="glm")
        means.append(mean.detach().cpu())
        variances.append(variance.detach().cpu())
    moments = Moments(torch.cat(means), torch.cat(variances))
    prediction = NumberPrediction.of([moments], [float(la.sigma_noise)])
    return Proposal(search.improvement(prediction), prediction)


def by_exact_ggn(search: Search, share: float) -> Proposal:
    """Choose by what all posteriors over LoRA weights and head approximate."""
    model = search.trained(share)
    pretrained = search.pretrained
    la = exact_ggn(pretrained, model, search.known, targets_of(search.known))
    choose_by_evidence(la)
    outputs, gradients = outputs_and_gradients(pretrained, model, search.pool)
    prediction = la.predict(outputs, gradients)
    return Proposal(search.improvement(prediction), prediction)


def by_improvement(search: Search, share: float) -> Proposal:
    """Choose by our posterior's expected improvement."""
    la = ours(search, share)
    prediction = predicted(search, la)
    return Proposal(search.improvement(prediction), prediction)


def by_agreement(search: Search, share: float) -> Proposal:
    """Choose by our posterior, whose prior and noise agreement has chosen."""
    la = ours(search, share)
    known = search.pretrained.loader(search.known)
    la.fit(known, progress_bar=False)
    la.optimize_prior_precision(method="agreement", train_loader=known)
    prediction = predicted_numbers(search.pretrained, la, search.pool)
    return Proposal(search.improvement(prediction), prediction)


def by_thompson(search: Search, share: float) -> Proposal:
    """Choose the best molecule of each of several functions of our posterior."""
    la = ours(search, share)
    prediction = predicted(search, la)
    batches = search.pretrained.prediction_loader(search.pool)
    places = la.acquire(batches, search.n, by="thompson", seed=search.round_seed)
    return Proposal(places.tolist(), prediction)


def ours(search: Search, share: float) -> LowRankKronLoRALaplace:
    """Make our posterior over LoRA weights and head, which is still to be fitted."""
    model = search.trained(share).model
    return laplace_lora_ext.Laplace(model, "regression", modules_to_save=True)


RULES: dict[str, Callable[[Search, float], Proposal]] = {
    "random": at_random,
    PLAIN: by_gaussian_process,
    "last-layer Laplace": by_last_layer,
    "stock Kron": by_stock_kron,
    "exact GGN": by_exact_ggn,
    "lowrank_kron with the head": by_improvement,
    "lowrank_kron with the head, agreement": by_agreement,
    "lowrank_kron with the head, Thompson": by_thompson,
}


def in_columns(records: Records) -> Records:
    """Give targets the outputs' shape `(B, 1)`, which the stock class needs."""
    return [{**record, "labels": [record["labels"]]} for record in records]


def predicted(search: Search, la: LoRALaplace) -> NumberPrediction:
    """Fit a posterior of ours to what is known, and predict the pool."""
    la.fit(search.pretrained.loader(search.known), progress_bar=False)
    choose_by_evidence(la)
    return predicted_numbers(search.pretrained, la, search.pool)


def choose_by_evidence(la: Any) -> None:
    """Choose prior precision and noise by the evidence, alike for all posteriors."""
    # Of their logarithms all values are allowed, and both begin at 1: targets are
    # standardised.
    logarithms = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.Adam([logarithms], lr=EVIDENCE_RATE)
    for _ in range(EVIDENCE_STEPS):
        optimizer.zero_grad()
        prior_precision, sigma_noise = logarithms.exp()
        evidence = la.log_marginal_likelihood(prior_precision, sigma_noise)
        (-evidence).backward()
        optimizer.step()
    prior_precision, sigma_noise = logarithms.detach().exp()
    la.prior_precision = prior_precision
    la.sigma_noise = sigma_noise


def run(options: Optimisation) -> Iterator[Result]:
    """Measure each seed with each rule."""
    rows: list[Row] = []
    for seed in options.seeds:
        task, unit = read(options, seed)
        pretrained = prepared(options, task)
        if options.rounds * options.batch >= len(task.test):
            raise SystemExit(
                f"There are {len(task.test)} molecules to choose from: give fewer "
                "--rounds, or a smaller --batch."
            )
        for name in RULES:
            say(options, f"Seed {seed}: {name}")
            rows += measured(pretrained, options, seed, unit, name)
        figures = {
            "task": description_of(task),
            "hyperparameters": asdict(pretrained.hyperparameters),
            "rows": rows,
        }
        yield figures, text_of(pretrained, options, rows)


def measured(
    pretrained: Pretrained,
    options: Optimisation,
    seed: int,
    unit: Unit,
    name: str,
) -> Iterator[Row]:
    """Choose and measure by turns."""
    known = pretrained.data[TRAIN]
    pool = pretrained.data[TEST]
    search = Search(pretrained, seed, n=options.batch, known=known, pool=pool)
    # All have been measured: the pool's targets are only kept from the rules.
    highest = targets_of([*known, *pool]).max().item()
    propose = RULES[name]
    for _ in range(options.rounds):
        started = time.perf_counter()
        proposal = propose(search, options.share)
        seconds = time.perf_counter() - started
        # Choosing without looking predicts nothing.
        nll = None
        if proposal.prediction is not None:
            targets = targets_of(search.pool)
            nll = quality_of_numbers(proposal.prediction, targets)["nll"]
        search.learn(proposal.places)
        yield {
            "name": name,
            "seed": seed,
            "measured": len(search.known),
            "regret": (highest - search.best) * unit.std,
            "nll": nll,
            "seconds": seconds,
        }


def text_of(
    pretrained: Pretrained,
    options: Optimisation,
    rows: list[Row],
) -> list[str]:
    """Put the figures in words and tables."""
    task = pretrained.task
    (of_what,) = task.classes
    words = (
        f"{task.name} ({of_what}, the larger the better): {len(task.train)} known "
        f"molecules to begin with, {len(task.test)} to choose from, {options.batch} a "
        f"round, seeds: {seeds_of(rows)}. LoRA weights in the upper half of the "
        "encoder, and the head, are trained by "
        f"{pretrained.hyperparameters.steps} steps first, and in each round by a share "
        f"of {options.share} of these, from where they are; the evidence chooses prior "
        "and noise, unless agreement is named. Unless "
        "Thompson sampling is named, molecules are chosen by expected improvement. "
        "Regret: what the best molecule of all is ahead of the best one measured, in "
        "the property's unit; NLL: of the pool before the choice, in standard "
        "deviations of the molecules known first; seconds of a round, training and "
        "prediction included. Mean ± standard deviation over seeds."
    )
    # Rows of a seed end with its last round.
    n_last = rows[-1]["measured"]
    last = [row for row in rows if row["measured"] == n_last]
    return [
        words,
        table(over_seeds(rows, ("measured", "name"), FIGURES)),
        f"Differences from the {PLAIN} with the same seed, means over all rounds; "
        "mean ± standard error over seeds:",
        table(paired_differences(rows, PLAIN, FIGURES)),
        "The same after the last round:",
        table(paired_differences(last, PLAIN, FIGURES)),
    ]
