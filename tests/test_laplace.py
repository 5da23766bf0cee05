"""Importing the package adds structures to the host, and nothing else."""

import subprocess
import sys
import textwrap

import pytest

import laplace_lora_ext
from tests.support.models import (
    CLASS_TOKEN_IDS,
    TwoLinear,
    lora_model,
)


def test_nothing_stock_changes():
    script = """
        import sys, torch, laplace
        {imports}
        from torch.utils.data import DataLoader, TensorDataset
        torch.manual_seed(0)
        X, y = torch.randn(20, 4), torch.randint(0, 3, (20,))
        layers = torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3)
        net = torch.nn.Sequential(*layers)
        for subset in ("all", "last_layer"):
            for structure in ("kron", "diag", "full"):
                la = laplace.Laplace(net, "classification", subset, structure)
                la.fit(DataLoader(TensorDataset(X, y), batch_size=7))
                la.optimize_prior_precision(n_steps=5)
                evidence = la.log_marginal_likelihood().item().hex()
                kind = type(la)
                print(kind.__module__, kind.__name__, evidence, la(X).sum(0).tolist())
    """
    outputs = [
        subprocess.run(
            [
                sys.executable,
                "-W",
                "ignore",
                "-c",
                textwrap.dedent(script.format(imports=line)),
            ],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for line in ("", "import laplace_lora_ext")
    ]
    assert "laplace.baselaplace KronLaplace" in outputs[0]
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    ("n_labels", "problem_type", "likelihood"),
    [
        (3, None, "classification"),
        (1, None, "regression"),
        (2, "regression", "regression"),
        (3, "single_label_classification", "classification"),
        (
            None,
            None,
            "classification",
        ),  # answers of a language model
    ],
)
def test_likelihood_is_read_off_the_model(n_labels, problem_type, likelihood):
    model = lora_model("bert", n_labels=n_labels) if n_labels else lora_model("gpt2")
    answers = {} if n_labels else {"class_token_ids": CLASS_TOKEN_IDS}
    model.config.problem_type = problem_type
    assert laplace_lora_ext.Laplace(model, **answers).likelihood == likelihood


def test_refuses_to_guess_a_likelihood():
    with pytest.raises(ValueError, match="Pass the likelihood"):
        laplace_lora_ext.Laplace(TwoLinear(), subset_of_weights="lora")
    with pytest.raises(ValueError, match="class_token_ids"):
        laplace_lora_ext.Laplace(lora_model("gpt2"), subset_of_weights="lora")
