"""Each example's rows are found, however a model lays them out, and that is proven."""

import gc
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import PretrainedConfig, PreTrainedModel

from laplace_lora_ext.models.lora_layers import find_blocks
from laplace_lora_ext.passes.graph import Graph, codewords
from tests.support.cases import assert_exact
from tests.support.dense import EXACT, full_rank
from tests.support.models import (
    CLASS_TOKEN_IDS,
    VOCABULARY,
    Batch,
    OfMapping,
    first_batch,
    lora_model,
    pairs,
    part_of,
    plain_model,
    ragged_batches,
    sequences,
    with_lora,
)
from tests.support.posteriors import (
    count_backward_passes,
    count_forward_passes,
    fitted,
    generator,
    make,
)

Forward = Callable[["Two", Any], Tensor]


# --- models ---------------------------------------------------------------------------


class Two(nn.Module):
    """An embedding, two linear layers, and a way to go through them."""

    def __init__(self, run: Forward) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 5)
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 3)
        self.constant = nn.Parameter(torch.zeros(4, 5))
        self.run = run

    def forward(self, x: Any) -> Tensor:
        return self.run(self, x)


def adapted(run: Forward) -> nn.Module:
    return with_lora(Two(run), "first", "second")


def hidden(m: Two, rows: Tensor) -> Tensor:
    return m.first(rows).tanh()


def both_layers(m: Two, rows: Tensor) -> Tensor:
    return m.second(hidden(m, rows))


def average(rows: Tensor) -> Tensor:
    """`(B, C)` logits of rows `(B, T, C)`, which are mixed by no linear function."""
    return rows.tanh().mean(1)


def means_of_logits(m: Two, rows: Tensor) -> Tensor:
    """`(B, C)` means of the logits of an example's rows `(B, T, d)`."""
    return m.second(rows.tanh()).mean(1)


# Layers that see the rows `(B, T, d)` laid out in some way.


def flat(m: Two, x: Tensor) -> Tensor:
    return average(both_layers(m, x.flatten(0, 1)).reshape(*x.shape[:2], -1))


def positions_first(m: Two, x: Tensor) -> Tensor:
    return average(both_layers(m, x.transpose(0, 1)).transpose(0, 1))


def on_tokens(run: Forward) -> Forward:
    """Of texts."""
    return lambda m, ids: run(m, m.embed(ids))


# Models that change their layout, share rows or mix examples.


def shared(n: int) -> Forward:
    """Send rows without a batch dimension through a layer, as DeBERTa does."""

    def run(m: Two, x: Tensor) -> Tensor:
        distances = m.first(m.constant[:n])
        attention = (m.first(x) @ distances.T).softmax(-1)
        return means_of_logits(m, attention @ distances)

    return run


def called_twice(m: Two, x: Tensor) -> Tensor:
    """A layer is called once more, where no gradient comes back."""
    rows = hidden(m, x)
    # None at all, which is not a gradient of zeros.
    stopped = _Through.apply(m.second(rows.sin()), lambda gradient: None)
    return average(m.second(rows) + stopped)


def contrast(m: Two, x: Tensor) -> Tensor:
    """An example is compared with the mean of its batch."""
    rows = m.first(x)
    return means_of_logits(m, rows - rows.mean(0))


def needs_pairs(m: Two, x: Tensor) -> Tensor:
    if len(x) == 1:
        raise LookupError("not alone")
    return shared(3)(m, x)


def sorted_by_first_tokens(m: Two, ids: Tensor) -> Tensor:
    order = ids[:, 0].argsort()
    return flat(m, m.embed(ids[order]))[order.argsort()]


# Models of batches with several inputs.


def gated(m: Two, batch: Batch) -> Tensor:
    """The first layer, which sees positions first, counts if the gate is open."""
    x = m.embed(batch["input_ids"])
    of_first = m.first(x.transpose(0, 1)).transpose(0, 1)
    return average(m.second(x) + batch["gate"] * of_first[..., :3])


def one_position(m: Two, batch: Batch) -> Tensor:
    """Positions come first, and the logits are those of one position."""
    x = m.embed(batch["input_ids"]).transpose(0, 1)
    return both_layers(m, x)[batch["at"], torch.arange(x.shape[1])].tanh()


# --- inputs ---------------------------------------------------------------------------


def numbers(*sizes: tuple[int, int]) -> list[Tensor]:
    """Make inputs `(n, length, 5)` of each size."""
    return [sequences(*size)[0] for size in sizes]


def texts(*sizes: tuple[int, int]) -> list[Tensor]:
    """Make a batch of each size, of so many texts and tokens."""
    draws = generator()
    # Token 0 is padding, or stands for an image.
    return [torch.randint(1, VOCABULARY, size, generator=draws) for size in sizes]


def squares(key: str, *values: Any) -> list[Batch]:
    """Make four texts of four tokens, where rows and positions could be confused."""
    (ids,) = texts((4, 4))
    return [{"input_ids": ids, key: torch.tensor(value)} for value in values]


# The first size is a square, in which rows and positions could be taken for each other.
SIZES = ((4, 4), (1, 4), (3, 4), (2, 6), (6, 6), (4, 8))


# --- curvature and covariance ---------------------------------------------------------


def checked(model: nn.Module, inputs: Sequence[Any]) -> Any:
    """Fit a posterior, and compare it with Jacobians that know of no rows."""
    if isinstance(inputs[0], Mapping):
        model = OfMapping(model)
    # So that the curvature is the same in any order of the rows.
    la = make(model, **full_rank())
    # One fit sees all sizes, since what was proved of a batch is used for the next.
    batches = [(X, torch.arange(len(model(X))) % 3) for X in inputs]
    la.fit(batches)
    assert_exact(la, batches)
    return la


CASES = {
    run.__name__: (on_tokens(run), texts(*SIZES)) for run in (flat, positions_first)
} | {
    "texts, shared rows": (on_tokens(shared(3)), texts((3, 3), (2, 5), (1, 3))),
    # The first batch is in order, by chance.
    "sorted texts": (
        sorted_by_first_tokens,
        list(torch.tensor([[[1, 2], [3, 4]], [[3, 4], [1, 2]]])),
    ),
    "called twice": (called_twice, numbers((4, 3))),
    "no example alone": (needs_pairs, numbers((4, 3), (3, 3))),
    # What the first batch does not show: no gradient comes to the first layer;
    "gated": (gated, squares("gate", 0.0, 0.0, 1.0, 2.0)),
    # and `(T, B)` and `(B, T)` have the same rows.
    "one position": (
        one_position,
        squares("at", [0, 1, 2, 3], [3, 0, 0, 1], [2, 2, 1, 0]),
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_curvature_and_covariance_are_exact(case):
    run, inputs = CASES[case]
    checked(adapted(run), inputs)


class OfExperts(PreTrainedModel):
    """Sends even tokens to one expert, and odd ones to another."""

    def __init__(self) -> None:
        super().__init__(PretrainedConfig())
        self.embed = nn.Embedding(VOCABULARY, 5)
        self.experts = nn.ModuleList(nn.Linear(5, 3) for _ in range(2))

    def forward(self, input_ids: Tensor) -> Tensor:
        ids, x = input_ids, self.embed(input_ids)
        rows = x.new_zeros(*ids.shape, 3)
        for remainder, expert in enumerate(self.experts):
            chosen = ids % 2 == remainder
            # As routers do, which do not call an expert that has nothing to do.
            if chosen.any():
                of_chosen = expert(x[chosen]).tanh()
                rows = rows.masked_scatter(chosen[..., None], of_chosen)
        return rows.mean(1)


def test_what_a_batch_shows_of_experts_says_nothing_of_the_next():
    # A token of each text for each expert, in order; then both tokens of a text.
    batches = [[1, 2], [2, 1]], [[1, 1], [2, 2]]
    model = with_lora(OfExperts(), "experts.0", "experts.1")
    checked(model, list(map(torch.tensor, batches)))


def matrix(model: nn.Module, batches: Sequence[Any], kfac_approx: str) -> Tensor:
    """Compute the dense curvature of a fit."""
    la = make(model, **full_rank(kfac_approx=kfac_approx))
    la.fit(batches)
    return la.H.to_matrix()


@pytest.mark.parametrize("run", [positions_first, shared(3)])
def test_factors_of_expand_are_those_of_batches_of_one(run):
    model = adapted(run)
    batches = [sequences(4, 4), sequences(3, 6)]
    alone = []
    for X, y in batches:
        alone += zip(X.split(1), y.split(1), strict=True)
    found = matrix(model, batches, "expand")
    assert_close(found, matrix(model, alone, "expand"), **EXACT)


# --- masks ----------------------------------------------------------------------------


def joined(m: Two, batch: Batch) -> Tensor:
    """Positions of which two neighbours were added up."""
    mask = batch["attention_mask"][..., None]
    real_tokens = m.embed(batch["input_ids"]) * mask
    x = real_tokens.unflatten(1, (-1, 2)).sum(2)
    return m.second((hidden(m, x) * mask[:, ::2]).sum(1))


@pytest.mark.parametrize(
    ("run", "batches", "message"),
    [
        # A mask of other positions.
        (joined, ragged_batches(padded_to=8), r"first\S+: the layer sees 4 .*use k"),
        (contrast, [sequences(4, 3)], r'rows of others: use kfac_approx="gradient"'),
    ],
)
def test_rows_that_no_mask_can_sort_are_refused(run, batches, message):
    with pytest.raises(NotImplementedError, match=message):
        matrix(adapted(run), batches, "expand")
    # Gradients of whole examples need no mask of the positions.
    assert matrix(adapted(run), batches, "gradient").any()


# Masks of what tokens attend to, added to their logits: of all queries, or of each.
@pytest.mark.parametrize("n_queries", [1, 7])
def test_a_mask_of_what_tokens_attend_to_is_exact_or_refused(n_queries):
    batch = first_batch(lengths=(4, 7, 5))
    is_padding = (batch["attention_mask"] == 0)[:, None, None]
    lowest = torch.finfo(torch.float64).min
    added = is_padding.expand(-1, 1, n_queries, -1).double() * lowest
    of_queries = batch | {"attention_mask": added}
    model = lora_model("bert")
    found = matrix(model, [of_queries], "gradient")
    assert_close(found, matrix(model, [batch], "gradient"), **EXACT)
    # It does not tell which positions count, nor where the last token is.
    with pytest.raises(NotImplementedError, match=r"1, \d, 7\): use kfac_approx"):
        matrix(model, [of_queries], "expand")
    la = make(lora_model("gpt2"), class_token_ids=CLASS_TOKEN_IDS)
    message = r"does not show .* pass one of shape \(3, 7\)"
    with pytest.raises(NotImplementedError, match=message):
        la.fit([of_queries])


# --- when a proof is made, and what fails ---------------------------------------------


@pytest.mark.parametrize("n_examples", [2, 3, 8, 9])
def test_of_any_two_examples_some_seed_has_the_first_alone(n_examples):
    words = codewords(n_examples).double()
    first_alone = words.T @ (1 - words)
    assert torch.equal(first_alone > 0, ~torch.eye(n_examples).bool())


def test_texts_are_proven_at_larger_sizes_and_other_inputs_every_time(monkeypatch):
    eight = first_batch(batch_size=8)
    of_one, *others = (part_of(eight, slice(n)) for n in (1, 3, 2, 3, 1, 4, 7, 8, 5, 2))
    # Of a single text there is nothing to prove.
    la = make(lora_model("bert"))
    la.fit([of_one])
    passes = count_backward_passes(monkeypatch)

    def n_proofs(batch: Batch) -> int:
        """Count the backward passes of a prediction beside its own."""
        passes.clear()
        la(batch, link_approx="probit")
        return len(passes) - 1

    # One for each power of two that a batch reaches.
    assert [n_proofs(batch) for batch in others] == [1, 0, 0, 0, 1, 0, 1, 0, 0]
    # Without what is remembered it is proven anew.
    la.recorder.taps.proven.clear()
    assert n_proofs(others[1]) == 1
    embed = la.model.transformer.get_input_embeddings()
    mask = eight["attention_mask"]
    embedded = embed(eight["input_ids"]).detach()
    for _ in range(2):
        assert n_proofs({"inputs_embeds": embedded, "attention_mask": mask}) == 1


# Passes of a batch of four: of the batch, and one of each example; and another of the
# batch where examples alone do not give its logits.
@pytest.mark.parametrize(
    ("run", "n_passes"), [(flat, 1), (shared(3), 5), (contrast, 6)]
)
def test_an_example_comes_alone_or_through_the_batch(run, n_passes):
    model, (X, y) = adapted(run), sequences(4, 3)
    la = checked(model, [X])
    calls = count_forward_passes(la)
    la.fit([(X, y)])
    assert len(calls) == n_passes
    # A batch of one takes one.
    la.fit([sequences(1, 3)])
    assert len(calls) == n_passes + 1


# --- models that overwrite or hook layers' values -------------------------------------


@pytest.fixture
def x() -> Tensor:
    """Inputs of four examples."""
    ((x, _),) = pairs()
    return x


def reading(overwrites: bool) -> nn.Module:
    """Change a layer's input in place, after the layer has read it, or not."""

    def run(m: Two, x: Tensor) -> Tensor:
        x = x.sin()
        logits = m.second(x).tanh()
        if overwrites:
            x.add_(1)
        return logits * x.sum(-1, keepdim=True)

    return with_lora(Two(run), "second")


def test_a_model_that_overwrites_what_its_layers_were_given_is_refused(x):
    # It is the overwriting that is refused, and not the model.
    checked(reading(overwrites=False), [x])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        make(reading(overwrites=True)).fit([(x, torch.arange(4) % 3)])


def test_hooks_of_the_users_own_are_part_of_the_model(x):
    model = reading(overwrites=False)
    for block in find_blocks(model):
        layer = block.module
        layer.register_forward_pre_hook(lambda layer, args: (args[0].sin(),))
        layer.register_forward_hook(lambda layer, args, output: output.mul_(1.5))
    checked(model, [x])


class _Through(torch.autograd.Function):
    """Passes a value on, and its gradient through some function."""

    @staticmethod
    def forward(ctx, x: Tensor, back: Callable[[Tensor], Any]) -> Tensor:
        ctx.back = back
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.back(gradient), None


def with_numbers_read(gradient: Tensor) -> Tensor:
    """Return a gradient, of which a number is read: `torch.func.vmap` refuses that."""
    return gradient if gradient.sum().item() else gradient.clone()


def test_operations_that_take_one_seed_give_the_same_by_single_seeds(x):
    def posterior(hooked: bool) -> Any:
        model = plain_model()
        if hooked:
            model.register_forward_hook(
                lambda *call: _Through.apply(call[-1], with_numbers_read)
            )
        la = make(model)
        # A second batch, for which it is known what the operation refuses.
        la.fit(pairs(2))
        return la

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours, expected = posterior(True), posterior(False)
        assert_close(ours.H.to_matrix(), expected.H.to_matrix())
        for link_approx in ("mean_field", "probit"):
            found = ours(x, link_approx=link_approx)
            assert_close(found, expected(x, link_approx=link_approx))
    # It is found out once, and no further pass is tried in vain.
    assert ours.recorder.taps.is_batchable is False
    assert expected.recorder.taps.is_batchable is True
    messages = [str(warning.message) for warning in caught]
    assert len([each for each in messages if "one by one" in each]) == 1


def test_errors_of_a_model_are_not_taken_for_what_batching_can_not_do():
    model = plain_model()
    la = make(model)

    def fail(gradient: Tensor) -> None:
        raise RuntimeError("theirs")

    failing = model.register_forward_hook(lambda *call: _Through.apply(call[-1], fail))
    with failing, pytest.raises(RuntimeError, match="theirs"):
        la.fit(pairs())
    assert la.recorder.taps.is_batchable is not False


def test_no_graph_waits_for_the_garbage_collector(monkeypatch):
    logits_of_graphs: list[weakref.ref] = []
    initialise = Graph.__init__

    def note(self, *args) -> None:
        initialise(self, *args)
        # A plain reference would itself keep the graph alive.
        logits_of_graphs.append(weakref.ref(self.logits))

    monkeypatch.setattr(Graph, "__init__", note)
    # What other tests have left behind must not be taken for this one's.
    gc.collect()
    gc.disable()
    la = fitted("gpt2")
    la(first_batch(), link_approx="mean_field")
    alive = [logits() for logits in logits_of_graphs]
    gc.enable()
    # At least one of each batch of the fit, and one of the prediction.
    assert len(alive) > 2
    # A graph that refers to itself would live on until a collection.
    assert not any(each is not None for each in alive)
