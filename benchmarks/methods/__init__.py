"""The one list of methods, ours and rivals; a new rival is one function and one line here."""

from functools import partial

from laplace.curvature.asdl import AsdlGGN

from benchmarks.methods import method as points
from benchmarks.methods import posteriors, sampled
from benchmarks.methods.method import Method, PointMethod, Posterior

BLOB, IVON = (partial(sampled.retrained, kind()) for kind in (sampled.BLoB, sampled.IVONLoRA))
ASDL = partial(posteriors.stock, structure="kron", backend=AsdlGGN)
METHODS: dict[str, Method] = {
    method.key: method
    for method in (
        PointMethod("map", "MAP", points.as_it_is),
        PointMethod("mc_dropout", "MC dropout", points.with_dropout),
        PointMethod("checkpoint_ensemble", "Checkpoint ensemble", points.last_checkpoints),
        PointMethod("deep_ensemble", "Deep ensemble", points.other_seeds),
        PointMethod("tfb", "TFB", sampled.training_free),
        PointMethod("blob", "BLoB", BLOB),
        PointMethod("ivon", "IVON-LoRA", IVON),
        Posterior("last_layer", "Last layer (LLLA)", posteriors.of_last_layer, on_training=True),
        # Stock curvatures in this library's class; then the stock classes themselves.
        Posterior("diag", "Stock diag", partial(posteriors.over_lora, structure="diag")),
        Posterior("kron", "Stock Kron", partial(posteriors.over_lora, structure="kron")),
        Posterior("stock_diag", "Stock diag", partial(posteriors.stock, structure="diag")),
        Posterior("stock_kron", "Stock Kron", partial(posteriors.stock, structure="kron")),
        Posterior("stock_kron_asdl", "Stock Kron (ASDL)", ASDL),
        Posterior("bare", "Bare loops", posteriors.BareLoops),
        Posterior("lowrank_kron_paper", "lowrank_kron (paper)", posteriors.of_paper),
        Posterior("lowrank_kron", "lowrank_kron", posteriors.over_lora, on_training=True),
    )
}


def posterior(key: str) -> Posterior:
    """A method that is fitted on training batches."""
    method = METHODS[key]
    assert isinstance(method, Posterior)
    return method
