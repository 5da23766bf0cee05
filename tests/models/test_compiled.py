"""Compiled models: run eagerly, with a warning, and compiled again afterwards."""

import pytest
import torch

from laplace_lora_ext.models.compiled import running_eagerly
from tests.support.models import lora_model, ragged_batches
from tests.support.posteriors import STRUCTURES, fitted, make


def compiled_whole():
    return torch.compile(lora_model("bert"))


def compiled_in_place():
    model = lora_model("bert")
    model.compile()
    return model


def compiled_base():
    model = lora_model("bert")
    model.base_model.model.bert.encoder = torch.compile(model.base_model.model.bert.encoder)
    return model


COMPILED = [compiled_whole, compiled_in_place, compiled_base]


@pytest.mark.parametrize("make_model", COMPILED)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_compiled_model_has_the_posterior_of_the_model_as_it_was(structure, make_model):
    batch = ragged_batches()[0]
    expected = fitted(structure=structure).predictive_moments(batch)
    with pytest.warns(UserWarning, match="The model is compiled: fits and predictions run it eag"):
        la = fitted(model=make_model(), structure=structure)
    torch.testing.assert_close(la.predictive_moments(batch), expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("make_model", COMPILED)
def test_compiled_modules_are_compiled_again_afterwards(make_model):
    model = make_model()
    before = [dict(vars(module)) for module in model.modules()]
    with running_eagerly(model):
        assert [dict(vars(module)) for module in model.modules()] != before
    assert [dict(vars(module)) for module in model.modules()] == before


def test_a_model_that_is_not_compiled_gives_no_warning(recwarn):
    make(lora_model("bert"))
    assert not [w for w in recwarn if "compiled" in str(w.message)]
