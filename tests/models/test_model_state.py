"""A posterior is used with the base, the head and the answers that it was fitted with."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig
from torch import nn

from laplace_lora_ext import from_pretrained
from laplace_lora_ext.models.model_state import FittedModel, ModelState, Weight
from tests.support.models import (
    CLASS_TOKEN_IDS,
    lora_model,
    pairs,
    plain_model,
    ragged_batches,
    with_lora,
)
from tests.support.posteriors import STRUCTURES, fitted, make

RANK = {"backend_kwargs": {"rank": 3}}


def head(model: nn.Module) -> torch.Tensor:
    return model.base_model.model.classifier.modules_to_save["default"].weight


def base(model: nn.Module) -> torch.Tensor:
    return model.base_model.model.bert.encoder.layer[0].output.dense.weight


def add(weight: torch.Tensor, value: float) -> None:
    with torch.no_grad():
        weight.add_(value)


def test_an_empty_weight_is_like_itself():
    assert Weight.of(torch.empty(0, 3)).equals(Weight.of(torch.empty(0, 3)))


@pytest.mark.parametrize("weight_of", [head, base])
def test_a_head_or_base_that_has_changed_since_the_fit_is_named(weight_of):
    la, batch = fitted(), ragged_batches()[0]
    la(batch)
    weight = weight_of(la.model.model)
    before = weight.detach().clone()
    add(weight, 1e-6)
    for use in (la, la.predictive_moments, lambda x: la.predictive_statistics([x])):
        with pytest.raises(
            RuntimeError, match=r"weight .* differs from that of the fit: fit again"
        ):
            use(batch)
    with torch.no_grad():
        weight.copy_(before)
    la(batch)  # the same values again, at the price of one more look
    weight.data = weight.data.clone()
    la(batch)


def test_a_weight_that_is_replaced_is_named():
    la, batch = fitted(), ragged_batches()[0]
    layer = la.model.model.base_model.model.bert.pooler.dense
    layer.weight = nn.Parameter(layer.weight.detach() * 1.001)
    with pytest.raises(
        RuntimeError, match=r"bert\.pooler\.dense\.weight differs from that of the fit"
    ):
        la(batch)


def test_an_adapter_may_be_merged_and_unmerged():
    model, batch = lora_model("bert", torch.float32), ragged_batches()[0]
    la = fitted(model=model)
    expected = la(batch)
    for _ in range(3):
        model.merge_adapter()
        model.unmerge_adapter()
    torch.testing.assert_close(la(batch), expected, rtol=1e-5, atol=1e-6)


def test_other_adapters_may_come_and_go():
    model, batch = lora_model("bert"), ragged_batches()[0]
    model.add_adapter("other", LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"]))
    model.set_adapter("default")
    la = fitted(model=model)
    expected = la(batch)
    for name, weight in model.named_parameters():
        if ".other." in name:
            add(weight, 1.0)
    assert torch.equal(la(batch), expected)
    model.delete_adapter("other")
    model.add_adapter("third", LoraConfig(task_type="SEQ_CLS", r=3, target_modules=["value"]))
    model.set_adapter("default")
    assert torch.equal(la(batch), expected)


def test_lora_layers_outside_the_posterior_count_as_well():
    la = fitted(target_modules=["value"])
    for name, weight in la.model.model.named_parameters():
        if "query.lora_B" in name:
            add(weight, 1e-3)
    with pytest.raises(RuntimeError, match=r"query\.lora_B\.weight differs from that of the fit"):
        la(ragged_batches()[0])


def changed_head(model):
    add(head(model), 1e-6)


def changed_base(model):
    add(base(model), 1e-6)


def changed_scaling(model):
    model.base_model.model.bert.encoder.layer[0].attention.self.query.set_scale("default", 3.0)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed_head, r"classifier\.modules_to_save\.weight differs from that of the fit"),
        (changed_base, r"output\.dense\.weight differs from that of the fit"),
        (changed_scaling, r"scaling of .*query\.lora_A.* was 2 at the fit, and now is 6"),
    ],
)
def test_a_state_of_another_model_is_not_loaded(structure, change, message):
    model = lora_model("bert")
    state = fitted(model=model, structure=structure).state_dict()
    other = make(copy.deepcopy(model), structure, **(RANK if "low" in structure else {}))
    change(other.model.model)
    with pytest.raises(ValueError, match=rf"fitted to another model\. .*{message}"):
        other.load_state_dict(state)
    assert other.n_data == 0


def test_a_state_of_other_answers_is_not_loaded():
    la = fitted("gpt2")
    other = make(la.model.model, class_token_ids=CLASS_TOKEN_IDS[::-1], **RANK)
    with pytest.raises(
        ValueError, match=r"fit had class_token_ids=\[11, 23, 42\], not \[42, 23, 11"
    ):
        other.load_state_dict(la.state_dict())


def test_a_state_of_other_layers_is_not_loaded():
    la = fitted()
    other = make(la.model.model, target_modules=["value"], **RANK)
    with pytest.raises(ValueError, match=r"query\.lora_A\.weight took part in the fit"):
        other.load_state_dict(la.state_dict())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 4}, "rank=3, not 4"),
        ({"rank": 3, "kfac_approx": "expand"}, "kfac_approx='gradient', not 'expand'"),
        ({"rank": 3, "tail": False}, "tail=True, not False"),
        ({"rank": 3, "stochastic": True}, "stochastic=None, not True"),
    ],
)
def test_a_state_of_other_settings_is_not_loaded(settings, message):
    la = fitted()
    other = make(la.model.model, backend_kwargs=settings)
    with pytest.raises(ValueError, match=f"fitted with {message}"):
        other.load_state_dict(la.state_dict())


def test_a_state_is_loaded_under_another_name_of_the_adapter_and_another_precision_of_the_base():
    model = lora_model("bert", torch.float32)
    la, batch = fitted(model=model), ragged_batches()[0]
    renamed = lora_model("bert", torch.float32)
    renamed.load_state_dict(model.state_dict())
    renamed.base_model.model.bert.embeddings.bfloat16().float().bfloat16()
    state = ModelState.of(la.model, la.blocks)
    other = make(renamed, **RANK)
    assert state.difference(ModelState.of(other.model, other.blocks)) is None
    named = {name.replace(".default", "") for name in state.blocks}
    assert named == set(state.blocks)
    other.load_state_dict(la.state_dict())
    add(renamed.base_model.model.bert.embeddings.word_embeddings.weight, 0.1)
    with pytest.raises(ValueError, match="word_embeddings"):
        other.load_state_dict(la.state_dict())
    assert torch.isfinite(la(batch)).all()


@pytest.mark.parametrize("weight_of", [head, base])
def test_a_checkpoint_of_another_head_or_base_is_refused(weight_of, tmp_path):
    la, batches = fitted(), ragged_batches()

    def ended():
        yield batches[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        la.fit(ended(), checkpoint=tmp_path, every=1)
    add(weight_of(la.model.model), 1e-3)
    with pytest.raises(ValueError, match="from a fit with other base or head"):
        la.fit(batches, checkpoint=tmp_path, every=1)


def test_a_look_at_an_unchanged_model_reads_no_weight(monkeypatch):
    la = fitted(model=plain_model(), batches=[(torch.randn(4, 5).double(), torch.arange(4) % 3)])
    watch = FittedModel(la.model, la.blocks)
    monkeypatch.setattr(ModelState, "of", None)
    watch.check()


def test_training_through_data_is_seen():
    """Neither the address nor the version of a weight tells of it."""
    model = lora_model("bert")
    la, batch = fitted(model=model), ragged_batches()[0]
    weight = base(model)
    before, marks = la(batch), (weight.data_ptr(), weight._version)
    weight.data.add_(1e-3)
    assert (weight.data_ptr(), weight._version) == marks
    with pytest.raises(RuntimeError, match=r"output\.dense\.weight differs from that of the fit"):
        la(batch)
    weight.data.sub_(1e-3)
    torch.testing.assert_close(la(batch), before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn])
def test_a_sample_is_a_few_numbers_wherever_they_are(dtype):
    weight = torch.arange(40).reshape(8, 5).to(dtype)
    for view in (weight, weight[2:], weight.mT, weight.mT[1:], weight[:, 1], weight[:0]):
        sample = Weight.of(view).sample
        step = max(1, view.numel() // 32)
        assert sample.tolist() == view.double().flatten()[::step][:32].tolist()


def test_weights_of_another_kind_of_tensor_are_passed_over():
    class Quantized(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func in (torch.Tensor.flatten, torch.Tensor.data_ptr):
                raise NotImplementedError(func)
            return super().__torch_function__(func, types, args, kwargs)

    model = lora_model("bert")
    layer = model.base_model.model.bert.pooler.dense
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Quantized), requires_grad=False)
    assert torch.isfinite(fitted(model=model)(ragged_batches()[0])).all()


def test_a_scaling_outside_the_posterior_counts_as_well(tmp_path):
    model = lora_model("bert")
    la = fitted(model=model, target_modules=["value"])
    la.save_pretrained(tmp_path)
    changed_scaling(model)
    with pytest.raises(RuntimeError, match=r"self\.query was 2\.0 at the fit, and now is 6\.0"):
        la(ragged_batches()[0])
    with pytest.raises(ValueError, match=r"self\.query was 2\.0 at the fit, and now is 6\.0"):
        from_pretrained(model, tmp_path)
    la.fit(ragged_batches())
    la(ragged_batches()[0])


class Normed(nn.Module):
    """Has running averages."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(5, 6), nn.BatchNorm1d(6)
        self.second = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x)).tanh())


def test_running_averages_that_move_after_the_fit_are_named(tmp_path):
    model, batches = with_lora(Normed(), "first", "second"), pairs(2)
    la = make(model)
    la.fit(batches)
    la(batches[0][0])
    la.save_pretrained(tmp_path)
    model.train()(batches[0][0])
    with pytest.raises(RuntimeError, match=r"norm\.running_mean differs from that of the fit"):
        la(batches[0][0])
    with pytest.raises(ValueError, match=r"norm\.running_mean differs from that of the fit"):
        from_pretrained(model, tmp_path)


def test_a_state_from_before_scalings_were_kept_is_loaded():
    la = fitted()
    state = la.state_dict()
    del state["model"]["scalings"]
    la.load_state_dict(state)
