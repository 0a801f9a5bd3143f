"""Models given by their sizes: `modules:` of a model file, for published models without a configuration.

Style `gpt` is GPT-2's block (layer norms, biases, a plain MLP of `4 hidden` unless stated, learned positions where
`seq` is stated, tied head); style `llama` is Llama's (RMS norms, no biases, a gated MLP, its own head). A module
without `vocab` is an encoder: no table, no head, attention both ways, and `tokens` of its own a sample.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from hetplan.specs.families.blocks import language_module
from hetplan.specs.families.body import Body
from hetplan.specs.families.config import MAX_LAYERS, MAX_SIZE
from hetplan.specs.families.dense import Traits, dense
from hetplan.specs.families.gpt import PlainTraits, plain, position_table
from hetplan.specs.fields import Fields
from hetplan.specs.model import Attention, Layer, Model, Module, Operator

STYLES = ("gpt", "llama")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """One entry of `modules:`."""

    body: Body
    style: str
    dropout: bool
    tokens: int | None


def read_modules(fields: Fields, name: str) -> Model:
    """Return the model that `modules:` (and `edges:`) of a model file describe.

    Raises: SpecError for a size that is missing, wrong or does not divide, a name twice, an edge to nowhere.
    """
    style = fields.choice("style", STYLES, default="gpt")
    rows = fields.rows("modules")
    if not rows:
        raise fields.error("a model has at least one module", "modules")
    modules: dict[str, Module] = {}
    max_seq_len: int | None = None
    for row in rows:
        module_name = row.text("name", default="language")
        if module_name in modules:
            raise row.error("this module is there twice", "name" if row.has("name") else None)
        entry = _entry(row, style)
        modules[module_name] = _decoder(entry, module_name) if entry.body.vocab else _encoder(entry, module_name)
        max_seq_len = entry.body.positions or max_seq_len
    edges = _edges(fields, tuple(modules))
    return Model(name=name, modules=tuple(modules.values()), edges=edges, family=style, max_seq_len=max_seq_len)


def _entry(row: Fields, style: str) -> _Entry:
    style = row.choice("style", STYLES, default=style)
    hidden = row.integer("hidden", minimum=1, maximum=MAX_SIZE)
    heads = row.integer("heads", minimum=1, maximum=MAX_LAYERS)
    if hidden % heads:
        raise row.error(f"{hidden} is not a multiple of heads {heads}", "hidden")
    kv_heads = row.integer("kv_heads", default=heads, minimum=1, maximum=MAX_LAYERS)
    if heads % kv_heads:
        raise row.error(f"heads {heads} is not a multiple of {kv_heads}", "kv_heads")
    vocab = row.integer("vocab", default=0, minimum=1, maximum=MAX_SIZE)
    ffn = (
        row.integer("ffn", minimum=1, maximum=MAX_SIZE)
        if style == "llama"
        else row.integer("ffn", default=4 * hidden, minimum=1, maximum=MAX_SIZE)
    )
    body = Body(
        vocab=vocab,
        hidden=hidden,
        ffn=ffn,
        layers=row.integer("layers", minimum=1, maximum=MAX_LAYERS),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        positions=row.integer("seq", default=None, minimum=1, maximum=MAX_SIZE) if vocab else None,
        tied=row.flag("tied", default=style == "gpt") if vocab else False,
    )
    tokens = None if vocab else row.integer("tokens", minimum=1, maximum=MAX_SIZE)
    entry = _Entry(body=body, style=style, dropout=row.flag("dropout", default=False), tokens=tokens)
    row.finish()
    return entry


def _decoder(entry: _Entry, name: str) -> Module:
    body = entry.body
    if entry.style == "llama":
        return language_module(dense(body, Traits(dropout=entry.dropout), (None,) * body.layers), name)
    positions: tuple[Operator, ...] = ()
    if body.positions is not None:
        positions = (position_table(body.positions, body.hidden),)
    return language_module(plain(body, PlainTraits(dropout=entry.dropout), embedding=positions), name)


def _encoder(entry: _Entry, name: str) -> Module:
    blocks = _decoder(replace(entry, body=replace(entry.body, vocab=1)), name).layers[1]
    return Module(name=name, layers=(_as_encoder(blocks, entry.tokens),) * entry.body.layers)


def _as_encoder(block: Layer, tokens: int | None) -> Layer:
    operators = tuple(replace(part, causal=False) if isinstance(part, Attention) else part for part in block.operators)
    return replace(block, kind="encoder", name="encoder", operators=operators, tokens_per_sample=tokens)


def _edges(fields: Fields, names: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Return the stated edges, or one from each module to the next."""
    if not fields.has("edges"):
        return tuple(itertools.pairwise(names))
    edges = []
    for row in fields.rows("edges"):
        sender, receiver = row.text("from", choices=names), row.text("to", choices=names)
        if names.index(sender) >= names.index(receiver):
            raise row.error("modules stand in the order data flows: an edge leads to a later one", "to")
        edges.append((sender, receiver))
        row.finish()
    return tuple(edges)
