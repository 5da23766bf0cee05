"""Distances from training texts in the last hidden state: a rival of entropies."""

from collections.abc import Iterable
from typing import Any

import torch
from sklearn.covariance import LedoitWolf

from benchmarks.models import AdaptedModel


def hidden_states(
    model: AdaptedModel,
    batches: Iterable[Any],
) -> torch.Tensor:
    """Compute last hidden states (texts, width), on the CPU, where the class is read.

    That is the last token of a prompt, and the first of any other text.
    """
    return torch.cat([_of_batch(model, batch) for batch in batches])


@torch.no_grad()
def _of_batch(model: AdaptedModel, batch: Any) -> torch.Tensor:
    logits_model = model.logits_model
    with logits_model.prepared():
        inputs = logits_model.inputs(batch)
        inputs = {name: each for name, each in inputs.items() if name != "labels"}
        outputs = model.model(**inputs, output_hidden_states=True)
    states = outputs.hidden_states[-1]  # (texts, tokens, width)
    if model.class_token_ids is None:
        place = torch.zeros(len(states), dtype=torch.long, device=states.device)
    else:
        tokens = torch.arange(states.shape[1], device=states.device)
        place = (inputs["attention_mask"] * tokens).argmax(-1)
    rows = torch.arange(len(states), device=states.device)
    return states[rows, place].double().cpu()


def distances(
    training: torch.Tensor,
    labels: torch.Tensor,
    states: torch.Tensor,
) -> torch.Tensor:
    """Compute squared distances (texts,) from the nearest class.

    The covariance is that of all classes.

    The covariance is shrunk as Ledoit and Wolf do: there may be fewer texts than
    numbers in a state.

    References
    ----------
    Lee et al., "A simple unified framework for detecting out-of-distribution samples
    and adversarial attacks", NeurIPS 2018.
    """
    classes = labels.unique()
    means = torch.stack([training[labels == each].mean(0) for each in classes])
    places = torch.searchsorted(classes, labels)
    apart = training - means[places]
    covariance = LedoitWolf(assume_centered=True).fit(apart.numpy())
    precision = torch.from_numpy(covariance.precision_)
    squares = []
    for mean in means:
        of_texts = states - mean
        squares.append(((of_texts @ precision) * of_texts).sum(-1))
    return torch.stack(squares).amin(0)
