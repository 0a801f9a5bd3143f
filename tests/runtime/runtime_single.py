"""The same training in one process, by autograd and torch's own AdamW and clipping: what layouts are held to."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import torch
from runtime_cases import Case, first_value_seed, model_of, sample_rows
from runtime_pool import DTYPES, LEARNING_RATE, NUM_STEPS, Outcome

from hetplan.runtime.attention import Tokens, positions_of
from hetplan.runtime.model import build_layer, start_values
from hetplan.runtime.parallel import Mesh

CPU = torch.device("cpu")
NULL = 1e-6
"""A gradient below this share of the whole is zero but for rounding: softmax does not see a shift of all keys."""


@dataclass(kw_only=True)
class Single:
    """Gradients of the first step, and what follows."""

    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    parameters: list[dict[str, torch.Tensor]] = field(default_factory=list)
    """After each step."""
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


@lru_cache(maxsize=64)
def single(model_name: str, num_samples: int, seq_len: int, precision: str, clip_norm: float, case: Case) -> Single:
    """Train on whole batches."""
    model, dtype = model_of(model_name), DTYPES[precision]
    shared: dict[str, torch.nn.Parameter] = {}
    layers = [build_layer(model, i, Mesh(), dtype=dtype, device=CPU, shared=shared) for i in range(len(model.chain))]
    start_values(shared.values(), first_value_seed, sum(layer.kind == "decoder" for layer in model.chain))
    decay = [p for p in shared.values() if p.held.decays]
    others = [p for p in shared.values() if not p.held.decays]
    adam = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=LEARNING_RATE,
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    found = Single()
    for step in range(NUM_STEPS):
        rows = torch.from_numpy(sample_rows(case, step))
        tokens = Tokens(
            num_samples=num_samples,
            positions=positions_of(seq_len, 1, 0, CPU),
            ids=rows[:, :-1].reshape(-1),
            labels=rows[:, 1:].reshape(-1),
        )
        out = None
        for layer in layers:
            out = layer(out, tokens)
        loss = out / (num_samples * seq_len)
        loss.backward()
        if step == 0:
            found.gradients = {name: p.grad.clone() for name, p in shared.items()}
        norm = torch.nn.utils.clip_grad_norm_(list(shared.values()), clip_norm if clip_norm > 0 else float("inf"))
        adam.step()
        adam.zero_grad()
        found.losses.append(loss.item())
        found.norms.append(norm.item())
        found.parameters.append({name: p.detach().clone() for name, p in shared.items()})
    return found


def single_of(case: Case) -> Single:
    """The single process of a case."""
    key = Case(model=case.model, layout=case.layout, seq_len=case.seq_len)
    return single(case.model, case.layout.num_samples, case.seq_len, case.precision, case.clip_norm, key)


@dataclass(kw_only=True)
class Difference:
    """Largest differences of a layout from the single process, relative to each tensor's norm."""

    gradient: float
    parameter: float
    loss: float
    norm: float
    worst: str = ""


def difference(outcome: Outcome, one: Single) -> Difference:
    """Compare every rank's every piece; every element must be there."""
    gradient, worst = 0.0, ""
    total = float(torch.stack([whole.norm() for whole in one.gradients.values()]).norm())
    null = {name for name, whole in one.gradients.items() if float(whole.norm()) < NULL * total}
    assert all(name.endswith(".k.bias") for name in null), null
    seen = {name: torch.zeros_like(values, dtype=torch.bool) for name, values in one.gradients.items()}
    for name, box, (low, high), values in outcome.gradients:
        where = tuple(slice(*side) for side in box)
        whole = one.gradients[name]
        error = float((whole[where].reshape(-1)[low:high] - values).norm() / max(float(whole.norm()), NULL * total))
        mark = seen[name][where].reshape(-1)
        mark[low:high] = True
        seen[name][where] = mark.view(seen[name][where].shape)
        gradient, worst = max((gradient, worst), (error, name))
    assert all(bool(mark.all()) for mark in seen.values()), "a part of a gradient is nowhere"
    parameter = 0.0
    for name, box, values in outcome.parameters:
        if name in null:
            continue
        whole = one.parameters[outcome.num_steps - 1][name]
        where = tuple(slice(*side) for side in box)
        parameter = max(parameter, float((whole[where] - values).norm() / whole.norm()))
    loss = max(
        abs(a - b) / abs(b) for row in outcome.losses for a, b in zip(row, one.losses[: outcome.num_steps], strict=True)
    )
    norm = max(
        abs(a - b) / abs(b) for row in outcome.norms for a, b in zip(row, one.norms[: outcome.num_steps], strict=True)
    )
    return Difference(gradient=gradient, parameter=parameter, loss=loss, norm=norm, worst=worst)
