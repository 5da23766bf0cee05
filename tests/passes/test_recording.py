"""Each example's rows are found, however a model lays them out."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot
from torch.testing import assert_close

from tests.support.dense import EXACT, assert_exact, full_rank, jacobians
from tests.support.models import (
    CLASS_TOKEN_IDS,
    VOCABULARY,
    OfMapping,
    first_batch,
    lora_model,
    ragged_batches,
    sequences,
    with_lora,
)
from tests.support.posteriors import (
    KFAC_APPROX,
    count_forward_passes,
    generator,
    make,
)

Forward = Callable[["Two", Any], Tensor]
Batch = dict[str, Tensor]


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


def logits_of_means(m: Two, rows: Tensor) -> Tensor:
    """`(B, C)` logits of the means of an example's rows `(B, T, d)`."""
    return m.second(rows.mean(1))


def means_of_logits(m: Two, rows: Tensor) -> Tensor:
    """`(B, C)` means of the logits of an example's rows `(B, T, d)`."""
    logits = m.second(rows.tanh())
    return logits.mean(1)


# Layers that see the rows `(B, T, d)` laid out in some way.


def by_example(m: Two, x: Tensor) -> Tensor:
    return average(both_layers(m, x))


def flat(m: Two, x: Tensor) -> Tensor:
    n_examples, length, _ = x.shape
    positions = x.flatten(0, 1)
    rows = both_layers(m, positions)
    in_order = rows.reshape(n_examples, length, -1)
    return average(in_order)


def positions_first(m: Two, x: Tensor) -> Tensor:
    turned = x.transpose(0, 1)
    rows = both_layers(m, turned)
    in_order = rows.transpose(0, 1)
    return average(in_order)


def positions_first_flat(m: Two, x: Tensor) -> Tensor:
    n_examples, length, _ = x.shape
    turned = x.transpose(0, 1)
    positions = turned.flatten(0, 1)
    rows = both_layers(m, positions)
    by_position = rows.reshape(length, n_examples, -1)
    in_order = by_position.transpose(0, 1)
    return average(in_order)


def windows(m: Two, x: Tensor) -> Tensor:
    """Pairs of neighbours are rows of their own, as in attention within windows."""
    n_examples, length, _ = x.shape
    pairs = x.reshape(-1, 2, 5)
    rows = both_layers(m, pairs)
    in_order = rows.reshape(n_examples, length, -1)
    return average(in_order)


def frames(m: Two, x: Tensor) -> Tensor:
    """Two halves of an example take turns, as the frames of a video do."""
    n_examples = len(x)
    halves = x.reshape(n_examples, 2, -1, 5)
    taking_turns = halves.transpose(1, 2)
    pairs = taking_turns.flatten(0, 1)
    rows = both_layers(m, pairs)
    in_turns = rows.reshape(n_examples, -1, 2, 3)
    in_halves = in_turns.transpose(1, 2)
    in_order = in_halves.flatten(1, 2)
    return average(in_order)


def backwards(m: Two, x: Tensor) -> Tensor:
    rows = both_layers(m, x.flip(0))
    return average(rows.flip(0))


LAYOUTS = {
    "by example": by_example,
    "flat": flat,
    "positions first": positions_first,
    "positions first, flat": positions_first_flat,
    "windows": windows,
    "frames": frames,
    "backwards": backwards,
}


def on_tokens(run: Forward) -> Forward:
    """Of texts, whose proofs are remembered."""

    def run_on_embeddings(m: Two, ids: Tensor) -> Tensor:
        return run(m, m.embed(ids))

    return run_on_embeddings


# Models that change their layout, share rows or mix examples.


def turning(m: Two, x: Tensor) -> Tensor:
    """Another layout at another length."""
    _, length, _ = x.shape
    if length == 6:
        return positions_first(m, x)
    return by_example(m, x)


def both_ways(m: Two, x: Tensor) -> Tensor:
    """Two calls of one layer, by example and with positions first."""
    in_order = hidden(m, x)
    by_position = in_order.transpose(0, 1)
    logits = both_layers(m, by_position)
    return logits.mean(0)


def shared(*leading: int) -> Forward:
    """Send rows without a batch dimension through a layer, as DeBERTa does."""

    def run(m: Two, x: Tensor) -> Tensor:
        n_rows = leading[-1]
        rows = m.constant[:n_rows]
        constant = rows.reshape(*leading, 5)
        distances = m.first(constant).flatten(0, -2)
        scores = m.first(x) @ distances.T
        attention = scores.softmax(-1)
        attended = attention @ distances
        return means_of_logits(m, attended)

    return run


def contrast(m: Two, x: Tensor) -> Tensor:
    """An example is compared with the mean of its batch."""
    rows = m.first(x)
    mean = rows.mean(0)
    return means_of_logits(m, rows - mean)


def needs_pairs(m: Two, x: Tensor) -> Tensor:
    if len(x) == 1:
        raise RuntimeError("not alone")
    run = shared(3)
    return run(m, x)


def ordering(m: Two, x: Tensor) -> Tensor:
    """Examples are sorted by their first number, and come back in their own order."""
    first_numbers = x[:, 0, 0]
    order = first_numbers.argsort()
    back = order.argsort()
    logits = by_example(m, x[order])
    return logits[back]


def routed(m: Two, x: Tensor) -> Tensor:
    """Positions go to one of two layers, by their first number."""
    to_first = x[..., 0] > 0
    of_first = of_chosen(m.first, x, to_first)
    of_second = of_chosen(m.second, x, ~to_first)
    rows = of_first + of_second
    return rows.mean(1)


def of_chosen(
    layer: nn.Module,
    x: Tensor,
    chosen: Tensor,
) -> Tensor:
    """Send the chosen positions through a layer; the others are 0."""
    out = x.new_zeros(*chosen.shape, 3)
    # As routers do, which do not call an expert that has nothing to do.
    if not chosen.any():
        return out
    outputs = layer(x[chosen])
    # Of the first layer's five outputs, too, as many as there are logits.
    rows = outputs[:, :3].tanh()
    places = chosen[..., None]
    return out.masked_scatter(places, rows)


def unequal_windows(m: Two, x: Tensor) -> Tensor:
    """Windows of two positions, as many as a text has before its zeros."""
    has_text = x[..., 0] != 0
    n_positions = has_text.sum(1)
    # The last window of an odd number is half empty.
    halves = (n_positions + 1) // 2
    n_windows = halves.tolist()
    windows = x.unflatten(1, (-1, 2))
    most = windows.shape[1]
    is_window = first_positions(most, n_windows)
    positions = hidden(m, windows[is_window])
    rows = positions.mean(1)
    of_texts = rows.split(n_windows)
    means = [of_text.mean(0) for of_text in of_texts]
    return m.second(torch.stack(means))


# Models of batches with several inputs.


def windows_of_texts(m: Two, batch: Batch) -> Tensor:
    """Rows are windows, and a second input tells which text each belongs to."""
    positions = hidden(m, batch["x"])
    windows = positions.mean(1)
    owners = one_hot(batch["text"])
    of_texts = owners.to(windows).T @ windows
    return m.second(of_texts)


def windows_of_tokens(m: Two, batch: Batch) -> Tensor:
    x = m.embed(batch["input_ids"])
    embedded = {"x": x, "text": batch["text"]}
    return windows_of_texts(m, embedded)


def texts_as_classes(m: Two, batch: Batch) -> Tensor:
    """The logits are products of images and texts, as in CLIP."""
    patches = both_layers(m, batch["x"])
    tokens = both_layers(m, batch["classes"])
    images = patches.mean(1)
    classes = tokens.mean(1)
    return images @ classes.T


def images_in_texts(m: Two, batch: Batch) -> Tensor:
    """Images take the places of tokens, as in LLaVA."""
    ids = batch["input_ids"]
    x = m.embed(ids)
    if "x" in batch:
        # Token 0 stands for an image.
        is_image = ids == 0
        patches = hidden(m, batch["x"])
        images = patches.mean(1)
        x = x.masked_scatter(is_image[..., None], images)
    return logits_of_means(m, x.tanh())


# --- inputs ---------------------------------------------------------------------------


def some_numbers(
    n: int,
    length: int,
) -> Tensor:
    """Make `(n, length, 5)` inputs."""
    X, _ = sequences(n, length)
    return X


def numbers(*sizes: tuple[int, int]) -> list[Tensor]:
    """Make a batch of each size, of so many examples and positions."""
    return [some_numbers(n, length) for n, length in sizes]


def texts(*sizes: tuple[int, int]) -> list[Tensor]:
    """Make a batch of each size, of so many texts and tokens."""
    draws = generator()
    batches = []
    for size in sizes:
        # Token 0 is padding, or stands for an image.
        ids = torch.randint(1, VOCABULARY, size, generator=draws)
        batches.append(ids)
    return batches


def some_tokens(
    n: int,
    length: int,
) -> Tensor:
    """Make `(n, length)` tokens."""
    (tokens,) = texts((n, length))
    return tokens


def first_positions(
    n_positions: int,
    counts: Sequence[int],
) -> Tensor:
    """`(B, n_positions)`, true at so many positions of each example."""
    positions = torch.arange(n_positions)
    ends = torch.tensor(counts)
    return positions < ends[:, None]


def choices(*counts: Sequence[int]) -> list[Tensor]:
    """So many of four positions of each example go to the first layer."""
    batches = []
    for of_batch in counts:
        n_examples = len(of_batch)
        X = some_numbers(n_examples, 4)
        to_first = first_positions(4, of_batch)
        # The sign of the first number tells the layer.
        X[..., 0] = torch.where(to_first, 1.0, -1.0)
        batches.append(X)
    return batches


def ending_at(*lengths: Sequence[int]) -> list[Tensor]:
    """Examples that are zero from some position on."""
    batches = []
    for of_batch in lengths:
        n_examples = len(of_batch)
        longest = max(of_batch)
        X = some_numbers(n_examples, longest)
        has_text = first_positions(longest, of_batch)
        X[~has_text] = 0
        batches.append(X)
    return batches


def with_images(
    *counts: Sequence[int],
) -> list[Batch]:
    """Texts of four tokens, of which so many stand for images."""
    batches = []
    for of_batch in counts:
        tokens = some_tokens(len(of_batch), 4)
        is_image = first_positions(4, of_batch)
        ids = torch.where(is_image, 0, tokens)
        batch = {"input_ids": ids}
        n_images = sum(of_batch)
        # A batch of texts alone has no images at all, rather than none.
        if n_images:
            batch["x"] = some_numbers(n_images, 4)
        batches.append(batch)
    return batches


def owners_of(n_windows: Sequence[int]) -> Tensor:
    """The number of the text that each window belongs to."""
    n_texts = len(n_windows)
    counts = torch.tensor(n_windows)
    return torch.arange(n_texts).repeat_interleave(counts)


def in_windows(
    *counts: Sequence[int],
) -> list[Batch]:
    """Windows of four positions, of which each text has so many."""
    batches = []
    for n_windows in counts:
        text = owners_of(n_windows)
        X = some_numbers(len(text), 4)
        batch = {"x": X, "text": text}
        batches.append(batch)
    return batches


def tokens_in_windows(
    *counts: Sequence[int],
) -> list[Batch]:
    """Windows of four tokens, of which each text has so many."""
    batches = []
    for n_windows in counts:
        text = owners_of(n_windows)
        ids = some_tokens(len(text), 4)
        batch = {"input_ids": ids, "text": text}
        batches.append(batch)
    return batches


def with_classes(
    *sizes: tuple[int, int],
) -> list[Batch]:
    """Images of each size, beside three texts."""
    three_texts = SORTED[:3]
    batches = []
    for X in numbers(*sizes):
        batch = {"x": X, "classes": three_texts}
        batches.append(batch)
    return batches


def examples_alike() -> list[Tensor]:
    X = some_numbers(4, 4)
    first = X[:1]
    return [first.expand_as(X)]


def in_some_orders() -> list[Tensor]:
    return [
        SORTED,
        SORTED.flip(0),
        SORTED,
        # In no order.
        SORTED[[2, 0, 1]],
    ]


UNSORTED = some_numbers(4, 3)
FIRST_NUMBERS = UNSORTED[:, 0, 0]
SORTED = UNSORTED[FIRST_NUMBERS.argsort()]
# The first size is a square, in which rows and positions could be taken for each other.
SIZES = (
    (4, 4),
    (1, 4),
    (3, 4),
    (2, 6),
    (6, 6),
    (4, 8),
)
# With examples that need one layer alone, and batches of which no example needs one.
COUNTS = (
    (1, 1),
    (2, 0),
    (1, 3),
    (3, 1),
    (4, 0, 2),
    (2, 2),
    (0, 2),
    (3, 3),
)


# --- curvature and covariance ---------------------------------------------------------


def checked(
    model: nn.Module,
    inputs: Sequence[Any],
    structure: str = "lowrank_kron",
) -> Any:
    """Fit a posterior, and compare it with Jacobians that know of no rows."""
    if isinstance(inputs[0], Mapping):
        model = OfMapping(model)
    # So that the curvature is the same in any order of the rows.
    settings = full_rank(structure)
    la = make(model, structure, **settings)
    batches = []
    for X in inputs:
        n_examples = len(model(X))
        labels = torch.arange(n_examples) % 3
        batches.append((X, labels))
    # One fit sees all sizes, since what was proved of a batch is used for the next.
    la.fit(batches)
    assert_exact(la, model, inputs)
    return la


layouts = pytest.mark.parametrize(
    "run",
    LAYOUTS.values(),
    ids=LAYOUTS,
)


@layouts
def test_rows_of_numbers_in_any_layout_are_exact(run):
    model = adapted(run)
    checked(model, numbers(*SIZES))


@layouts
def test_rows_of_texts_in_any_layout_are_exact(run):
    model = adapted(on_tokens(run))
    checked(model, texts(*SIZES))


CASES = [
    pytest.param(
        positions_first,
        examples_alike(),
        id="examples alike",
    ),
    pytest.param(
        turning,
        numbers(
            (4, 3),
            (4, 6),
            (6, 6),
            (4, 3),
        ),
        id="by length",
    ),
    pytest.param(
        both_ways,
        numbers((4, 4), (3, 3), (3, 5)),
        id="two calls of a layer, two layouts",
    ),
    pytest.param(
        shared(1),
        numbers((1, 3), (4, 3), (2, 5)),
        id="one shared row",
    ),
    pytest.param(
        shared(3),
        numbers(
            (1, 3),
            (3, 3),
            (2, 5),
            (4, 4),
        ),
        id="as many shared rows as examples",
    ),
    pytest.param(
        shared(1, 3),
        numbers((3, 3), (2, 5)),
        id="shared rows with a leading one",
    ),
    pytest.param(
        on_tokens(shared(3)),
        texts((3, 3), (2, 5), (1, 3)),
        id="texts, shared rows",
    ),
    pytest.param(
        contrast,
        numbers((4, 3), (3, 3)),
        id="examples that count for others",
    ),
    pytest.param(
        needs_pairs,
        numbers((4, 3), (3, 3)),
        id="no example alone",
    ),
    pytest.param(
        ordering,
        in_some_orders(),
        id="sorted",
    ),
    pytest.param(
        routed,
        choices(*COUNTS),
        id="routed",
    ),
    pytest.param(
        unequal_windows,
        ending_at(
            (4, 4),
            (2, 6),
            (4, 4),
            (6, 2),
        ),
        id="unequal windows of texts",
    ),
    pytest.param(
        windows_of_texts,
        in_windows(
            (2, 2),
            (1, 3),
            (1, 2),
            (3, 1, 1),
            (1, 3, 2),
        ),
        id="windows as rows",
    ),
    pytest.param(
        windows_of_tokens,
        tokens_in_windows((2, 2), (1, 3)),
        id="windows of tokens as rows",
    ),
    pytest.param(
        texts_as_classes,
        with_classes((3, 3), (6, 3)),
        id="texts as classes",
    ),
    pytest.param(
        images_in_texts,
        with_images(
            (1, 1),
            (2, 0),
            (0, 2),
            (1, 3),
            (0, 0),
            (1, 2, 0),
        ),
        id="images in texts",
    ),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("run", "inputs"), CASES)
def test_curvature_and_covariance_are_exact(run, inputs):
    checked(adapted(run), inputs)


@pytest.mark.parametrize("structure", ["diag", "full"])
def test_shared_rows_in_the_hosts_structures(structure):
    model = adapted(shared(3))
    inputs = numbers((4, 3), (2, 3))
    checked(model, inputs, structure)


def matrix(
    model: nn.Module,
    batches: Sequence[Any],
    kfac_approx: str,
) -> Tensor:
    """Compute the dense curvature of a fit."""
    settings = full_rank(kfac_approx=kfac_approx)
    la = make(model, **settings)
    la.fit(batches)
    return la.H.to_matrix()


@pytest.mark.parametrize("run", [flat, positions_first, shared(3)])
def test_factors_of_expand_are_those_of_batches_of_one(run):
    model = adapted(run)
    batches = [
        sequences(4, 4),
        sequences(3, 6),
    ]
    batches_of_one = []
    for X, y in batches:
        inputs = X.split(1)
        labels = y.split(1)
        batches_of_one += zip(inputs, labels, strict=True)
    found = matrix(model, batches, "expand")
    expected = matrix(model, batches_of_one, "expand")
    assert_close(found, expected, **EXACT)


# --- masks ----------------------------------------------------------------------------


def padded(joined: int) -> Forward:
    """Flat positions, of which so many neighbours were added up."""

    def run(m: Two, batch: Batch) -> Tensor:
        mask = batch["attention_mask"][..., None]
        embedded = m.embed(batch["input_ids"])
        real_tokens = embedded * mask
        groups = real_tokens.unflatten(1, (-1, joined))
        x = groups.sum(2)
        rows = hidden(m, x.flatten(0, 1))
        by_text = rows.reshape(x.shape)
        real = by_text * mask[:, ::joined]
        return m.second(real.sum(1))

    return run


@pytest.mark.parametrize("kfac_approx", KFAC_APPROX)
def test_padding_does_not_count(kfac_approx):
    model = adapted(padded(1))
    short = ragged_batches(padded_to=7)
    long = ragged_batches(padded_to=11)
    of_short = matrix(model, short, kfac_approx)
    of_long = matrix(model, long, kfac_approx)
    assert_close(of_short, of_long, **EXACT)


def test_a_mask_of_other_positions_is_refused():
    model = adapted(padded(2))
    batches = ragged_batches(padded_to=8)
    message = r"first\S+: the layer sees 4 .*use kfac"
    with pytest.raises(NotImplementedError, match=message):
        matrix(model, batches, "expand")
    # Gradients of whole examples need no mask of the positions.
    curvature = matrix(model, batches, "gradient")
    assert curvature.any()


def test_rows_that_count_for_others_are_refused():
    model = adapted(contrast)
    batches = [sequences(4, 3)]
    message = r'rows of others: use kfac_approx="gradient"'
    with pytest.raises(NotImplementedError, match=message):
        matrix(model, batches, "expand")


@pytest.mark.parametrize("kfac_approx", KFAC_APPROX)
def test_one_mask_of_all_texts_is_that_of_each(kfac_approx):
    batch = first_batch(lengths=(5, 5, 5), padded_to=7)
    of_first = batch["attention_mask"][:1]
    shared_by_all = batch | {"attention_mask": of_first}
    model = adapted(padded(1))
    found = matrix(model, [shared_by_all], kfac_approx)
    expected = matrix(model, [batch], kfac_approx)
    assert_close(found, expected, **EXACT)


def with_additive_mask(batch: Batch, n_queries: int) -> Batch:
    """Take a mask of what tokens attend to, which is added to their logits."""
    is_padding = batch["attention_mask"] == 0
    of_tokens = is_padding[:, None, None]
    of_queries = of_tokens.expand(-1, 1, n_queries, -1)
    lowest = torch.finfo(torch.float64).min
    added = of_queries.double() * lowest
    return batch | {"attention_mask": added}


# One mask of all queries, or one of each.
queries = pytest.mark.parametrize("n_queries", [1, 7])


@queries
def test_a_mask_of_what_tokens_attend_to_is_exact_or_refused(n_queries):
    batch = first_batch(lengths=(4, 7, 5))
    of_queries = with_additive_mask(batch, n_queries)
    model = lora_model("bert")
    found = matrix(model, [of_queries], "gradient")
    expected = matrix(model, [batch], "gradient")
    assert_close(found, expected, **EXACT)
    # It does not tell which positions count.
    message = r"1, \d, 7\): use kfac_approx"
    with pytest.raises(NotImplementedError, match=message):
        matrix(model, [of_queries], "expand")


@queries
def test_the_last_token_is_not_looked_for_in_a_mask_of_what_tokens_attend_to(n_queries):
    batch = first_batch(lengths=(4, 7, 5))
    of_queries = with_additive_mask(batch, n_queries)
    model = lora_model("gpt2")
    la = make(model, class_token_ids=CLASS_TOKEN_IDS)
    message = r"does not show .* pass one of shape \(3, 7\)"
    with pytest.raises(NotImplementedError, match=message):
        la.fit([of_queries])


def without_mask(m: Two, batch: Batch) -> Tensor:
    rows = hidden(m, batch["x"])
    return logits_of_means(m, rows)


@pytest.mark.parametrize(
    "shape",
    [
        (1, 4),
        (3, 4, 4),
        (3, 1, 4, 4),
    ],
)
def test_a_mask_beside_features_counts_no_padding_as_positions(
    shape,
):
    counts = torch.arange(4) > 0
    batch = {
        "x": some_numbers(3, 4),
        "attention_mask": counts.expand(shape),
        "labels": torch.arange(3),
    }
    model = adapted(without_mask)
    curvature = matrix(model, [batch], "gradient")
    assert curvature.any()
    message = 'use kfac_approx="gradient"'
    with pytest.raises(NotImplementedError, match=message):
        matrix(model, [batch], "expand")


# --- passes ---------------------------------------------------------------------------


@pytest.mark.parametrize("run", [by_example, shared(3), contrast])
def test_jacobians_are_differentiable_in_the_inputs(run):
    model = adapted(run)
    x = some_numbers(3, 3)
    x.requires_grad_()

    def slope(Js: Tensor, logits: Tensor) -> Tensor:
        """Differentiate some function of both in the inputs."""
        squares = Js.square()
        total = squares.sum() + logits.sum()
        (slope,) = torch.autograd.grad(total, x)
        return slope

    backend = make(model).backend
    Js, logits = backend.jacobians(x, enable_backprop=True)
    found = slope(Js, logits)
    expected = slope(
        Js=jacobians(model, x),
        logits=model(x),
    )
    assert_close(found, expected, **EXACT)


@pytest.mark.parametrize(
    ("run", "n_passes"),
    [
        # One pass of the batch.
        (flat, 1),
        # And one of each example.
        (shared(3), 1 + 4),
        # And another of the batch, since examples alone do not give its logits.
        (contrast, 1 + 4 + 1),
        # No pass of an example alone comes to an end, and the batch takes another.
        (needs_pairs, 1 + 1),
    ],
)
def test_an_example_comes_alone_or_through_the_batch(run, n_passes):
    model = adapted(run)
    X, y = sequences(4, 3)
    la = checked(model, [X])
    # Of those that come to an end.
    calls = count_forward_passes(la)
    la.fit([(X, y)])
    assert len(calls) == n_passes


@pytest.mark.parametrize("run", [flat, shared(3), contrast])
def test_a_batch_of_one_takes_one_pass(run):
    model = adapted(run)
    # Of a larger batch it is proved first how examples are laid out.
    la = checked(model, numbers((4, 3)))
    one_example = sequences(1, 3)
    calls = count_forward_passes(la)
    la.fit([one_example])
    assert len(calls) == 1
