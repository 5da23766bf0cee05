"""Kinds of adapters beside plain LoRA: what they do to factors, files and batches."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.testing import assert_close

import laplace_lora_ext
from tests.compatibility.kinds import with_dora, with_frozen_a
from tests.support.dense import full_rank
from tests.support.models import (
    base_model,
    first_batch,
    lora_model,
    pairs,
    plain_model,
)
from tests.support.posteriors import (
    OURS_AND_A_HOSTS,
    fitted,
    make,
    sizes,
)

structures = pytest.mark.parametrize("structure", OURS_AND_A_HOSTS)


def test_doras_identity_is_no_input_of_expand():
    n = 5
    batches = pairs(n=n)
    settings = full_rank(kfac_approx="expand")
    la = make(with_dora(), **settings)
    la.fit(batches)
    sums = la.H_facs.blocks
    # DoRA sends an identity through A and B too, which is no input of theirs.
    for block in sums:
        assert block.normalizer == n
    # The first A reads the examples as they are.
    ((X, _),) = batches
    found = sums[0].input_factor.trace
    expected = X.square().sum()
    assert_close(found, expected)


def test_kron_is_refused_for_dora():
    model = with_dora()
    message = r"doesn't support DoRA.*first\.lora_A"
    with pytest.raises(NotImplementedError, match=message):
        make(model, "kron")


def test_statistics_of_b_are_those_that_it_has_beside_a():
    settings = full_rank(kfac_approx="expand")
    batches = pairs(2)
    both = make(plain_model(), **settings)
    both.fit(batches)
    alone = make(with_frozen_a(), **settings)
    alone.fit(batches)
    # Blocks of A and B take turns.
    is_b = torch.tensor([False, True, False, True])
    n_weights = torch.tensor(sizes(both))
    of_b = is_b.repeat_interleave(n_weights)
    H = both.H.to_matrix()
    found = alone.H.to_matrix()
    expected = H[of_b][:, of_b]
    assert_close(found, expected)


def loaded_for_inference(folder: Path) -> PeftModel:
    """Load an adapter of which PEFT makes no weight trainable."""
    # The base model of `lora_model`.
    torch.manual_seed(0)
    base = base_model("bert").double()
    model = PeftModel.from_pretrained(base, folder)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            assert not weight.requires_grad, name
    return model


def fitted_over_b(structure: str):
    """Fit a posterior over B alone, since A is not trained."""
    model = with_frozen_a(lora_model("bert"))
    return fitted(structure=structure, model=model)


@structures
def test_a_posterior_over_b_alone_is_saved_and_loaded(structure, tmp_path):
    la = fitted_over_b(structure)
    la.save_pretrained(tmp_path)
    la.model.model.save_pretrained(tmp_path)
    loaded = loaded_for_inference(tmp_path)
    again = laplace_lora_ext.from_pretrained(loaded, tmp_path)
    # Which are trained can't be seen of the model: the file must say it.
    found = [block.name for block in again.blocks]
    expected = [block.name for block in la.blocks]
    assert found == expected
    batch = first_batch()
    found = again(batch)
    assert_close(found, la(batch))


def test_a_posterior_over_both_does_not_take_the_state_of_one_over_b():
    over_b = fitted_over_b("lowrank_kron")
    state = over_b.state_dict()
    # Of the same rank: that the weights differ is all that is wrong.
    over_both = fitted()
    message = r"lora_A\.weight .*was None at the fit"
    with pytest.raises(ValueError, match=message):
        over_both.load_state_dict(state)


@structures
def test_draws_of_a_posterior_over_b_alone_have_their_own_b(structure, tmp_path):
    la = fitted_over_b(structure)
    la.model.model.save_pretrained(tmp_path)
    (folder,) = la.sample_adapters(1, tmp_path / "draws")
    drawn = load_file(folder / "adapter_model.safetensors")
    written = load_file(tmp_path / "adapter_model.safetensors")
    for name, value in written.items():
        is_kept = torch.equal(drawn[name], value)
        is_b = "lora_B" in name
        assert is_kept != is_b, name


def test_a_posterior_over_b_alone_is_guarded_against_another_a():
    la = fitted_over_b("lowrank_kron")
    batch = first_batch()
    first, *_ = la.blocks
    A = first.owner.lora_A["default"]
    # It takes no part, and yet decides what B's inputs are.
    A.weight.data += 1e-3
    message = r"query\.lora_A\.weight differs from that of the fit"
    with pytest.raises(RuntimeError, match=message):
        la(batch)
