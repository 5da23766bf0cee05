"""Importing the package adds structures to the host, and nothing else."""

import subprocess
import sys

import pytest

import laplace_lora_ext
from tests.support.models import TwoLinear, lora_model
from tests.support.tasks import token_classifier

# In a process of its own, since this one has imported the package long ago.
SCRIPT = """
import torch, laplace
from torch.utils.data import DataLoader, TensorDataset

def evidences():
    torch.manual_seed(0)
    X = torch.randn(20, 4)
    y = torch.randint(0, 3, (20,))
    loader = DataLoader(TensorDataset(X, y), batch_size=7)
    layers = torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3)
    for subset in ("all", "last_layer"):
        for structure in ("kron", "diag", "full"):
            net = torch.nn.Sequential(*layers)
            la = laplace.Laplace(net, "classification", subset, structure)
            la.fit(loader)
            la.optimize_prior_precision(n_steps=5)
            # To the last digit.
            number = la.log_marginal_likelihood().item().hex()
            yield type(la).__module__, number, la(X).sum(0).tolist()

of_host = list(evidences())
import laplace_lora_ext
assert list(evidences()) == of_host
assert all(module.startswith("laplace.") for module, *_ in of_host)
"""


def test_nothing_stock_changes():
    subprocess.run([sys.executable, "-W", "ignore", "-c", SCRIPT], check=True)


def test_likelihood_is_read_off_the_model():
    for n_labels, problem_type, likelihood in (
        (3, None, "classification"),
        (1, None, "regression"),
        (2, "regression", "regression"),
        (3, "multi_label_classification", "multi_label_classification"),
    ):
        model = lora_model("bert", n_labels=n_labels)
        model.config.problem_type = problem_type
        assert laplace_lora_ext.Laplace(model).likelihood == likelihood
    of_tokens = laplace_lora_ext.Laplace(token_classifier())
    assert of_tokens.likelihood == "token_classification"


def test_refuses_to_guess_a_likelihood():
    # A module of one's own has no configuration that tells.
    plain = TwoLinear()
    with pytest.raises(ValueError, match="Pass the likelihood"):
        laplace_lora_ext.Laplace(plain, subset_of_weights="lora")
    # A model that writes may be asked for answers, or for texts.
    writing = lora_model("gpt2")
    with pytest.raises(ValueError, match="class_token_ids"):
        laplace_lora_ext.Laplace(writing, subset_of_weights="lora")
