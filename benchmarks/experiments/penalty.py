"""The penalty on the scale of the logits, chosen by many draws of few texts."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch

from benchmarks.fine_tuning import TEST, Pretrained, fine_tune, prepare
from benchmarks.held_out import held_out
from benchmarks.methods.method import labels_of
from benchmarks.methods.posteriors import lowrank_kron
from benchmarks.options import Penalty
from benchmarks.report import Result, Row, as_frame, say, table
from laplace_lora_ext.predictive.links import mean_field
from laplace_lora_ext.predictive.statistics import PredictiveStatistics
from laplace_lora_ext.tuning.gridsearch import grid_of_priors

# From 0.2 to 20 as in a search, but close enough to need no polynomial between them.
SCALES = 5.0 ** (np.arange(-16, 31) / 16)
PRESENT = 16  # the place of the scale 1
N_PRIORS = 50
NO_VARIANCE = 1e12  # prior precision, far beyond the grid
FEW_DRAWS_ARE_WORSE = 0.05  # than the figure that is shown as the bad luck

# Takes summed losses `(priors, scales)`; returns the place of the pair to predict with.
Rule = Callable[[np.ndarray], tuple[int, ...]]


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
    for name, rule in rules_of(options.below, options.above).items():
        nll, regret = draws.judged(rule)
        rows.append(
            {
                "task": pretrained.task.name,
                "seed": seed,
                "rule": name,
                "held_out": len(held),
                "nll": nll.mean().item(),
                "regret": regret.mean().item(),
                "bad_luck": np.quantile(regret, 1 - FEW_DRAWS_ARE_WORSE).item(),
            }
        )
    return rows


def losses_of(statistics: PredictiveStatistics, labels: torch.Tensor) -> np.ndarray:
    """Compute the loss of each text `(N, priors, scales)`.

    At the last of the priors there is no variance to speak of.
    """
    grid = grid_of_priors(-4, 4, N_PRIORS, 10.0, None).tolist()
    of_priors = []
    for prior_precision in (*grid, NO_VARIANCE):
        moments = statistics.moments(prior_precision)
        f_mu, f_var = moments.f_mu.double(), moments.f_var.double()
        of_scales = []
        for scale in SCALES:
            log_p = mean_field(scale * f_mu, scale**2 * f_var)
            of_scales.append(-log_p.gather(1, labels[:, None])[:, 0])
        of_priors.append(torch.stack(of_scales, dim=1))
    return torch.stack(of_priors, dim=1).numpy()


def rules_of(below: Sequence[float], above: Sequence[float]) -> dict[str, Rule]:
    """Make the rules by which a pair of prior and scale is chosen."""
    squares = np.log(SCALES) ** 2
    only_present = np.full(len(SCALES), np.inf)
    only_present[PRESENT] = 0.0

    def penalised(penalty: np.ndarray) -> Rule:
        def choose(summed: np.ndarray) -> tuple[int, ...]:
            return _lowest(summed + penalty)

        return choose

    def temperature(summed: np.ndarray) -> tuple[int, ...]:
        return len(summed) - 1, int(summed[-1].argmin())

    def trained_model(summed: np.ndarray) -> tuple[int, ...]:
        return len(summed) - 1, PRESENT

    rules = {}
    for of_smaller, of_larger in product(below, above):
        factors = np.where(SCALES < 1, of_smaller, of_larger)
        name = f"{of_smaller:g} (log s)² below 1, {of_larger:g} above"
        rules[name] = penalised(factors * squares)
    return rules | {
        "prior alone": penalised(only_present),
        "temperature alone": temperature,
        "trained model": trained_model,
    }


@dataclass(frozen=True)
class Draws:
    """Texts that choose, drawn again and again; those left judge."""

    losses: np.ndarray
    n_held: int
    n_draws: int
    seed: int

    def judged(self, rule: Rule) -> tuple[np.ndarray, np.ndarray]:
        """Compute each draw's NLL, and how much lower the best pair's is.

        All rules have the same draws.
        """
        generator = np.random.default_rng(self.seed)
        nlls = []
        regrets = []
        for _ in range(self.n_draws):
            order = generator.permutation(len(self.losses))
            chosen = rule(self.losses[order[: self.n_held]].sum(0))
            of_others = self.losses[order[self.n_held :]].mean(0)
            nlls.append(of_others[chosen])
            regrets.append(of_others[chosen] - of_others.min())
        return np.array(nlls), np.array(regrets)


def text_of(rows: list[Row], options: Penalty) -> list[str]:
    """Put the rows in words and a table: NLL of tasks, and means over them."""
    frame = as_frame(rows)
    shown = []
    for rule, of_rule in frame.groupby("rule", sort=False):
        of_tasks = of_rule.groupby("task", sort=False)[["nll", "regret", "bad_luck"]]
        means = of_tasks.mean()
        of_all = means.mean()
        shown.append(
            {
                "Chosen": rule,
                **means["nll"].to_dict(),
                "Regret": of_all["regret"],
                "Bad luck": of_all["bad_luck"],
            }
        )
    held = sorted({str(row["held_out"]) for row in rows})
    words = (
        f"Test NLL by what {' or '.join(held)} texts choose, means of {options.draws} "
        "draws. The regret is above the best pair of the same texts, and bad luck is "
        "what it exceeds in one of twenty draws, both means of the tasks."
    )
    return [words, table(shown)]


def _lowest(summed: np.ndarray) -> tuple[int, ...]:
    """Find the place of the lowest number."""
    return tuple(int(i) for i in np.unravel_index(summed.argmin(), summed.shape))
