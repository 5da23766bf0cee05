"""Adapters of one PEFT model: the active one, new ones, and files of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

from peft import PeftModel, load_peft_weights, set_peft_model_state_dict
from torch import Tensor, nn

from laplace_lora_ext.messages import listed
from laplace_lora_ext.models.weights import owner_of, without_adapter

# Initialisations of LoRA that subtract what they put into the adapter from the base
# model.
_CHANGE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


def own_weights(model: nn.Module, adapter: str) -> dict[str, nn.Parameter]:
    """Find an adapter's weights, by names without the adapter's."""
    return {
        without_adapter(name): weight
        for name, weight in model.named_parameters()
        if owner_of(name) == adapter
    }


def active_again(model: nn.Module) -> Callable[[], None]:
    """Return a function that activates the present adapter again.

    What is trainable now is trainable then.
    """
    active = [(each, each.active_adapter) for each in _peft_models(model)]
    trainable = [(weight, weight.requires_grad) for weight in model.parameters()]

    def activate() -> None:
        for peft_model, adapter in active:
            # Without adapters, PEFT has an empty list there.
            if isinstance(adapter, str) and peft_model.active_adapter != adapter:
                peft_model.set_adapter(adapter)
        # PEFT's `set_adapter` makes all weights of an adapter trainable, frozen ones
        # too.
        for weight, requires_grad in trainable:
            weight.requires_grad_(requires_grad)

    return activate


@contextmanager
def own_adapter_back(model: nn.Module) -> Iterator[None]:
    """Activate the user's adapter again at the end.

    An error removes adapters that were added within.
    """
    activate = active_again(model)
    before = [(each, set(each.peft_config)) for each in _peft_models(model)]
    try:
        yield
    # An interruption from the keyboard leaves as little behind as an error.
    except BaseException:
        activate()
        for peft_model, names in before:
            for added in set(peft_model.peft_config) - names:
                peft_model.delete_adapter(added)
        raise
    activate()


def add_fresh_adapter(model: PeftModel, adapter: str) -> None:
    """Add an untrained adapter like the active one, and activate it.

    Torch's random state decides its values. What is frozen in the other one, as
    `lora_A` in LoRA-FA, is frozen here too. Refused are a name that is taken, weights
    that train beside the adapter, and an initialisation that would change the base
    model. PEFT refuses a second AdaLoRA.
    """
    if adapter in model.peft_config:
        raise ValueError(
            f"The model has an adapter {adapter!r} already: remove it with "
            f"model.delete_adapter({adapter!r})."
        )
    shared = [
        name
        for name, weight in model.named_parameters()
        if weight.requires_grad and owner_of(name) is None
    ]
    if shared:
        raise ValueError(
            f"Weights train that belong to no adapter, {listed(shared)}: a second one "
            "would begin with what they have learnt. Name their modules in "
            "modules_to_save, or freeze them."
        )
    like = model.active_adapter
    # A PeftModel's own is one, where a layer's may be several.
    assert isinstance(like, str)
    # A copy: PEFT writes into the configuration that an adapter is added with.
    config = deepcopy(model.peft_config[like])
    initialisation = getattr(config, "init_lora_weights", True)
    if str(initialisation).startswith(_CHANGE_BASE):
        raise ValueError(
            f"init_lora_weights={initialisation!r} changes the base model, which then "
            "can't take a second adapter: choose another initialisation, or train each "
            "on its own model."
        )
    own = own_weights(model, like)
    trained = {name: weight.requires_grad for name, weight in own.items()}
    model.add_adapter(adapter, config)
    model.set_adapter(adapter)
    # PEFT has made all of the new adapter trainable.
    model.requires_grad_(False)
    for name, weight in own_weights(model, adapter).items():
        weight.requires_grad_(trained[name])


def add_copy(model: PeftModel, adapter: str, name: str) -> None:
    """Add a copy of an adapter under another name, and activate it.

    What `add_fresh_adapter` refuses is refused.
    """
    if model.active_adapter != adapter:
        model.set_adapter(adapter)
    add_fresh_adapter(model, name)
    weights = own_weights(model, adapter)
    for of_copy, weight in own_weights(model, name).items():
        weight.data.copy_(weights[of_copy].data)


def read_adapter(model: PeftModel, adapter: str, directory: Path) -> None:
    """Load an adapter's weights from a directory.

    `write_adapter` has written it, or a trainer.
    """
    weights = load_peft_weights(str(_folder_of(adapter, directory)), device="cpu")
    set_peft_model_state_dict(model, weights, adapter)


def find_peft_model(model: nn.Module) -> PeftModel:
    """Find the `PeftModel` that a model is or holds; an error if there is none."""
    peft_models = _peft_models(model)
    if not peft_models:
        raise ValueError(
            "This model is no PeftModel and holds none, which adapters of their own "
            "need: make it with peft.get_peft_model."
        )
    return peft_models[0]


def _peft_models(model: nn.Module) -> list[PeftModel]:
    return [module for module in model.modules() if isinstance(module, PeftModel)]


def new_folders(directory: str | Path, n_samples: int) -> list[Path]:
    """Name new folders, one a sample; `FileExistsError` if one is there."""
    # With leading zeros, names sort as numbers do.
    digits = len(str(n_samples - 1))
    folders = [
        Path(directory) / f"sample_{index:0{digits}}" for index in range(n_samples)
    ]
    for folder in folders:
        if folder.exists():
            raise FileExistsError(
                f"{folder} exists: remove it or name another directory."
            )
    return folders


def write_adapter(
    model: PeftModel,
    adapter: str,
    weights: Mapping[int, Tensor],
    directory: Path,
    **kwargs: Any,
) -> Path:
    """Save an adapter with other values for some of its weights, and return its folder.

    `weights` maps the `id` of a parameter to the values to save in its place. The model
    itself does not change.
    """
    # The dictionary is new, and its tensors are the model's own: put in place, not
    # written into.
    state = model.state_dict()
    for name, parameter in model.named_parameters():
        if id(parameter) in weights:
            state[name] = weights[id(parameter)]
    model.save_pretrained(
        str(directory), selected_adapters=[adapter], state_dict=state, **kwargs
    )
    return _folder_of(adapter, directory)


def _folder_of(adapter: str, directory: Path) -> Path:
    """Return where PEFT saves an adapter: any but "default" has a folder of its own."""
    return directory if adapter == "default" else directory / adapter
