"""`predict_proba` in the hands of tools for scikit-learn's estimators."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.models import N_CLASSES, ragged_batches
from tests.support.posteriors import fitted

sklearn_base = pytest.importorskip("sklearn.base")


class Texts(sklearn_base.ClassifierMixin, sklearn_base.BaseEstimator):
    """A fitted posterior as an estimator of arrays of token ids `(texts, positions)`."""

    def __init__(self, la=None) -> None:
        self.la = la
        self.classes_ = np.arange(N_CLASSES)

    def fit(self, X, y):
        return self

    def predict_proba(self, X):
        return self.la.predict_proba(X)

    def predict(self, X):
        return self.predict_proba(X).argmax(1)

    def __sklearn_is_fitted__(self) -> bool:
        return True


def texts(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and labels, all of one length."""
    batches = ragged_batches(lengths=(6,) * n, seed=5)
    parts = [torch.cat([batch[key] for batch in batches]) for key in ("input_ids", "labels")]
    return parts[0].numpy(), parts[1].numpy()


def test_conformal_sets_of_mapie_are_those_of_the_probabilities():
    classification = pytest.importorskip("mapie.classification")
    if not hasattr(classification, "SplitConformalClassifier"):
        pytest.skip("this MAPIE has other names")
    la, (X, y) = fitted(), texts(60)
    assert 0 < (y == la.predict_proba(X).argmax(1)).mean() < 1
    conformal = classification.SplitConformalClassifier(Texts(la), confidence_level=0.8)
    conformal.conformalize(X[:40], y[:40])
    labels, sets = conformal.predict_set(X[40:])
    # The score "lac" is 1 less the probability of the label; 33 of 41 are 80 %.
    probabilities = la.predict_proba(X)
    threshold = np.sort(1 - probabilities[np.arange(40), y[:40]])[33 - 1]
    np.testing.assert_array_equal(labels, probabilities[40:].argmax(1))
    np.testing.assert_array_equal(sets[..., 0], 1 - probabilities[40:] <= threshold)
