"""LoRA of embeddings, whose weights are bare parameters, as two linear layers of one-hot tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from peft.tuners import lora
from torch.nn.functional import embedding

from laplace_lora_ext.models.rows import LinearRows


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


class EmbeddingLayer:
    """A layer that adds `scale * B A[:, ids]`.

    PEFT calls neither A nor B as a module, so calls of the layer stand for theirs: the tokens' ids
    are what came in, and what the layer returns has the gradient of what it adds.

    Parameters
    ----------
    owner : peft.tuners.lora.Embedding
    adapter : str
    """

    def __init__(self, owner: Any, adapter: str) -> None:
        self.owner = owner
        self.adapter = adapter

    @property
    def A(self) -> torch.Tensor:  # noqa: N802
        """`(r, vocabulary)`."""
        return self.owner.lora_embedding_A[self.adapter]

    @property
    def B(self) -> torch.Tensor:  # noqa: N802
        """`(d, r)`."""
        return self.owner.lora_embedding_B[self.adapter]

    @property
    def padding(self) -> int | None:
        """The token whose column of A no gradient comes to."""
        return self.owner.get_base_layer().padding_idx

    def listen(self, hook: Callable[..., torch.Tensor | None], prepend: bool = False) -> Any:
        """Have `hook` called with the owner, the ids, and what it returns; gives the handle.

        With `prepend`, before all other hooks. Calls with `adapter_names`, or with ids of another
        shape than the output's, are refused.
        """

        def checked(
            owner: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: torch.Tensor
        ) -> torch.Tensor | None:
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
            return hook(owner, args, output)

        return self.owner.register_forward_hook(checked, with_kwargs=True, prepend=prepend)

    def scaled(self, gradients: torch.Tensor) -> torch.Tensor:
        """By the adapter's scaling, and by the embedding's own, as of Gemma 3; in full precision.

        `(..., d)` gradients of what the layer returns become those of what B does.
        """
        own: Any = getattr(self.owner, "_get_embed_scale", lambda: None)()  # of newer PEFT
        gradients = gradients.to(self.B.device, _full(self.B)) * self.owner.scaling[self.adapter]
        return gradients if own is None else gradients * own.to(self.B)


class EmbeddingHalf(LinearRows):
    """A or B as a linear layer, which calls of the whole layer stand for.

    Parameters
    ----------
    layer : EmbeddingLayer
    weights : torch.nn.ParameterDict
        of all adapters
    """

    def __init__(self, layer: EmbeddingLayer, weights: Any) -> None:
        self._layer, self._weights = layer, weights
        self.register_forward_hook = layer.listen

    @property
    def weight(self) -> torch.Tensor:
        return self._weights[self._layer.adapter]

    @property
    def _hf_hook(self) -> Any:
        """What Accelerate offloads the weight with."""
        return getattr(self._weights, "_hf_hook", None)


class TokenColumns(EmbeddingHalf):
    """`lora_embedding_A`, `(r, vocabulary)`, as a linear layer of one-hot tokens.

    The rows of a batch take as many numbers as logits at each of its positions would. PyTorch gives
    the column of the padding token no gradient, and so does this: the token's rows are 0.
    """

    @property
    def held_column(self) -> int | None:
        return self._layer.padding

    @property
    def input_map(self) -> tuple[Any, ...]:
        return "one-hot", self.weight.shape[1], self.held_column

    def input_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Of tokens `(...)`, `(..., vocabulary)`."""
        # Older PyTorch scatters by int64 alone.
        weight, ids = self.weight, ids.to(self.weight.device).long()
        rows = weight.new_zeros(*ids.shape, weight.shape[1], dtype=_full(weight))
        counted = torch.ones_like(ids) if self.held_column is None else ids != self.held_column
        return rows.scatter_(-1, ids[..., None], counted[..., None].to(rows))

    def output_rows(self, gradients: torch.Tensor) -> torch.Tensor:
        """`(..., r)`, of gradients `(..., d)` of what the embedding returns."""
        B = self._layer.B.detach()
        return self._layer.scaled(gradients) @ B.to(_full(B))


class Projection(EmbeddingHalf):
    """`lora_embedding_B`, `(d, r)`, as a linear layer of the tokens' columns of A."""

    @property
    def input_map(self) -> tuple[Any, ...]:
        return "columns", id(self._layer.owner), self._layer.adapter

    def input_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Of tokens `(...)`, `(..., r)`."""
        A = self._layer.A.detach()
        return embedding(ids.to(A.device), A.T)

    def output_rows(self, gradients: torch.Tensor) -> torch.Tensor:
        """`(..., d)`, of gradients `(..., d)` of what the embedding returns."""
        return self._layer.scaled(gradients)


def halves(layer: Any, adapter: str) -> tuple[Any, Any]:
    """A and B of PEFT's layer: linear layers, convolutions, or halves of an embedding's LoRA."""
    if is_embedding(layer):
        shared = EmbeddingLayer(layer, adapter)
        return (
            TokenColumns(shared, layer.lora_embedding_A),
            Projection(shared, layer.lora_embedding_B),
        )
    return layer.lora_A[adapter], layer.lora_B[adapter]


def _full(weight: torch.Tensor) -> torch.dtype:
    return torch.promote_types(weight.dtype, torch.float32)
