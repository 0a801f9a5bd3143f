"""The executor's step beside that of torch.distributed.pipelining's own 1F1B: same layout, same layers, same processes.

Two ranks, a pipeline of two stages. Both sides run forward and backward passes of all microbatches, clip by the global
norm and update by fused AdamW; steps of one and the other take turns, so whatever else the machine does meets both. The
ratio of a pair of neighbouring steps is hardly touched by it; the median over pairs is the result, with an interval
from resampling the pairs.

    python scripts/bench/executor.py --pairs 60 --out scripts/bench/results/executor-DATE.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

from hetplan.plan.records import Layout, Replica, Stage
from hetplan.runtime.attention import Tokens, positions_of
from hetplan.runtime.buckets import AdamSettings, Kinds
from hetplan.runtime.executor import Executor, Settings, required_groups
from hetplan.runtime.groups import Groups
from hetplan.runtime.model import Head, build_layer, start_values
from hetplan.runtime.parallel import Mesh
from hetplan.runtime.ranks import Task, plain_seats
from hetplan.specs.importers.hugging_face import model_from_config

CPU = torch.device("cpu")
SEQ_LEN, MICROBATCH, NUM_MICROBATCHES = 128, 2, 8
MODELS = {
    "llama, 8 layers of 256": {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    },
    "gpt, 8 layers of 384": {
        "model_type": "gpt2",
        "n_embd": 384,
        "n_head": 6,
        "n_layer": 8,
        "n_positions": SEQ_LEN,
        "vocab_size": 512,
        "tie_word_embeddings": False,
    },
}
CUT = ((0, 5), (5, 10))
LAYOUT = Layout(
    replicas=(
        Replica(
            stages=tuple(Stage(group="a", first_layer=first, end_layer=end) for first, end in CUT),
            microbatch=MICROBATCH,
            num_microbatches=NUM_MICROBATCHES,
        ),
    )
)
Step = Callable[[torch.Tensor], tuple[float, float]]
"""From the samples of a step to loss and gradient norm."""


class _Logits(nn.Module):
    """The head without its loss, which torch's schedule computes itself."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.norm, self.logits = head.norm, head.logits

    def forward(self, rows: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        return self.logits.with_bias(self.norm(rows))


class _Stage(nn.Module):
    """Layers as torch's pipelining takes them: one tensor in, one out."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.first = layers[0].__class__.__name__ == "Embedding"

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        count = given.shape[0]
        tokens = Tokens(
            num_samples=count,
            positions=positions_of(SEQ_LEN, 1, 0, CPU),
            ids=given.reshape(-1) if self.first else None,
        )
        rows = None if self.first else given.reshape(count * SEQ_LEN, -1)
        for layer in self.layers:
            rows = layer(rows, tokens)
        return rows.view(count, SEQ_LEN, -1)


def _ours(model: Any, rank: int, groups: Groups) -> Step:
    task = Task(layout=LAYOUT, seats=plain_seats(LAYOUT), seq_len=SEQ_LEN)
    groups.make(required_groups(model, task))
    kinds = Kinds(weights=torch.float32, gradients=torch.float32)
    executor = Executor(model, task, Settings(kinds=kinds, device=CPU), groups)

    def step(samples: torch.Tensor) -> tuple[float, float]:
        result = executor.step(lambda first, count: samples[first : first + count], 3e-4)
        return result.loss, result.grad_norm

    return step


def _torchs(model: Any, rank: int) -> Step:
    shared: dict[str, nn.Parameter] = {}
    layers: list[nn.Module] = [
        build_layer(model, index, Mesh(), dtype=torch.float32, device=CPU, shared=shared) for index in range(*CUT[rank])
    ]
    start_values(shared.values(), 0, 8)
    if isinstance(layers[-1], Head):
        layers[-1] = _Logits(layers[-1])
    scale = 1.0 / (LAYOUT.num_samples * SEQ_LEN)

    def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        flat = logits.reshape(-1, logits.shape[-1])
        return functional.cross_entropy(flat.float(), labels.reshape(-1), reduction="sum") * scale

    stage = PipelineStage(_Stage(layers), rank, 2, CPU)
    schedule = Schedule1F1B(stage, NUM_MICROBATCHES, loss_of, scale_grads=False)
    settings = AdamSettings()
    decay = [p for p in shared.values() if p.held.decays]
    others = [p for p in shared.values() if not p.held.decays]
    adam = torch.optim.AdamW(
        [{"params": decay, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=3e-4,
        betas=settings.betas,
        eps=settings.epsilon,
        fused=True,
    )

    def step(samples: torch.Tensor) -> tuple[float, float]:
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(samples[:, :-1].contiguous())
        else:
            schedule.step(target=samples[:, 1:].contiguous(), losses=losses)
        gradients = [p.grad for p in shared.values()]
        both = torch.zeros(2, dtype=torch.float64)
        both[0] = torch.stack(torch._foreach_norm(gradients)).square().sum()
        both[1] = sum(float(loss.detach()) for loss in losses)
        dist.all_reduce(both)
        norm = float(both[0]) ** 0.5
        torch._foreach_mul_(gradients, min(1.0, 1.0 / (norm + 1e-6)))
        adam.step()
        adam.zero_grad(set_to_none=True)
        return float(both[1]), norm

    return step


def _rank_main(rank: int, store: str, config: dict[str, Any], pairs: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    model = model_from_config(config, "bench")
    sides = {"hetplan": _ours(model, rank, Groups(rank, 300.0)), "torch": _torchs(model, rank)}
    generator = torch.Generator().manual_seed(0)
    rows: list[dict[str, tuple[float, float]]] = []
    agreed = 0.0
    for number in range(pairs + 3):
        samples = torch.randint(0, config["vocab_size"], (LAYOUT.num_samples, SEQ_LEN + 1), generator=generator)
        order = list(sides) if number % 2 else list(reversed(sides))
        row, results = {}, {}
        for name in order:
            dist.barrier()
            cpu_s, wall_s = time.process_time(), time.perf_counter()
            results[name] = sides[name](samples)
            dist.barrier()
            row[name] = (time.perf_counter() - wall_s, time.process_time() - cpu_s)
        if number >= 3:
            rows.append(row)
        ours, theirs = results["hetplan"], results["torch"]
        agreed = max(agreed, abs(ours[0] - theirs[0]) / theirs[0], abs(ours[1] - theirs[1]) / theirs[1])
    pipe.send((rows, agreed))
    pipe.close()
    dist.barrier()
    os._exit(0)


def _measure(config: dict[str, Any], pairs: int) -> list[tuple[list[dict[str, tuple[float, float]]], float]]:
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(2):
            mine, theirs = context.Pipe(duplex=False)
            arguments = (rank, str(Path(folder) / "store"), config, pairs, theirs)
            processes.append(context.Process(target=_rank_main, args=arguments, daemon=True))
            processes[-1].start()
            pipes.append(mine)
        found = [pipe.recv() for pipe in pipes]
        for process in processes:
            process.join()
    return found


def _interval(ratios: list[float]) -> tuple[float, float]:
    """The middle 95 % of medians of resampled pairs."""
    draw = random.Random(0)
    medians = sorted(median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return medians[50], medians[1949]


def _result(config: dict[str, Any], pairs: int) -> dict[str, Any]:
    (rows, agreed), (others, _) = _measure(config, pairs)
    walls = {name: [row[name][0] for row in rows] for name in ("hetplan", "torch")}
    cpus = {name: [a[name][1] + b[name][1] for a, b in zip(rows, others, strict=True)] for name in walls}
    ratios = [ours / theirs for ours, theirs in zip(walls["hetplan"], walls["torch"], strict=True)]
    low, high = _interval(ratios)
    return {
        "step_s": {name: round(median(values), 5) for name, values in walls.items()},
        "cpu_s_both_ranks": {name: round(median(values), 5) for name, values in cpus.items()},
        "step_ratio": round(median(ratios), 4),
        "step_ratio_95": [round(low, 4), round(high, 4)],
        "cpu_ratio": round(median(a / b for a, b in zip(cpus["hetplan"], cpus["torch"], strict=True)), 4),
        "largest_difference_of_loss_and_norm": agreed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--out", type=Path, help="write the result there")
    given = parser.parse_args()
    for module in ("torch._dynamo", "torch.fx.experimental.symbolic_shapes"):
        import_module(module)
    result = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "machine": f"{os.cpu_count()} CPUs, {platform.machine()}, load {os.getloadavg()[0]:.1f} at the start",
        "layout": f"stages {CUT}, {NUM_MICROBATCHES} microbatches of {MICROBATCH} x {SEQ_LEN} tokens, fp32, 1f1b",
        "pairs": given.pairs,
        "models": {name: _result(config, given.pairs) for name, config in MODELS.items()},
    }
    print(json.dumps(result, indent=1))
    if given.out:
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
