"""LoRA of embeddings, whose weights are bare parameters, as two linear layers of one-hot tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from peft.tuners import lora
from torch.nn.functional import embedding


def is_embedding(layer: Any) -> bool:
    """Whether PEFT's layer is the LoRA of an embedding."""
    return isinstance(layer, lora.Embedding)


def obstacle(layer: lora.LoraLayer) -> str | None:
    """What keeps the LoRA of an embedding from being linear, in the embedding's own words."""
    base: Any = layer.get_base_layer()
    if base.max_norm is not None:
        return "max_norm"
    if base.scale_grad_by_freq:  # what comes back is no derivative
        return "scale_grad_by_freq"
    return "tensor parallel" if getattr(layer, "input_fns", None) else None


class EmbeddingHalf:
    """`lora_embedding_A` or `lora_embedding_B` of a layer that adds `scale * B A[:, ids]`.

    PEFT calls neither of them as a module. The whole layer's calls stand for theirs: the tokens'
    ids are what came in, and what the layer returns has the gradient of what it adds.

    Parameters
    ----------
    owner : peft.tuners.lora.Embedding
    adapter : str

    Attributes
    ----------
    held_column : int or None
        a column of the weight that no gradient comes to
    """

    part: ClassVar[str]
    held_column: int | None = None

    def __init__(self, owner: Any, adapter: str) -> None:
        self.owner = owner
        self.adapter = adapter

    @property
    def weight(self) -> torch.Tensor:
        return getattr(self.owner, self.part)[self.adapter]

    def register_forward_hook(self, hook: Callable[..., None]) -> Any:
        """Listen to the owner's calls; `hook` gets the owner, the ids, and what it returns.

        What the model goes on with is a copy: it may change that in place.

        Raises
        ------
        NotImplementedError
            In a call with `adapter_names`, or with ids of another shape than the output's.
        """

        def listen(
            owner: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: torch.Tensor
        ) -> torch.Tensor:
            if kwargs.get("adapter_names") is not None:
                raise NotImplementedError(
                    "A batch with adapter_names calls the LoRA of an embedding, of which all "
                    "examples must have the same adapter: give each adapter batches of its own."
                )
            if args[0].shape != output.shape[:-1]:
                raise NotImplementedError(
                    f"An embedding with LoRA was given tokens of shape {tuple(args[0].shape)} and "
                    f"returned {tuple(output.shape)}, not one row a token: leave it out with "
                    "target_modules."
                )
            hook(owner, args, output)
            return output.clone()

        # Before hooks that others have added, which may change what the layer returns.
        return self.owner.register_forward_hook(listen, with_kwargs=True, prepend=True)

    @property
    def _hf_hook(self) -> Any:
        """What Accelerate offloads the weight with."""
        return getattr(getattr(self.owner, self.part), "_hf_hook", None)

    @property
    def input_map(self) -> tuple[Any, ...]:
        """What decides, beside the tokens, on the rows that `input_rows` makes."""
        raise NotImplementedError

    def input_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """What the weight is applied to, `(..., n)`, of the ids `(...)` of tokens."""
        raise NotImplementedError

    def output_rows(self, gradients: torch.Tensor) -> torch.Tensor:
        """Gradients of what the weight makes of them, `(..., m)`, of the layer's `(..., d)`."""
        raise NotImplementedError

    @property
    def statistics_dtype(self) -> torch.dtype:
        """Of the rows: float32 or better."""
        return torch.promote_types(self.weight.dtype, torch.float32)

    def _scaled(self, gradients: torch.Tensor) -> torch.Tensor:
        """By the adapter's scaling, and by the embedding's own, as of Gemma 3."""
        own: Any = getattr(self.owner, "_get_embed_scale", lambda: None)()  # of newer PEFT
        scaling = self.owner.scaling[self.adapter]
        gradients = gradients.to(self.weight.device, self.statistics_dtype) * scaling
        return gradients if own is None else gradients * own.to(self.weight)


class TokenColumns(EmbeddingHalf):
    """`lora_embedding_A`, `(r, vocabulary)`, applied to one-hot tokens.

    The rows of a batch take as many numbers as logits at each of its positions would. PyTorch gives
    the column of the padding token no gradient, and so does this: the token's rows are 0.
    """

    part = "lora_embedding_A"

    @property
    def held_column(self) -> int | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.owner.get_base_layer().padding_idx

    @property
    def input_map(self) -> tuple[Any, ...]:
        return self.part, self.weight.shape[1], self.held_column

    def input_rows(self, ids: torch.Tensor) -> torch.Tensor:
        # Older PyTorch scatters by int64 alone.
        weight, ids = self.weight, ids.to(self.weight.device).long()
        rows = weight.new_zeros(*ids.shape, weight.shape[1], dtype=self.statistics_dtype)
        counted = torch.ones_like(ids) if self.held_column is None else ids != self.held_column
        return rows.scatter_(-1, ids[..., None], counted[..., None].to(rows))

    def output_rows(self, gradients: torch.Tensor) -> torch.Tensor:
        projection = getattr(self.owner, Projection.part)[self.adapter].detach()
        return self._scaled(gradients) @ projection.to(self.statistics_dtype)


class Projection(EmbeddingHalf):
    """`lora_embedding_B`, `(d, r)`, applied to the tokens' columns of A."""

    part = "lora_embedding_B"

    @property
    def input_map(self) -> tuple[Any, ...]:
        return self.part, id(self.owner), self.adapter

    def input_rows(self, ids: torch.Tensor) -> torch.Tensor:
        columns = getattr(self.owner, TokenColumns.part)[self.adapter].detach()
        return embedding(ids.to(columns.device), columns.T)

    def output_rows(self, gradients: torch.Tensor) -> torch.Tensor:
        return self._scaled(gradients)


def halves(layer: Any, adapter: str) -> tuple[Any, Any]:
    """A and B of PEFT's layer: linear layers, convolutions, or halves of an embedding's LoRA."""
    if is_embedding(layer):
        return TokenColumns(layer, adapter), Projection(layer, adapter)
    return layer.lora_A[adapter], layer.lora_B[adapter]
