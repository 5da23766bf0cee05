"""Distances from training texts in the last hidden state: a rival of entropies."""

from collections.abc import Iterable
from typing import Any

import torch
from sklearn.covariance import LedoitWolf
from torch import Tensor

from benchmarks.models import AdaptedModel


def hidden_states(model: AdaptedModel, batches: Iterable[Any]) -> Tensor:
    """Compute last hidden states (texts, width), on the CPU, where the class is read.

    That is the last token of a prompt, and the first of any other text.
    """
    return torch.cat([_of_batch(model, batch) for batch in batches])


@torch.no_grad()
def _of_batch(model: AdaptedModel, batch: Any) -> Tensor:
    logits_model = model.logits_model
    with logits_model.prepared():
        inputs = dict(logits_model.inputs(batch))
        # With labels the model would compute a loss of its own, which nobody reads.
        inputs.pop("labels", None)
        outputs = model.model(**inputs, output_hidden_states=True)
    states = outputs.hidden_states[-1]
    n_texts, n_tokens, _ = states.shape
    if model.class_token_ids is None:
        first = states[:, 0]
        return first.double().cpu()
    # Padding may be on either side: the last token is the last that is none.
    places = torch.arange(n_tokens, device=states.device)
    last = (inputs["attention_mask"] * places).argmax(-1)
    texts = torch.arange(n_texts, device=states.device)
    return states[texts, last].double().cpu()


def distances(training: Tensor, labels: Tensor, states: Tensor) -> Tensor:
    """Compute squared distances (texts,) from the nearest class.

    The covariance is that of all classes: a few texts of each could tell no other. It
    is shrunk as Ledoit and Wolf do: there may be fewer texts than numbers in a state.

    References
    ----------
    Lee et al., "A simple unified framework for detecting out-of-distribution samples
    and adversarial attacks", NeurIPS 2018.
    """
    # Some classes may have no training text, where few are asked for.
    classes = labels.unique()
    of_classes = [training[labels == each] for each in classes]
    means = torch.stack([of_class.mean(0) for of_class in of_classes])
    places = torch.searchsorted(classes, labels)
    apart = training - means[places]
    # Centred by the means of their classes already.
    covariance = LedoitWolf(assume_centered=True).fit(apart.numpy())
    precision = torch.from_numpy(covariance.precision_)
    squares = []
    for mean in means:
        of_texts = states - mean
        products = of_texts @ precision
        squares.append((products * of_texts).sum(-1))
    # A foreign text is far from all of them.
    return torch.stack(squares).amin(0)
