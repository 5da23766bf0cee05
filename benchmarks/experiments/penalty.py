"""The penalty on the scale of the logits, chosen by many draws of few texts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from torch import Tensor

from benchmarks.fine_tuning import TEST, Pretrained, fine_tune, prepare
from benchmarks.held_out import held_out
from benchmarks.methods.method import labels_of
from benchmarks.methods.posteriors import lowrank_kron
from benchmarks.options import Penalty
from benchmarks.report import Result, Row, as_frame, say, table
from laplace_lora_ext.predictive.links import mean_field
from laplace_lora_ext.predictive.statistics import PredictiveStatistics
from laplace_lora_ext.tuning.gridsearch import grid_of_priors

# From 0.04 to 20 as in a search, but close enough to need no spline between them.
SCALES = 5.0 ** (np.arange(-32, 31) / 16)
PRESENT = 32  # the place of the scale 1
# The last is far beyond the grid of a search: without variance.
PRIORS = (*grid_of_priors(-4, 4, 50, 10.0, None).tolist(), 1e12)
ONE_OF_TWENTY = 0.95  # quantile: only one draw of twenty is worse
MEANS = ["nll", "regret", "bad_luck"]


def run(options: Penalty) -> Iterator[Result]:
    """Train on each task, and report after each of them."""
    rows: list[Row] = []
    for task in options.tasks:
        for seed in options.seeds:
            pretrained = prepare(options.of_task(task), seed)
            say(options, f"{task}, seed {seed}")
            rows += measured(pretrained, options, seed)
            yield {"rows": rows}, text_of(rows, options)


def measured(pretrained: Pretrained, options: Penalty, seed: int) -> list[Row]:
    """Let held-out texts choose by every rule, again and again."""
    rest, held = held_out(pretrained)
    model = fine_tune(pretrained, rest, seed)
    la = lowrank_kron(model)
    la.fit(pretrained.loader(rest), progress_bar=not options.quiet)
    records = pretrained.data[TEST]
    statistics = la.predictive_statistics(pretrained.prediction_loader(records))
    losses = losses_of(statistics, labels_of(records))
    # Texts of the test set that the model has not seen stand in for those held out: as
    # many, and others in every draw.
    draws = Draws(losses, n_held=len(held), n_draws=options.draws, seed=seed)
    rows = []
    for name, penalty in penalties_of(options.below, options.above).items():
        judged = draws.judged(penalty)
        rows.append(
            {
                "task": pretrained.task.name,
                "seed": seed,
                "rule": name,
                "held_out": len(held),
                "nll": judged.nll.mean().item(),
                "regret": judged.regret.mean().item(),
                "bad_luck": np.quantile(judged.regret, ONE_OF_TWENTY).item(),
            }
        )
    return rows


def losses_of(statistics: PredictiveStatistics, labels: Tensor) -> np.ndarray:
    """Compute the loss of each text `(N, priors, scales)`.

    At the last of the priors there is no variance to speak of.
    """
    of_priors = []
    for prior_precision in PRIORS:
        moments = statistics.moments(prior_precision).to(torch.float64)
        of_scales = []
        for scale in SCALES:
            log_p = mean_field(moments.scaled(scale))
            of_labels = log_p.gather(1, labels[:, None])[:, 0]
            of_scales.append(-of_labels)
        of_priors.append(torch.stack(of_scales, dim=1))
    return torch.stack(of_priors, dim=1).numpy()


def penalties_of(
    below: Sequence[float],
    above: Sequence[float],
) -> dict[str, np.ndarray]:
    """Make what each rule adds to summed losses `(priors, scales)` before it chooses.

    A rule that may not choose a pair adds infinity to it.
    """
    shape = (len(PRIORS), len(SCALES))
    squares = np.log(SCALES) ** 2
    penalties = {}
    for of_smaller, of_larger in product(below, above):
        factors = np.where(SCALES < 1, of_smaller, of_larger)
        name = f"{of_smaller:g} (log s)² below 1, {of_larger:g} above"
        penalties[name] = np.broadcast_to(factors * squares, shape)
    prior_alone = np.full(shape, np.inf)
    prior_alone[:, PRESENT] = 0
    penalties["prior alone"] = prior_alone
    temperature_alone = np.full(shape, np.inf)
    temperature_alone[-1, :] = 0
    penalties["temperature alone"] = temperature_alone
    trained_model = np.full(shape, np.inf)
    trained_model[-1, PRESENT] = 0
    penalties["trained model"] = trained_model
    return penalties


@dataclass(frozen=True)
class Judged:
    """What a rule's choices are worth, each array one number a draw."""

    nll: np.ndarray
    regret: np.ndarray  # above the best pair of the texts that judge


@dataclass(frozen=True)
class Draws:
    """Texts that choose, drawn again and again; those left judge."""

    losses: np.ndarray  # (texts, priors, scales)
    n_held: int
    n_draws: int
    seed: int

    def judged(self, penalty: np.ndarray) -> Judged:
        """Let the texts of each draw choose, and measure what they chose."""
        # The same draws for all rules.
        generator = np.random.default_rng(self.seed)
        nlls = []
        regrets = []
        for _ in range(self.n_draws):
            order = generator.permutation(len(self.losses))
            of_held = self.losses[order[: self.n_held]].sum(0)
            of_others = self.losses[order[self.n_held :]].mean(0)
            chosen = (of_held + penalty).argmin()
            nll = of_others.flat[chosen]
            nlls.append(nll)
            regrets.append(nll - of_others.min())
        return Judged(nll=np.array(nlls), regret=np.array(regrets))


def text_of(rows: list[Row], options: Penalty) -> list[str]:
    """Put the rows in words and a table: NLL of tasks, and means over them."""
    frame = as_frame(rows)
    shown = []
    for rule, of_rule in frame.groupby("rule", sort=False):
        # Seeds of a task first, so that all tasks count alike.
        of_tasks = of_rule.groupby("task", sort=False)[MEANS].mean()
        of_all = of_tasks.mean()
        row = {"Chosen": rule} | of_tasks["nll"].to_dict()
        row["Regret"] = of_all["regret"]
        row["Bad luck"] = of_all["bad_luck"]
        shown.append(row)
    held = sorted({str(row["held_out"]) for row in rows})
    words = (
        f"Test NLL by what {' or '.join(held)} texts choose, means of {options.draws} "
        "draws. The regret is above the best pair of the same texts, and bad luck is "
        "what it exceeds in one of twenty draws, both means of the tasks."
    )
    return [words, table(shown)]
