"""Faster arithmetic that the GPU has is not switched on: TF32, cuDNN's search for algorithms."""

from __future__ import annotations

from haiprof.diagnosis.finding import Abstention, Finding, Judgement
from haiprof.diagnosis.rule_inputs import RuleInputs
from haiprof.diagnosis.setting_prices import UNKNOWN
from haiprof.diagnosis.thresholds import MIN_STEPS, TF32_CAPABILITY
from haiprof.run_analysis.settings import RankSettings

RULE = "fast_paths_off"
_MATRIX_LAYERS = ("Linear", "NonDynamicallyQuantizableLinear", "Conv", "LSTM", "GRU", "RNN")


def fast_paths_off(inputs: RuleInputs) -> Judgement:
    """A note where float32 products could be in TF32, or convolutions have no search.

    Both change results in the last digits, or from run to run, so that they are the user's choice;
    what they would save here is not measured. Source: NVIDIA's data sheet of the A100, 19.5 TFLOPS
    in float32 and 156 in TF32; PyTorch's Performance Tuning Guide, cuDNN auto-tuner.
    """
    if not inputs.settings:
        return Abstention(rule=RULE, why="no settings were recorded")
    if not inputs.uses_gpu:
        return Abstention(rule=RULE, why="no GPU")
    if inputs.steps.height < MIN_STEPS:
        return Abstention(rule=RULE, why=f"fewer than {MIN_STEPS} steps")
    ranks = list(inputs.settings.values())
    found = [
        (what, remedy)
        for what, remedy, is_off in _PATHS
        if all(is_off(settings) for settings in ranks)
    ]
    if not found:
        return None
    return Finding(
        rule=RULE,
        title="; ".join(what for what, _ in found),
        evidence=(),
        remedy="; ".join(remedy for _, remedy in found),
        confidence=0.5,
        severity="info",
        missing=(UNKNOWN,),
    )


def _without_tf32(settings: RankSettings) -> bool:
    """Products of float32 matrices on a GPU that has TF32, by a model that has such matrices."""
    flags, able = settings.flags, _capability(settings)
    if able is None or able < TF32_CAPABILITY or settings.autocast is not None:
        return False
    full = flags.get("matmul_precision") in ("highest", None) and flags.get("tf32_matmul") != "tf32"
    numbers: dict[str, int] = {}
    for model in settings.models:
        for dtype, count in model.dtypes.items():
            numbers[dtype] = numbers.get(dtype, 0) + count
    single = max(numbers, key=lambda dtype: numbers[dtype], default=None) == "float32"
    return full and single and _has_layers(settings, _MATRIX_LAYERS)


def _without_search(settings: RankSettings) -> bool:
    flags = settings.flags
    searches = flags.get("cudnn_benchmark") is not False
    chosen = flags.get("cudnn_deterministic") is True or flags.get("deterministic") is True
    usable = flags.get("cudnn_enabled") is True and not chosen
    return usable and not searches and _has_layers(settings, ("Conv",))


def _has_layers(settings: RankSettings, names: tuple[str, ...]) -> bool:
    return any(layer.startswith(names) for model in settings.models for layer in model.layers)


def _capability(settings: RankSettings) -> tuple[int, int] | None:
    """`9.0` as numbers."""
    major, _, minor = str(settings.flags.get("compute_capability")).partition(".")
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None


_PATHS = (
    (
        "float32 matrix products do not use the tensor cores",
        "torch.set_float32_matmul_precision('high') (TF32: 10 bits of mantissa), or torch.autocast "
        "with bfloat16",
        _without_tf32,
    ),
    (
        "cuDNN takes the first algorithm for each convolution",
        "torch.backends.cudnn.benchmark = True, where shapes of batches seldom change",
        _without_search,
    ),
)
"""What is off, what switches it on, and whether it is off on a rank."""
