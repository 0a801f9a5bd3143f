"""Models given by their layers' sizes alone: `layers:` of a model file, for chains whose seconds come from a table.

```yaml
layers:
  - {kind: embedding, params: 53608448, width: 1024}
  - {kind: decoder, repeat: 24, params: 12596224, width: 1024, tp: 8}
  - {kind: head, params: 51513344, width: 1024}
```
`params` counts a whole layer, before any split; `width` is the features a token carries out of it; `tp` the degrees by
which the layer may be cut, all divisors of it. Such a layer states no work: it is priced from measured layers.
"""

from __future__ import annotations

from hetplan.specs.families.config import MAX_LAYERS, MAX_SIZE
from hetplan.specs.fields import Fields
from hetplan.specs.model import Layer, LayerKind, Model, Module, Parameters

KINDS: tuple[LayerKind, ...] = ("embedding", "decoder", "encoder", "projector", "mtp", "head")
STATED = "stated size"
"""Name of the operator that stands for a layer of which only the size is known."""


def read_layers(fields: Fields, name: str) -> Model:
    """Return the model that `layers:` of a model file describe.

    Raises: SpecError for a size that is missing or senseless.
    """
    layers: list[Layer] = []
    for row in fields.rows("layers"):
        kind = row.choice("kind", KINDS)
        params = row.integer("params", minimum=0, maximum=10**15)
        layer = Layer(
            kind=kind,
            name=kind,
            width=row.integer("width", minimum=1, maximum=MAX_SIZE),
            operators=(
                Parameters(name=STATED, params=params, cut_by=row.integer("tp", default=1, minimum=1, maximum=65_536)),
            ),
        )
        layers += [layer] * row.integer("repeat", default=1, minimum=1, maximum=MAX_LAYERS)
        row.finish()
    if not layers:
        raise fields.error("a model has at least one layer", "layers")
    return Model(name=name, modules=(Module(name="language", layers=tuple(layers)),), family="stated")
