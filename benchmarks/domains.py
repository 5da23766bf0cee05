"""Domains of CLINC150 that share one head: each has intents of its own."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from benchmarks.fine_tuning import OVERRIDES, Pretrained
from benchmarks.models import encoder_folder, load_tokenizer
from benchmarks.options import Remember
from benchmarks.tasks.intents import CLINC, Intents
from benchmarks.tasks.task import Example, Task
from benchmarks.training import Records

SEPARATOR = "+"
IMPOSSIBLE = -30.0  # a logit's offset; without end, gradients would be no numbers


@dataclass(frozen=True)
class Domains:
    """Texts of domains, and the encoder with one head over the intents of all."""

    tasks: list[Task]  # labels count on from one domain to the next
    pretrained: Pretrained

    @property
    def names(self) -> list[str]:
        """List the domains' names, in their order."""
        return [task.name for task in self.tasks]

    @cached_property
    def outside(self) -> Tensor:
        """Make offsets `(classes, classes)` of logits, by label.

        They leave the intents of the label's own domain, and no other.
        """
        n_classes = torch.tensor([len(task.classes) for task in self.tasks])
        places = torch.arange(len(self.tasks))
        domain = places.repeat_interleave(n_classes)  # of each class
        is_outside = domain[:, None] != domain
        return IMPOSSIBLE * is_outside.float()

    @cached_property
    def train(self) -> list[Records]:
        """Tokenize the training texts of each domain."""
        return [self.pretrained.records(task.train) for task in self.tasks]

    @cached_property
    def test(self) -> list[Records]:
        """Tokenize the test texts of each domain."""
        return [self.pretrained.records(task.test) for task in self.tasks]


def read_domains(names: str, options: Remember, seed: int) -> Domains:
    """Draw texts of the domains that "travel+banking" names, ten an intent."""
    tasks: list[Task] = []
    classes: list[str] = []
    for name in names.split(SEPARATOR):
        intents = Intents(name, CLINC, domain=name)
        task = intents.read(options, seed)
        tasks.append(_counted_on(task, first=len(classes)))
        classes += task.classes
    # One head has the intents of all domains from the start, also of those to come.
    union = Task(
        name=names,
        classes=classes,
        is_prompt=False,
        train=[example for task in tasks for example in task.train],
        test=[example for task in tasks for example in task.test],
    )
    return Domains(tasks, _prepared(union, options))


def _counted_on(task: Task, first: int) -> Task:
    """Return a task whose labels begin with that number."""
    return replace(
        task,
        train=_moved(task.train, first),
        test=_moved(task.test, first),
        # What is out of one domain's scope may be another's.
        shifted={},
    )


def _moved(examples: Sequence[Example], first: int) -> list[Example]:
    """Count labels from that number on."""
    moved = []
    for example in examples:
        assert example.label is not None  # of training and test texts
        moved.append(Example(example.text, example.label + first))
    return moved


def _prepared(task: Task, options: Remember) -> Pretrained:
    """Find the encoder, which gets a head over all classes."""
    folder = encoder_folder()
    # Only the last weights of each domain are learnt on from.
    settings = replace(Intents.hyperparameters, checkpoints=1)
    settings = settings.asked(options, OVERRIDES)
    return Pretrained(task, settings, load_tokenizer(folder), folder, options)
