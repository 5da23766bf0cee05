"""One pass over the training data, by one process or by many."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any, NamedTuple

import torch
import tqdm

from laplace_lora_ext.messages import naming, warn
from laplace_lora_ext.models.batches import named_batches
from laplace_lora_ext.models.same_model import hashes
from laplace_lora_ext.passes.checks import noting_calls
from laplace_lora_ext.processes.exchange import count, gathered, rank
from laplace_lora_ext.processes.shards import Share, refuse_copies

_LITTLE = 0.1  # probability of all answers together
_GUESS = 0.99  # a loss from this share of the labels' entropy on is chance


@dataclass(frozen=True)
class Seen:
    """What is seen of labels and answers beside the sums, to warn of once all are summed."""

    answered: float = 0.0  # probability of all answers together, summed over texts
    n_texts: int = 0  # that have answers
    all_binary: bool = True  # whether every label is 0 or 1
    labels: Counter[int] = field(default_factory=Counter)  # how many texts have each class

    @classmethod
    def of(cls, y: torch.Tensor, answered: Sequence[torch.Tensor]) -> Seen:
        """Of the labels of a batch, and of what `LogitsModel.weighing_answers` gave."""
        probability = sum(of_pass.sum().item() for of_pass in answered)
        all_binary = bool(((y == 0) | (y == 1)).all())
        labels = Counter[int]() if y.ndim > 1 or y.is_floating_point() else Counter(y.tolist())
        return cls(probability, sum(map(len, answered)), all_binary, labels)

    def __add__(self, other: Seen) -> Seen:
        """What is seen of the texts of both."""
        answered, n_texts = self.answered + other.answered, self.n_texts + other.n_texts
        all_binary = self.all_binary and other.all_binary
        return Seen(answered, n_texts, all_binary, self.labels + other.labels)

    def warn(self, likelihood: str, loss: float) -> None:
        """Warn of answers that the model hardly gives, of chance, and of classes as numbers.

        `loss` is the mean of the texts that these are seen of.
        """
        if self.n_texts and self.answered < _LITTLE * self.n_texts:
            warn(
                "The tokens class_token_ids have only "
                f"{100 * self.answered / self.n_texts:.2g} % of the model's probability together: "
                "does it write the answers with other tokens, such as those with a space in front? "
                "(If it was trained on these tokens' logits alone, all is well.)"
            )
        chance = self._loss_of_chance(likelihood)
        if 0 < _GUESS * chance <= loss:
            warn(
                "The trained model is no better than guessing on these texts: its loss is "
                f"{loss:.4f}, and would be {chance:.4f} without reading them. Was the adapter "
                'saved without its head? With task_type="SEQ_CLS", or the head in modules_to_save, '
                "PEFT saves both. Else check that texts and labels are those of training."
            )
        if likelihood == "regression" and self.all_binary:
            warn(
                'Every target is 0 or 1, but the likelihood "regression" takes them for numbers. '
                "If they are classes, wrap the model in a module that returns "
                "torch.stack([torch.zeros_like(f), f], -1).flatten(0, 1) for its logits f, whose "
                "softmax is the sigmoid of f, and pass batches (X, labels.long().flatten()) to the "
                'likelihood "classification".'
            )

    def _loss_of_chance(self, likelihood: str) -> float:
        """Entropy of the labels; of pairs, whose order means nothing, that of a coin."""
        if likelihood == "reward_modeling":
            return math.log(2)
        if likelihood != "classification":
            return 0.0
        counts = torch.tensor(list(self.labels.values()), dtype=torch.float64)
        return torch.special.entr(counts / counts.sum()).sum().item()


class Sums(NamedTuple):
    """The sums over a data set."""

    H: Any  # the curvature, as the posterior sums it
    loss: torch.Tensor  # (), float64
    n_data: int
    called: frozenset[int] = frozenset()  # indices of the blocks whose layers any batch called
    seen: Seen = Seen()


def sums_of(la: Any, loader: Iterable[Any], progress_bar: bool, before: Sums | None = None) -> Sums:
    """Sum the batches of a loader, and of all ranks' loaders, counting each example once.

    `la` is a `LoRALaplace`, whose structure says what is summed. The sums go on from those that
    were `before`, which stay as they are: a fit in parts sums as one fit does. A `ValueError` if
    there are no data, ranks differ in weights or settings, or two have the same data.
    """
    share = Share(loader)
    zero = torch.zeros((), device=la.model.device, dtype=torch.float64)
    H = la._zeros()
    if before is not None and rank() == 0:  # the other ranks' sums are added to these
        H = H + before.H
    sums, n_before = Sums(H, zero, 0), 0 if before is None else before.n_data
    hidden = not progress_bar or rank() > 0
    options = {"unit": " examples", "total": share.size, "disable": hidden}
    with tqdm.tqdm(desc="[Computing Hessian]", **options) as bar:
        for name, batch in named_batches(share.loader):
            with naming(name):
                la._draw_after(n_before + sums.n_data)
                X, y = la.model.split(batch)
                n_new = len(share.places(len(y)))
                if n_new:
                    called = set(sums.called)
                    with noting_calls(la.blocks, called), la.model.weighing_answers() as answered:
                        loss, H = la._add_batch(sums.H, X, y)
                    loss, n_data = sums.loss + loss.to(sums.loss), sums.n_data + len(y)
                    seen = sums.seen + Seen.of(y, answered)
                    sums = Sums(H, loss, n_data, frozenset(called), seen)
                else:  # a pass that other ranks wait for
                    la._add_batch(la._zeros(), X, y)
            bar.update(n_new)
    if share.size not in (None, sums.n_data):
        warn(
            f"The loader gave {sums.n_data} examples, but its data set has {share.size}: is "
            "drop_last set, or does a sampler repeat some or leave some out?"
        )
    reports = gathered(_Report(la, sums))
    n_data = sum(report.n_data for report in reports)
    if not n_data:
        raise ValueError("The training loader has no data. (A generator can be read once.)")
    _check_alike(reports)
    loss = torch.tensor([report.loss for report in reports], dtype=torch.float64).sum().to(zero)
    reduce(add, (report.seen for report in reports)).warn(la.likelihood, loss.item() / n_data)
    la.model.output_size = max(report.n_outputs for report in reports)
    H = sums.H
    if count() > 1:
        H = reduce(add, map(la._unpacked, gathered(la._packed(H))))
    if before is not None:
        loss, n_data = loss + before.loss, n_data + before.n_data
    return Sums(H, loss, n_data, frozenset[int]().union(*(r.called for r in reports)))


class _Report:
    """What a rank tells the others about its sums."""

    def __init__(self, la: Any, sums: Sums) -> None:
        settings = type(la).__name__, la.likelihood, la.blocks[0].statistics_dtype, la._settings()
        self.identity = {"settings": repr(settings)}
        if count() > 1:
            self.identity |= hashes(la.model, la.blocks)
        self.n_data, self.loss = sums.n_data, sums.loss.item()
        self.n_outputs, self.called = la.model.output_size, sums.called
        self.seen = sums.seen


def _check_alike(reports: Sequence[_Report]) -> None:
    """Refuse ranks with other models than the first, and ranks with the same data."""
    first = reports[0].identity
    for number, report in enumerate(reports):
        differing = [key for key in first if first[key] != report.identity[key]]
        if differing:
            raise ValueError(
                f"Rank {number} and rank 0 differ in {' and '.join(differing)}: load the same "
                "adapter and pass the same settings on every rank."
            )
    refuse_copies([(report.n_data, report.loss) for report in reports])
