"""A model and its batches: logits of classes, inputs and labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from inspect import Parameter, signature
from threading import get_ident
from typing import Any, TypeVar

import torch
from accelerate.utils import extract_model_from_parallel
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from laplace_lora_ext.models.answers import Answers
from laplace_lora_ext.models.batches import (
    IGNORED,
    Positions,
    check_texts,
    check_tokenized,
    is_tokens,
    logits_of,
    positions_of,
    text_first,
)
from laplace_lora_ext.models.choices import Choices, answers_of
from laplace_lora_ext.models.running import (
    TURNS,
    State,
    Tree,
    alone,
    as_tensor,
    evaluating,
    put_back,
)
from laplace_lora_ext.models.weights import device_of

_LABEL_KEYS = ("label", "labels")
_HALF = (torch.float16, torch.bfloat16)
_BY_KEYWORD = (Parameter.KEYWORD_ONLY, Parameter.VAR_KEYWORD)

Result = TypeVar("Result")


class LogitsModel(nn.Module):
    """A model that maps a batch to its classes' logits `(B, C)`.

    They are in float32 or better.

    A transformers model, bare or within PEFT's, DistributedDataParallel's or
    torch.compile's wrapper, is called with a batch's keys as keyword arguments, and so
    is a module whose forward pass has no place for a mapping, as `forward(self,
    **inputs)`. Any other module is called with the batch itself, a mapping or a tensor,
    as laplace-torch does. Compiled ones run eagerly here.

    Of a language model the logits are those of `class_token_ids` where the answer is
    read, see `AnswerTokens`, of several tokens behind each text, see `AnswerTexts`, or
    without them those of choices that the batch brings, see `Choices`. Labels,
    `dict_key_y` in a mapping, are never passed on to it.

    Attributes
    ----------
    adapter : str or None
        which is active in prepared passes, whichever is otherwise; None for any
    output_size : int
        C; 0 before the first forward pass
    answers : Answers or None
        how a language model's logits are read; None for what the model itself returns
    class_token_ids : list of int, list of list of int, or None
        a language model's answers, one token a class, or several. Other models have
        none, and neither have those whose batches bring choices
    mask_token_id : int or None
        the token at which a masked language model's answer is read
    normalised : bool
        whether logits of answers are means over their tokens, rather than sums
    """

    may_answer = True  # as a language model; other tasks read all outputs

    def __init__(
        self,
        model: nn.Module,
        class_token_ids: Sequence[Any] | None = None,
        dict_key_y: str = "labels",
        mask_token_id: int | None = None,
        adapter: str | None = None,
        *,
        normalised: bool = False,
    ) -> None:
        super().__init__()
        self.training = False
        self._tree = Tree(model)
        self._within: set[int] = set()  # threads that are in a session
        self._shared_state: State | None = None
        self.model = model
        self.adapter = adapter
        self.dict_key_y = dict_key_y
        self.output_size = 0
        parameters = list(signature(unwrapped(model).forward).parameters.values())
        has_place = bool(parameters) and parameters[0].kind not in _BY_KEYWORD
        self._takes_only_keywords = self.transformer is not None or not has_place
        # A mapping that has it is one of keywords.
        self._first_key = parameters[0].name if len(parameters) > 1 else None
        answers = self._find_answers(class_token_ids, mask_token_id, normalised)
        self.answers = answers
        self.class_token_ids = answers.class_token_ids if answers else None
        self.mask_token_id = answers.mask_token_id if answers else None
        self.normalised = answers is not None and answers.normalised

    @cached_property
    def transformer(self) -> PreTrainedModel | None:
        """Find the transformers model within, if there is one."""
        # Were it set as an attribute, it would be a child module, a second time.
        return find_transformer(self.model)

    def for_module(self, model: nn.Module) -> LogitsModel:
        """Make another of these around another module that answers alike."""
        return type(self)(
            model,
            self.class_token_ids,
            self.dict_key_y,
            self.mask_token_id,
            normalised=self.normalised,
        )

    def forward(self, batch: Any, own: Tensor | None = None, **options: Any) -> Tensor:
        """Compute logits `(B, C)` of a batch without its labels, on the model's device.

        Models without such logits are refused, as are batches that `check_texts` or
        `AnswerTokens` refuse. Which rows an example has `own` in a larger batch changes
        no logits. Options are those of tasks' own models.
        """
        logits = self._logits(batch, **options)
        self.output_size = logits.shape[-1]
        return logits.to(self.device, torch.promote_types(logits.dtype, torch.float32))

    def _logits(self, batch: Any) -> Tensor:
        """Compute logits where the model computes, and in its precision."""
        inputs = self._inputs(batch)
        if self.answers is None:
            logits = logits_of(self._call(inputs))
        else:
            logits, _ = self.answers.scores(inputs, self._call)
        if logits.ndim != 2:
            raise ValueError(
                "The model must return logits of shape (batch, outputs), not "
                f"{tuple(logits.shape)}: wrap it in a module that returns one row for "
                "each example. For labels of tokens the likelihood is "
                '"token_classification".'
            )
        return logits

    def log_probs(self, batch: Any) -> Tensor:
        """Compute log-probabilities `(B, C + 1)` of `class_token_ids`, and all else."""
        assert self.answers is not None
        return self.answers.log_probs(self._inputs(batch), self._call)

    def split(self, batch: Any) -> tuple[Any, Tensor]:
        """Split a training batch, a mapping or `(X, y)`, into inputs and labels.

        The labels are on the model's device.
        """
        X, y = self.split_if_labelled(batch)
        if y is not None:
            return X, y
        given: Any = type(X).__name__
        if isinstance(X, Mapping):
            given = sorted(str(key) for key, value in X.items() if value is not None)
        raise ValueError(
            f"No labels {self.dict_key_y!r} in the batch, which has only {given}: pass "
            "the key of the labels as dict_key_y, or pairs (X, y)."
        )

    def split_if_labelled(self, batch: Any) -> tuple[Any, Tensor | None]:
        """Split a batch as `split` does; labels that are missing are None."""
        if isinstance(batch, Tensor):
            return batch, None
        check_tokenized(batch)
        if isinstance(batch, Mapping):
            X, y = batch, batch.get(self.dict_key_y)
        elif isinstance(batch, (tuple, list)) and len(batch) == 2:
            X, y = batch
        else:
            raise TypeError(
                "A batch must be a mapping (with labels, to learn from), a tensor or a "
                f"pair (X, y), not {type(batch).__name__}."
            )
        if isinstance(y, list | tuple) and any(isinstance(each, str) for each in y):
            raise TypeError(f"Labels must be numbers, such as those of classes: {y}.")
        return X, None if y is None else as_tensor(y).to(self.device)

    def positions(self, batch: Any, n_logits: int) -> Positions:
        """Describe the rows of a batch that has `n_logits` rows of logits."""
        mask = self.token_mask(batch)
        n_examples = n_logits if mask is None else len(mask)
        rows = self._inputs(batch)
        if self.answers is not None:
            rows = self.answers.rows(rows)
        positions = positions_of(rows, n_examples, self.device)
        # A module of one's own may put texts into another order, as by their lengths.
        is_text = positions.is_text and self.transformer is not None
        owners = self.owners(batch)
        return positions._replace(owners_of_logits=owners, is_text=is_text)

    def token_mask(self, batch: Any) -> Tensor | None:
        """Mark tokens `(B, T)` that have logits; None where examples have one row."""
        return None

    def owners(self, batch: Any) -> Tensor | None:
        """Number each logit's example, `(N,)`; None where each example has one row."""
        mask = self.token_mask(batch)
        return None if mask is None else mask.nonzero()[:, 0]

    def unlabelled(self, inputs: Any) -> Any:
        """Return inputs without labels, which may say what of them has logits."""
        if not isinstance(inputs, Mapping) or self.dict_key_y not in inputs:
            return inputs
        return {key: value for key, value in inputs.items() if key != self.dict_key_y}

    def in_places(self, rows: Tensor, batch: Any, dim: int = 0) -> Tensor:
        """Put rows where their tokens are: N along one dimension, `(B, T)` along two.

        Elsewhere is nan, and in whole numbers -100. Rows of examples stay as they are.
        """
        # Moments know no texts.
        mask = self.token_mask(batch) if isinstance(batch, Mapping) else None
        if mask is None:
            return rows
        by_row = rows.movedim(dim, 0)
        empty = torch.nan if rows.is_floating_point() else IGNORED
        found = by_row.new_full((*mask.shape, *by_row.shape[1:]), empty)
        found[mask.to(rows.device)] = by_row
        return found.movedim((0, 1), (dim, dim + 1))

    def inputs(self, batch: Any) -> Any:
        """Return the inputs of a batch that may have labels."""
        return self.split_if_labelled(batch)[0]

    def text(self, batch: Any) -> Any:
        """Return inputs with `input_ids` `(B, T)`; None for a batch without texts."""
        inputs = self._inputs(self.inputs(batch))
        tokens = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
        return inputs if isinstance(tokens, Tensor) and tokens.ndim == 2 else None

    def agree(self, logits: Tensor, others: Tensor) -> bool:
        """Tell whether two computations of the same logits differ by rounding alone."""
        dtype = next(self.model.parameters()).dtype
        # Layers, whose errors add up, may compute in float32 whatever the weights are.
        share = 0.05 if dtype in _HALF else 1e-3
        atol = share * logits.abs().max().item()
        return torch.allclose(others, logits, rtol=0.0, atol=atol)

    @property
    def device(self) -> torch.device:
        """Say where batches and logits are: on the first parameter's device."""
        # Asked at each call: `parameters()` takes five times as long to find it.
        first = next(self.tree.weights())
        return device_of(self.model) if first.is_meta else first.device

    @property
    def tree(self) -> Tree:
        """List the model's modules: as they are now, or were when the session began."""
        if get_ident() not in self._within:
            self._tree = self._tree.current()
        return self._tree

    @contextmanager
    def running(self) -> Iterator[None]:
        """Evaluate the model: a session, within which nothing about it changes.

        `adapter` is the only active one, other threads wait, and compiled modules run
        eagerly. What is right already is left alone, since modules may watch what is
        set on them. On leaving, also by an exception, the user's adapter is active
        again, and every module has its own mode. A session within another one has
        nothing to do.
        """
        if get_ident() in self._within:
            yield
            return
        # The turn comes first: all that follows changes the model, also for other
        # threads.
        with alone(), evaluating(self.tree, self.adapter), self._begun():
            yield

    def in_turn(self, compute: Callable[[], Result], *, may_share: bool) -> Result:
        """Return what is computed of the model, while no other thread changes it.

        What makes forward passes alone may share it with other threads that do so at
        the same time, unless a pass would find what another one has left.
        """
        # Answers are read by hooks, which other threads' passes would call too.
        may_share = may_share and self.answers is None
        if may_share and get_ident() not in self._within and self.tree.is_constant:
            with TURNS.together(self, self._watched), self._begun():
                result = compute()
                state = self._shared_state
                assert state is not None
                if not state.has_changed():
                    return result
                self._tree.leaves_state = True
        with self.running():
            return compute()

    @contextmanager
    def _begun(self) -> Iterator[None]:
        self._within.add(get_ident())
        try:
            yield
        finally:
            self._within.remove(get_ident())

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Let the model evaluate, and note its state, for passes of several threads."""
        tree = self._tree
        with evaluating(tree, self.adapter), put_back(tree) as state:
            state.watch()
            self._shared_state = state
            try:
                yield
            finally:
                self._shared_state = None

    @contextmanager
    def forward_passes(self) -> Iterator[None]:
        """Run the model in a session, without gradients."""
        with self.running(), torch.no_grad():
            yield

    @contextmanager
    def prepared(self, trainable: Sequence[Tensor] = ()) -> Iterator[None]:
        """Run the model in a session, with gradients for the given parameters alone.

        On leaving, every parameter's `requires_grad` is as it was.
        """
        wanted = set(map(id, trainable))
        with self.running():
            # By their places: hooks that offload weights may replace them within.
            changed: list[tuple[dict[str, Any], str]] = [
                (holder, name)
                for holder in self.tree.parameters
                for name, weight in holder.items()
                if weight is not None and weight.requires_grad != (id(weight) in wanted)
            ]

            def flip() -> None:
                for holder, name in changed:
                    holder[name].requires_grad_(not holder[name].requires_grad)

            flip()
            try:
                yield
            finally:
                flip()

    def _inputs(self, batch: Any) -> Any:
        """Return a batch without labels on the model's device, a mapping as a dict."""
        device = self.device
        if isinstance(batch, Tensor):
            batch = batch.to(device)
            if not (is_tokens(batch) and self._takes_only_keywords):
                return batch
            batch = {"input_ids": batch}
        if self.transformer is not None:  # a model of one's own may take texts
            check_tokenized(batch)
        if not isinstance(batch, Mapping):
            return batch
        inputs = {
            key: value.to(device) if isinstance(value, Tensor) else value
            for key, value in batch.items()
            if key not in (self.dict_key_y, *_LABEL_KEYS)
        }
        if self.transformer is None:
            return inputs
        check_texts(inputs, self.transformer)
        # Answers come after a text, and are read where its last token is.
        return text_first(inputs) if self.answers else inputs

    def _call(self, inputs: Any) -> Any:
        """Call the model with inputs, or with the keys of a mapping as keywords.

        transformers' models take keywords. Other modules do if their forward pass takes
        nothing by position, or its first place, of several, is one of the keys', as in
        `forward(self, input_ids, **others)`. Each call finds the model's state as the
        user has left it, and leaves it so.
        """
        given = inputs if isinstance(inputs, Mapping) else {}
        # One that several threads run is put back when all have left.
        with nullcontext() if self._shared_state else put_back(self.tree):
            if given and (self._takes_only_keywords or self._first_key in given):
                return self.model(**given)
            return self.model(inputs)

    def _find_answers(
        self,
        class_token_ids: Sequence[Any] | None,
        mask_token_id: int | None,
        normalised: bool,
    ) -> Answers | None:
        transformer = self.transformer
        if not self.may_answer:
            if class_token_ids is not None or mask_token_id is not None or normalised:
                raise ValueError(
                    "Labels of tokens are classes of the model's own output: leave out "
                    "class_token_ids, class_texts, mask_token_id and normalised."
                )
            return None
        if class_token_ids is not None:
            return answers_of(class_token_ids, transformer, mask_token_id, normalised)
        if transformer is not None and transformer.can_generate():
            return Choices(transformer, normalised)
        return None


# --- wrappers -------------------------------------------------------------------------


def find_transformer(model: nn.Module) -> PreTrainedModel | None:
    """Find the transformers model within wrappers, if there is one."""
    inner = unwrapped(model)
    return inner if isinstance(inner, PreTrainedModel) else None


def unwrapped(model: nn.Module) -> nn.Module:
    """Return what PEFT's, torch.compile's or data parallel wrappers hold."""
    while not isinstance(model, PreTrainedModel):
        if isinstance(model, PeftModel):
            inner = model.get_base_model()
        else:  # accelerate's function puts torch's wrapper back
            inner = extract_model_from_parallel(getattr(model, "_orig_mod", model))
        if inner is model:
            break
        model = inner
    return model
