"""Heads beside LoRA weights: exact where mathematics says so, by every public call."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.testing import assert_close

import laplace_lora_ext
from tests.support.cases import Case, dense
from tests.support.dense import full_rank
from tests.support.heads import HEADS, PARTS, plain, roberta, trained
from tests.support.models import (
    TwoLinear,
    first_batch,
    head_of,
    lora_model,
    ragged_batches,
)
from tests.support.posteriors import (
    count_backward_passes,
    count_forward_passes,
    make,
    sizes,
    stock,
)

# What rounding leaves of float64.
assert_exact = partial(assert_close, rtol=1e-8, atol=1e-11)


# --- models with heads ----------------------------------------------------------------


def heads_of(la) -> list[str]:
    """Name the head's weights and biases."""
    return [block.name for block in la.blocks if block.kind == "head"]


def around(build: Callable[[], Case], structure: str = "lowrank_kron", **keywords):
    """Fit a posterior of a case's adapter and head."""
    case = build()
    la = make(case.model, structure, **case.keywords, **keywords)
    la.fit(case.batches)
    return la


@pytest.mark.parametrize("rank", [1, 3])
def test_the_smaller_factor_is_dense_and_the_larger_one_has_the_rank(rank):
    settings = {"rank": rank}
    la = around(HEADS["a head of two layers"], backend_kwargs=settings)
    factors_of_blocks = zip(la.blocks, la.H.blocks, strict=True)
    for block, factors in factors_of_blocks:
        smaller, larger = sorted(block.shape)
        small = factors.Q
        assert small.shape == (smaller, smaller)
        # No more than the factor has.
        n_columns = min(rank, larger)
        large = factors.U
        assert large.shape == (larger, n_columns)


def test_expand_is_kfac_of_a_head_that_examples_go_through_once():
    build = HEADS["a head of a plain module"]
    la = around(build, **full_rank(kfac_approx="expand"))
    of_case = dense(build())
    expected = of_case.curvature("full")
    found = la.H.to_matrix()
    parts = torch.arange(la.n_params).split(sizes(la))
    for block, part in zip(la.blocks, parts, strict=True):
        of_block = found[part][:, part]
        if block.parameter == "bias":
            # Its inputs are ones, so that nothing is approximated.
            assert_exact(of_block, expected[part][:, part])
        else:
            # Of a weight, KFAC is an approximation: it must be there at least.
            assert of_block.trace() > 0


def test_the_hosts_kron_is_stock_krons_over_the_same_weights():
    build = HEADS["a head of one layer"]
    ours = around(build, "kron")
    theirs = stock(build().model, "bert", "kron", ragged_batches(), PARTS)
    found = ours.H_facs.kfacs
    expected = theirs.H_facs.kfacs
    for factors, of_host in zip(found, expected, strict=True):
        # A bias has no factor of inputs.
        F_out, *F_in = factors
        host_out, *host_in = of_host
        assert_exact(F_out, host_out)
        # The host has divided the factor of the inputs by the number of examples.
        mean_in = [factor / ours.n_data for factor in F_in]
        assert_exact(mean_in, host_in)


# --- everything else ------------------------------------------------------------------


def test_a_fit_with_the_head_takes_no_further_passes(monkeypatch):
    def passes(modules_to_save: bool) -> tuple[int, int]:
        la = make(lora_model("bert"), modules_to_save=modules_to_save)
        forward = count_forward_passes(la)
        with monkeypatch.context() as patch:
            backward = count_backward_passes(patch)
            la.fit(ragged_batches())
        return len(forward), len(backward)

    of_adapter = passes(False)
    assert passes(True) == of_adapter
    # Passes were counted at all.
    assert min(of_adapter) > 0


def test_a_file_keeps_the_choice_of_heads(tmp_path):
    model = roberta()
    # One layer of the head's two.
    la = make(model, modules_to_save=["classifier.out_proj"])
    la.fit(ragged_batches())
    la.save_pretrained(tmp_path)
    loaded = laplace_lora_ext.from_pretrained(model, tmp_path)
    assert heads_of(loaded) == heads_of(la) == OUT_PROJ
    head_of(model).out_proj.bias.data[0] += 1
    with pytest.raises(RuntimeError, match=r"out_proj\.bias have changed since"):
        la(first_batch())


# --- selected -------------------------------------------------------------------------


WHOLE = "base_model.model.classifier.modules_to_save.default"
# Both layers have a bias, which takes part wherever its weight does.
DENSE = [f"{WHOLE}.dense.weight", f"{WHOLE}.dense.bias"]
OUT_PROJ = [f"{WHOLE}.out_proj.weight", f"{WHOLE}.out_proj.bias"]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["classifier"], DENSE + OUT_PROJ),
        ("classifier", DENSE + OUT_PROJ),
        (["classifier.out_proj"], OUT_PROJ),
        # In the order of the model, whatever that of the names.
        (["out_proj", "dense"], DENSE + OUT_PROJ),
        ([], []),
    ],
    ids=["what PEFT wraps", "a single name", "a layer within", "two layers", "no name"],
)
def test_names_select_heads(names, expected):
    model = roberta()
    # LoRA alone is the default.
    assert not heads_of(make(model))
    la = make(model, modules_to_save=names)
    assert heads_of(la) == expected


def test_what_is_frozen_in_a_head_is_left_out_unless_all_is():
    model = roberta()
    head_of(model).dense.requires_grad_(False)
    assert heads_of(make(model, modules_to_save=True)) == OUT_PROJ
    # As in an adapter that was loaded for inference.
    model.requires_grad_(False)
    assert heads_of(make(model, modules_to_save=True)) == DENSE + OUT_PROJ


# --- refused --------------------------------------------------------------------------


class WithNorm(nn.Module):
    """Its head is not of linear layers alone."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(5, 6)
        self.head = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        encoded = self.encoder(x)
        return self.head(encoded)


def with_norm() -> nn.Module:
    config = LoraConfig(target_modules=["encoder"], modules_to_save=["head"])
    return trained(WithNorm(), config)


def headless() -> nn.Module:
    return get_peft_model(TwoLinear(), LoraConfig(target_modules=["first"]))


def tied() -> nn.Module:
    """Make a model in which another layer has the weight of the head's last one."""
    model = plain()
    last = head_of(model)[-1]
    spare = nn.Linear(4, 3)
    spare.weight = last.weight
    model.base_model.model.spare = spare
    return model


@pytest.mark.parametrize(
    ("model", "selection", "message"),
    [
        (plain, ["score"], r"head\.0, .*head\.2, .*head\.4\."),
        (headless, True, "with none"),
        (headless, ["head"], "none"),
        (with_norm, True, r"head\.0\.weight is a weight of LayerNorm"),
        (tied, True, r"head\S*\.4\.weight"),
    ],
)
def test_heads_that_can_not_take_part_are_refused_by_name(model, selection, message):
    refused = (NotImplementedError, ValueError)
    with pytest.raises(refused, match=message):
        make(model(), modules_to_save=selection)


def test_the_linear_layer_of_a_head_takes_part_by_its_name():
    model = with_norm()
    la = make(model, modules_to_save=["head.1"])
    # Its weight and its bias.
    assert len(heads_of(la)) == 2


def test_the_hosts_kron_refuses_a_layer_without_its_bias():
    model = lora_model("bert")
    head = head_of(model)
    head.bias.requires_grad_(False)
    la = make(model, "kron", modules_to_save=True)
    batches = ragged_batches()
    message = r"biases of 1 layers .*classifier\S*\.weight"
    with pytest.raises(NotImplementedError, match=message):
        la.fit(batches)
