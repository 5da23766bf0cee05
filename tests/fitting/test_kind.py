"""Another posterior of the same kind."""

from tests.support.models import lora_model, ragged_batches
from tests.support.posteriors import fitted, make, plain_regression


def test_another_posterior_of_the_same_kind():
    options = {
        "prior_mean": 0.3,
        "temperature": 2.0,
        "enable_backprop": True,
        "target_modules": ["value"],
        "backend_kwargs": {"rank": 2, "tail": False, "kfac_approx": "expand"},
    }
    la = fitted(**options)
    other = la.around(lora_model("bert", lora_alpha=3))
    assert other.H is None
    other.fit(ragged_batches())
    same = make(lora_model("bert", lora_alpha=3), **options)
    same.fit(ragged_batches())
    assert [block.name for block in other.blocks] == [block.name for block in la.blocks]
    assert other.log_marginal_likelihood() == same.log_marginal_likelihood()
    assert (other.temperature, other.prior_mean, other.enable_backprop) == (2.0, 0.3, True)
    answers = fitted("gpt2")
    assert answers.around(lora_model("gpt2")).model.class_token_ids == answers.model.class_token_ids
    kron = fitted(structure="kron", damping=True)
    assert kron.around(lora_model("bert", lora_alpha=3)).damping
    regression, _ = plain_regression()
    assert regression.around(regression.model.model).sigma_noise == regression.sigma_noise
