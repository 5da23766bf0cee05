"""Numbers of any unit, trained in stages, where texts tell nothing."""

import math

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from torch.utils.data import DataLoader

from laplace_lora_ext import train_in_stages
from laplace_lora_ext.metrics import compare
from tests.support.models import base_model
from tests.support.posteriors import normal
from tests.support.ranks import Texts
from tests.support.trainers import trainer_of

N_TRAIN = 60
N_TEST = 200


Text = dict[str, Tensor]


def texts_with_noise(mean: float, deviation: float) -> list[Text]:
    """Make texts with targets that they tell nothing of."""
    noise = normal(N_TRAIN + N_TEST).float()
    texts = Texts(N_TRAIN + N_TEST)
    return [
        text | {"labels": mean + deviation * each}
        for text, each in zip(texts, noise, strict=True)
    ]


def untrained_model(mean: float) -> PeftModel:
    """Make a model that predicts the mean of the targets."""
    torch.manual_seed(0)
    base = base_model("bert", n_labels=1)
    # Small steps would take long to get there.
    base.classifier.bias.data.fill_(mean)
    config = LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS")
    return get_peft_model(base, config)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("mean", "deviation", "members"), [(50.0, 10.0, 1), (0.0, 0.05, 2)]
)
def test_noise_of_any_size_is_found_by_the_held_out_texts(
    tmp_path, mean, deviation, members
):
    texts = texts_with_noise(mean, deviation)
    trainer = trainer_of(
        tmp_path,
        model=untrained_model(mean),
        data=texts[:N_TRAIN],
        max_steps=200,
        per_device_train_batch_size=20,
        save_strategy="no",
        logging_strategy="no",
        learning_rate=1e-3,
    )
    la = train_in_stages(trainer, members=members)
    noises = [member.sigma_noise.item() for member in la.members]
    logged = {}
    for entry in trainer.state.log_history:
        logged |= entry
    assert logged["laplace_sigma_noise"] == pytest.approx(sum(noises) / members)

    loader = DataLoader(texts[N_TRAIN:], batch_size=50)
    found = compare(la, loader).posterior
    # The least NLL that a prediction can have: 3.72 and -1.58.
    entropy = math.log(deviation) + (1 + math.log(2 * math.pi)) / 2
    # Both what the test texts' mean square and what twelve held-out texts say of the
    # variance vary: by √(2 / n) of it, of which the NLL takes half, and the square of
    # the second, too.
    error_of_test = math.sqrt(2 / N_TEST) / 2
    error_of_held_out = math.sqrt(2 / 12) / 2
    error = error_of_test + error_of_held_out
    assert found["nll"] == pytest.approx(entropy, abs=2 * error)
    assert found["coverage"] > 0.7
