"""Inputs with a fixed seed, models, and the comparison that the tests share."""

import importlib.util
import warnings

import torch

TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3, torch.float64: 1e-12}


def inputs(tokens=70, batch=2, heads=2, value_heads=None, key_dim=12, value_dim=10, decay=None, dtype=torch.float32, seed=0):
    """q, k, v, beta and g (None, or by `decay` "scalar" or "channel") as a dict."""
    generator = torch.Generator().manual_seed(seed)
    value_heads = value_heads or heads

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    made = {
        "q": normal(batch, tokens, heads, key_dim).to(dtype),
        "k": (0.4 * normal(batch, tokens, heads, key_dim)).to(dtype),
        "v": normal(batch, tokens, value_heads, value_dim).to(dtype),
        "beta": torch.sigmoid(normal(batch, tokens, value_heads)).to(dtype),
    }
    if decay is not None:
        extra = [key_dim] if decay == "channel" else []
        made["g"] = -torch.nn.functional.softplus(normal(batch, tokens, value_heads, *extra) - 1).to(torch.float32)
    return made


def state(sequences=2, value_heads=2, key_dim=12, value_dim=10, seed=1):
    """A float32 state [N, HV, K, V]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sequences, value_heads, key_dim, value_dim, generator=generator)


def import_hf():
    """Returns the modules transformers and efla.hf, and silences their warnings and progress bars."""
    warnings.simplefilter("ignore")  # of flash-linear-attention, that there is no GPU
    import transformers

    if importlib.util.find_spec("fla"):
        import fla.models  # noqa: F401: transformers keeps the models of the package that registers them last
    import efla.hf

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers, efla.hf


def enlarge_weights(model):
    """Multiplies the matrices of a new model by 8, so that every part of it matters."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)


def error(got, expected):
    """The relative RMS error, infinite where a shape differs or a value is not finite."""
    if got.shape != expected.shape or not torch.isfinite(got).all():
        return float("inf")
    got, expected = got.detach().double(), expected.detach().double()
    return float((got - expected).norm() / expected.norm().clamp_min(1e-30))


def assert_close(test, got, expected, dtype=torch.float32, factor=1.0, what=""):
    """Fails `test` unless `got` is within the tolerance of `dtype` of `expected`."""
    tolerance = TOLERANCE[dtype] * factor
    distance = error(got, expected)
    if not distance <= tolerance:
        test.fail(f"{what}: relative error {distance:.2e}, at most {tolerance:.0e} expected")
