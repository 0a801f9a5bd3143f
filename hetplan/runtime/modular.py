"""One rank of a job whose encoder and language model have grids of their own, on torch.distributed.

A rank has a seat in the encoder's grid, in the language model's, or in both (colocated). A step is

1. the encoder's ranks run forward over their samples of every microbatch and send each language shard the rows of its
   samples;
2. the language model's ranks run 1F1B over the microbatches, stage by stage; the first stage sends the gradient of the
   rows back;
3. the encoder's ranks run backward; gradients are summed over each unit's data-parallel ranks.

Losses are divided by the number of labels of the whole batch, so gradients are those of the global mean whoever had
which samples. All ranks compute the same division of a batch (see `modular_batch`) from the same seed. Sends never
block, receives do; messages between two ranks are told apart by their tag (kind, microbatch).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from hetplan.errors import UsageError
from hetplan.plan.modules import ModuleLayout, Placement
from hetplan.plan.program import Action, program
from hetplan.runtime.modular_batch import Division, Sample, patches_of, text_of
from hetplan.runtime.modular_model import (
    Decoder,
    Tower,
    gradients_of,
    merge_of,
    modules_of,
    num_labels,
    sizes_of,
    start,
)
from hetplan.specs.model import Model

ROWS, ROW_GRADIENTS, FORWARD, BACKWARD = range(4)
MOST_MICROBATCHES = 100_000


def require_runnable(layout: ModuleLayout) -> None:
    """Refuse what this executor does not run.

    Raises:
        UsageError: more than an encoder and a language model, tensor or context parallelism, or an encoder of stages.
    """
    if len(layout.placements) != 2:
        raise UsageError("`hetplan run` trains one encoder unit and one language model; this plan has other units")
    encoder, language = layout.placements
    for placement in (encoder, language):
        if placement.tp > 1 or placement.cp > 1:
            raise UsageError(f"{placement.name}: `hetplan run` has no tp or cp for modules yet; search with --tp 1")
    if encoder.pp > 1:
        raise UsageError(f"{encoder.name}: `hetplan run` runs an encoder on one stage; search with other --pp")
    if layout.num_microbatches > MOST_MICROBATCHES:
        raise UsageError(f"{layout.num_microbatches} microbatches a step are more than {MOST_MICROBATCHES}")


@dataclass(slots=True, kw_only=True)  # mutable: filled while a step runs
class Spent:
    """Processor seconds of a rank, by microbatch."""

    encoder_s: dict[int, float] = field(default_factory=dict)
    language_s: dict[int, float] = field(default_factory=dict)

    def add(self, book: dict[int, float], microbatch: int, start_s: float) -> None:
        """Add the processor time since `start_s`."""
        book[microbatch] = book.get(microbatch, 0.0) + time.process_time() - start_s


class ModularRank:
    """One process of the job."""

    def __init__(self, model: Model, layout: ModuleLayout, rank: int, seed: int = 0) -> None:
        """Build what this rank holds; every rank calls this at the same time.

        Raises:
            UsageError: the layout or the model cannot be run.
        """
        require_runnable(layout)
        self._layout, self._rank = layout, rank
        encoder, language = layout.placements
        tower, words = (sizes_of(module) for module in modules_of(model))
        self._seed, self._vocab, self._merge = seed, words.vocab, merge_of(model)
        self._width = words.hidden
        self._encoder_dp = rank - encoder.first_rank if encoder.first_rank <= rank < encoder.end_rank else None
        place = rank - language.first_rank if language.first_rank <= rank < language.end_rank else None
        self._stage: int | None = None if place is None else place // language.dp
        self._language_dp: int | None = None if place is None else place % language.dp
        self.tower: Tower | None = None
        self.decoder: Decoder | None = None
        if self._encoder_dp is not None:
            self.tower = Tower(tower, words.hidden, self._merge)
            start(self.tower, "tower", seed)
            for name, parameter in self.tower.named_parameters():
                parameter.requires_grad_(tower.trains or name.startswith("project"))
        if self._stage is not None:
            ends = [round(i * words.layers / language.pp) for i in range(language.pp + 1)]
            self.decoder = Decoder(words, ends[self._stage], ends[self._stage + 1])
            start(self.decoder, "decoder", seed)
        self._groups = self._make_groups(encoder, language)
        self._order = program("1f1b", language.pp, layout.num_microbatches)
        self._pending: list[dist.Work] = []
        self._kept: list[torch.Tensor] = []
        self.spent = Spent()

    def _make_groups(self, encoder: Placement, language: Placement) -> list[tuple[nn.Module, dist.ProcessGroup | None]]:
        """Return this rank's modules with the group their gradients are summed over (None: alone)."""
        found: list[tuple[nn.Module, dist.ProcessGroup | None]] = []
        runs = [(self.tower, list(range(encoder.first_rank, encoder.end_rank)))]
        for stage in range(language.pp):
            first = language.first_rank + stage * language.dp
            runs.append((self.decoder if stage == self._stage else None, list(range(first, first + language.dp))))
        for module, ranks in runs:
            group = dist.new_group(ranks) if len(ranks) > 1 else None
            if module is not None and self._rank in ranks:
                found.append((module, group))
        return found

    @property
    def encoder_shard(self) -> int | None:
        """Which shard of the encoder's samples this rank has."""
        return self._encoder_dp

    @property
    def language_shard(self) -> int | None:
        """Which shard of the language model's samples this rank has; None where stages share it."""
        return self._language_dp if self._layout.placements[1].pp == 1 else None

    def modules(self) -> list[tuple[str, nn.Module]]:
        """Return what this rank holds, with the prefix of its names."""
        held = [("tower", self.tower), ("decoder", self.decoder)]
        return [(prefix, module) for prefix, module in held if module is not None]

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return gradients by name, summed over the ranks that hold the same."""
        return gradients_of(iter(self.modules()))

    def step(self, batch: Sequence[Sample], division: Division) -> float:
        """Run one batch forward and backward; return this rank's part of the mean loss (last stages have one)."""
        for _, module in self.modules():
            module.zero_grad(set_to_none=True)
        labels = num_labels([sample.length for sample in batch], [sample.text for sample in batch])
        work = _Step(self, batch, division, 1.0 / labels)
        work.encode()
        loss = work.speak()
        work.learn()
        for pending in self._pending:
            pending.wait()
        self._pending, self._kept = [], []
        self._sum_gradients()
        return loss

    def _sum_gradients(self) -> None:
        for module, group in self._groups:
            if group is None:
                continue
            own = [parameter for parameter in module.parameters() if parameter.requires_grad]
            for parameter in own:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            flat = torch.cat([parameter.grad.flatten() for parameter in own if parameter.grad is not None])
            dist.all_reduce(flat, group=group)
            at = 0
            for parameter in own:
                parameter.grad = flat[at : at + parameter.numel()].view_as(parameter).clone()
                at += parameter.numel()

    def send(self, rows: torch.Tensor, to: int, kind: int, microbatch: int) -> None:
        """Send rows without waiting; they are kept until they are through."""
        rows = rows.detach().contiguous()
        work = dist.isend(rows, to, tag=kind * MOST_MICROBATCHES + microbatch)
        self._kept.append(rows)
        if work is not None:
            self._pending.append(work)

    def receive(self, length: int, of: int, kind: int, microbatch: int) -> torch.Tensor:
        """Wait for rows."""
        rows = torch.empty(length, self._width)
        dist.recv(rows, of, tag=kind * MOST_MICROBATCHES + microbatch)
        return rows


class _Step:
    """The state of one step of one rank."""

    def __init__(self, rank: ModularRank, batch: Sequence[Sample], division: Division, scale: float) -> None:
        self._own = rank
        self._batch, self._division, self._scale = batch, division, scale
        encoder, language = rank._layout.placements
        self._encoder, self._language = encoder, language
        self._outputs: dict[int, torch.Tensor] = {}
        self._here: dict[tuple[int, int, int], torch.Tensor] = {}
        self._inputs: dict[int, torch.Tensor] = {}
        self._results: dict[int, torch.Tensor] = {}
        self._leaves: dict[int, dict[int, torch.Tensor]] = {}

    def encode(self) -> None:
        """Run the tower over this rank's samples of every microbatch, and deal the rows out."""
        if self._own.tower is None or self._own._encoder_dp is None:
            return
        for j in range(self._own._layout.num_microbatches):
            mine = [s for s in self._division.encoder[j][self._own._encoder_dp] if self._batch[s].images]
            if not mine:
                continue
            begin_s = time.process_time()
            sizes = [size * self._own._merge for s in mine for size in self._batch[s].images]
            patches = torch.cat([self._patches(self._batch[s]) for s in mine])
            self._outputs[j] = self._own.tower(patches, sizes)
            self._own.spent.add(self._own.spent.encoder_s, j, begin_s)
            rows = dict(zip(mine, self._outputs[j].split([sum(self._batch[s].images) for s in mine]), strict=True))
            for d, wanted in enumerate(self._shared(j)):
                if wanted:
                    self._hand_over(torch.cat([rows[s] for s in wanted]), d, j)

    def _shared(self, j: int, encoder_dp: int | None = None) -> list[list[int]]:
        """Return, by language shard, the samples of an encoder shard (this rank's) it has, images only."""
        e = self._own._encoder_dp if encoder_dp is None else encoder_dp
        held = set(self._division.encoder[j][e if e is not None else 0])
        return [[s for s in shard if s in held and self._batch[s].images] for shard in self._division.language[j]]

    def _hand_over(self, rows: torch.Tensor, shard: int, j: int) -> None:
        to = self._language.first_rank + shard
        if to == self._own._rank:
            self._here[ROWS, j, self._own._encoder_dp or 0] = rows.detach()
        else:
            self._own.send(rows, to, ROWS, j)

    def speak(self) -> float:
        """Run the language model's program; return the summed loss of this rank, scaled."""
        if self._own._stage is None:
            return 0.0
        loss = 0.0
        for action in self._own._order.ranks[self._own._stage]:
            if action.kind == "F":
                loss += self._forward(action)
            else:
                self._backward(action)
        return loss

    def _mine(self, j: int) -> list[int]:
        return list(self._division.language[j][self._own._language_dp or 0])

    def _peer(self, stage: int) -> int:
        return self._language.first_rank + stage * self._language.dp + (self._own._language_dp or 0)

    def _forward(self, action: Action) -> float:
        j, decoder, stage = action.microbatch, self._own.decoder, self._own._stage
        mine = self._mine(j)
        if decoder is None or stage is None or not mine:
            return 0.0
        lengths = [self._batch[s].length for s in mine]
        texts = [self._text(self._batch[s]) for s in mine]
        if stage == 0:
            images = self._images(j, mine)
            begin_s = time.process_time()
            rows = decoder.embed(images, texts)
        else:
            rows = self._own.receive(sum(lengths), self._peer(stage - 1), FORWARD, j).requires_grad_()
            begin_s = time.process_time()
            self._inputs[j] = rows
        out = decoder(rows, lengths)
        loss = 0.0
        if stage == self._language.pp - 1:
            out = decoder.loss_sum(out, lengths, texts) * self._scale
            loss = float(out.detach())
        self._results[j] = out
        self._own.spent.add(self._own.spent.language_s, j, begin_s)
        if stage < self._language.pp - 1:
            self._own.send(out, self._peer(stage + 1), FORWARD, j)
        return loss

    def _images(self, j: int, mine: list[int]) -> list[torch.Tensor]:
        """Return the image rows of this shard's samples, as leaves whose gradients go back."""
        rows: dict[int, torch.Tensor] = {}
        for e in range(self._encoder.dp):
            wanted = self._shared(j, e)[self._own._language_dp or 0]
            if not wanted:
                continue
            sizes = [sum(self._batch[s].images) for s in wanted]
            of = self._encoder.first_rank + e
            local = self._here.pop((ROWS, j, e), None)
            found = self._own.receive(sum(sizes), of, ROWS, j) if local is None else local
            for s, part in zip(wanted, found.split(sizes), strict=True):
                rows[s] = part.clone().requires_grad_()
        self._leaves[j] = rows
        empty = torch.zeros(0, self._own._width)
        return [rows.get(s, empty) for s in mine]

    def _backward(self, action: Action) -> None:
        j, stage = action.microbatch, self._own._stage
        mine = self._mine(j)
        if stage is None or not mine:
            return
        result = self._results.pop(j)
        if stage == self._language.pp - 1:
            begin_s = time.process_time()
            result.backward()  # type: ignore[no-untyped-call]
        else:
            gradient = self._own.receive(result.shape[0], self._peer(stage + 1), BACKWARD, j)
            begin_s = time.process_time()
            result.backward(gradient)  # type: ignore[no-untyped-call]
        self._own.spent.add(self._own.spent.language_s, j, begin_s)
        if stage > 0:
            own = self._inputs.pop(j)
            self._own.send(
                own.grad if own.grad is not None else torch.zeros_like(own), self._peer(stage - 1), BACKWARD, j
            )
            return
        for e in range(self._encoder.dp):
            wanted = self._shared(j, e)[self._own._language_dp or 0]
            if wanted:
                self._give_back(torch.cat([self._gradient(j, s) for s in wanted]), e, j)

    def _gradient(self, j: int, s: int) -> torch.Tensor:
        leaf = self._leaves[j][s]
        return leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)

    def _give_back(self, rows: torch.Tensor, e: int, j: int) -> None:
        to = self._encoder.first_rank + e
        if to == self._own._rank:
            self._here[ROW_GRADIENTS, j, self._own._language_dp or 0] = rows
        else:
            self._own.send(rows, to, ROW_GRADIENTS, j)

    def learn(self) -> None:
        """Run the tower backward with the gradients that came back."""
        for j, output in self._outputs.items():
            wanted = self._shared(j)
            places: dict[int, torch.Tensor] = {}
            for d, samples in enumerate(wanted):
                if not samples:
                    continue
                sizes = [sum(self._batch[s].images) for s in samples]
                local = self._here.pop((ROW_GRADIENTS, j, d), None)
                of = self._language.first_rank + d
                found = self._own.receive(sum(sizes), of, ROW_GRADIENTS, j) if local is None else local
                places |= dict(zip(samples, found.split(sizes), strict=True))
            mine = [s for s in self._division.encoder[j][self._own._encoder_dp or 0] if self._batch[s].images]
            begin_s = time.process_time()
            output.backward(torch.cat([places[s] for s in mine]))  # type: ignore[no-untyped-call]
            self._own.spent.add(self._own.spent.encoder_s, j, begin_s)

    def _patches(self, sample: Sample) -> torch.Tensor:
        return patches_of(sample, self._own._merge, self._own._seed)

    def _text(self, sample: Sample) -> torch.Tensor:
        return text_of(sample, self._own._vocab, self._own._seed)
