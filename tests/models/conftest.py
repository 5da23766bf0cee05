"""A model that many tests of models take."""

import pytest
from peft import PeftModel

from tests.support.models import lora_model


@pytest.fixture
def bert() -> PeftModel:
    return lora_model("bert").eval()
