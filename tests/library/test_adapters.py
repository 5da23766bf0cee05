"""Kinds of adapters beside plain LoRA: what they do to factors, files and batches."""

import pytest
import torch
from laplace.curvature.curvlinops import CurvlinopsGGN
from peft import PeftModel
from safetensors.torch import load_file
from torch.testing import assert_close

import laplace_lora_ext
from tests.compatibility.kinds import with_dora, with_frozen_a
from tests.support.models import base_model, lora_model, pairs, plain_model, ragged_batches
from tests.support.posteriors import STRUCTURES, fitted, make, sizes


def test_doras_identity_is_no_input_of_expand_and_hosts_backends_are_refused():
    model = with_dora()
    X, y = pairs(1, 5)[0]
    la = make(model, backend_kwargs={"rank": 100, "kfac_approx": "expand"})
    la.fit([(X, y)])
    assert [block.normalizer for block in la.H_facs.blocks] == [5] * 4
    of_first_A = la.H_facs.blocks[0]
    assert_close(of_first_A.input_factor.trace, X.square().sum())
    for structure in ("kron", "diag", "full"):
        with pytest.raises(NotImplementedError, match=r"don't support DoRA.*first\.lora_A"):
            make(model, structure, backend=CurvlinopsGGN)


def test_statistics_of_b_are_those_that_it_has_beside_a():
    settings = {"rank": 100, "kfac_approx": "expand"}
    both = make(plain_model(), backend_kwargs=settings)
    alone = make(with_frozen_a(), backend_kwargs=settings)
    for la in (both, alone):
        la.fit(pairs(2))
    of_b = torch.cat([torch.full((n,), index % 2 == 1) for index, n in enumerate(sizes(both))])
    assert_close(alone.H.to_matrix(), both.H.to_matrix()[of_b][:, of_b])


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_posterior_over_b_alone_is_saved_drawn_from_and_guarded(structure, tmp_path):
    trained = with_frozen_a(lora_model("bert"))
    la = fitted(structure=structure, model=trained)
    batch, *_ = ragged_batches()
    la.save_pretrained(tmp_path)
    trained.save_pretrained(tmp_path)
    torch.manual_seed(0)
    loaded = PeftModel.from_pretrained(base_model("bert").double(), tmp_path)  # for inference
    again = laplace_lora_ext.from_pretrained(loaded, tmp_path)
    assert [b.name for b in again.blocks] == [b.name for b in la.blocks]
    assert not any(p.requires_grad for n, p in loaded.named_parameters() if "lora_" in n)
    assert_close(again(batch), la(batch))
    settings = {"backend_kwargs": {"rank": 3}} if structure == "lowrank_kron" else {}
    of_both = make(loaded, structure, **settings)
    with pytest.raises(ValueError, match=r"lora_A\.weight .*was None at the fit"):
        of_both.load_state_dict(la.state_dict())
    (folder,) = la.sample_adapters(1, tmp_path / "draws")
    drawn = load_file(folder / "adapter_model.safetensors")
    written = load_file(tmp_path / "adapter_model.safetensors")
    changed = {name for name in written if not torch.equal(drawn[name], written[name])}
    assert changed == {name for name in written if "lora_B" in name}
    with torch.no_grad():
        la.blocks[0].owner.lora_A["default"].weight.add_(1e-3)
    with pytest.raises(RuntimeError, match=r"query\.lora_A\.weight differs from that of the fit"):
        la(batch)
