"""Everything that is known about models and batches: a batch in, logits of its classes out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from inspect import Parameter, signature
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from laplace_lora_ext.messages import warn
from laplace_lora_ext.models.adapters import only_active
from laplace_lora_ext.models.answers import AnswerTokens, logits_of
from laplace_lora_ext.models.batches import Positions, check_texts, moved, positions_of, text_first
from laplace_lora_ext.models.locks import (
    LOCK,
    as_tensor,
    cpu_as_default,
    is_compiled,
    running_eagerly,
)
from laplace_lora_ext.models.weights import device_of

_LABEL_KEYS = ("label", "labels")
_BY_KEYWORD = Parameter.KEYWORD_ONLY, Parameter.VAR_KEYWORD

# How far rounding may move logits, relative to the largest: in half precision, and in others.
_ROUNDING_OF_HALF, _ROUNDING = 0.05, 1e-3


_LAST = 8  # calls of layers to search for the logits, so that few activations are kept


class LogitsModel(nn.Module):
    """A model that maps a batch to the logits of its classes, `(B, C)`, in float32 or better.

    A transformers model, bare or within PEFT's, DistributedDataParallel's or torch.compile's
    wrapper, is called with a batch's keys as keyword arguments, and so is a module whose forward
    pass has no place for a mapping, as `forward(self, **inputs)`. Any other module is called with
    the batch itself, a mapping or a tensor, as laplace-torch does. Compiled ones run eagerly here.

    Of a language model the logits are those of `class_token_ids`, which it needs, where the answer
    is read; see `AnswerTokens`. Labels, `dict_key_y` in a mapping, are never passed on to it.
    """

    adapter: str | None  # which is active in prepared passes, whichever is otherwise; None for any
    output_size: int  # C; 0 before the first forward pass

    def __init__(
        self,
        model: nn.Module,
        class_token_ids: Sequence[int] | None = None,
        dict_key_y: str = "labels",
        mask_token_id: int | None = None,
        adapter: str | None = None,
    ) -> None:
        super().__init__()
        if is_compiled(model):
            warn(
                "The model is compiled: fits and predictions run it eagerly, since compiled code "
                "does not call LoRA layers as modules."
            )
        self.model = model
        self.adapter = adapter
        self.dict_key_y = dict_key_y
        self.output_size = 0
        transformer = find_transformer(model)
        self._transformer = (transformer,)  # a tuple, so that it is no child module
        parameters = list(signature(unwrapped(model).forward).parameters.values())
        by_position = parameters and parameters[0].kind not in _BY_KEYWORD
        self._first_place = parameters[0].name if by_position else None
        self._has_more_places = len(parameters) > 1
        self._answers = self._find_answers(class_token_ids, mask_token_id)

    @property
    def transformer(self) -> PreTrainedModel | None:
        """The transformers model within, if there is one."""
        return self._transformer[0]

    @property
    def is_multi_label(self) -> bool:
        """Whether a transformers classifier was trained on several labels for each example."""
        problem_type = getattr(getattr(self.transformer, "config", None), "problem_type", None)
        return self._answers is None and problem_type == "multi_label_classification"

    @property
    def class_token_ids(self) -> list[int] | None:
        return None if self._answers is None else self._answers.ids

    @property
    def mask_token_id(self) -> int | None:
        return None if self._answers is None else self._answers.mask_token_id

    def forward(self, batch: Any = None, **model_kwargs: Any) -> torch.Tensor:
        """Logits `(B, C)` of a batch, without its labels, both on the model's device.

        The batch may also come as keyword arguments, as transformers' models take it. Models
        without such logits are refused, as are batches that `check_texts` or `AnswerTokens` refuse.
        """
        if batch is None:
            return self._logits(model_kwargs)
        return self._logits(batch, **model_kwargs)

    def _logits(self, batch: Any, **model_kwargs: Any) -> torch.Tensor:
        inputs = self._inputs(batch)
        if self._answers is not None:
            self._answers.warn_if_answered(inputs)
            logits = self._answers.logits(inputs, self._call, **model_kwargs)[:, self._answers.ids]
        else:
            logits = logits_of(self._call(inputs, **model_kwargs))
        if logits.ndim == 3:
            raise ValueError(
                "The model must return logits of shape (batch, outputs), not "
                f"{tuple(logits.shape)}, which may be those of tokens: for token classification, "
                "wrap it in a module that returns logits[mask], the rows of labelled tokens, and "
                "pass batches (X, y) with the mask in X and a label for each of these rows in y."
            )
        if logits.ndim != 2:
            raise ValueError(
                "The model must return logits of shape (batch, outputs), not "
                f"{tuple(logits.shape)}: wrap it in a module that returns one row for each example."
            )
        self.output_size = logits.shape[-1]
        return logits.to(self.device, torch.promote_types(logits.dtype, torch.float32))

    def log_probs(self, batch: Any) -> torch.Tensor:
        """Log-probabilities `(B, C)`; with `class_token_ids` `(B, C + 1)`, the last of all else."""
        if self._answers is None:
            return self(batch).log_softmax(-1)
        return self._answers.log_probs(self._answers.logits(self._inputs(batch), self._call))

    def weighing_answers(self) -> AbstractContextManager[list[torch.Tensor]]:
        """As `AnswerTokens.weighing`; without `class_token_ids` nothing is put there."""
        return nullcontext([]) if self._answers is None else self._answers.weighing()

    def split(self, batch: Any) -> tuple[Any, torch.Tensor]:
        """Inputs and a copy of the labels of a training batch, a mapping or a pair `(X, y)`."""
        X, y = self.split_if_labelled(batch)
        if y is not None:
            return X, y
        if isinstance(X, Mapping):
            given = sorted(str(key) for key, value in X.items() if value is not None)
            raise ValueError(
                f"No labels {self.dict_key_y!r} in the batch, which has only {given}: pass the key "
                "of the labels as dict_key_y."
            )
        raise TypeError(
            "A batch to learn from must be a mapping with labels or a pair (X, y), not "
            f"{type(X).__name__} without labels."
        )

    def split_if_labelled(self, batch: Any) -> tuple[Any, torch.Tensor | None]:
        """As `split`, but without labels, or with None in their place, the second is None."""
        if isinstance(batch, torch.Tensor):
            return batch, None
        if isinstance(batch, Mapping):
            X, y = batch, batch.get(self.dict_key_y)
        elif isinstance(batch, (tuple, list)) and len(batch) == 2:
            X, y = batch
        else:
            raise TypeError(
                "A batch must be a mapping (with labels, to learn from), a tensor or a pair "
                f"(X, y), not {type(batch).__name__}."
            )
        return X, None if y is None else as_tensor(y).to(self.device)

    def positions(self, batch: Any, n_examples: int) -> Positions:
        """Sizes and mask of a batch that has `n_examples` examples."""
        return positions_of(self._inputs(batch), n_examples, self.device)

    def inputs(self, batch: Any) -> Any:
        """Inputs of a batch that may have labels."""
        return self.split_if_labelled(batch)[0]

    def text(self, batch: Any) -> Any:
        """Inputs of a batch of texts with `input_ids` `(B, T)`; None for any other batch."""
        inputs = self._inputs(self.inputs(batch))
        tokens = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
        return inputs if isinstance(tokens, torch.Tensor) and tokens.ndim == 2 else None

    def agree(self, logits: torch.Tensor, others: torch.Tensor) -> bool:
        """Whether two computations of the same logits differ by rounding alone."""
        if logits.shape != others.shape:
            return False
        is_half = next(self.model.parameters()).dtype in (torch.float16, torch.bfloat16)
        rounding = (_ROUNDING_OF_HALF if is_half else _ROUNDING) * logits.abs().max()
        return bool((logits - others).abs().max() <= rounding)

    @property
    def device(self) -> torch.device:
        """Where batches go, and logits come: the device of the model's first parameter."""
        return device_of(self.model)

    @contextmanager
    def prepared(self, trainable: Sequence[torch.Tensor] = ()) -> Iterator[None]:
        """The model in evaluation mode, with gradients for the given parameters alone.

        `adapter` is the only active one, other threads wait, and compiled modules run eagerly. On
        leaving, also by an exception, the user's adapter is active again, and every module's mode
        and every parameter's `requires_grad` and `.grad` are as they were.
        """
        active = nullcontext() if self.adapter is None else only_active(self.model, self.adapter)
        with LOCK, cpu_as_default(), active, running_eagerly(self.model):
            modules = list(self.modules())
            modes = [module.training for module in modules]
            before: list[tuple[dict[str, Any], str, bool, Any]] = [
                (module._parameters, name, parameter.requires_grad, parameter.grad)
                for module in modules
                for name, parameter in module._parameters.items()
                if parameter is not None
            ]
            wanted = {id(parameter) for parameter in trainable}
            try:
                self.eval()
                for parameters, name, requires_grad, _ in before:
                    is_wanted = id(parameters[name]) in wanted
                    if requires_grad != is_wanted:
                        parameters[name].requires_grad_(is_wanted)
                    parameters[name].grad = None
                yield
            finally:
                for module, mode in zip(modules, modes, strict=True):
                    if module.training != mode:
                        module.training = mode
                for parameters, name, requires_grad, grad in before:
                    # Hooks that offload weights may have replaced the parameter.
                    parameters[name].requires_grad_(requires_grad).grad = grad

    def _inputs(self, batch: Any) -> Any:
        """The batch without its labels on the model's device, of the same type as before."""
        transformer = self.transformer
        if isinstance(batch, torch.Tensor):
            batch = batch.to(self.device)
            is_tokens = batch.ndim == 2 and not batch.is_floating_point()
            if not is_tokens or not self._takes_keywords({}):
                return batch
            batch = {"input_ids": batch}
        if not isinstance(batch, Mapping):
            return batch
        inputs = moved(batch, self.device, self.dict_key_y, *_LABEL_KEYS)
        if transformer is not None:
            check_texts(inputs, transformer)
        return inputs if self._answers is None or transformer is None else text_first(inputs)

    def _call(self, inputs: Any, **kwargs: Any) -> Any:
        if isinstance(inputs, Mapping) and self._takes_keywords(inputs):
            return self.model(**inputs, **kwargs)
        return self.model(inputs, **kwargs)

    def _takes_keywords(self, inputs: Mapping[str, Any]) -> bool:
        """Whether the model takes a mapping's keys as keyword arguments, rather than the mapping.

        Other modules than transformers' do if their forward pass takes nothing by position, or its
        first place, of several, is one of the keys', as in `forward(self, input_ids, **others)`.
        """
        if self.transformer is not None:
            return True
        if self._first_place is None:
            return True
        return self._first_place in inputs and self._has_more_places

    def _find_answers(
        self, class_token_ids: Sequence[int] | None, mask_token_id: int | None
    ) -> AnswerTokens | None:
        transformer = self.transformer
        if class_token_ids is not None:
            return AnswerTokens(class_token_ids, transformer, mask_token_id)
        if transformer is not None and transformer.can_generate():
            raise ValueError(
                f"{type(transformer).__name__} is a language model: pass class_token_ids, the "
                "tokens of the answers, as tokenizer.convert_tokens_to_ids gives them. For free "
                'text, use the likelihood "language_modeling" and hessian_structure="lowrank_kron".'
            )
        return None


def logits_and_hidden_states(
    model: LogitsModel, batch: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits `(B, C)` of one forward pass, and what the layer that made them was given, `(B, d)`.

    That layer is a language model's output layer, or else the linear layer whose outputs are the
    logits, at the positions where they are read: in a head of several layers the last one. Where
    there is none, as where a model changes its logits afterwards, there is only None.

    Call it within `model.prepared()`.
    """
    calls: deque[tuple[torch.Tensor, torch.Tensor]] = deque(maxlen=_LAST)
    weights = [(module, getattr(module, "weight", None)) for module in model.modules()]
    # With a matrix for a weight, and LoRA around them.
    layers: list[Any] = [m for m, w in weights if isinstance(w, torch.Tensor) and w.ndim == 2]
    output_layer: Any = None
    if model.transformer is not None and model.class_token_ids is not None:
        output_layer = model.transformer.get_output_embeddings()
        layers = layers if output_layer is None else [output_layer]

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        # Routers of experts have a matrix for a weight too, and return tuples.
        if given and isinstance(output, torch.Tensor):
            calls.append((given[0], output))

    with ExitStack() as hooks:
        for layer in layers:
            hooks.callback(layer.register_forward_hook(note, with_kwargs=True).remove)
        logits = model(batch)
    for inputs, outputs in calls:
        rows = outputs.shape[:-1]
        if inputs.shape[:-1] != rows or rows[:1] != logits.shape[:1]:
            continue
        read, made = (rows.reshape(len(logits), -1, rows.shape[-1]) for rows in (inputs, outputs))
        if output_layer is not None and made.shape[1] == 1:  # its logits may be capped or scaled
            return logits, read[:, 0].to(logits)
        if made.shape[-1] == logits.shape[-1]:
            is_made = (made.to(logits) == logits[:, None]).all(-1)
            if is_made.any(1).all():
                place = is_made.int().argmax(1)[:, None, None].to(read.device)
                return logits, read.take_along_dim(place, dim=1)[:, 0].to(logits)
    return logits, None


def find_transformer(model: nn.Module) -> PreTrainedModel | None:
    """The transformers model that a model is, apart from wrappers, if it is one."""
    inner = unwrapped(model)
    return inner if isinstance(inner, PreTrainedModel) else None


def unwrapped(model: nn.Module) -> nn.Module:
    """What is within PEFT's, DistributedDataParallel's or torch.compile's wrappers."""
    while not isinstance(model, PreTrainedModel):
        if isinstance(model, PeftModel):
            inner = model.get_base_model()
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            inner = model._orig_mod  # accelerate's function puts this wrapper back
        else:
            inner = extract_model_from_parallel(model)
        if inner is model or not isinstance(inner, nn.Module):
            break
        model = inner
    return model
