"""Models given by their layers' sizes alone: `layers:` of a model file, for chains whose seconds come from a table.

```yaml
layers:
  - {kind: embedding, params: 53608448, width: 1024}
  - {kind: decoder, repeat: 24, params: 12596224, width: 1024, tp: 8}
  - {kind: head, params: 51513344, width: 1024}
```
`params` counts a whole layer, before any split; `width` is the features a token carries out of it; `tp` the degrees by
which the layer may be cut, all divisors of it. Such a layer states no work: it is priced from measured layers.

```yaml
volumes: {stages: 8, replicas: 8, gradient: 0.65 GB, activation: 471.25 MB}
```
states the traffic of a job and nothing else: gradients of a stage on one device, activations of a microbatch over a
boundary. `hetplan search` then lays its stages and replicas over the devices of a cluster.
"""

from __future__ import annotations

from hetplan.specs.families.config import MAX_LAYERS, MAX_SIZE
from hetplan.specs.fields import Fields
from hetplan.specs.model import Layer, LayerKind, Model, Module, Parameters, Volumes

KINDS: tuple[LayerKind, ...] = ("embedding", "decoder", "encoder", "projector", "mtp", "head")
STATED = "stated size"
"""Name of the operator that stands for a layer of which only the size is known."""


def read_volumes(fields: Fields, name: str) -> Model:
    """Return the job whose traffic `volumes:` of a model file state.

    Raises: SpecError for a volume that is missing or senseless.
    """
    inner = fields.fields("volumes")
    volumes = Volumes(
        stages=inner.integer("stages", minimum=1, maximum=MAX_LAYERS),
        replicas=inner.integer("replicas", minimum=1, maximum=MAX_SIZE),
        gradient_bytes=inner.quantity("gradient", "bytes"),
        activation_bytes=inner.quantity("activation", "bytes"),
    )
    inner.finish()
    layer = Layer(
        kind="decoder",
        name="stage",
        width=1,
        operators=(Parameters(name=STATED, params=round(volumes.gradient_bytes)),),
    )
    module = Module(name="language", layers=(layer,) * volumes.stages)
    return Model(name=name, modules=(module,), family="volumes", volumes=volumes)


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
