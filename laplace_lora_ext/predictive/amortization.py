"""A posterior whose variances are learnt, to predict at the price of one forward pass."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader

from laplace_lora_ext.models.batches import named_batches
from laplace_lora_ext.models.hidden_states import logits_and_hidden_states
from laplace_lora_ext.models.locks import exclusive
from laplace_lora_ext.models.posterior import Posterior
from laplace_lora_ext.models.swapping import Swapping, special_tokens
from laplace_lora_ext.predictive.amortized import LearntVariance, log_variances
from laplace_lora_ext.predictive.data_sets import Columns, over_loader
from laplace_lora_ext.predictive.moments import Moments
from laplace_lora_ext.processes.exchange import together

_SWAPPED = "swapped"


@exclusive
@torch.inference_mode(False)
@torch.no_grad()
@together()
def amortize(
    la: Posterior,
    loader: DataLoader | Iterable[Any],
    unlabelled: str | DataLoader | Iterable[Any] | None = _SWAPPED,
    progress_bar: bool = False,
    generator: torch.Generator | None = None,
) -> LearntVariance:
    """Learn the variances of the logits, so that predictions take one forward pass.

    A ridge regression finds the logarithms of the variances, at the present prior precision, in
    what the output layer reads and in the log-probabilities (outputs, where they are numbers). No
    label goes in. Then `la(batch, pred_type="amortized")`, `la.predict(...)` and
    `la.predict_proba(...)` predict with these variances, with every link. They are saved with the
    posterior, and refused when its fit or its prior precision changes.

    Parameters
    ----------
    loader : DataLoader or iterable
        training data, with or without labels; read twice
    unlabelled : "swapped", DataLoader, iterable or None, default="swapped"
        more examples, such as predictions will meet. "swapped" adds a copy of each text in which 30
        % of the tokens are those of other texts; to images and sounds it adds nothing
    progress_bar : bool, default=False
    generator : torch.Generator, optional
        of the CPU, for swapped tokens; by default the same in every call

    Returns
    -------
    LearntVariance
        with `r_squared` and `mean_error`, which say how good it is; also in `la.learnt_variance`

    Raises
    ------
    ValueError
        If there are fewer than three examples, a number is not finite, or the likelihood is
        "reward_modeling".
    """
    if la.predicted_likelihood is not la.trained_likelihood:
        raise ValueError(f"Variances are learnt of classes or numbers, not for {la.likelihood}.")
    if isinstance(unlabelled, str) and unlabelled != _SWAPPED:
        raise ValueError(f'unlabelled is "{_SWAPPED}", data or None, not {unlabelled!r}.')
    la.check_model()
    swapping = _swapping(la, loader) if unlabelled == _SWAPPED else None

    def learnt_from(batch: Any) -> Columns:
        la.check_model()
        inputs = la.model.inputs(batch)
        f_var = la.moments(inputs, False)[1]
        if not torch.isfinite(f_var).all():
            raise ValueError("the predictive covariance is not finite")
        return _features(la, inputs)[1].cpu(), log_variances(f_var).cpu()

    def with_copy(batch: Any) -> Columns:
        text = la.model.text(batch)
        if swapping is None or text is None:
            return learnt_from(batch)
        swapped = swapping(text["input_ids"], text.get("attention_mask"), generator)
        return *learnt_from(batch), *learnt_from({**text, "input_ids": swapped})

    generator = torch.Generator() if generator is None else generator
    columns = over_loader(loader, with_copy, "[Variances]", progress_bar)
    if not isinstance(unlabelled, str | None):
        columns += over_loader(unlabelled, learnt_from, "[Variances, unlabelled]", progress_bar)
    features, logs = torch.cat(columns[::2]), torch.cat(columns[1::2])
    learnt = LearntVariance.of(features, logs, la.prior_precision, la.curvature_scale)
    la.learnt_variance = learnt.to(la.model.device, la.blocks[0].statistics_dtype)
    return la.learnt_variance


def amortized_moments(la: Posterior, x: Any) -> Moments:
    """Mean and learnt covariance of a batch's logits, from one forward pass.

    A `ValueError` if nothing was learnt, or the fit or the prior precision has changed since.
    """
    if isinstance(x, Moments):
        raise ValueError('Moments hold no inputs: pass these for pred_type="amortized".')
    la.check_model()
    learnt = la.learnt_variance
    if learnt is None:
        raise ValueError("No variance is learnt for this fit: call la.amortize(loader) first.")
    if not learnt.is_of(la.prior_precision, la.curvature_scale):
        raise ValueError("The prior has changed since la.amortize(loader): call it again.")
    with torch.set_grad_enabled(la.enable_backprop):
        f_mu, features = _features(la, x)
        if features.shape[-1] != len(learnt.mean):
            raise ValueError("The model's output layer is not that of la.amortize: call it again.")
        with torch.autocast(la.model.device.type, enabled=False):
            return Moments(f_mu, learnt.covariance(features))


def _features(la: Posterior, inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits `(B, C)`, and features `(B, p)` that their variances are learnt from."""
    with la.model.prepared():
        logits, hidden = logits_and_hidden_states(la.model, inputs)
    outputs = logits if la.predicted_likelihood.is_gaussian else logits.log_softmax(-1)
    features = outputs if hidden is None else torch.cat([hidden, outputs], dim=-1)
    return logits, features.to(la.blocks[0].statistics_dtype)


def _swapping(la: Posterior, loader: Iterable[Any]) -> Swapping | None:
    """What swaps tokens of a data set's texts; None if there are no texts."""
    batches = (batch for _, batch in named_batches(loader))
    texts = [text for batch in batches if (text := la.model.text(batch)) is not None]
    if not texts:
        return None
    special = set() if la.model.transformer is None else special_tokens(la.model.transformer)
    return Swapping(((t["input_ids"], t.get("attention_mask")) for t in texts), special)
