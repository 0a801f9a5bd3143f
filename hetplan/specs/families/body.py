"""The sizes every decoder family states, read with the defaults of its `transformers` class (version 5.24)."""

from __future__ import annotations

from dataclasses import dataclass

from hetplan.specs.families.config import MAX_LAYERS, Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What a family's configuration class assumes where a field is missing."""

    vocab: int
    hidden: int
    ffn: int
    layers: int
    heads: int
    positions: int
    kv_heads: int | None = None
    """None: as many as heads."""
    head_dim: int | None = None
    """None: hidden over heads."""
    tied: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """Sizes of a decoder as stated."""

    vocab: int
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    positions: int | None
    tied: bool


def read_body(
    config: Config,
    defaults: Defaults,
    *,
    whole_heads: bool = False,
    own_head_dim: bool = True,
    grouped: bool = True,
) -> Body:
    """Return the sizes `config` states.

    `whole_heads`: the family refuses a hidden size that is no multiple of its heads. `own_head_dim`: the family
    honours a stated `head_dim`. `grouped`: it honours `num_key_value_heads`.

    Raises: SpecError for a size that is missing, wrong, or does not divide.
    """
    hidden = config.size("hidden_size", default=defaults.hidden)
    heads = config.size("num_attention_heads", default=defaults.heads, limit=MAX_LAYERS)
    if whole_heads:
        require_multiple(config, "hidden_size", hidden, "num_attention_heads", heads)
    return Body(
        vocab=config.size("vocab_size", default=defaults.vocab),
        hidden=hidden,
        ffn=config.size("intermediate_size", default=defaults.ffn),
        layers=config.size("num_hidden_layers", default=defaults.layers, limit=MAX_LAYERS),
        heads=heads,
        kv_heads=_kv_heads(config, heads, defaults.kv_heads) if grouped else heads,
        head_dim=_head_dim(config, hidden, heads, defaults.head_dim, stated=own_head_dim),
        positions=config.optional_size("max_position_embeddings", default=defaults.positions),
        tied=config.flag("tie_word_embeddings", default=defaults.tied),
    )


def require_multiple(config: Config, key: str, value: int, of: str, divisor: int) -> None:
    """Raise SpecError unless `value` is a multiple of `divisor`."""
    if value % divisor:
        raise config.error(f"{value} is not a multiple of {of} {divisor}", key)


def dropout(config: Config, *keys: str, default: float = 0.0) -> bool:
    """Return whether any of the probabilities is above zero; all of them are checked."""
    return max(config.probability(key, default=default) for key in keys) > 0


def _kv_heads(config: Config, heads: int, default: int | None) -> int:
    key = "num_key_value_heads"
    stated = config.optional_size(key, default=default, limit=MAX_LAYERS)
    kv_heads = heads if stated is None else stated
    if heads % kv_heads:
        origin = "" if key in config.values else " (not stated: the default of its transformers class)"
        raise config.error(f"num_attention_heads {heads} is not a multiple of {kv_heads}{origin}", key)
    return kv_heads


def _head_dim(config: Config, hidden: int, heads: int, default: int | None, *, stated: bool) -> int:
    if stated:
        if default is not None and config.values.get("head_dim", default) is None:
            raise config.error("must be a whole number, not null", "head_dim")
        head_dim = config.optional_size("head_dim", default=default)
        if head_dim is not None:
            return head_dim
    if hidden < heads:
        raise config.error(f"{hidden} is less than num_attention_heads {heads}", "hidden_size")
    return hidden // heads
