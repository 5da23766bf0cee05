"""Training in stages and mixtures of what it trains, beside what they compete with."""

from collections.abc import Callable, Collection, Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import transformers
from peft import get_peft_model_state_dict
from torch import Tensor

from benchmarks.experiments.calibration import Tests, figures_of, measured, text_of
from benchmarks.experiments.overview import COUNTS
from benchmarks.fine_tuning import (
    HELD,
    HELD_OUT,
    MEMBER_SEEDS,
    TEST,
    TRAIN,
    Pretrained,
    fine_tune,
    held_out,
    labels_of,
    prepare,
    untrained,
)
from benchmarks.measuring import megabytes_of, processor_clock
from benchmarks.methods import CALIBRATED, METHODS, POSTERIORS
from benchmarks.methods.members import Member, Posteriors, logits_of, predict_maps
from benchmarks.methods.method import (
    Loaders,
    Method,
    Posterior,
    find_methods,
    fit_temperature,
)
from benchmarks.methods.posteriors import LINK, lowrank_kron, probabilities
from benchmarks.methods.priors import NO_PRIOR, Prediction, Prior, geometric_mean
from benchmarks.methods.students import predict_with_student, tempered
from benchmarks.metrics import distances
from benchmarks.models import AdaptedModel
from benchmarks.options import SeveralSeeds, Stages
from benchmarks.report import Result, Row, say
from benchmarks.training import MAXIMUM_LIKELIHOOD, Recipe, Records, Smoothed
from laplace_lora_ext import LoRALaplace, LowRankKronLoRALaplace
from laplace_lora_ext.metrics import negative_log_likelihood
from laplace_lora_ext.models.adapters import active_again, find_peft_model
from laplace_lora_ext.predictive.posterior import Hyperparameters
from laplace_lora_ext.predictive.statistics import (
    MixtureStatistics,
    PredictiveStatistics,
)
from laplace_lora_ext.training import stages
from laplace_lora_ext.training.stages import SECOND_STAGE
from laplace_lora_ext.training.students import STEPS, distill

FIRST_STAGE = 1 - HELD_OUT  # of the steps, as of the texts
STAGES = FIRST_STAGE + SECOND_STAGE
BOTH_TRAININGS = 1 + FIRST_STAGE  # an ordinary one, and a second one as long as a stage
EXPLAINED = (
    "Trainings are steps relative to an ordinary training's; forward passes are the "
    "seconds of a prediction relative to the bare model's; MB are those of adapters "
    "and posteriors; seconds of fits are processor time on a CPU."
)
LOG_NO_VARIANCE = 12  # log10 of a prior precision
FIGURES = (
    "accuracy",
    "nll",
    "ece",
    "brier",
    "aurc",
    "regret",
    "chosen",
    "trainings",
    "forward_passes",
    "megabytes",
    "fit_seconds",
    "predict_seconds",
)
TEMPERATURE = Prior("held_out_temperature", "temperature of the held-out texts")
PENALISED = Prior("held_out_penalised", "temperature with the posterior's penalty")
HELD_OUT_TEXTS = Prior("held_out", "held-out texts")
PRIOR_ALONE = Prior("held_out_prior", "held-out texts, no scale of the logits")
VALIDATION = Prior("validation", "validation")
ELSEWHERE = Prior("validation_elsewhere", "second training")
# What `amortize` and `distill` read by default.
SWAPPED = Prior("swapped", "training texts and swapped copies")
# Labels of texts that nobody trains on, for a temperature of the model that has all.
MORE_LABELS = (100, 500)

TEMPERATURE_SCALING = Method("temperature_scaling", "Temperature scaling")
SECOND_MIXTURE = Method("second_mixture", "Mixture of two")
STAGED_MAP = Method("staged_map_1", "In stages, MAP")
STAGED = Method("staged_1", "In stages")
LABEL_SMOOTHING = Method("label_smoothing", "Label smoothing in stages")


def run(options: Stages) -> Iterator[Result]:
    """Measure each seed, and report after each of its parts."""
    rows: list[Row] = []
    for seed in options.seeds:
        pretrained = prepare(options, seed)
        trial = Trial(
            pretrained,
            options,
            seed,
            has_students=not options.no_students,
            rivals=find_methods(CALIBRATED, options.rivals),
            posteriors=find_methods(POSTERIORS, options.posteriors),
        )
        # Each part begins when the one before it has been reported.
        parts = [trial.in_stages(options.members), trial.smoothed(options.smoothing)]
        if not options.no_ordinary:
            parts = [trial.ordinary(), trial.of_rivals(), *parts]
        for part in parts:
            rows += part
            words = text_of(pretrained, rows, FIGURES)
            yield figures_of(pretrained, rows), [*words, EXPLAINED]


class Trial:
    """One seed: trains, and measures how what it has trained predicts."""

    # Of a prediction of all test texts, by a model itself and by a posterior around it.
    bare: float
    exact: float
    adapter_megabytes: float

    def __init__(
        self,
        pretrained: Pretrained,
        options: SeveralSeeds,
        seed: int,
        has_students: bool = False,
        rivals: Collection[Method] = (),
        posteriors: Sequence[Posterior] = (),
    ) -> None:
        self.pretrained = pretrained
        self.has_students = has_students
        self.rivals = rivals
        self.posteriors = posteriors
        self.options = options
        self.seed = seed
        self.records = pretrained.data[TRAIN]
        self.batches = pretrained.loader(self.records)
        self.rest, self.held = held_out(pretrained)
        self.held_loaders = {HELD: pretrained.loader(self.held)}
        self.held_labels = labels_of(self.held)
        self.tests = Tests(pretrained, seed)
        self.loaders = self.tests.loaders
        self.clock = processor_clock(pretrained.device)

    def ordinary(self) -> Iterator[Row]:
        """Train as usual, and a second time with a fifth of the texts held out."""
        model = fine_tune(self.pretrained, self.records, self.seed)
        member = self.fitted(model.model, self.records, self.loaders)
        self._measure(model.model, member)
        other = self._second_training(model.model, member)
        of_map = self._with_distances(model, predict_maps([member], self.loaders))
        yield self.tests.row(
            METHODS["map"],
            of_map,
            self.bare,
            trainings=1,
            megabytes=self.adapter_megabytes,
        )
        yield from self._with_more_labels(model, member)
        temperature = self._temperature([other])
        # The second training alone: its held-out texts are the validation texts of its
        # own model.
        yield self._maps(
            TEMPERATURE_SCALING, [other], FIRST_STAGE, VALIDATION, temperature
        )
        yield self._maps(
            TEMPERATURE_SCALING, [member], BOTH_TRAININGS, ELSEWHERE, temperature
        )
        fit_seconds = member.seconds + other.seconds
        # Both trainings have been paid for: in the mixture both predict.
        for method, members in (
            (METHODS["lowrank_kron"], [member]),
            (SECOND_MIXTURE, [member, other]),
        ):
            chosen = len(members) * [member.la.hyperparameters]
            yield self._posteriors(
                method, ELSEWHERE, members, chosen, BOTH_TRAININGS, fit_seconds
            )

    def of_rivals(self) -> Iterator[Row]:
        """Measure methods of the list that are asked for, on the ordinary training."""
        if not self.rivals:
            return
        for rows in measured(self.pretrained, self.seed, self.rivals):
            # MAP, which is the unit of costs, has a row already.
            yield from (row for row in rows if row["method"] != "map")

    def _with_more_labels(self, model: AdaptedModel, member: Member) -> Iterator[Row]:
        """Measure the model at temperatures of more labelled texts, where there are."""
        for count in MORE_LABELS:
            examples = self.pretrained.task.further[:count]
            if len(examples) < count:
                return
            records = self.pretrained.records(examples)
            logits = model.logits(self.pretrained.prediction_loader(records))
            temperature = fit_temperature(logits, labels_of(records))
            prior = Prior(f"further_{count}", f"{count} more labels")
            yield self._maps(TEMPERATURE_SCALING, [member], 1, prior, temperature)

    def _measure(self, model: Any, member: Member) -> None:
        """Measure a model, which is as large as all others, and its posterior."""
        adapted = AdaptedModel(model, self.pretrained.class_token_ids)

        def predict(batch: Any) -> Any:
            return member.la(batch, link_approx=LINK)

        self.bare = self.tests.seconds(lambda batch: adapted.logits([batch]))
        self.exact = self.tests.seconds(predict)
        self.tests.bare_seconds = self.bare
        trained = get_peft_model_state_dict(find_peft_model(model))
        self.adapter_megabytes = megabytes_of(trained)

    def _kept(self, la: LoRALaplace) -> float:
        """Return the MB of an adapter and of the posterior around it."""
        return self.adapter_megabytes + megabytes_of(la.state_dict())

    def _second_training(self, model: Any, member: Member) -> Member:
        """Choose a posterior's prior by a second training; return that one's."""

        def train(examples: Any) -> Any:
            self._add_member(model, 1)
            self.train(model, list(examples), FIRST_STAGE, 1)
            return model

        history = member.la.optimize_prior_precision(
            method="second_training", train=train, train_loader=self.batches
        )
        (second,) = history.posteriors
        assert isinstance(second, LowRankKronLoRALaplace)  # as the member is
        return self._with_statistics(second, {**self.held_loaders, **self.loaders})

    def _with_distances(
        self, model: AdaptedModel, prediction: Prediction
    ) -> Prediction:
        """Add distances from training texts, where each text has a hidden state."""
        if self.pretrained.task.has_choices:
            return prediction
        training = model.hidden_states(self.batches)
        labels = labels_of(self.records)
        signs = {}
        for name, loader in self.loaders.items():
            of_texts = distances(training, labels, model.hidden_states(loader))
            signs[name] = {"mahalanobis": of_texts}
        return replace(prediction, signs=signs)

    def in_stages(self, members: int) -> Iterator[Row]:
        """Train as `in_stages` does, for each number of members, and MAPs alone.

        Its parts are put together anew, since more members share what fewer have
        trained and fitted: a test asks for equality.
        """
        counts = [count for count in COUNTS if count <= members]
        most = counts[-1]
        model = untrained(self.pretrained, self.seed)
        adapters = [active_again(model)]
        for number in range(1, most):
            adapters.append(self._add_member(model, number))

        def stage(records: Records, share: float, loaders: Loaders) -> list[Member]:
            members = []
            for number, activate in enumerate(adapters):
                activate()
                self.train(model, records, share, number)
                members.append(self.fitted(model, records, loaders))
            adapters[0]()
            return members

        firsts = stage(self.rest, FIRST_STAGE, self.held_loaders)
        self._measure(model, firsts[0])
        # The second stage changes the weights that these posteriors are around.
        choices = {count: self._choices(firsts[:count]) for count in counts}
        without_scale = [self._prior_alone(firsts[0])]
        penalised = {
            count: self._penalised_temperature(firsts[:count]) for count in counts
        }
        of_others = [self._chosen_for(other, model) for other in self.posteriors]
        seconds = stage(self.records, SECOND_STAGE, self.loaders)
        for count in counts:
            yield from self._staged(
                firsts[:count], seconds[:count], choices[count], penalised[count]
            )
        # What the scale of the logits adds is seen beside the same without it.
        fit_seconds = firsts[0].seconds + seconds[0].seconds
        yield self._posteriors(
            STAGED, PRIOR_ALONE, seconds[:1], without_scale, STAGES, fit_seconds
        )
        for other, chosen in zip(self.posteriors, of_others, strict=True):
            yield self._other_in_stages(other, model, chosen)

    def _built(self, method: Posterior, model: Any, records: Records) -> LoRALaplace:
        """Fit a posterior of the list to texts that its model was trained on."""
        say(self.options, f"Seed {self.seed}: {method.title} in stages")
        la = method.build(AdaptedModel(model, self.pretrained.class_token_ids))
        la.fit(self.pretrained.loader(records), progress_bar=not self.options.quiet)
        return la

    def _chosen_for(self, method: Posterior, model: Any) -> Hyperparameters:
        """Let held-out texts choose for a posterior of the list, as for ours."""
        la = self._built(method, model, self.rest)
        la.optimize_prior_precision(
            method="gridsearch", val_loader=self.held_loaders[HELD], link_approx=LINK
        )
        return la.hyperparameters

    def _other_in_stages(
        self, method: Posterior, model: Any, chosen: Hyperparameters
    ) -> Row:
        """Measure a posterior of the list around the weights of both stages."""
        started = self.clock()
        la = self._built(method, model, self.records)
        la.hyperparameters = chosen
        fit_seconds = self.clock() - started
        prior_precision = geometric_mean(chosen.prior_precision)
        named = Method(f"staged_{method.key}", f"{method.title} in stages")
        return self._by_batches(
            named, HELD_OUT_TEXTS, la, fit_seconds, chosen=prior_precision
        )

    def _by_batches(
        self,
        method: Method,
        prior: Prior,
        la: LoRALaplace,
        fit_seconds: float,
        chosen: float | None = None,
        pred_type: str = "glm",
    ) -> Row:
        """Measure a posterior in stages by passes over the texts."""

        def predict(batch: Any) -> Tensor:
            return probabilities(la, batch, LINK, pred_type=pred_type)

        predicted = {}
        for name, loader in self.loaders.items():
            predicted[name] = torch.cat([predict(batch) for batch in loader])
        prediction = Prediction(predicted, prior, LINK, chosen=chosen)
        seconds = self.tests.seconds(predict)
        return self.tests.row(
            method,
            prediction,
            seconds,
            fit_seconds,
            trainings=STAGES,
            megabytes=self._kept(la),
        )

    def _maps(
        self,
        method: Method,
        members: Sequence[Member],
        trainings: float,
        prior: Prior = NO_PRIOR,
        temperature: float | None = None,
    ) -> Row:
        """Measure members' models, without their posteriors."""
        prediction = predict_maps(members, self.loaders, prior, temperature)
        seconds = len(members) * self.bare
        megabytes = len(members) * self.adapter_megabytes
        return self.tests.row(
            method, prediction, seconds, trainings=trainings, megabytes=megabytes
        )

    def _posteriors(
        self,
        method: Method,
        prior: Prior,
        members: Sequence[Member],
        chosen: Sequence[Hyperparameters],
        trainings: float,
        fit_seconds: float,
    ) -> Row:
        """Measure a posterior, or a mixture, with what was chosen for each member."""
        posteriors = Posteriors(members, chosen)
        labels = self.tests.labels[TEST]
        prediction = posteriors.predict(self.loaders, prior, labels)
        seconds = len(members) * self.exact
        megabytes = sum(self._kept(member.la) for member in members)
        return self.tests.row(
            method,
            prediction,
            seconds,
            fit_seconds,
            trainings=trainings,
            megabytes=megabytes,
        )

    def _staged(
        self,
        firsts: list[Member],
        members: list[Member],
        chosen: list[Hyperparameters],
        penalised: float,
    ) -> Iterator[Row]:
        """Measure some members."""
        count = len(members)
        maps = Method(f"staged_map_{count}", f"{count} MAPs in stages")
        posteriors = Method(f"staged_{count}", f"Mixture of {count} in stages")
        if count == 1:
            maps = STAGED_MAP
            posteriors = STAGED
        trainings = count * STAGES
        yield self._maps(maps, members, trainings)
        temperature = self._temperature(firsts)
        yield self._maps(maps, members, trainings, TEMPERATURE, temperature)
        yield self._maps(maps, members, trainings, PENALISED, penalised)
        fit_seconds = sum(member.seconds for member in (*firsts, *members))
        yield self._posteriors(
            posteriors, HELD_OUT_TEXTS, members, chosen, trainings, fit_seconds
        )
        if count == 1 and self.has_students:
            la = copy(members[0].la)
            (la.hyperparameters,) = chosen
            yield self._amortized(la, fit_seconds)
            yield self._student(la, la.distill, posteriors, fit_seconds)
            # What a temperature teaches, in the posterior's place.
            teacher = tempered(la, temperature)
            teach = partial(distill, [la], teacher)
            method = Method(maps.key, "In stages, temperature")
            yield self._student(la, teach, method, fit_seconds=0.0)

    def _amortized(self, la: LoRALaplace, fit_seconds: float) -> Row:
        """Learn the variances of a posterior, and predict in one pass."""
        say(self.options, f"Seed {self.seed}: {STAGED.title}, learning variances")
        started = self.clock()
        la.amortize(self.batches)
        fit_seconds += self.clock() - started
        named = Method(f"{STAGED.key}_amortized", f"{STAGED.title}, learnt variance")
        return self._by_batches(named, SWAPPED, la, fit_seconds, pred_type="amortized")

    def _student(
        self,
        la: LoRALaplace,
        teach: Callable[..., str],
        method: Method,
        fit_seconds: float,
    ) -> Row:
        """Teach a new adapter what a posterior or a temperature predicts."""
        started = self.clock()
        model = find_peft_model(la.model)
        taught = predict_with_student(
            model, teach, self.pretrained, self.seed, self.loaders
        )
        fit_seconds += self.clock() - started
        named = Method(f"{method.key}_student", f"{method.title}, student")
        prediction = Prediction(taught, SWAPPED)
        # It is a model of the same size, and predicts by itself.
        return self.tests.row(
            named,
            prediction,
            self.bare,
            fit_seconds,
            trainings=STAGES + STEPS,
            megabytes=self.adapter_megabytes,
        )

    def smoothed(self, amounts: Sequence[float]) -> Iterator[Row]:
        """Train in stages with as much label smoothing as held-out texts prefer."""
        if not amounts:
            return
        # Without any smoothing, too: a method must be free to do nothing.
        losses = {amount: self._loss_with(amount) for amount in (0.0, *amounts)}
        best = min(losses, key=lambda amount: losses[amount])
        # Read from the cache: of all the amounts only one first stage has to be in
        # memory.
        model = self._first_stage(best)
        self.train(model.model, self.records, SECOND_STAGE, 0, smoothing(best))
        prediction = Prediction(
            model.probabilities(self.loaders), prior=HELD_OUT_TEXTS, chosen=best
        )
        trainings = len(losses) * FIRST_STAGE + SECOND_STAGE
        yield self.tests.row(
            LABEL_SMOOTHING,
            prediction,
            self.bare,
            trainings=trainings,
            megabytes=self.adapter_megabytes,
        )

    def _loss_with(self, amount: float) -> float:
        """Compute the held-out texts' NLL after a first stage with smoothed labels."""
        model = self._first_stage(amount)
        logits = model.logits(self.held_loaders[HELD])
        return negative_log_likelihood(logits.softmax(-1), self.held_labels)

    def _first_stage(self, amount: float) -> AdaptedModel:
        """Train a model on the texts that are not held out, with smoothed labels."""
        model = untrained(self.pretrained, self.seed)
        self.train(model, self.rest, FIRST_STAGE, 0, smoothing(amount))
        return AdaptedModel(model, self.pretrained.class_token_ids)

    def _add_member(self, model: Any, number: int) -> Callable[[], None]:
        """Add an adapter whose first weights don't depend on how many there are."""
        transformers.set_seed(self.seed + MEMBER_SEEDS * number)
        return stages.add_member(model, number)

    def train(
        self,
        model: Any,
        records: Records,
        share: float,
        number: int,
        recipe: Recipe = MAXIMUM_LIKELIHOOD,
    ) -> None:
        """Train the active adapter for a share of the steps.

        It has an optimizer and an order of its own.
        """
        # Members differ in the order of their texts and in dropout, as those of
        # ensembles do.
        seed = self.seed + MEMBER_SEEDS * number
        say(
            self.options,
            f"Seed {self.seed}: training {number} for {share:g} of the steps",
        )
        transformers.set_seed(seed)
        adapted = AdaptedModel(model, self.pretrained.class_token_ids)
        self.pretrained.train_or_read(
            adapted.logits_model,
            records,
            self.pretrained.hyperparameters.for_share(share),
            seed,
            recipe,
        )

    def fitted(self, model: Any, records: Records, loaders: Loaders) -> Member:
        """Fit a posterior to the texts that its model was trained on."""
        say(self.options, f"Seed {self.seed}: fitting")
        started = self.clock()
        adapted = AdaptedModel(model, self.pretrained.class_token_ids)
        la = lowrank_kron(adapted)
        la.fit(self.pretrained.loader(records), progress_bar=not self.options.quiet)
        return self._with_statistics(la, loaders, self.clock() - started)

    def _with_statistics(
        self, la: LowRankKronLoRALaplace, loaders: Loaders, seconds: float = 0.0
    ) -> Member:
        """Collect a posterior's statistics; test texts' don't count to its seconds."""
        statistics = {}
        for name, loader in loaders.items():
            started = self.clock()
            statistics[name] = la.predictive_statistics(loader)
            # Those of held-out texts are part of choosing; others only measure.
            if name not in self.loaders:
                seconds += self.clock() - started
        return Member(la, statistics, seconds)

    def _choices(self, firsts: Sequence[Member]) -> list[Hyperparameters]:
        """Let held-out texts choose for one posterior, or for a mixture."""
        posteriors = [member.la for member in firsts]
        chosen, _ = stages.choose_priors(posteriors, held_out_of(firsts))
        return chosen

    def _prior_alone(self, first: Member) -> Hyperparameters:
        """Let held-out texts choose one posterior's prior, without a scale."""
        # A copy: the posterior keeps what was chosen for it with the scale.
        la = copy(first.la)
        held = first.statistics[HELD]
        la.optimize_prior_precision(
            method="gridsearch", val_loader=held, optimize_scale=False
        )
        return la.hyperparameters

    def _penalised_temperature(self, firsts: Sequence[Member]) -> float:
        """Find the temperature by the posteriors' own search, without variance.

        The search has a penalty for being surer than the model. Few held-out texts, all
        of them right, would else choose a temperature near 0.
        """
        together = stages.joined([member.la for member in firsts])
        together.optimize_prior_precision(
            method="gridsearch",
            val_loader=held_out_of(firsts),
            log_prior_prec_min=LOG_NO_VARIANCE,
            log_prior_prec_max=LOG_NO_VARIANCE,
            grid_size=1,
        )
        return 1 / float(together.members[0].logit_scale)

    def _temperature(self, members: Sequence[Member]) -> float:
        """Find the temperature at which the members' mean predicts held-out texts."""
        return fit_temperature(logits_of(members, HELD), self.held_labels)


def held_out_of(firsts: Sequence[Member]) -> PredictiveStatistics | MixtureStatistics:
    """Join members' statistics of the held-out texts, by which they choose together.

    A mixture is less sure than its members, and wants another prior.
    """
    held = tuple(member.statistics[HELD] for member in firsts)
    return held[0] if len(held) == 1 else MixtureStatistics(held)


def smoothing(amount: float) -> Recipe:
    """Smooth labels; by none, a training is the one that others share."""
    return Smoothed(amount) if amount else MAXIMUM_LIKELIHOOD
