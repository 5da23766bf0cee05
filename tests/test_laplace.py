"""Importing the package adds structures to the host, and nothing else."""

import subprocess
import sys
import textwrap

import pytest

import laplace_lora_ext
from tests.support.models import CLASS_TOKEN_IDS, TwoLinear, lora_model

# In a process of its own, since this one has imported the package long ago.
SCRIPT = """
    import torch, laplace
    {imports}
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    X = torch.randn(20, 4)
    y = torch.randint(0, 3, (20,))
    loader = DataLoader(TensorDataset(X, y), batch_size=7)
    net = torch.nn.Sequential(
        torch.nn.Linear(4, 6),
        torch.nn.Tanh(),
        torch.nn.Linear(6, 3),
    )
    for subset in ("all", "last_layer"):
        for structure in ("kron", "diag", "full"):
            la = laplace.Laplace(net, "classification", subset, structure)
            la.fit(loader)
            la.optimize_prior_precision(n_steps=5)
            evidence = la.log_marginal_likelihood()
            kind = type(la)
            print(kind.__module__, kind.__name__)
            # To the last digit.
            print(evidence.item().hex(), la(X).sum(0).tolist())
"""


def printed(imports: str) -> str:
    """Run the script with a line of imports; return what it prints."""
    script = SCRIPT.format(imports=imports)
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        check=True,
    )
    return finished.stdout


def test_nothing_stock_changes():
    without = printed("")
    # That the host's own classes are asked for.
    assert "laplace.baselaplace KronLaplace" in without
    with_ours = printed("import laplace_lora_ext")
    assert with_ours == without


@pytest.mark.parametrize(
    ("n_labels", "problem_type", "likelihood"),
    [
        (3, None, "classification"),
        (1, None, "regression"),
        (2, "regression", "regression"),
        (3, "single_label_classification", "classification"),
        (3, "multi_label_classification", "multi_label_classification"),
    ],
)
def test_likelihood_is_read_off_the_model(n_labels, problem_type, likelihood):
    model = lora_model("bert", n_labels=n_labels)
    model.config.problem_type = problem_type
    la = laplace_lora_ext.Laplace(model)
    assert la.likelihood == likelihood


def test_answers_of_a_language_model_are_classes():
    model = lora_model("gpt2")
    # A model that writes says nothing of a problem.
    model.config.problem_type = None
    la = laplace_lora_ext.Laplace(model, class_token_ids=CLASS_TOKEN_IDS)
    assert la.likelihood == "classification"


def test_refuses_to_guess_a_likelihood():
    # A module of one's own has no configuration that tells.
    plain = TwoLinear()
    with pytest.raises(ValueError, match="Pass the likelihood"):
        laplace_lora_ext.Laplace(plain, subset_of_weights="lora")
    # A model that writes may be asked for answers, or for texts.
    writing = lora_model("gpt2")
    with pytest.raises(ValueError, match="class_token_ids"):
        laplace_lora_ext.Laplace(writing, subset_of_weights="lora")
