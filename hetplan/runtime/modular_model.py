"""A small vision-language model in plain torch: vision tower, projector, decoder, of the sizes a model's modules have.

Blocks are pre-norm transformers (layer norm, softmax attention, an MLP of the module's width with GELU); the tower
attends within an image, the decoder causally within a sample. `merge` neighbouring tokens of the tower are averaged
into one before the projector. Samples stand one behind the other in one tensor, with the lengths of their parts beside
it, so nothing is padded. A parameter's first value depends on its name and the seed alone, so any division of the model
over processes starts from the same values.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from hetplan.errors import UsageError
from hetplan.specs.model import Attention, Linear, Loss, Model, Module

PATCH_WIDTH = 32
"""Numbers a patch has; content is made up, so only the amount of work matters."""
START_STD = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What a module is built from."""

    hidden: int
    ffn: int
    heads: int
    layers: int
    vocab: int = 0
    trains: bool = True


def sizes_of(module: Module) -> Sizes:
    """Return the sizes of an encoder or language module.

    Raises:
        UsageError: its blocks are not plain transformers.
    """
    blocks = [layer for layer in module.layers if layer.kind in ("encoder", "decoder")]
    attentions = [one for layer in blocks[:1] for one in layer.operators if isinstance(one, Attention)]
    linears = [one for layer in blocks[:1] for one in layer.operators if isinstance(one, Linear)]
    if not blocks or len(attentions) != 1 or len({layer.width for layer in blocks}) != 1:
        raise UsageError(f"module {module.name!r} is no plain transformer: `hetplan run` cannot build it")
    vocab = [one.vocab for layer in module.layers for one in layer.operators if isinstance(one, Loss)]
    ffn = max(one.outputs for one in linears)
    return Sizes(
        hidden=blocks[0].width,
        ffn=ffn,
        heads=attentions[0].num_heads,
        layers=len(blocks),
        vocab=vocab[0] if vocab else 0,
        trains=any(layer.gradients == "all" for layer in module.layers),
    )


class Block(nn.Module):
    """One transformer block over samples that stand one behind the other."""

    def __init__(self, sizes: Sizes, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = sizes.heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(sizes.hidden), nn.LayerNorm(sizes.hidden)
        self.qkv = nn.Linear(sizes.hidden, 3 * sizes.hidden)
        self.out = nn.Linear(sizes.hidden, sizes.hidden)
        self.up, self.down = nn.Linear(sizes.hidden, sizes.ffn), nn.Linear(sizes.ffn, sizes.hidden)

    def forward(self, rows: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Return rows of the same shape, [sum(lengths), hidden]."""
        mixed = [self._attend(part) for part in self.qkv(self.norm1(rows)).split(list(lengths))]
        rows = rows + self.out(torch.cat(mixed))
        changed: torch.Tensor = rows + self.down(functional.gelu(self.up(self.norm2(rows))))
        return changed

    def _attend(self, part: torch.Tensor) -> torch.Tensor:
        length = part.shape[0]
        q, k, v = part.view(length, 3, self.heads, -1).permute(1, 2, 0, 3)
        mixed = functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=self.causal)
        return mixed[0].transpose(0, 1).reshape(length, -1)


class Tower(nn.Module):
    """Vision tower and projector: patches to rows of the decoder's width."""

    def __init__(self, sizes: Sizes, width: int, merge: int) -> None:
        super().__init__()
        self.merge = merge
        self.patches = nn.Linear(PATCH_WIDTH, sizes.hidden)
        self.blocks = nn.ModuleList(Block(sizes, causal=False) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.hidden)
        self.project_up, self.project_down = nn.Linear(sizes.hidden, width), nn.Linear(width, width)

    def forward(self, patches: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Return rows for patches [sum(lengths), PATCH_WIDTH] of images of `lengths` patches."""
        rows = self.patches(patches)
        for block in self.blocks:
            rows = block(rows, lengths)
        rows = self.norm(rows).view(-1, self.merge, rows.shape[1]).mean(dim=1)
        projected: torch.Tensor = self.project_down(functional.gelu(self.project_up(rows)))
        return projected


class Decoder(nn.Module):
    """The blocks `first` to `end` of a decoder; the first stage has the table, the last one norm, head and loss."""

    def __init__(self, sizes: Sizes, first: int, end: int) -> None:
        super().__init__()
        self.sizes = sizes
        self.first, self.end = first, end
        self.words = nn.Embedding(sizes.vocab, sizes.hidden) if first == 0 else None
        self.blocks = nn.ModuleDict({str(i): Block(sizes, causal=True) for i in range(first, end)})
        is_last = end == sizes.layers
        self.norm = nn.LayerNorm(sizes.hidden) if is_last else None
        self.head = nn.Linear(sizes.hidden, sizes.vocab, bias=False) if is_last else None

    def embed(self, images: Sequence[torch.Tensor], texts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the rows of samples, each its image rows and then its words."""
        if self.words is None:
            raise UsageError("only the first stage has the table of words")
        return torch.cat([torch.cat([image, self.words(text)]) for image, text in zip(images, texts, strict=True)])

    def forward(self, rows: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Return the rows behind this stage's blocks."""
        for block in self.blocks.values():
            rows = block(rows, lengths)
        return rows

    def loss_sum(self, rows: torch.Tensor, lengths: Sequence[int], texts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the summed cross-entropy of the words that follow another row of their sample."""
        if self.norm is None or self.head is None:
            raise UsageError("only the last stage has a head")
        kept, labels = [], []
        for part, length, text in zip(rows.split(list(lengths)), lengths, texts, strict=True):
            known = min(len(text), length - 1)
            kept.append(part[length - 1 - known : length - 1])
            labels.append(text[len(text) - known :])
        logits = self.head(self.norm(torch.cat(kept)))
        return functional.cross_entropy(logits, torch.cat(labels), reduction="sum")


def num_labels(lengths: Sequence[int], texts: Sequence[int]) -> int:
    """Return how many words of samples are predicted: all but one that nothing stands before."""
    return sum(min(text, length - 1) for length, text in zip(lengths, texts, strict=True))


def start(module: nn.Module, prefix: str, seed: int) -> nn.Module:
    """Give parameters the values their names and the seed lead to (biases 0, norms 1); return the module."""
    for name, parameter in module.named_parameters():
        source = torch.Generator().manual_seed(zlib.crc32(f"{seed} {prefix}.{name}".encode()))
        with torch.no_grad():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=source) * START_STD)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    return module


def modules_of(model: Model) -> tuple[Module, Module]:
    """Return the encoder and the language module.

    Raises:
        UsageError: the model is not one encoder before one language model.
    """
    towers = [module for module in model.modules if any(layer.kind == "encoder" for layer in module.layers)]
    decoders = [module for module in model.modules if any(layer.kind == "decoder" for layer in module.layers)]
    if len(towers) != 1 or len(decoders) != 1:
        raise UsageError("`hetplan run` trains one encoder before one language model on grids of their own")
    return towers[0], decoders[0]


def merge_of(model: Model) -> int:
    """Return how many of the tower's tokens become one at the decoder."""
    tower, _ = modules_of(model)
    ends = [module.layers[-1] for module in model.modules if all(layer.kind == "projector" for layer in module.layers)]
    own = tower.layers[-1].tokens_per_sample
    out = ends[0].tokens_per_sample if ends else own
    return max(1, round(own / out)) if own and out else 1


def gradients_of(modules: Iterator[tuple[str, nn.Module]]) -> dict[str, torch.Tensor]:
    """Return the gradients of modules by full name."""
    return {
        f"{prefix}.{name}": parameter.grad.detach().clone()
        for prefix, module in modules
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
