"""Names of the parts of a Llama-like model on each pipeline stage, as torchtitan takes them.

torchtitan cuts a model by fully qualified module names, one list a virtual stage in model order
(``module_names_per_model_part``): ``tok_embeddings``, ``layers.0`` .., ``norm``, ``output``. Where only the ends differ
it takes two numbers instead: how many layers fewer the first and the last stage hold than those between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from hetplan.errors import UsageError
from hetplan.plan.rules import listed
from hetplan.specs.model import Model

EMBEDDING_NAMES = ("tok_embeddings",)
HEAD_NAMES = ("norm", "output")


def module_names(model: Model, cut: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    """Return the module names of each virtual stage of a cut; together they name every part once.

    Raises:
        UsageError: the model has parts these names do not cover.
    """
    strange = {layer.kind for layer in model.chain} - {"embedding", "decoder", "head"}
    if strange:
        raise UsageError(f"{model.name} has {listed(sorted(strange))} layers, which have no module names here")
    return tuple(tuple(_names(model, first, end)) for first, end in pairwise(cut))


def _names(model: Model, first: int, end: int) -> Iterator[str]:
    number = sum(layer.kind == "decoder" for layer in model.chain[:first])
    for layer in model.chain[first:end]:
        if layer.kind == "embedding":
            yield from EMBEDDING_NAMES
        elif layer.kind == "head":
            yield from HEAD_NAMES
        else:
            yield f"layers.{number}"
            number += 1


def less_layers(decoders: Sequence[int]) -> tuple[int, int] | None:
    """Return how many layers fewer the first and last stage hold, or None where the stages between differ.

    torchtitan divides ``layers + first_less + last_less`` evenly, so both numbers are counted from the stages between.
    """
    if len(decoders) < 3 or len(set(decoders[1:-1])) != 1:
        return None
    return decoders[1] - decoders[0], decoders[1] - decoders[-1]
