"""Training in stages and mixtures of what it trains, beside what they compete with."""

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from time import process_time
from typing import Any, NamedTuple

import torch
import transformers
from torch.utils.data import DataLoader

from benchmarks import report
from benchmarks.experiments.calibration import Tests, figures_of, text_of
from benchmarks.experiments.overview import COUNTS, shown
from benchmarks.fine_tuning import MEMBER_SEEDS, TEST, Pretrained, fine_tune, prepare, untrained
from benchmarks.methods.method import Loaders, fit_temperature, labels_of
from benchmarks.methods.posteriors import over_lora
from benchmarks.methods.priors import FACTORS, Prior, probabilities
from benchmarks.methods.students import Scaled, predict_with_student
from benchmarks.models import AdaptedModel
from benchmarks.options import Stages
from benchmarks.report import Result, Row, say
from benchmarks.training import Records, Smoothed
from laplace_lora_ext import LaplaceMixture
from laplace_lora_ext.metrics import negative_log_likelihood
from laplace_lora_ext.models.adapters import active_again, add_fresh_adapter
from laplace_lora_ext.predictive.statistics import MixtureStatistics
from laplace_lora_ext.processes.shards import divided
from laplace_lora_ext.stages import SECOND_STAGE
from laplace_lora_ext.training.students import STEPS

HELD_OUT = 0.2
HELD = "held-out texts"
LINK = "mean_field"
EXPLAINED = (
    "Trainings are steps relative to an ordinary training's; forward passes are the seconds of a "
    "prediction relative to the bare model's; seconds are processor time."
)
FIGURES = ("accuracy", "nll", "ece", "regret", "chosen", "trainings", "forward_passes")
FIGURES += ("fit_seconds", "predict_seconds")
TEMPERATURE = Prior("held_out_temperature", "temperature of the held-out texts")
HELD_OUT_TEXTS = Prior("held_out", "held-out texts")
VALIDATION = Prior("validation", "validation")
ELSEWHERE = Prior("validation_elsewhere", "second training")
TAUGHT_BY = {
    None: Prior("training_texts", "training texts"),
    "swapped": Prior("swapped", "training texts and swapped copies"),
}
MOST_TAUGHT = 2  # members of a mixture that teaches


def run(options: Stages) -> Iterator[Result]:
    """Measure each seed, and report after each of its parts."""
    rows: list[Row] = []
    for seed in options.seeds:
        pretrained = prepare(options, seed)
        trial = Trial(pretrained, seed)
        for part in (trial.ordinary, trial.in_stages, trial.smoothed):
            rows += part()
            words = text_of(pretrained, rows, FIGURES)
            yield figures_of(pretrained, rows), [*words, EXPLAINED]
    first = [row for row in rows if row["seed"] == options.seeds[0]]
    report.draw_reliability(shown(first), options.output / "reliability.png")


class Member(NamedTuple):
    """A posterior, what it keeps of data sets, and the seconds of both."""

    la: Any
    statistics: Mapping[str, Any]
    seconds: float

    def predict(self, name: str, prior_precision: torch.Tensor) -> torch.Tensor:
        """Class probabilities (texts, classes) of a data set."""
        return probabilities(self.la, self.statistics[name].moments(prior_precision), LINK)


class Trial:
    """One seed: trains, and measures how what it has trained predicts."""

    def __init__(self, pretrained: Pretrained, seed: int) -> None:
        self.pretrained, self.options, self.seed = pretrained, pretrained.options, seed
        self.whole = pretrained.loader("train")
        labels = torch.tensor([record["labels"] for record in self.whole.dataset])
        ((rest, held),) = divided(self.whole, HELD_OUT, labels)
        self.rest, self.held = pretrained.loader(list(rest)), pretrained.loader(list(held))
        self.tests = Tests(pretrained, seed)
        self.loaders = self.tests.loaders
        self.seconds: dict[str, float] = {}  # of a prediction of all test texts, by its kind

    def ordinary(self) -> list[Row]:
        """Ordinary training, and a second one that holds out a fifth of the texts."""
        model = fine_tune(self.pretrained, self._records(self.whole), self.seed)
        own = self._fitted(model.model, self.whole, self.loaders)
        self.seconds = {
            "bare": self.tests.seconds(lambda batch: model.logits([batch])),
            "exact": self.tests.seconds(lambda batch: own.la(batch, link_approx=LINK)),
        }

        def train(examples: Any) -> Any:
            self._add_member(model.model, 1)
            self.train(model.model, list(examples), 1 - HELD_OUT, 1)
            return model.model

        how: Any = {"method": "second_training", "train": train, "train_loader": self.whole}
        (second,) = own.la.optimize_prior_precision(**how).posteriors
        other = self._with_statistics(second, {HELD: self.held, **self.loaders})
        both, chosen = [own, other], [own.la.prior_precision] * 2
        temperature = self._temperature([other])
        scaling = ("temperature_scaling", "Temperature scaling")
        mixture = ("second_mixture", "Mixture of two")
        elsewhere = partial(self.tests.row, prior=ELSEWHERE, trainings=2 - HELD_OUT)
        fits: Any = {"fit_seconds": own.seconds + other.seconds}
        return [
            self.tests.row("map", "MAP", **self._bare([own]), trainings=1),
            self.tests.row(
                *scaling,
                **self._bare([other], temperature),
                trainings=1 - HELD_OUT,
                prior=VALIDATION,
            ),
            elsewhere(*scaling, **self._bare([own], temperature)),
            elsewhere("lowrank_kron", "lowrank_kron", **self._exact([own], chosen[:1]), **fits),
            elsewhere(*mixture, **self._exact(both, chosen), **fits),
        ]

    def in_stages(self) -> list[Row]:
        """What `laplace_lora_ext.in_stages` comes to for each number of members, and MAPs alone.

        It is put together here from its parts, since more members share what fewer have trained
        and fitted: a test asks for equality.
        """
        counts = [count for count in COUNTS if count <= self.options.members]
        model = untrained(self.pretrained, self.seed)
        activate = [active_again(model)]
        for number in range(1, counts[-1]):
            self._add_member(model, number)
            activate.append(active_again(model))
        firsts: list[Member] = []
        for number, again in enumerate(activate):
            again()
            self.train(model, self._records(self.rest), 1 - HELD_OUT, number)
            firsts.append(self._fitted(model, self.rest, {HELD: self.held}))
        choices = {count: self._choices(firsts[:count]) for count in counts}
        seconds: list[Member] = []
        for number, again in enumerate(activate):
            again()
            self.train(model, self._records(self.whole), SECOND_STAGE, number)
            seconds.append(self._fitted(model, self.whole, self.loaders))
        return [row for n in counts for row in self._staged(firsts[:n], seconds[:n], choices[n])]

    def _staged(
        self, firsts: list[Member], members: list[Member], choices: list[torch.Tensor]
    ) -> Iterator[Row]:
        """Rows of some members."""
        count = len(members)
        names = ("In stages, MAP", "In stages")
        if count > 1:
            names = (f"{count} MAPs in stages", f"Mixture of {count} in stages")
        trainings = count * (1 - HELD_OUT + SECOND_STAGE)
        bare = partial(self.tests.row, f"staged_map_{count}", names[0], trainings=trainings)
        yield bare(**self._bare(members))
        temperature = self._temperature(firsts)
        yield bare(**self._bare(members, temperature), prior=TEMPERATURE)
        costs = {
            "trainings": trainings,
            "fit_seconds": sum(member.seconds for member in (*firsts, *members)),
        }
        row = partial(self.tests.row, f"staged_{count}", names[1], **costs)
        yield row(**self._exact(members, choices), prior=HELD_OUT_TEXTS)
        las: list[Any] = [copy(member.la) for member in members]
        for la, prior_precision in zip(las, choices, strict=True):
            la.prior_precision = prior_precision
        la = las[0] if count == 1 else LaplaceMixture(las)
        if count <= MOST_TAUGHT:
            yield from self._in_one_pass(la, f"staged_{count}", names[1], costs)
        if count == 1:
            scaled = Scaled(la, temperature)
            costs = {"trainings": trainings}
            yield self._student(scaled, "swapped", bare.args[0], "In stages, temperature", costs)

    def _in_one_pass(
        self, la: Any, method: str, name: str, costs: dict[str, float]
    ) -> Iterator[Row]:
        """What a posterior or a mixture teaches: its variances, and an adapter of its own."""
        for unlabelled in (None, "swapped") if method == "staged_1" else ("swapped",):
            say(self.options, f"Seed {self.seed}: {name}, taught by {unlabelled or 'its texts'}")
            started = process_time()
            la.amortize(self.whole, unlabelled=unlabelled)
            fit_seconds = costs["fit_seconds"] + process_time() - started

            def predict(batch: Any) -> torch.Tensor:
                return la(batch, pred_type="amortized", link_approx=LINK).detach().cpu()

            seconds = self.tests.seconds(predict)
            yield self.tests.row(
                f"{method}_amortized",
                f"{name}, learnt variance",
                {key: torch.cat([*map(predict, loader)]) for key, loader in self.loaders.items()},
                prior=TAUGHT_BY[unlabelled],
                link=LINK,
                predict_seconds=seconds,
                forward_passes=seconds / self.seconds["bare"],
                **{**costs, "fit_seconds": fit_seconds},
            )
            yield self._student(la, unlabelled, method, name, costs)

    def _student(
        self, teacher: Any, unlabelled: str | None, method: str, name: str, costs: dict[str, float]
    ) -> Row:
        started = process_time()
        found = predict_with_student(teacher, self.pretrained, unlabelled, self.seed, self.loaders)
        return self.tests.row(
            f"{method}_student",
            f"{name}, student",
            found,
            prior=TAUGHT_BY[unlabelled],
            trainings=costs["trainings"] + STEPS,
            fit_seconds=costs.get("fit_seconds", 0.0) + process_time() - started,
            predict_seconds=self.seconds["bare"],
            forward_passes=1.0,
        )

    def smoothed(self) -> list[Row]:
        """Training in stages with label smoothing, as much of it as held-out texts prefer."""
        losses: dict[float, float] = {}
        for amount in (0.0, *self.options.smoothing):
            logits = self._smoothed(amount).logits(self.held)
            losses[amount] = negative_log_likelihood(logits.softmax(-1), labels_of(self.held))
        amount = min(losses, key=lambda tried: losses[tried])
        model = self._smoothed(amount)
        self.train(model.model, self._records(self.whole), SECOND_STAGE, 0, amount)
        found = {name: model.logits(loader).softmax(-1) for name, loader in self.loaders.items()}
        name = ("label_smoothing", "Label smoothing in stages")
        trainings = len(losses) * (1 - HELD_OUT) + SECOND_STAGE
        bare = {"predict_seconds": self.seconds["bare"], "forward_passes": 1.0}
        own = {"prior": HELD_OUT_TEXTS, "chosen": amount, "trainings": trainings, **bare}
        return [self.tests.row(*name, found, **own)]

    def _smoothed(self, amount: float) -> AdaptedModel:
        """The model after a first stage with smoothed labels."""
        model = untrained(self.pretrained, self.seed)
        self.train(model, self._records(self.rest), 1 - HELD_OUT, 0, amount)
        return AdaptedModel(model, self.pretrained.class_token_ids)

    def _records(self, loader: DataLoader) -> Records:
        return loader.dataset  # pyright: ignore[reportReturnType]

    def _add_member(self, model: Any, number: int) -> None:
        transformers.set_seed(self.seed + MEMBER_SEEDS * number)
        add_fresh_adapter(model, f"member_{number}")

    def train(
        self, model: Any, records: Records, share: float, number: int, smoothing: float = 0.0
    ) -> None:
        """Train the active adapter for a share of the steps, with its own optimizer and order."""
        seed = self.seed + MEMBER_SEEDS * number
        say(self.options, f"Seed {self.seed}: training {number} for {share:g} of the steps")
        transformers.set_seed(seed)
        adapted = AdaptedModel(model, self.pretrained.class_token_ids)
        loader = self.pretrained.loader(records, generator=torch.Generator().manual_seed(seed))
        settings = self.pretrained.hyperparameters.for_share(share)
        recipe = Smoothed(smoothing) if smoothing else None
        self.pretrained.train_or_read(adapted.logits_model, loader, settings, seed, recipe)

    def _fitted(self, model: Any, data: DataLoader, loaders: Loaders) -> Member:
        say(self.options, f"Seed {self.seed}: fitting")
        started = process_time()
        la = over_lora(AdaptedModel(model, self.pretrained.class_token_ids))
        la.fit(self.pretrained.loader(self._records(data)), progress_bar=not self.options.quiet)
        return self._with_statistics(la, loaders, process_time() - started)

    def _with_statistics(self, la: Any, loaders: Loaders, seconds: float = 0.0) -> Member:
        """A posterior and its statistics; those of test texts are no part of a fit's seconds."""
        statistics = {}
        for name, loader in loaders.items():
            started = process_time()
            statistics[name] = la.predictive_statistics(loader)
            seconds += 0 if name in self.loaders else process_time() - started
        return Member(la, statistics, seconds)

    def _choices(self, firsts: Sequence[Member]) -> list[torch.Tensor]:
        """What held-out texts choose for one posterior, or for the mixture of several."""
        held: Any = [member.statistics[HELD] for member in firsts]
        if len(firsts) == 1:
            choice = copy(firsts[0].la)
            members = [choice]
            (held,) = held
        else:
            choice = LaplaceMixture([member.la for member in firsts])
            members = choice.members
            held = MixtureStatistics(tuple(held), ())
        choice.optimize_prior_precision(method="gridsearch", val_loader=held, link_approx=LINK)
        return [la.prior_precision.clone() for la in members]

    def _temperature(self, members: Sequence[Member]) -> float:
        """The temperature with which the members' mean predicts held-out texts best."""
        logits = torch.stack([member.statistics[HELD].f_mu for member in members])
        return fit_temperature(logits, labels_of(self.held))

    def _bare(self, members: Sequence[Member], temperature: float | None = None) -> dict[str, Any]:
        """Predictions of the members' models, and their cost."""
        found = {}
        for name in self.loaders:
            logits = torch.stack([member.statistics[name].f_mu for member in members])
            found[name] = (logits / (temperature or 1)).softmax(-1).mean(0)
        passes = float(len(members))
        cost = {"predict_seconds": passes * self.seconds["bare"], "forward_passes": passes}
        return {"probabilities": found, "chosen": temperature, **cost}

    def _exact(
        self, members: Sequence[Member], prior_precisions: Sequence[torch.Tensor]
    ) -> dict[str, Any]:
        """Predictions of posteriors, with their regret and cost."""
        own = list(zip(members, prior_precisions, strict=True))

        def predicted(name: str, factor: float | torch.Tensor = 1.0) -> torch.Tensor:
            return torch.stack([member.predict(name, factor * x) for member, x in own]).mean(0)

        found = {name: predicted(name) for name in self.loaders}
        labels = self.tests.labels[TEST]
        tried = (negative_log_likelihood(predicted(TEST, factor), labels) for factor in FACTORS)
        seconds = len(own) * self.seconds["exact"]
        return {
            "probabilities": found,
            "link": LINK,
            "chosen": torch.stack(list(prior_precisions)).log().mean().exp().item(),
            "regret": negative_log_likelihood(found[TEST], labels) - min(tried),
            "predict_seconds": seconds,
            "forward_passes": seconds / self.seconds["bare"],
        }
