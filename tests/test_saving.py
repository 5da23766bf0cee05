"""Posteriors in files and on the hub: the same after a round trip, or refused."""

import random
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from laplace_lora_ext import from_pretrained
from laplace_lora_ext.curvature.backend import LowRankKronGGN
from laplace_lora_ext.saving import (
    CHECKSUM,
    FILE,
    UNKNOWN,
    read_state,
    write_sealed,
)
from tests.support.models import (
    CLASS_TOKEN_IDS,
    lora_model,
    ragged_batches,
)
from tests.support.posteriors import (
    STRUCTURES,
    fitted,
    make,
    some_precision,
)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_posterior_survives(structure, tmp_path):
    model = lora_model("bert")
    batch, *rest = ragged_batches()
    la = fitted(
        model=model,
        structure=structure,
        target_modules=["value"],
        temperature=0.5,
    )
    la.prior_precision = some_precision(la, "layerwise")
    model.save_pretrained(tmp_path)
    la.save_pretrained(tmp_path / "new")
    read = from_pretrained(model, tmp_path / "new")
    assert type(read) is type(la)
    assert torch.equal(read(batch), la(batch))
    assert torch.equal(
        read.log_marginal_likelihood(),
        la.log_marginal_likelihood(),
    )
    for posterior in (la, read):
        posterior.fit(rest, override=False)
    torch.testing.assert_close(read(batch), la(batch), rtol=1e-12, atol=0)
    torch.testing.assert_close(
        read.state_dict()["H"],
        la.state_dict()["H"],
        rtol=1e-8,
        atol=1e-12,
    )


def test_answers_and_settings_survive(tmp_path):
    la = fitted(
        "gpt2",
        backend_kwargs={"stochastic": True, "num_samples": 2},
        rank=2,
    )
    la.save_pretrained(tmp_path)
    read = from_pretrained(la.model.model, tmp_path)
    assert read.model.class_token_ids == CLASS_TOKEN_IDS
    assert read.backend.settings == la.backend.settings


def test_a_file_that_holds_no_posterior_is_refused(tmp_path):
    la = fitted()
    with pytest.raises(FileNotFoundError, match=FILE):
        from_pretrained(la.model.model, tmp_path)
    path = tmp_path / FILE
    no_posterior = (
        rf"{FILE} holds no posterior that this release reads .*fit and save it again"
    )
    for metadata in (
        None,
        {"laplace_lora_ext": "3", "state": "{}"},
    ):
        safetensors.torch.save_file({"a": torch.ones(2)}, path, metadata)
        with pytest.raises(ValueError, match=no_posterior):
            from_pretrained(la.model.model, tmp_path)
    of_later_release = {
        "laplace_lora_ext": "5",
        CHECKSUM: UNKNOWN,
    }
    write_sealed(
        path,
        safetensors.torch.save({"a": torch.ones(2)}, of_later_release),
    )
    with pytest.raises(ValueError, match=no_posterior):
        from_pretrained(la.model.model, tmp_path)


def damaged(content: bytes, rng: random.Random) -> bytes:
    """A file of which some bytes are others, missing, or too many."""
    start = rng.randrange(len(content))
    length = rng.choice([1, 1, 1, 8])
    others = bytes(
        byte ^ rng.randrange(1, 256) for byte in content[start : start + length]
    )
    ways = [
        content[:start] + others + content[start + length :],
        content[:start] + content[start + length :],
        content[:start] + others + content[start:],
        content[:start],
        content + others,
    ]
    return rng.choice([ways[0], *ways])


def test_no_damaged_file_is_loaded(tmp_path):
    la = fitted()
    rng = random.Random(0)
    la.save_pretrained(tmp_path)
    path = tmp_path / FILE
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    for number in range(600):
        if number % 2:
            path.write_bytes(damaged(content, rng))
        else:  # most bytes are numbers, and mistakes in the header are worse
            path.write_bytes(damaged(content[:header], rng) + content[header:])
        with pytest.raises(
            ValueError,
            match=rf"{FILE} (is damaged|holds no posterior that this)",
        ):
            from_pretrained(la.model.model, tmp_path)
    path.write_bytes(content)
    assert torch.equal(from_pretrained(la.model.model, tmp_path).mean, la.mean)


class WithOptions(LowRankKronGGN):
    """A backend of a user's own, with options of all kinds."""

    def __init__(
        self,
        *args: Any,
        options: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.options = options

    @property
    def settings(self) -> dict[str, Any]:
        return super().settings | {"options": self.options}


OPTIONS = {
    "a tuple": (2, 3),
    "tuples within": {
        "ranks": [(1, "a"), (2, ("b",))],
        "other": (),
    },
    "numbers as keys": {0: 3, 1: 4},
    "one key": {"tensor": 1},
    "tuples as keys": {(0, "query"): 3},
    "numpy": np.int64(3),
    "none": None,
}


@pytest.mark.parametrize("name", OPTIONS)
def test_settings_come_back_from_a_file_as_they_were(name, tmp_path):
    settings = {"rank": 3, "options": OPTIONS[name]}
    la = fitted(backend=WithOptions, backend_kwargs=settings)
    la.save_pretrained(tmp_path)
    read = from_pretrained(la.model.model, tmp_path, backend=WithOptions)
    assert read.backend.options == OPTIONS[name]
    assert type(read.backend.options) is type(OPTIONS[name]) or name == "numpy"
    assert torch.equal(
        read.log_marginal_likelihood(),
        la.log_marginal_likelihood(),
    )
    same = make(
        la.model.model,
        backend=WithOptions,
        backend_kwargs=settings,
    )
    same.load_state_dict(read_state(tmp_path))
    other = make(
        la.model.model,
        backend=WithOptions,
        backend_kwargs=settings | {"options": [9]},
    )
    with pytest.raises(ValueError, match=r"options=.*, not \[9\]"):
        other.load_state_dict(read_state(tmp_path))
    with pytest.raises(ValueError, match="pass backend=WithOptions"):
        from_pretrained(la.model.model, tmp_path)


def test_lists_and_tensors_in_settings_equal_tuples():
    model = lora_model("bert")
    states = []
    for options in ((1, 2), [1, 2], torch.tensor([1, 2])):
        states.append(
            fitted(
                model=model,
                backend=WithOptions,
                backend_kwargs={"options": options},
            )
        )
    for la in states:
        for other in states:
            other.load_state_dict(la.state_dict())


def test_what_a_file_can_not_hold_is_named(tmp_path):
    la = fitted(
        backend=WithOptions,
        backend_kwargs={"options": {torch.float32}},
    )
    with pytest.raises(
        TypeError,
        match=r"no set: pass something else than \{torch.float32\}",
    ):
        la.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def other_weights(la):
    la.blocks[0].weight.data.mul_(1.01)
    return la


def another_structure(la):
    return make(la.model.model, "diag")


def another_model(la):
    return make(lora_model("bert", r=3), backend_kwargs={"rank": 3})


def another_rank(la):
    return make(la.model.model, backend_kwargs={"rank": 4})


def another_approximation(la):
    return make(
        la.model.model,
        backend_kwargs={"rank": 3, "kfac_approx": "expand"},
    )


def another_likelihood(la):
    return make(
        la.model.model,
        likelihood="regression",
        backend_kwargs={"rank": 3},
    )


FOREIGN = [
    (another_structure, "cls_name='LowRank.*not 'DiagLoRA"),
    (another_model, "fitted to another model"),
    (other_weights, "around other LoRA weights"),
    (another_rank, "rank=3, not 4"),
    (another_approximation, "kfac_approx='gradient', not 'expand'"),
    (
        another_likelihood,
        "likelihood='classification', not 'regression'",
    ),
]


@pytest.mark.parametrize(("another", "message"), FOREIGN)
def test_the_state_of_another_posterior_is_refused_and_changes_nothing(
    another, message
):
    la = fitted()
    state = la.state_dict() | {"prior_precision": torch.tensor([7.0])}
    other = another(la)
    before = dict(vars(other))
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(state)
    for name, value in before.items():
        assert vars(other)[name] is value, name


def test_draws_of_a_model_that_has_changed_are_not_written(
    tmp_path,
):
    la = other_weights(fitted())
    with pytest.raises(RuntimeError, match="have changed since the fit"):
        la.sample_adapters(2, tmp_path / "draws")
    assert not (tmp_path / "draws").exists()
