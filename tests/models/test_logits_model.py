"""A batch in, logits out, and a model that is left as it was."""

from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from laplace_lora_ext.models.logits_model import LogitsModel
from tests.support.models import record_calls

LOGITS = torch.arange(6.0).reshape(3, 2)
X = torch.zeros(3, 1)
Y = torch.tensor([0, 1, 1])


class Returning(nn.Module):
    """Returns what it is told to."""

    def __init__(self, output: Any = LOGITS) -> None:
        super().__init__()
        # A module that is adapted has a weight, which tells its device.
        self.weight = nn.Parameter(torch.zeros(()))
        self.output = output

    def forward(self, batch: Any) -> Any:
        return self.output


# --- what a model is called with ------------------------------------------------------


def test_labels_never_reach_the_model_and_other_options_do(batch, bert):
    batch["output_hidden_states"] = True
    batch |= dict.fromkeys(["label", "answer"], batch["labels"])
    calls = record_calls(bert.base_model.model)
    LogitsModel(bert, dict_key_y="answer")(batch)
    # PEFT passes all of its own arguments on, most of them None.
    given = {name for name, value in calls[0].items() if value is not None}
    # A label that arrived would make the model compute a loss.
    assert given >= {"input_ids", "attention_mask", "output_hidden_states"}
    assert given.isdisjoint({"label", "labels", "answer"})


@pytest.mark.parametrize(
    "forward",
    [
        lambda batch: batch["x"],
        lambda x: x["x"],
        lambda batch, **more: batch["x"],
        # These have no place for a mapping.
        lambda **inputs: inputs["x"],
        lambda *, x, mask: x,
        lambda x, mask: x,
    ],
)
def test_a_mapping_without_labels_is_given_as_one_or_as_keywords(forward):
    model = Returning()
    model.forward = forward
    batch = {"x": LOGITS, "mask": [1], "labels": Y}
    assert torch.equal(LogitsModel(model)(batch), LOGITS)


# --- labels ---------------------------------------------------------------------------


def test_split_takes_labels_out_of_a_mapping_and_a_pair_apart():
    model = LogitsModel(Returning(), dict_key_y="answer")
    for batch in ({"x": X, "answer": Y}, ({"x": X}, Y), [{"x": X}, Y.tolist()]):
        inputs, labels = model.split(batch)
        assert inputs["x"] is X
        assert torch.equal(labels, Y)


# --- outputs --------------------------------------------------------------------------

# A tuple with names, which is read by these and not by its first place.
Output = namedtuple("Output", ["hidden_states", "logits"])


@pytest.mark.parametrize(
    "output",
    [
        LOGITS.bfloat16(),
        (LOGITS, "more"),
        SimpleNamespace(logits=(LOGITS, "more")),
        Output(logits=LOGITS, hidden_states=()),
    ],
)
def test_logits_are_read_off_the_output_in_float32(output):
    model = LogitsModel(Returning(output))
    # A model of one's own may read texts.
    logits = model(["three", "short", "texts"])
    assert torch.equal(logits, LOGITS)
    assert logits.dtype is torch.float32
    assert model.output_size == 2
    assert LogitsModel(Returning(LOGITS.double()))(X).dtype is torch.float64


def test_any_other_output_is_refused():
    for output in ((), {"scores": LOGITS}, ("text", LOGITS)):
        with pytest.raises(TypeError, match="must return logits"):
            LogitsModel(Returning(output))(X)
    for shape in ((3,), (3, 4, 2), ()):
        with pytest.raises(ValueError, match="shape"):
            LogitsModel(Returning(torch.zeros(shape)))(X)
