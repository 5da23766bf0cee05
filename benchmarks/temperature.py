"""Temperature scaling."""

import torch
from torch.nn.functional import cross_entropy


def fit_temperature(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """Find the one number by which logits are divided to minimise the NLL.

    Parameters
    ----------
    logits : torch.Tensor
        Logits of validation texts (texts, classes).
    labels : torch.Tensor
        Their classes (texts,).

    Returns
    -------
    temperature : float
        Above 1 for an overconfident model.
    """
    log_temperature = torch.zeros((), requires_grad=True)
    optimizer = torch.optim.LBFGS([log_temperature], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(logits / log_temperature.exp(), labels)
        loss.backward()
        return loss

    optimizer.step(closure)  # pyright: ignore[reportArgumentType]
    return log_temperature.exp().item()
