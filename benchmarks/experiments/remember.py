"""Domains learnt one after the other with one adapter, and what is forgotten."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any, ClassVar

import torch
from torch.nn.functional import cross_entropy

import laplace_lora_ext
from benchmarks.domains import Domains, read_domains
from benchmarks.fine_tuning import untrained
from benchmarks.models import AdaptedModel
from benchmarks.options import Remember
from benchmarks.report import Result, Row, over_seeds, paired_differences, say, table
from benchmarks.training import Recipe, Records, read_or_train, train
from laplace_lora_ext import LoRALaplace

CHOOSING_SEED = 0
REPLAYED_AN_INTENT = 5


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

    def penalty(self) -> torch.Tensor:
        """Penalise the present weights, in nats of the old data's likelihood."""
        return torch.zeros(())


class OldWeights(Memory):
    """Half the squared distance from the last domain's weights."""

    name = "L2 to the old weights"
    weights = (1.0, 10.0, 100.0)

    def keep(self, records: Records) -> None:
        """Copy the weights."""
        del records
        self._old = [weight.detach().clone() for weight in self._trained]

    def penalty(self) -> torch.Tensor:
        """Sum the squares over LoRA weights and head."""
        pairs = zip(self._trained, self._old, strict=True)
        squares = [(weight - old).square().sum() for weight, old in pairs]
        return torch.stack(squares).sum() / 2

    @property
    def _trained(self) -> list[torch.nn.Parameter]:
        return [each for each in self.model.model.parameters() if each.requires_grad]


class Posteriors(Memory):
    """One posterior a domain, over LoRA weights and head; their penalties add up."""

    name = "Remember, one posterior a domain"
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
            modules_to_save=True,
        )
        # All texts are of one domain, so that one row is the offset of all.
        offset = self.domains.outside[records[0]["labels"]]

        def leave_the_domain(module: Any, inputs: Any, output: Any) -> Any:
            output.logits = output.logits + offset.to(output.logits)
            return output

        # Training had the same offsets: the Fisher has to be that of its loss.
        hook = self.model.model.register_forward_hook(leave_the_domain)
        la.fit(self.domains.pretrained.loader(records), progress_bar=False)
        hook.remove()
        self._posteriors.append(la)

    def penalty(self) -> torch.Tensor:
        """Add up the posteriors' penalties, as the callback `Remember` does."""
        return torch.stack([la.penalty() for la in self._posteriors]).sum()


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


METHODS: tuple[type[Memory], ...] = (Memory, OldWeights, Diagonals, Replay, Posteriors)


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
        model = AdaptedModel(untrained(self.domains.pretrained, self.seed))
        memory = self.method(self.domains, model)
        for place in range(n_domains):
            new = self.domains.train[place]
            say(self.options, self.seed, self.method.name, self.weight, place)
            self._learn(model, memory, new, is_first=place == 0)
            for tested in range(n_domains):
                yield {
                    "name": self.method.name,
                    "weight": self.weight,
                    "seed": self.seed,
                    "learnt": place + 1,
                    "domain": self.domains.names[tested],
                    **self._quality(model, self.domains.test[tested]),
                }
            if place + 1 < n_domains:
                memory.keep(new)

    def _learn(
        self, model: AdaptedModel, memory: Memory, new: Records, is_first: bool
    ) -> None:
        """Train on a domain, or read an equal training."""
        pretrained = self.domains.pretrained
        records = new + memory.replayed()
        weight = self.weight
        if is_first:  # nothing is remembered yet
            weight = None

        def loss_of(batch: Any) -> torch.Tensor:
            labels = batch["labels"]
            offsets = self.domains.outside.to(labels.device)[labels]
            loss = cross_entropy(model.logits_model(batch) + offsets, labels)
            if weight is None:
                return loss
            # The loss is a mean over the new texts, the penalty a sum over the old.
            return loss + weight * memory.penalty() / len(new)

        key: list[Any] = [
            "domains",
            asdict(pretrained.hyperparameters),
            records,
            self.seed,
        ]
        if weight is not None:
            key += [self.method.name, weight]
        read_or_train(
            model.model,
            key,
            self.options.cache,
            lambda: train(
                model.model,
                pretrained.shuffled_loader(records, self.seed),
                loss_of,
                pretrained.hyperparameters,
                show_progress=not self.options.quiet,
                recipe=Recipe(),
            ),
        )

    def _quality(self, model: AdaptedModel, records: Records) -> Row:
        """Measure the model among the intents of the texts' domain."""
        labels = torch.tensor([record["labels"] for record in records])
        logits = model.logits(self.domains.pretrained.prediction_loader(records))
        logits += self.domains.outside[labels]
        right = (logits.argmax(-1) == labels).double().mean()
        return {
            "accuracy": right.item(),
            "nll": cross_entropy(logits, labels).item(),
        }


def run(options: Remember) -> Iterator[Result]:
    """Choose each method's weight on other domains, and measure each seed."""
    tried: list[Row] = []
    chosen = {method: _chosen(method, options, tried) for method in METHODS}
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


def _chosen(method: type[Memory], options: Remember, tried: list[Row]) -> float | None:
    """Choose by the NLL of two other domains, learnt in turn; add what was tried."""
    if not method.weights:
        return None
    domains = read_domains(options.chosen_on, options, CHOOSING_SEED)
    by_weight: dict[float, float] = {}
    for weight in method.weights:
        course = Course(domains, options, CHOOSING_SEED, method, weight)
        last = [row for row in course.rows(2) if row["learnt"] == 2]
        of_both = {key: mean(row[key] for row in last) for key in ("accuracy", "nll")}
        tried.append({"name": method.name, "weight": weight, **of_both})
        by_weight[weight] = of_both["nll"]
    return min(by_weight, key=lambda weight: by_weight[weight])


def summaries(domains: Domains, rows: Sequence[Row]) -> list[Row]:
    """Sum up each method and seed: means over the domains learnt so far."""
    found: list[Row] = []
    names = list(dict.fromkeys((row["seed"], row["name"]) for row in rows))
    for seed, name in names:
        own = [row for row in rows if (row["seed"], row["name"]) == (seed, name)]
        summary: Row = {"name": name, "seed": seed, "weight": own[0]["weight"]}
        for learnt in range(2, len(domains.names) + 1):
            known = domains.names[:learnt]
            after = [
                row for row in own if row["learnt"] == learnt and row["domain"] in known
            ]
            for key in ("accuracy", "nll"):
                summary[f"{key}_after_{learnt}"] = mean(row[key] for row in after)
        for row in own:
            if row["learnt"] == len(domains.names):
                summary[f"{row['domain']}_at_the_end"] = row["accuracy"]
        found.append(summary)
    return found


def text_of(
    domains: Domains, options: Remember, tried: Sequence[Row], rows: Sequence[Row]
) -> list[str]:
    """Put the figures in words and tables."""
    by_seed = summaries(domains, rows)
    measured = [key for key in by_seed[0] if key not in ("name", "seed", "weight")]
    ends = [key for key in measured if key.startswith(("accuracy_", "nll_"))]
    settings = domains.pretrained.hyperparameters
    sizes = f"{len(domains.train[0])} training and {len(domains.test[0])} test texts"
    words = (
        f"{', then '.join(domains.names)}: {sizes} a domain, {settings.steps} steps "
        f"each, {len({row['seed'] for row in rows})} seeds. One head has the intents "
        "of all; a text's domain is known, in training and test, and the softmax is "
        "over its intents. Accuracy and NLL are means over the domains learnt so far, "
        "and at the end there is the accuracy on each. Mean ± standard deviation over "
        "seeds."
    )
    beside = f"Each method minus {OURS!r}, of the same seed; mean ± standard error:"
    choice = (
        f"Weights tried on two domains of {options.chosen_on}, learnt in turn (means "
        "over both); the lowest NLL chooses:"
    )
    differences = paired_differences(by_seed, OURS, ends)
    return [
        words,
        table(over_seeds(by_seed, ("name",), measured)),
        beside,
        table(differences),
        choice,
        table(tried),
    ]
