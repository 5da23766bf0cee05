"""Methods that are fitted on training batches: Laplace approximations and their rivals."""

import inspect
from collections.abc import Iterable
from functools import partial
from typing import Any, cast

import torch
import transformers
from laplace import Laplace

import laplace_lora_ext
from benchmarks.models import AdaptedModel
from laplace_lora_ext.likelihoods import Classification

# The paper's rank of large Kronecker factors, and this library's default.
LARGE_FACTOR_RANK = 10


def over_lora(model: AdaptedModel, structure: str = "lowrank_kron", **keywords: Any) -> Any:
    """Our class over LoRA weights, with one of its own structures or the host's."""
    tokens = model.class_token_ids
    what: Any = (model.model, "classification", "lora", structure)
    return laplace_lora_ext.Laplace(*what, class_token_ids=tokens, **keywords)


of_paper = partial(over_lora, backend_kwargs=laplace_lora_ext.PAPER_SETTINGS)
# As from 20 classes on.
with_drawn_labels = partial(over_lora, backend_kwargs={"stochastic": True, "num_samples": 8})


def of_last_layer(model: AdaptedModel) -> Any:
    """LLLA: the output layer if it has LoRA weights, or the last transformer layer."""
    adapter: Any = model.model
    if "lm_head" in adapter.peft_config["default"].target_modules:
        return over_lora(model, target_modules=["lm_head"])
    config: Any = model.model.config
    return over_lora(model, layers_to_transform=[config.num_hidden_layers - 1])


def of_first_half(model: AdaptedModel) -> Any:
    config: Any = model.model.config
    return over_lora(model, layers_to_transform=list(range(config.num_hidden_layers // 2)))


def with_mean_at_start(model: AdaptedModel) -> Any:
    """A prior around the LoRA weights before training, and not around 0."""
    la = over_lora(model)
    names = {id(p): name for name, p in model.model.named_parameters()}
    start = (model.initial[names[id(block.weight)]] for block in la.blocks)
    la.prior_mean = torch.cat([weight.flatten() for weight in start])
    return la


def stock(model: AdaptedModel, structure: str, **keywords: Any) -> Any:
    """laplace-torch's own class over all that requires a gradient, which are the LoRA weights."""
    model.model.requires_grad_(False)
    for weight in model.lora_weights:
        weight.requires_grad_(True)
    return Laplace(model.logits_model, "classification", "all", structure, **keywords)


class BareLoops:
    """The passes without which no rival could do: C a batch for a fit, C + 1 for a prediction."""

    def __init__(self, model: AdaptedModel) -> None:
        self._model = model
        self._weights = model.lora_weights

    def fit(self, batches: Iterable[Any]) -> None:
        for batch in batches:
            logits = self._model.logits_model(batch)
            seeds = Classification().exact_seeds(logits.detach()).vectors
            self._differentiate(logits, seeds)

    def __call__(self, batch: Any, **_: Any) -> torch.Tensor:
        logits = self._model.logits_model(batch)
        identity = torch.eye(logits.shape[1], device=logits.device)
        self._differentiate(logits, identity[:, None].expand(-1, len(logits), -1))
        return logits.detach().softmax(-1)

    def _differentiate(self, logits: torch.Tensor, seeds: torch.Tensor) -> None:
        for number, seed in enumerate(seeds, start=1):
            torch.autograd.grad(logits, self._weights, seed, retain_graph=number < len(seeds))

    def state_dict(self) -> dict[str, Any]:
        return {"H": ()}


class BayesianLoRA:
    """The package of that name, for causal language models, probit and a prior precision of 1."""

    def __init__(self, model: AdaptedModel) -> None:
        try:
            import bayesian_lora.kfac  # pyright: ignore
            import bayesian_lora.main  # pyright: ignore
        except ImportError as error:
            raise RuntimeError(f"the package bayesian-lora cannot be imported ({error})") from error
        self._package: Any = bayesian_lora
        self._model, self._inner = model, cast("Any", model.model)
        self._rank = self._inner.peft_config["default"].r
        self._device = str(model.logits_model.device)
        self._factors: Any = None

    def fit(self, batches: Iterable[Any]) -> None:
        factors = self._package.kfac.calculate_kronecker_factors(
            self._inner,
            lambda _, batch: self._model.logits_model(batch),
            batches,
            n_kfac=LARGE_FACTOR_RANK,
            lr_threshold=self._rank + 1,
            target_module_keywords=["lora"],
        )
        self._factors = self._package.main.cholesky_decompose_small_factors(
            factors, self._rank + 1, self._device, torch.float32
        )
        self._inner.eval()

    def __call__(self, batch: Any, **_: Any) -> torch.Tensor:
        tokens = self._model.class_token_ids or []
        inputs = type(batch)({key: value for key, value in batch.items() if key != "labels"})
        # Like `LogitsModel` for the others: no cache, and only the answer's logits.
        known = inspect.signature(transformers.LlamaForCausalLM.forward).parameters
        options = [("use_cache", False), ("logits_to_keep", 1)]
        jacobian, mean = self._package.main.jacobian_mean(
            self._inner,
            type(batch)({**inputs, **{key: v for key, v in options if key in known}}),
            output_callback=lambda outputs: outputs.logits[:, -1, tokens],
        )
        prior_variance = torch.ones((), device=self._device)
        sizes = (len(tokens), self._rank, LARGE_FACTOR_RANK, self._device)
        covariance = self._package.main.variance(
            inputs, jacobian, self._factors, prior_variance, *sizes
        )
        scale = (1 + torch.pi / 8 * covariance.diagonal(dim1=-2, dim2=-1)).sqrt()
        return (mean / scale).softmax(-1)

    def state_dict(self) -> dict[str, Any]:
        return {"H": self._factors}
