"""Batches of texts as fine-tuning's collators make them."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import tests.support.dense as dense
from laplace_lora_ext.models.lora_layers import find_blocks
from laplace_lora_ext.predictive.moments import draw_seed
from tests.compatibility.families import FAMILIES, RIGHT
from tests.support.cases import unpadded_rows
from tests.support.models import lora_model, ragged_batches
from tests.support.posteriors import make, sizes

# The tokens at the beginning of a text that have no label.
PROMPT = 2
LENGTHS = (7, 4, 5, 7, 3, 6)


def text_batches(
    lengths: Sequence[int] = LENGTHS, **ragged: Any
) -> list[dict[str, Any]]:
    """Make `ragged_batches` with labels behind two tokens of prompt."""
    batches = ragged_batches(lengths, **ragged)
    for batch in batches:
        mask = batch["attention_mask"]
        # Of real tokens, wherever the padding is.
        has_no_label = (mask.cumsum(1) <= PROMPT) | (mask == 0)
        batch["labels"] = batch["input_ids"].masked_fill(has_no_label, -100)
    return batches


def fitted_text(
    model: nn.Module | None = None,
    batches: Sequence[Mapping[str, Any]] | None = None,
    num_samples: int = 3,
    rank: int = 3,
    seed: int = 0,
    **keywords: Any,
):
    """Fit a posterior of a language model, by default of a tiny GPT-2 in float64."""
    la = make(
        model or lora_model("gpt2").eval(),
        likelihood="language_modeling",
        backend_kwargs={"num_samples": num_samples, "rank": rank, "seed": seed},
        **keywords,
    )
    la.fit(batches or text_batches())
    return la


def encoder_decoder(kind: str) -> nn.Module:
    """Make a tiny "t5" or "bart" with an adapter, in float64."""
    return FAMILIES[kind.upper()].model(RIGHT)


def pairs_of_texts() -> dict[str, Tensor]:
    """Make a batch of sources and labels of other lengths, for an encoder-decoder."""
    (source,) = ragged_batches((5, 3, 4), padded_to=5)
    (target,) = ragged_batches((3, 4, 2), padded_to=4, seed=2)
    is_padding = target["attention_mask"] == 0
    labels = target["input_ids"].masked_fill(is_padding, -100)
    labels[1, ::2] = -100
    return source | {"labels": labels}


def drawn_models(la: Any, n_samples: int, seed: torch.Generator) -> list[nn.Module]:
    """Copy a model with weights drawn by dense algebra, as `score` draws."""
    of_blocks = la.prior_precision.expand(len(la.blocks))
    n_weights = torch.tensor(sizes(la))
    prior = of_blocks.repeat_interleave(n_weights)
    precision = la.H.to_matrix() + prior.diag()
    root = dense.power(precision, -0.5)
    # `score` draws one seed of the generator that it is given, and weights by that.
    noise = torch.Generator().manual_seed(draw_seed(seed))
    models = []
    for _ in range(n_samples):
        z = torch.randn(1, la.n_params, generator=noise, dtype=torch.float64)
        weights = la.mean + root @ z[0]
        model = copy.deepcopy(la.model.model)
        of_blocks = weights.split(sizes(la))
        for block, part in zip(find_blocks(model), of_blocks, strict=True):
            block.weight.data = part.view_as(block.weight)
        models.append(model)
    return models


def token_logits(
    model: Callable[..., Any], batches: Sequence[Mapping[str, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Compute logits `(N, V)` of labelled tokens, text by text."""
    logits = []
    labels = []
    for batch in batches:
        for text in unpadded_rows(batch):
            # The logits at a position are those of the next token.
            following = text["labels"][0, 1:]
            has_label = following != -100
            (places,) = has_label.nonzero(as_tuple=True)
            output = model(text["input_ids"], use_cache=False)
            logits.append(output.logits[0, places])
            labels.append(following[places])
    return torch.cat(logits), torch.cat(labels)
