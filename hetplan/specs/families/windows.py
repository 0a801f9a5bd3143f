"""Which layers of a model look back over a window only, one entry a layer (None: over everything)."""

from __future__ import annotations

from hetplan.specs.families.config import Config
from hetplan.units import show

Windows = tuple[int | None, ...]


def same_window(config: Config, layers: int, *, default: int | None = None) -> Windows:
    """Return the stated window for every layer."""
    return (config.optional_size("sliding_window", default=default),) * layers


def late_windows(config: Config, layers: int, *, default: int = 4096, first: int = 28) -> Windows:
    """Return a window for layers from `max_window_layers` on, where `use_sliding_window` is set (Qwen2, Qwen3)."""
    if not config.flag("use_sliding_window", default=False):
        return (None,) * layers
    window = config.optional_size("sliding_window", default=default)
    first = config.count("max_window_layers", default=first)
    return typed_windows(config, layers, window, tuple(index >= first for index in range(layers)))


def early_windows(config: Config, layers: int, *, default: int = 4096, end: int = 28) -> Windows:
    """Return a window for every other layer before `max_window_layers` (Qwen2-MoE)."""
    if not config.flag("use_sliding_window", default=False):
        return (None,) * layers
    window = config.optional_size("sliding_window", default=default)
    end = config.count("max_window_layers", default=end)
    return typed_windows(config, layers, window, tuple(index % 2 == 0 and index < end for index in range(layers)))


def patterned_windows(config: Config, layers: int, *, default: int, every: int) -> Windows:
    """Return a window for all layers but each `every`-th (Gemma 2: 2, Gemma 3: 6 or `sliding_window_pattern`)."""
    window = config.optional_size("sliding_window", default=default)
    return typed_windows(config, layers, window, tuple((index + 1) % every != 0 for index in range(layers)))


def typed_windows(config: Config, layers: int, window: int | None, sliding: tuple[bool, ...]) -> Windows:
    """Return `window` where `layer_types` says so; `sliding` stands in where that field is missing.

    Raises: SpecError when `layer_types` has another length than the model, or an unknown word.
    """
    types = config.texts("layer_types")
    if types is not None:
        if len(types) != layers:
            raise config.error(f"has {len(types)} entries for {layers} layers", "layer_types")
        unknown = sorted(set(types) - {"sliding_attention", "full_attention"})
        if unknown:
            raise config.error(
                f"unknown attention {show(unknown[0])}; known: full_attention, sliding_attention", "layer_types"
            )
        sliding = tuple(kind == "sliding_attention" for kind in types)
    return tuple(window if slides else None for slides in sliding)
