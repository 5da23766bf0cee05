"""Kinds of adapters beside plain LoRA: what they do to factors, files and batches."""

from pathlib import Path

import pytest
import torch
from laplace.curvature.curvlinops import CurvlinopsGGN
from peft import PeftModel
from safetensors.torch import load_file
from torch.testing import assert_close

import laplace_lora_ext
from tests.compatibility.kinds import with_dora, with_frozen_a
from tests.support.dense import full_rank
from tests.support.models import (
    base_model,
    lora_model,
    pairs,
    plain_model,
    ragged_batches,
)
from tests.support.posteriors import STRUCTURES, fitted, make, sizes


def test_doras_identity_is_no_input_of_expand():
    ((X, y),) = pairs(n=5)
    la = make(with_dora(), **full_rank(kfac_approx="expand"))
    la.fit([(X, y)])
    n_rows = [block.normalizer for block in la.H_facs.blocks]
    assert n_rows == [5] * 4
    of_first_A = la.H_facs.blocks[0]
    assert_close(of_first_A.input_factor.trace, X.square().sum())


@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
def test_hosts_backends_are_refused_for_dora(structure):
    message = r"don't support DoRA.*first\.lora_A"
    with pytest.raises(NotImplementedError, match=message):
        make(with_dora(), structure, backend=CurvlinopsGGN)


def test_statistics_of_b_are_those_that_it_has_beside_a():
    settings = full_rank(kfac_approx="expand")
    both = make(plain_model(), **settings)
    both.fit(pairs(2))
    alone = make(with_frozen_a(), **settings)
    alone.fit(pairs(2))
    # Blocks of A and B take turns.
    is_b = torch.tensor([False, True, False, True])
    of_b = is_b.repeat_interleave(torch.tensor(sizes(both)))
    expected = both.H.to_matrix()[of_b][:, of_b]
    assert_close(alone.H.to_matrix(), expected)


def loaded_for_inference(folder: Path) -> PeftModel:
    """Load an adapter of which PEFT makes no weight trainable."""
    torch.manual_seed(0)
    base = base_model("bert").double()
    model = PeftModel.from_pretrained(base, folder)
    for name, weight in model.named_parameters():
        assert not ("lora_" in name and weight.requires_grad), name
    return model


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_posterior_over_b_alone_is_saved_and_loaded(structure, tmp_path):
    trained = with_frozen_a(lora_model("bert"))
    la = fitted(structure=structure, model=trained)
    la.save_pretrained(tmp_path)
    trained.save_pretrained(tmp_path)
    loaded = loaded_for_inference(tmp_path)
    again = laplace_lora_ext.from_pretrained(loaded, tmp_path)
    assert [block.name for block in again.blocks] == [block.name for block in la.blocks]
    batch, *_ = ragged_batches()
    assert_close(again(batch), la(batch))
    settings = {"backend_kwargs": {"rank": 3}} if structure == "lowrank_kron" else {}
    of_both = make(loaded, structure, **settings)
    with pytest.raises(ValueError, match=r"lora_A\.weight .*was None at the fit"):
        of_both.load_state_dict(la.state_dict())


@pytest.mark.parametrize("structure", STRUCTURES)
def test_draws_of_a_posterior_over_b_alone_have_their_own_b(structure, tmp_path):
    trained = with_frozen_a(lora_model("bert"))
    trained.save_pretrained(tmp_path)
    la = fitted(structure=structure, model=trained)
    (folder,) = la.sample_adapters(1, tmp_path / "draws")
    drawn = load_file(folder / "adapter_model.safetensors")
    written = load_file(tmp_path / "adapter_model.safetensors")
    for name, value in written.items():
        is_drawn = "lora_B" in name
        assert torch.equal(drawn[name], value) == (not is_drawn), name


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_posterior_over_b_alone_is_guarded_against_another_a(structure):
    la = fitted(structure=structure, model=with_frozen_a(lora_model("bert")))
    batch, *_ = ragged_batches()
    A = la.blocks[0].owner.lora_A["default"]
    with torch.no_grad():
        A.weight.add_(1e-3)
    message = r"query\.lora_A\.weight differs from that of the fit"
    with pytest.raises(RuntimeError, match=message):
        la(batch)
