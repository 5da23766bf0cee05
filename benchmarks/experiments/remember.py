"""Domains learnt one after the other with one adapter, and what is forgotten."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from statistics import mean
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import laplace_lora_ext
from benchmarks.domains import Domains, read_domains
from benchmarks.fine_tuning import untrained
from benchmarks.models import AdaptedModel
from benchmarks.options import Remember
from benchmarks.report import Result, Row, over_seeds, paired_differences, say, table
from benchmarks.training import Checkpoints, Recipe, Records, read_or_train, train
from laplace_lora_ext import LoRALaplace

CHOOSING_SEED = 0  # one is enough: weights are powers of ten
REPLAYED_AN_INTENT = 5
QUALITIES = ("accuracy", "nll")
IDENTITY = ("name", "seed", "weight")  # of a course


class Memory:
    """What a method keeps of the domains that are past; here, nothing."""

    name: ClassVar[str] = "Nothing"
    weights: ClassVar[tuple[float, ...]] = ()  # that another trio chooses from

    def __init__(self, domains: Domains, model: AdaptedModel) -> None:
        self.domains = domains
        self.model = model

    def keep(self, records: Records) -> None:
        """Keep what it needs of a domain that has just been learnt."""

    def replayed(self) -> Records:
        """Return old texts to mix into the new ones."""
        return []

    def penalty(self) -> Tensor:
        """Penalise the present weights, in nats of the old data's likelihood."""
        return torch.zeros(())


class OldWeights(Memory):
    """Half the squared distance from the last domain's weights."""

    name = "L2 to the old weights"
    weights = (1.0, 10.0, 100.0)

    def keep(self, records: Records) -> None:
        """Copy the weights."""
        del records
        weights = self.model.trained_weights
        # Clones: training goes on in place.
        self._old = [weight.detach().clone() for weight in weights]

    def penalty(self) -> Tensor:
        """Sum the squares over LoRA weights and head."""
        weights = self.model.trained_weights
        squares = []
        for weight, old in zip(weights, self._old, strict=True):
            distance = weight - old
            squares.append(distance.square().sum())
        # Half of them, as a Gaussian's logarithm has it.
        return torch.stack(squares).sum() / 2


class Posteriors(Memory):
    """One posterior a domain, over LoRA weights and head; their penalties add up."""

    name = "Remember, one posterior a domain"
    # From Bayes' rule, which is a weight of 1, on.
    weights = (1.0, 10.0, 100.0)
    structure: ClassVar[str] = "lowrank_kron"

    def __init__(self, domains: Domains, model: AdaptedModel) -> None:
        super().__init__(domains, model)
        self._posteriors: list[LoRALaplace] = []

    def keep(self, records: Records) -> None:
        """Fit a posterior, whose prior precision stays at its default of 1."""
        la = laplace_lora_ext.Laplace(
            self.model.model,
            "classification",
            hessian_structure=self.structure,
            # The head is trained on every domain, and forgets as well.
            modules_to_save=True,
        )
        # All texts are of one domain, so that one row is the offset of all.
        some_label = records[0]["labels"]
        offset = self.domains.outside[some_label]
        batches = self.domains.pretrained.loader(records)

        def leave_the_domain(module: Any, inputs: Any, output: Any) -> Any:
            output.logits = output.logits + offset.to(output.logits)
            return output

        # Training had the same offsets: the Fisher has to be that of its loss.
        hook = self.model.model.register_forward_hook(leave_the_domain)
        la.fit(batches, progress_bar=False)
        hook.remove()
        self._posteriors.append(la)

    def penalty(self) -> Tensor:
        """Add up the posteriors' penalties, as the callback `Remember` does."""
        penalties = [la.penalty() for la in self._posteriors]
        return torch.stack(penalties).sum()


OURS = Posteriors.name


class Diagonals(Posteriors):
    """The same with a diagonal Fisher: elastic weight consolidation."""

    name = "EWC, diagonal Fisher"
    structure = "diag"


class Replay(Memory):
    """Five texts an intent, mixed into the new ones."""

    name = "Replay of five texts an intent"

    def __init__(self, domains: Domains, model: AdaptedModel) -> None:
        super().__init__(domains, model)
        self._kept: Records = []

    def keep(self, records: Records) -> None:
        """Keep the first texts of each intent."""
        n_kept: dict[int, int] = {}
        for record in records:
            label = record["labels"]
            n_kept[label] = n_kept.get(label, 0) + 1
            if n_kept[label] <= REPLAYED_AN_INTENT:
                self._kept.append(record)

    def replayed(self) -> Records:
        """Return the texts that were kept."""
        return self._kept


# Nothing comes first, as the floor; ours comes last, behind all its rivals.
METHODS: tuple[type[Memory], ...] = (
    Memory,
    OldWeights,
    Diagonals,
    Replay,
    Posteriors,
)


@dataclass(frozen=True)
class Course:
    """A method that learns domains in turn, with one seed."""

    domains: Domains
    options: Remember
    seed: int
    method: type[Memory]
    weight: float | None

    def rows(self, n_domains: int) -> Iterator[Row]:
        """Learn as many domains; measure all of these after each."""
        domains = self.domains
        model = AdaptedModel(untrained(domains.pretrained, self.seed))
        memory = self.method(domains, model)
        for place in range(n_domains):
            new = domains.train[place]
            say(self.options, self.seed, self.method.name, self.weight, place)
            # In the first domain nothing is remembered yet.
            weight = None if place == 0 else self.weight
            self._learn(model, memory, new, weight)
            learnt = place + 1
            for tested in range(n_domains):
                quality = self._quality(model, domains.test[tested])
                yield {
                    "name": self.method.name,
                    "weight": self.weight,
                    "seed": self.seed,
                    "learnt": learnt,
                    "domain": domains.names[tested],
                    **quality,
                }
            # Nothing is learnt after the last.
            if learnt < n_domains:
                memory.keep(new)

    def _learn(
        self,
        model: AdaptedModel,
        memory: Memory,
        new: Records,
        weight: float | None,
    ) -> None:
        """Train on a domain, or read an equal training."""
        pretrained = self.domains.pretrained
        records = new + memory.replayed()

        def loss_of(batch: Any) -> Tensor:
            labels = batch["labels"]
            # Replayed texts are of other domains than the rest of their batch.
            offsets = self.domains.outside.to(labels.device)[labels]
            logits = model.logits_model(batch) + offsets
            loss = cross_entropy(logits, labels)
            if weight is None:
                return loss
            # The loss is a mean over the new texts, the penalty a sum over the old.
            return loss + weight * memory.penalty() / len(new)

        def trained() -> Checkpoints:
            return train(
                model.model,
                pretrained.shuffled_loader(records, self.seed),
                loss_of,
                pretrained.hyperparameters,
                show_progress=not self.options.quiet,
                recipe=Recipe(),
            )

        settings = asdict(pretrained.hyperparameters)
        key: list[Any] = ["domains", settings, records, self.seed]
        # Methods without a weight differ by their records alone, if at all: the first
        # domain is learnt once for all methods.
        if weight is not None:
            key += [self.method.name, weight]
        read_or_train(model.model, key, self.options.cache, trained)

    def _quality(self, model: AdaptedModel, records: Records) -> Row:
        """Measure the model among the intents of the texts' domain."""
        labels = torch.tensor([record["labels"] for record in records])
        batches = self.domains.pretrained.prediction_loader(records)
        logits = model.logits(batches)
        logits += self.domains.outside[labels]
        predicted = logits.argmax(-1)
        is_right = predicted == labels
        return {
            "accuracy": is_right.double().mean().item(),
            "nll": cross_entropy(logits, labels).item(),
        }


def run(options: Remember) -> Iterator[Result]:
    """Choose each method's weight on other domains, and measure each seed."""
    tried: list[Row] = []
    chosen: dict[type[Memory], float | None] = {}
    for method in METHODS:
        chosen[method] = None
        if method.weights:
            of_method = list(_tried(method, options))
            best = min(of_method, key=itemgetter("nll"))
            chosen[method] = best["weight"]
            tried += of_method
    rows: list[Row] = []
    for seed in options.seeds:
        domains = read_domains(options.task, options, seed)
        for method, weight in chosen.items():
            course = Course(domains, options, seed, method, weight)
            rows += course.rows(len(domains.tasks))
        figures = {
            "domains": domains.names,
            "train": [len(records) for records in domains.train],
            "test": [len(records) for records in domains.test],
            "hyperparameters": asdict(domains.pretrained.hyperparameters),
            "tried": tried,
            "rows": rows,
        }
        yield figures, text_of(domains, options, tried, rows)


def _tried(method: type[Memory], options: Remember) -> Iterator[Row]:
    """Learn two other domains in turn, with each weight that a method may have."""
    domains = read_domains(options.chosen_on, options, CHOOSING_SEED)
    for weight in method.weights:
        course = Course(domains, options, CHOOSING_SEED, method, weight)
        # Two are the fewest of which one can be forgotten.
        last = [row for row in course.rows(2) if row["learnt"] == 2]
        tried: Row = {"name": method.name, "weight": weight}
        for key in QUALITIES:
            # Over both: what is kept of the old may be bought by learning less new.
            tried[key] = mean(row[key] for row in last)
        yield tried


def summaries(domains: Domains, rows: Sequence[Row]) -> list[Row]:
    """Sum up each method and seed: means over the domains learnt so far."""
    courses: dict[tuple[int, str], list[Row]] = {}
    for row in rows:
        seed_and_name = (row["seed"], row["name"])
        course = courses.setdefault(seed_and_name, [])
        course.append(row)
    return [_summary(domains.names, course) for course in courses.values()]


def _summary(domains: Sequence[str], course: Sequence[Row]) -> Row:
    """Sum up the rows of one method and seed."""
    first = course[0]
    summary: Row = {key: first[key] for key in IDENTITY}
    # After the first domain nothing can be forgotten: all methods are alike.
    for n_learnt in range(2, len(domains) + 1):
        learnt = domains[:n_learnt]
        after = [row for row in course if row["learnt"] == n_learnt]
        known = [row for row in after if row["domain"] in learnt]
        for key in QUALITIES:
            of_domains = [row[key] for row in known]
            summary[f"{key}_after_{n_learnt}"] = mean(of_domains)
    at_the_end = [row for row in course if row["learnt"] == len(domains)]
    for row in at_the_end:
        summary[f"{row['domain']}_at_the_end"] = row["accuracy"]
    return summary


def text_of(
    domains: Domains,
    options: Remember,
    tried: Sequence[Row],
    rows: Sequence[Row],
) -> list[str]:
    """Put the figures in words and tables."""
    by_seed = summaries(domains, rows)
    measured = [key for key in by_seed[0] if key not in IDENTITY]
    # Not those of each domain at the end: they are in the means already.
    means = [key for key in measured if key.startswith(("accuracy_", "nll_"))]
    settings = domains.pretrained.hyperparameters
    n_train = len(domains.train[0])
    n_test = len(domains.test[0])
    seeds = {row["seed"] for row in rows}
    words = (
        f"{', then '.join(domains.names)}: {n_train} training and {n_test} test texts "
        f"a domain, {settings.steps} steps each, {len(seeds)} seeds. One head has the "
        "intents of all; a text's domain is known, in training and test, and the "
        "softmax is over its intents. Accuracy and NLL are means over the domains "
        "learnt so far, and at the end there is the accuracy on each. Mean ± standard "
        "deviation over seeds."
    )
    beside = f"Each method minus {OURS!r}, of the same seed; mean ± standard error:"
    choice = (
        f"Weights tried on two domains of {options.chosen_on}, learnt in turn (means "
        "over both); the lowest NLL chooses:"
    )
    differences = paired_differences(by_seed, OURS, means)
    return [
        words,
        table(over_seeds(by_seed, ("name",), measured)),
        beside,
        table(differences),
        choice,
        table(tried),
    ]
