"""Adapters of two halves of the data, merged: by means, and by their posteriors."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from peft.utils.merge_utils import dare_linear, ties
from torch import Tensor

from benchmarks.fine_tuning import TEST, Pretrained, fine_tune, prepare
from benchmarks.held_out import held_out
from benchmarks.methods.method import labels_of
from benchmarks.methods.posteriors import lowrank_kron
from benchmarks.models import AdaptedModel
from benchmarks.options import Merge
from benchmarks.report import (
    Result,
    Row,
    over_seeds,
    paired_differences,
    say,
    table,
)
from benchmarks.training import Records
from laplace_lora_ext import LowRankKronLoRALaplace
from laplace_lora_ext.merging import mode_of_product
from laplace_lora_ext.metrics import negative_log_likelihood, quality
from laplace_lora_ext.models.weights import Block
from laplace_lora_ext.tuning.losses import scale_penalty

# Of the sum of two adapters, of which a half is the mean.
FACTORS = (0.5, 0.6, 0.7, 0.8)
PRIOR_PRECISIONS = (0.01, 0.1, 1.0, 10.0, 100.0)  # of which one is chosen
NO_SEARCH = 1.0  # the prior precision that a posterior starts with
# Not its "linear", which is a sum by the root of 1/2: `FACTORS` have one near it.
PEFTS = {"ties": ties, "dare_linear": dare_linear}
DENSITY = 0.5  # share of the weights that these keep
# From 1/16 to 16, four to an octave.
SCALES = tuple(2 ** (step / 4) for step in range(-16, 17))
HALVES = ("texts", "intents")
FIGURES = ("accuracy", "nll", "ece")
REFERENCE = "mean"


def run(options: Merge) -> Iterator[Result]:
    """Measure each seed and way to halve, and report after each."""
    rows: list[Row] = []
    for seed in options.seeds:
        pretrained = prepare(options, seed)
        for halved in HALVES:
            trial = Trial(pretrained, options, seed, halved)
            for row in trial.rows():
                rows.append({"seed": seed, "halves": halved, **row})
            figures = {"task": pretrained.description, "rows": rows}
            yield figures, text_of(pretrained, rows)


class Trial:
    """One seed and one way to halve: both halves' adapters, and all about them.

    Both trainings start from the same weights. Factors, priors and scales of the logits
    are those that predict a held-out fifth best.
    """

    def __init__(
        self,
        pretrained: Pretrained,
        options: Merge,
        seed: int,
        halved: str,
    ) -> None:
        self._pretrained = pretrained
        self._seed = seed
        rest, held = held_out(pretrained)
        tested = pretrained.data[TEST]
        self._held = pretrained.prediction_loader(held)
        self._test = pretrained.prediction_loader(tested)
        self._held_labels = labels_of(held)
        self._test_labels = labels_of(tested)
        say(options, f"Seed {seed}: halves of {halved}")
        n_classes = len(pretrained.task.classes)
        self._halves = halves_of(rest, halved, n_classes)
        self._models = [fine_tune(pretrained, half, seed) for half in self._halves]
        self._joint = fine_tune(pretrained, rest, seed)

    def rows(self) -> Iterator[Row]:
        """Measure the halves' adapters, what is merged of them, and one on all."""
        first, second = self._models
        yield self._row("the first half's", first)
        yield self._row("the second half's", second)
        yield self._row("trained on both", self._joint)
        posteriors = [
            self._posterior(model, half)
            for model, half in zip(self._models, self._halves, strict=True)
        ]
        # The first half's model holds what is tried: it has been measured already.
        blocks = posteriors[0].blocks
        for candidates in self._merged(posteriors):
            yield self._best(first, blocks, candidates)

    def _merged(
        self,
        posteriors: Sequence[LowRankKronLoRALaplace],
    ) -> Iterator[list["Candidate"]]:
        """Merge in each way, with each number that may be chosen for it."""
        # In float64: conjugate gradients add up many small steps.
        means = [la.mean.double() for la in posteriors]
        mean = torch.stack(means).mean(0)
        yield [Candidate(REFERENCE, 0.5, mean)]
        total = 2 * mean
        yield [
            Candidate("sum, by a factor", factor, factor * total) for factor in FACTORS
        ]
        by_name = {
            "product of posteriors": PRIOR_PRECISIONS,
            "product, prior precision 1": (NO_SEARCH,),
        }
        for name, priors in by_name.items():
            yield [
                Candidate(name, prior, product(posteriors, prior)) for prior in priors
            ]
        for way in PEFTS:
            torch.manual_seed(self._seed)  # of what "dare_linear" leaves out
            weights = merged_by_peft(posteriors[0].blocks, means, way)
            yield [Candidate(f"PEFT's {way}", DENSITY, weights)]

    def _posterior(
        self,
        model: AdaptedModel,
        records: Records,
    ) -> LowRankKronLoRALaplace:
        """Fit a posterior over LoRA weights and the head, which is merged as well."""
        la = lowrank_kron(model, modules_to_save=True)
        la.fit(self._pretrained.loader(records))
        return la

    def _best(
        self,
        model: AdaptedModel,
        blocks: Sequence[Block],
        candidates: Sequence["Candidate"],
    ) -> Row:
        """Measure the candidate that predicts the held-out texts best."""

        def loss(candidate: Candidate) -> float:
            set_weights(blocks, candidate.weights)
            logits = model.logits(self._held)
            _, least = best_scale(logits, self._held_labels)
            return least

        best = min(candidates, key=loss)
        set_weights(blocks, best.weights)
        return {**self._row(best.name, model), "chosen": best.number}

    def _row(self, name: str, model: AdaptedModel) -> Row:
        """Predict the test texts, at the scale that suits the held-out ones."""
        model.model.eval()
        # For every row: a merged model is less sure, or surer, by its size alone.
        of_held = model.logits(self._held)
        scale, _ = best_scale(of_held, self._held_labels)
        logits = scale * model.logits(self._test)
        figures = quality(logits.softmax(-1), self._test_labels)
        return {"adapter": name, **figures}


@dataclass(frozen=True)
class Candidate:
    """Merged weights, and the number that they were merged with."""

    name: str
    number: float
    weights: Tensor


def best_scale(
    logits: Tensor,
    labels: Tensor,
) -> tuple[float, float]:
    """Find the scale of logits with the least loss, and this loss.

    A penalty keeps a few texts that are all right from asking for certainty.
    """

    def loss(scale: float) -> float:
        probabilities = (scale * logits).softmax(-1)
        nll = negative_log_likelihood(probabilities, labels)
        penalty = scale_penalty(math.log(scale)).item()
        return len(labels) * nll + penalty

    scale = min(SCALES, key=loss)
    return scale, loss(scale)


def halves_of(
    records: Records,
    halved: str,
    n_classes: int,
) -> tuple[Records, Records]:
    """Halve training texts: every intent's texts, or the intents."""
    first: Records = []
    second: Records = []
    seen: Counter[int] = Counter()
    for record in records:
        label = record["labels"]
        if halved == "intents":
            is_first = label < n_classes / 2
        else:
            # By turns within each intent, so that both halves have all of them.
            is_first = seen[label] % 2 == 0
        seen[label] += 1
        half = first if is_first else second
        half.append(record)
    return first, second


def product(
    posteriors: Sequence[LowRankKronLoRALaplace],
    prior_precision: float,
) -> Tensor:
    """Find the mode of a product of posteriors with a prior precision."""
    for la in posteriors:
        la.prior_precision = prior_precision
    return mode_of_product(posteriors)


@torch.no_grad()
def set_weights(blocks: Sequence[Block], weights: Tensor) -> None:
    """Write weights `(parameters,)` into the parameters of blocks, in order."""
    parts = weights.split([block.weight.numel() for block in blocks])
    for block, part in zip(blocks, parts, strict=True):
        block.weight.copy_(part.view_as(block.weight))


def merged_by_peft(
    blocks: Sequence[Block], weights: Sequence[Tensor], way: str
) -> Tensor:
    """Merge LoRA weights as PEFT's `add_weighted_adapter`, with weights of 1/2.

    PEFT merges no heads: theirs are the mean.
    """
    merge = PEFTS[way]
    # The root, as PEFT takes, since both factors of a product are merged.
    halves = torch.full((len(weights),), 0.5).sqrt()
    halves = halves.to(weights[0])
    sizes = [block.weight.numel() for block in blocks]
    adapters = [each.split(sizes) for each in weights]
    merged: list[Tensor] = []
    for block, *of_block in zip(blocks, *adapters, strict=True):
        if "lora_" in block.known_as:
            merged.append(merge(of_block, halves, DENSITY))
        else:
            merged.append(torch.stack(of_block).mean(0))
    return torch.cat(merged)


def text_of(pretrained: Pretrained, rows: list[Row]) -> list[str]:
    """Put the rows in words and a table."""
    task = pretrained.task
    words = (
        f"{task.name}: adapters of two halves of its texts, or of its "
        f"{len(task.classes)} intents with one head over all, from the same first "
        "weights. A fifth of the texts is held out, and chooses each merge's number "
        "and a scale of the logits for each row."
    )
    differences: list[Row] = []
    for halved in HALVES:
        of_halves = [
            {**row, "name": row["adapter"]} for row in rows if row["halves"] == halved
        ]
        if of_halves:
            compared = paired_differences(of_halves, REFERENCE, FIGURES)
            differences += [{"halves": halved, **row} for row in compared]
    return [
        words,
        table(over_seeds(rows, ["halves", "adapter"], FIGURES)),
        f"Differences from the {REFERENCE} with the same seed, mean ± standard error "
        "over seeds:",
        table(differences),
    ]
