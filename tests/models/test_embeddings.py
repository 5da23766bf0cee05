"""LoRA of embeddings as two linear layers."""

from __future__ import annotations

import accelerate
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.nn.functional import embedding

from laplace_lora_ext.models.embeddings import Projection, TokenColumns, halves, is_embedding
from laplace_lora_ext.models.lora_layers import (
    find_blocks,
    warn_if_untrained,
    warn_of_other_trainable,
)
from tests.support.kinds import Words
from tests.support.models import base_model, lora_model, ragged_batches, with_lora
from tests.support.posteriors import fitted, generator, make

IDS = torch.tensor([[3, 2, 8, 3], [0, 2, 2, 7]])


class Scaled(nn.Embedding):
    """As those of Gemma 3."""

    def __init__(self, *sizes: int, **settings: int) -> None:
        super().__init__(*sizes, **settings)
        self.register_buffer("embed_scale", torch.tensor(1.7), persistent=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * self.embed_scale


class Around(nn.Module):
    """What `change` makes of an embedding's rows, averaged."""

    def __init__(self, words: nn.Module, change=torch.tanh) -> None:
        super().__init__()
        self.words, self.change = words, change
        self.last = nn.Linear(4, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.last(self.change(self.words(ids)).tanh().mean(1))


def layer_of(words: nn.Module) -> nn.Module:
    return with_lora(Around(words), "words").words


@pytest.mark.parametrize("ids", [IDS, IDS.int(), IDS[0]])
@pytest.mark.parametrize("padding", [{}, {"padding_idx": 2}])
@pytest.mark.parametrize("kind", [nn.Embedding, Scaled])
def test_gradients_of_the_halves_are_those_of_autograd(kind, padding, ids):
    layer = layer_of(kind(9, 4, **padding))
    if kind is Scaled and not hasattr(layer, "_get_embed_scale"):
        pytest.skip("this PEFT does not scale")
    g = torch.randn(*ids.shape, 4, generator=generator()).double()
    for half in halves(layer, "default"):
        (expected,) = torch.autograd.grad(layer(ids), half.weight, g)
        rows, gradients = half.input_rows(ids), half.output_rows(g)
        found = gradients.reshape(-1, gradients.shape[-1]).T @ rows.reshape(-1, rows.shape[-1])
        torch.testing.assert_close(found, expected)
        by_seed = half.output_rows(torch.stack([g, 2 * g]))
        torch.testing.assert_close(by_seed, torch.stack([gradients, 2 * gradients]))


def test_b_is_given_what_a_makes_of_the_tokens():
    A, B = halves(layer_of(nn.Embedding(9, 4)), "default")
    assert (A.weight.shape, B.weight.shape) == ((2, 9), (4, 2))
    torch.testing.assert_close(A.input_rows(IDS) @ A.weight.T, B.input_rows(IDS))


def test_the_embedding_of_padding_has_no_gradient():
    A, B = halves(layer_of(nn.Embedding(9, 4, padding_idx=2)), "default")
    assert (A.held_column, B.held_column) == (2, None)
    assert not A.input_rows(IDS)[IDS == 2].any()
    assert B.input_rows(IDS)[IDS == 2].all()


def test_half_precision_is_left_behind():
    layer = layer_of(nn.Embedding(9, 4)).bfloat16()
    exact = layer_of(nn.Embedding(9, 4))
    exact.load_state_dict(layer.state_dict())
    g = torch.randn(2, 4, 4, generator=generator()).bfloat16()
    for half, other in zip(halves(layer, "default"), halves(exact, "default"), strict=True):
        found = half.output_rows(g)
        assert found.dtype is torch.float32
        torch.testing.assert_close(found.double(), other.output_rows(g), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(half.input_rows(IDS).double(), other.input_rows(IDS))


def test_which_layers_are_embeddings():
    model = with_lora(Words(), "words", "last")
    assert is_embedding(model.words)
    assert not is_embedding(model.last)
    assert halves(model.last, "default") == (
        model.last.lora_A["default"],
        model.last.lora_B["default"],
    )


def test_names_are_those_of_the_parameters():
    model = with_lora(base_model("bert"), "word_embeddings", "query")
    blocks = find_blocks(model)
    lora = [n for n, _ in model.named_parameters() if ".lora_" in n]
    assert [block.name for block in blocks] == lora
    assert all(model.get_parameter(block.name) is block.weight for block in blocks)
    A, B = blocks[:2]
    assert (A.name, B.parameter) == (
        "bert.embeddings.word_embeddings.lora_embedding_A.default",
        "lora_embedding_B",
    )
    assert (A.matrix, A.adapter, A.lora_layer) == (
        "lora_A",
        "default",
        "bert.embeddings.word_embeddings",
    )
    assert A.transformer_layer == "bert.embeddings.word_embeddings"
    assert (A.shape, A.small_output, B.shape, B.small_output) == ((2, 60), True, (12, 2), False)
    assert isinstance(A.layer, TokenColumns)
    assert isinstance(B.layer, Projection)


def test_any_name_of_an_adapter():
    model = get_peft_model(base_model("bert"), LoraConfig(target_modules=["key"]), "weight")
    model.add_adapter("other", LoraConfig(r=2, target_modules=["word_embeddings"]))
    model.set_adapter("other")
    assert [(b.adapter, b.lora_layer) for b in find_blocks(model)] == [
        ("other", "base_model.model.bert.embeddings.word_embeddings")
    ] * 2
    model.add_adapter("third", LoraConfig(r=2, target_modules=["word_embeddings"]))
    model.delete_adapter("weight")
    model.add_adapter("weight", LoraConfig(r=2, target_modules=["word_embeddings"]))
    model.set_adapter("weight")
    assert {(b.adapter, b.parameter) for b in find_blocks(model)} == {
        ("weight", "lora_embedding_A"),
        ("weight", "lora_embedding_B"),
    }


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        ({"target_modules": ["word_embeddings"]}, {"embeddings"}),
        ({"target_modules": r".*\.query"}, {"attention"}),
        ({"layers_to_transform": [1]}, {"attention"}),
        ({"target_modules": ["query", "word_embeddings"]}, {"embeddings", "attention"}),
    ],
)
def test_a_selection_of_layers(selection, expected):
    model = with_lora(base_model("bert"), "word_embeddings", "query")
    found = {
        part
        for block in find_blocks(model, **selection)
        for part in ("embeddings", "attention")
        if f".{part}." in block.name
    }
    assert found == expected


def test_an_untrained_adapter_is_noticed(recwarn):
    model = get_peft_model(
        base_model("bert"), LoraConfig(r=2, target_modules=["word_embeddings", "query"])
    )
    both = find_blocks(model)
    expected = (
        "Every lora_B and lora_embedding_A weight is 0, .* every lora_A and lora_embedding_B 0:"
    )
    with pytest.warns(UserWarning, match=expected):
        warn_if_untrained(both)
    with pytest.warns(UserWarning, match=r"Every lora_embedding_A weight is 0"):
        warn_if_untrained(find_blocks(model, target_modules=["word_embeddings"]))
    recwarn.clear()
    both[0].weight.data[0, 5] = 1e-3
    warn_if_untrained(both)
    warn_if_untrained([both[1]])  # B alone, as where A is frozen
    warn_of_other_trainable(model)
    assert not recwarn.list


def test_a_trained_embedding_may_be_alone():
    model = with_lora(base_model("bert"), "word_embeddings")
    A, B = find_blocks(model)
    B.weight.requires_grad_(False)
    (alone,) = find_blocks(model)
    assert alone.name == A.name


def test_the_hooks_of_others_come_behind():
    model = with_lora(Around(nn.Embedding(9, 4), lambda x: x), "words")
    expected = make(with_lora(Around(nn.Embedding(9, 4), lambda x: 3 * x), "words"))
    handle = model.words.register_forward_hook(lambda _, __, output: 3 * output)
    found = make(model)
    data = [(IDS, torch.tensor([0, 1]))]
    for la in (expected, found):
        la.fit(data)
    torch.testing.assert_close(found.H.to_matrix(), expected.H.to_matrix())
    assert list(model.words._forward_hooks.values()) == [model.words._forward_hooks[handle.id]]


def test_a_model_may_change_what_an_embedding_returned():
    def overwrite(rows: torch.Tensor) -> torch.Tensor:
        rows *= 3
        return rows

    in_place = make(with_lora(Around(nn.Embedding(9, 4), overwrite), "words"))
    expected = make(with_lora(Around(nn.Embedding(9, 4), lambda x: 3 * x), "words"))
    data = [(IDS, torch.tensor([0, 1]))]
    for la in (expected, in_place):
        la.fit(data)
    torch.testing.assert_close(in_place.H.to_matrix(), expected.H.to_matrix())


def test_adapters_of_examples_are_refused():
    model = lora_model("bert", target_modules=["query", "word_embeddings"])
    model.add_adapter("second", LoraConfig(r=3, target_modules=["query"]))
    model.set_adapter("default")
    (batch, *_) = ragged_batches()
    la = make(model.eval())
    with pytest.raises(NotImplementedError, match=r"with adapter_names.*batches of its own"):
        la.fit([batch | {"adapter_names": ["default", "second", "__base__"]}])
    assert not any(module._forward_hooks for module in model.modules())


def test_an_embedding_that_returns_other_rows_is_refused():
    class Positions(nn.Embedding):
        """Takes a batch's tokens, and returns rows of positions for all of them."""

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return embedding(torch.arange(ids.shape[1]), self.weight).expand(3, 1, -1, -1)

    la = make(with_lora(Around(Positions(9, 4), lambda rows: rows[0]), "words"))
    with pytest.raises(NotImplementedError, match=r"tokens of shape \(2, 4\) and returned \(3, 2"):
        la.fit([(IDS, torch.tensor([0, 1]))])


def test_offloaded_embeddings_are_refused():
    model = with_lora(base_model("bert"), "word_embeddings", "query")
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    with pytest.raises(NotImplementedError, match="LoRA of an embedding needs whole LoRA weights"):
        find_blocks(model)
    assert len(find_blocks(model, target_modules=["query"])) == 4


def test_draws_leave_the_embedding_of_padding_as_it_is():
    model = with_lora(Words(padding_idx=2), "words").eval()
    la = fitted(model=model, batches=[(IDS, torch.tensor([0, 1]))])
    A = la.blocks[0].weight.flatten().reshape(2, 9)
    drawn = la.sample(5, generator()).split([18, 8], dim=1)[0].reshape(5, 2, 9)
    assert (drawn[:, :, 2] == A[:, 2]).all()
    others = torch.arange(9) != 2
    assert (drawn[:, :, others] != A[:, others]).all()
    padding = torch.full((1, 3), 2)
    assert not la.predictive_moments(padding).f_var.allclose(torch.zeros(()).double())


def test_an_adapter_that_was_loaded(tmp_path):
    model = lora_model("bert", target_modules=["query", "word_embeddings"])
    torch.nn.init.normal_(find_blocks(model)[0].weight)
    model.save_pretrained(tmp_path)
    torch.manual_seed(0)
    loaded = PeftModel.from_pretrained(base_model("bert"), tmp_path)
    pairs = zip(find_blocks(loaded), find_blocks(model), strict=True)
    assert all(torch.equal(a.weight, b.weight.to(a.weight)) for a, b in pairs)
