"""Kinds of adapters beside plain LoRA: what they do to factors, files and batches."""

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.testing import assert_close

import laplace_lora_ext
from tests.compatibility.kinds import with_dora, with_frozen_a
from tests.support.dense import full_rank
from tests.support.models import base_model, first_batch, lora_model, pairs, plain_model
from tests.support.posteriors import OURS_AND_A_HOSTS, fitted, make, sizes

structures = pytest.mark.parametrize("structure", OURS_AND_A_HOSTS)


def test_doras_identity_is_no_input_of_expand():
    batches = pairs(n=5)
    la = make(with_dora(), **full_rank(kfac_approx="expand"))
    la.fit(batches)
    # DoRA sends an identity through A and B too, which is no input of theirs.
    for block in la.H_facs:
        assert block.normalizer == 5
    # The first A reads the examples as they are.
    ((X, _),) = batches
    assert_close(la.H_facs[0].trace, X.square().sum())


def test_kron_is_refused_for_dora():
    with pytest.raises(NotImplementedError, match=r"DoRA.*first\.lora_A"):
        make(with_dora(), "kron")


def test_statistics_of_b_are_those_that_it_has_beside_a():
    both = make(plain_model(), **full_rank(kfac_approx="expand"))
    both.fit(pairs(2))
    alone = make(with_frozen_a(), **full_rank(kfac_approx="expand"))
    alone.fit(pairs(2))
    # Blocks of A and B take turns.
    is_b = torch.tensor([False, True, False, True])
    of_b = is_b.repeat_interleave(torch.tensor(sizes(both)))
    assert_close(alone.H.to_matrix(), both.H.to_matrix()[of_b][:, of_b])


def fitted_over_b(structure: str = "lowrank_kron"):
    """Fit a posterior over B alone, since A is not trained."""
    return fitted(structure=structure, model=with_frozen_a(lora_model("bert")))


@structures
def test_a_posterior_over_b_alone_is_saved_and_loaded(structure, tmp_path):
    la = fitted_over_b(structure)
    la.save_pretrained(tmp_path)
    la.model.model.save_pretrained(tmp_path)
    # The base model of `lora_model`.
    torch.manual_seed(0)
    model = PeftModel.from_pretrained(base_model("bert").double(), tmp_path)
    # PEFT makes no weight trainable, so which are can't be seen of the model.
    for name, weight in model.named_parameters():
        assert "lora_" not in name or not weight.requires_grad
    again = laplace_lora_ext.from_pretrained(model, tmp_path)
    assert [block.name for block in again.blocks] == [block.name for block in la.blocks]
    batch = first_batch()
    assert_close(again(batch), la(batch))


def test_a_posterior_over_both_does_not_take_the_state_of_one_over_b():
    state = fitted_over_b().state_dict()
    # Of the same rank: that the weights differ is all that is wrong.
    with pytest.raises(ValueError, match=r"lora_A\.weight .*None at the fit"):
        fitted().load_state_dict(state)


@structures
def test_draws_of_a_posterior_over_b_alone_have_their_own_b(structure, tmp_path):
    la = fitted_over_b(structure)
    la.model.model.save_pretrained(tmp_path)
    (folder,) = la.sample_adapters(1, tmp_path / "draws")
    drawn = load_file(folder / "adapter_model.safetensors")
    for name, value in load_file(tmp_path / "adapter_model.safetensors").items():
        assert torch.equal(drawn[name], value) != ("lora_B" in name), name


def test_a_posterior_over_b_alone_is_guarded_against_another_a():
    la = fitted_over_b()
    first, *_ = la.blocks
    # It takes no part, and yet decides what B's inputs are.
    first.owner.lora_A["default"].weight.data += 1e-3
    with pytest.raises(RuntimeError, match=r"query\.lora_A\.weight differs"):
        la(first_batch())
