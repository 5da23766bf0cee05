"""The one list of methods, ours and rivals: a function and a line each."""

from functools import partial

from laplace.curvature.asdl import AsdlGGN

from benchmarks.methods import method as points
from benchmarks.methods import posteriors, sampled, swag, trained_again
from benchmarks.methods.method import Method, PointMethod, Posterior

# Stock curvatures in this library's class.
LORA_DIAG = partial(posteriors.over_lora, structure="diag")
LORA_KRON = partial(posteriors.over_lora, structure="kron")
# The stock classes themselves, for comparisons of costs.
STOCK_DIAG = partial(posteriors.stock, structure="diag")
STOCK_KRON = partial(posteriors.stock, structure="kron")
STOCK_KRON_ASDL = partial(posteriors.stock, structure="kron", backend=AsdlGGN)
# Rivals that train again, each by its own recipe.
BY_BLOB = partial(sampled.retrained, sampled.BLoB())
BY_IVON = partial(sampled.retrained, sampled.IVONLoRA())
BY_SWAG = partial(swag.of_iterates, swag.SWAG())
BY_MONTECLORA = partial(trained_again.alone, trained_again.MonteCLoRA())

ALL: tuple[Method, ...] = (
    PointMethod("map", "MAP", points.as_it_is),
    PointMethod("mc_dropout", "MC dropout", points.with_dropout),
    PointMethod("checkpoint_ensemble", "Checkpoint ensemble", points.last_checkpoints),
    PointMethod("deep_ensemble", "Deep ensemble", points.other_seeds),
    PointMethod("tfb", "TFB", sampled.training_free),
    PointMethod("blob", "BLoB", BY_BLOB),
    PointMethod("ivon", "IVON-LoRA", BY_IVON),
    PointMethod("swag", "SWAG", BY_SWAG),
    PointMethod("monteclora", "MonteCLoRA", BY_MONTECLORA),
    PointMethod("distilled", "Student of a deep ensemble", trained_again.distilled),
    Posterior(
        "last_layer",
        "Last layer (LLLA)",
        posteriors.of_last_layer,
        on_training=True,
    ),
    Posterior("head", "Head alone", posteriors.of_head),
    Posterior("diag", "Stock diag", LORA_DIAG),
    Posterior("kron", "Stock Kron", LORA_KRON),
    Posterior("stock_diag", "Stock diag", STOCK_DIAG),
    Posterior("stock_kron", "Stock Kron", STOCK_KRON),
    Posterior("stock_kron_asdl", "Stock Kron (ASDL)", STOCK_KRON_ASDL),
    Posterior("bare", "Bare loops", posteriors.BareLoops),
    Posterior("lowrank_kron_paper", "lowrank_kron (paper)", posteriors.of_paper),
    Posterior(
        "lowrank_kron",
        "lowrank_kron",
        posteriors.lowrank_kron,
        on_training=True,
    ),
)
METHODS = {method.key: method for method in ALL}


def posterior(key: str) -> Posterior:
    """Return a method that is fitted on training batches, by its key."""
    method = METHODS[key]
    assert isinstance(method, Posterior)
    return method
