"""The prior precision that held-out texts choose for another training."""

import torch
from torch.utils.data import DataLoader

from laplace_lora_ext import TokenGridSearch
from tests.support.models import lora_model
from tests.support.posteriors import generator
from tests.support.texts import fitted_text, text_batches

FEW = {"n_samples": 2, "grid_size": 9}


def test_held_out_texts_choose():
    texts = [{key: value[0] for key, value in one.items()} for one in text_batches(batch_size=1)]
    seen = []

    def train(examples):
        seen.extend(examples.indices)
        return lora_model("gpt2", lora_alpha=3).eval()

    la = fitted_text()
    torch.manual_seed(0)
    la.optimize_prior_precision(
        method="second_training",
        train=train,
        train_loader=DataLoader(texts, batch_size=2),
        held_out=0.4,
        search=lambda **options: TokenGridSearch(generator=generator(3), **FEW, **options),
    )
    part = DataLoader([texts[place] for place in seen], batch_size=2)
    rest = DataLoader([texts[place] for place in range(6) if place not in seen], batch_size=2)
    other = fitted_text(lora_model("gpt2", lora_alpha=3).eval(), part)
    other.optimize_prior_precision(
        method="gridsearch", val_loader=rest, generator=generator(3), **FEW
    )
    assert torch.equal(la.prior_precision, other.prior_precision)
    assert len(seen) == 4
