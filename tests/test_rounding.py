"""Numbers that are equal, up to rounding."""

import pytest
import torch

from laplace_lora_ext.rounding import OF_PASSES, equal_up_to_rounding

NUMBERS = torch.tensor([1e-3, -4.0, 0.0, torch.inf, torch.nan], dtype=torch.float64)


@pytest.mark.parametrize(
    ("dtype", "units", "relative"),
    [
        (torch.float32, 16, 16 * 2**-23),
        (torch.float64, 16, 16 * 2**-52),
        (torch.float32, OF_PASSES, 10_000 * 2**-23),
        # Units are large there, and no more than a twentieth is rounding.
        (torch.bfloat16, 16, 0.05),
    ],
)
def test_a_few_units_in_the_last_place_of_the_largest_are_rounding(
    dtype, units, relative
):
    change = torch.tensor([1.0, 0, 0, 0, 0]) * relative * 4
    near, far = NUMBERS + 0.9 * change, NUMBERS + 1.1 * change
    assert equal_up_to_rounding(near, NUMBERS, dtype, units)
    assert not equal_up_to_rounding(far, NUMBERS, dtype, units)


def test_other_shapes_are_others_and_nothing_equals_nothing():
    assert not equal_up_to_rounding(NUMBERS[:1], NUMBERS, torch.float32)
    assert not equal_up_to_rounding(-NUMBERS[3:4], NUMBERS[3:4], torch.float32)
    assert equal_up_to_rounding(NUMBERS[:0], NUMBERS[:0], torch.float32)
    assert not equal_up_to_rounding(NUMBERS, NUMBERS[:4], torch.float32, units=0)
