"""Weights that FSDP2 has sharded or Accelerate has offloaded."""

import accelerate
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from tests.support.dense import EXACT
from tests.support.models import laplace_keywords, lora_model, ragged_batches
from tests.support.posteriors import STRUCTURES, make
from tests.support.ranks import assert_alike, on_ranks, strided_loader

REACHABLE = [structure for structure in STRUCTURES if structure != "kron"]


def build(model, structure: str, kind: str = "bert"):
    settings = {"backend_kwargs": {"rank": 100}} if structure == "lowrank_kron" else {}
    return make(model, structure, prior_precision=0.1, **settings, **laplace_keywords(kind))


def facts(la):
    """What a fit, a choice and a prediction come to."""
    la.fit(strided_loader(12))
    before = la.log_marginal_likelihood().detach(), la(ragged_batches()[0])
    la.optimize_prior_precision(method="agreement", train_loader=strided_loader(12))
    return *before, la.prior_precision


def settings_of(model) -> dict[str, object]:
    return {
        name: (p.requires_grad, p.device, p.shape, p.grad) for name, p in model.named_parameters()
    }


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
@pytest.mark.parametrize("structure", REACHABLE)
@pytest.mark.parametrize("where", ["disk", "main memory"])
def test_offloaded_weights(tmp_path, where, structure, kind):
    model = lora_model(kind)
    if where == "disk":
        accelerate.disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    else:
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    before = settings_of(model)
    assert next(model.parameters()).is_meta
    la = build(model, structure, kind)
    expected = facts(build(lora_model(kind), structure, kind))
    assert_close(facts(la), expected, **EXACT)
    assert settings_of(model) == before
    with pytest.raises(NotImplementedError, match="A draw of the weights needs whole LoRA weights"):
        la(ragged_batches()[0], pred_type="nn", link_approx="mc", n_samples=2)


def test_weights_that_changed_elsewhere_are_noticed(tmp_path):
    model = lora_model("bert")
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    la = build(model, "lowrank_kron")
    la.fit(ragged_batches())
    la.blocks[2].values.add_(1)  # in main memory, where the hook fetches it from
    with pytest.raises(RuntimeError, match="have changed since the fit"):
        la(ragged_batches()[0])


@pytest.mark.parametrize("structure", REACHABLE)
def test_data_parallel(structure):
    expected = facts(build(lora_model("bert"), structure))

    def job(_):
        return facts(build(DistributedDataParallel(lora_model("bert")), structure))

    assert_alike(on_ranks(job, 2), expected, **EXACT)


def sharded(structure: str, leave_out: bool = False):
    """A posterior of a model whose layers, perhaps without LoRA weights, are sharded by FSDP2."""
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("this torch has no FSDP2")
    model = lora_model("bert")
    options = {"mesh": init_device_mesh("cpu", (2,))}
    if leave_out:
        lora = {p for name, p in model.named_parameters() if "lora_" in name}
        options["ignored_params"] = lora
    for layer in model.base_model.model.bert.encoder.layer:
        fsdp.fully_shard(layer, **options)
    fsdp.fully_shard(model, **options)
    return build(model, structure)


@pytest.mark.parametrize("structure", REACHABLE)
def test_sharded_weights(structure):
    def job(_):
        la = sharded(structure)
        before = settings_of(la.model)
        result = facts(la)
        assert settings_of(la.model) == before
        with pytest.raises(NotImplementedError, match="Pass them to fully_shard"):
            la(ragged_batches()[0], pred_type="nn", link_approx="mc", n_samples=2)
        return result

    expected = facts(build(lora_model("bert"), structure))
    assert_alike(on_ranks(job, 2), expected, **EXACT)


def test_a_sharded_base_with_whole_lora_weights():
    def job(_):
        la = sharded("kron", leave_out=True)
        drawn = torch.Generator()
        result = facts(la)
        la(ragged_batches()[0], pred_type="nn", link_approx="mc", n_samples=2, generator=drawn)
        return result

    expected = facts(build(lora_model("bert"), "kron"))
    assert_alike(on_ranks(job, 2), expected, **EXACT)
