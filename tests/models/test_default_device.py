"""A default device other than the model's, which has no place in a posterior."""

import pytest
import torch
from torch import nn

from laplace_lora_ext.models.default_device import as_tensor, restored, set_aside
from tests.support.models import lora_model, ragged_batches
from tests.support.posteriors import make
from tests.support.texts import fitted_text, text_batches

pytestmark = pytest.mark.skipif(
    not hasattr(torch, "get_default_device"), reason="PyTorch does not tell its default device"
)


@pytest.fixture
def elsewhere():
    """A function that makes tensors without a device useless."""
    yield lambda: torch.set_default_device("meta")
    torch.set_default_device(None)


class Wrapper(nn.Module):
    """A user's, which notes where its own tensors are."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.devices = model, set()

    def forward(self, batch):
        self.devices.add(torch.ones(1).device.type)
        return self.model(**{key: value for key, value in batch.items() if key != "labels"}).logits


def outcomes(la, batches):
    """Of every way to choose, and of predictions and statistics."""
    torch.manual_seed(0)
    la.fit(batches)
    found = [la.log_marginal_likelihood()]
    for method in ("marglik", "agreement"):
        data = {} if method == "marglik" else {"train_loader": batches}
        la.optimize_prior_precision(method=method, **data)
        found.append(la.prior_precision)
    for method in ("gridsearch", "val_gd"):
        la.optimize_prior_precision(method=method, val_loader=batches)
        found.append(la.prior_precision)
    moments = la.predictive_statistics(batches).moments(la.prior_precision)
    links = [la(batches[0], link_approx=link) for link in ("probit", "mean_field")]
    return [*found, *moments, *links, la.functional_samples(batches[0], n_samples=1).isfinite()]


def test_a_posterior_is_the_same_and_users_code_has_its_default(elsewhere):
    model, batches = Wrapper(lora_model("bert").eval()), ragged_batches()
    expected = outcomes(make(model), batches)
    assert model.devices == {"cpu"}
    model.devices.clear()
    elsewhere()
    found = outcomes(make(model), batches)
    assert model.devices == {"meta"}
    assert torch.ones(1).is_meta
    torch.set_default_device(None)
    torch.testing.assert_close(found, expected)


def test_texts_are_scored_the_same(elsewhere):
    la, (batch, *_) = fitted_text(), text_batches()
    expected = la.score(batch, generator=torch.Generator().manual_seed(0)).tokens
    elsewhere()
    found = la.score(batch, generator=torch.Generator().manual_seed(0)).tokens
    torch.set_default_device(None)
    torch.testing.assert_close(vars(found), vars(expected))


def test_a_training_has_the_users_default(elsewhere):
    batches = ragged_batches(batch_size=1)
    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    la, devices = make(lora_model("bert").eval()), []
    la.fit(loader)

    def train(_):
        devices.append(torch.ones(1).device.type)
        raise KeyboardInterrupt

    elsewhere()
    with pytest.raises(KeyboardInterrupt):
        la.optimize_prior_precision(method="second_training", train=train, train_loader=loader)
    assert devices == ["meta"]


def test_it_comes_back_after_an_error(elsewhere):
    def fail():
        with set_aside():
            assert torch.ones(1).device.type == "cpu"
            with restored():
                assert torch.ones(1).is_meta
            with set_aside():
                assert torch.ones(1).device.type == "cpu"
            raise KeyError

    elsewhere()
    with pytest.raises(KeyError):
        fail()
    assert torch.ones(1).is_meta
    with restored():
        assert torch.ones(1).is_meta


def test_a_tensor_stays_where_it_is_and_numbers_are_on_the_cpu():
    tensor = torch.ones(2, requires_grad=True)
    with torch.device("meta"):
        assert as_tensor(tensor) is tensor
        assert as_tensor([1.0, 2.0]).device.type == "cpu"
        assert as_tensor(3).item() == 3
