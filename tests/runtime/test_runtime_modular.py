"""A small vision-language model under plans whose modules have grids of their own trains as one process does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch", reason="the executor needs torch; pip install 'hetplan[torch]'")

import torch
from modular_pool import loads_of, run_all, single, small_batch, small_model, two

from hetplan.errors import UsageError
from hetplan.runtime.modular import require_runnable
from hetplan.runtime.modular_batch import divide

PLANS = {
    "apart 1 + 1": (two((1, 1), (0, 1, 1), 4, 2), False),
    "apart 1 + dp2": (two((2, 1), (0, 1, 2), 2, 4), False),
    "apart dp2 + dp2": (two((2, 2), (0, 1, 2), 4, 2), False),
    "apart dp2 + pp2": (two((2, 2), (0, 2, 1), 4, 2), False),
    "apart 1 + pp3, balanced": (two((3, 1), (0, 3, 1), 8, 1), True),
    "together dp2 + dp2": (two((0, 2), (0, 1, 2), 2, 4), False),
    "together dp4 + pp2 dp2": (two((0, 4), (0, 2, 2), 2, 4), False),
    "together dp4 + dp4, balanced": (two((0, 4), (0, 1, 4), 2, 4), True),
    "frozen tower, apart dp2 + pp2": (two((2, 2), (0, 2, 1), 4, 2), False),
}


def test_gradients_of_every_plan_are_those_of_one_process(tmp_path_factory: pytest.TempPathFactory) -> None:
    batch = small_batch()
    models = [small_model("train: {vision: frozen}\n" if "frozen" in name else "") for name in PLANS]
    jobs = [(model, layout, batch, balanced) for model, (layout, balanced) in zip(models, PLANS.values(), strict=True)]
    results = run_all(tmp_path_factory.mktemp("modular"), jobs)
    for name, model, ranks in zip(PLANS, models, results, strict=True):
        loss, gradients = single(model, batch)
        assert [found for found, _ in ranks] == pytest.approx([loss] * len(ranks), rel=1e-5), name
        seen: set[str] = set()
        for _, own in ranks:
            for key, value in own.items():
                wanted = gradients[key]
                error = float((value - wanted).norm() / wanted.norm().clamp_min(1e-12))
                assert error < 1e-4, (name, key)
                seen.add(key)
        assert seen == set(gradients), name
        assert all(float(value.norm()) > 0 for value in gradients.values())


def test_a_wrong_division_would_be_seen() -> None:
    model, batch = small_model(), small_batch()
    _, whole = single(model, batch)
    _, part = single(model, batch[:-1])
    assert any(float((part[key] - whole[key]).norm() / whole[key].norm()) > 1e-2 for key in whole)


@pytest.mark.parametrize("balanced", [False, True])
def test_every_sample_is_at_one_shard_of_each_unit(balanced: bool) -> None:
    batch = small_batch(24, seed=2)
    layout = two((2, 2), (0, 1, 2), 3, 8)
    division = divide(batch, layout, loads_of(batch) if balanced else None)
    for unit in (division.encoder, division.language):
        assert sorted(s for shards in unit for shard in shards for s in shard) == list(range(24))
    for j in range(3):
        both = [sorted(s for shard in unit[j] for s in shard) for unit in (division.encoder, division.language)]
        assert both[0] == both[1]
    if balanced:
        loads = loads_of(batch)[:, 1]
        shares = [loads[list(shard)].sum() for shards in division.language for shard in shards]
        assert max(shares) <= 1.05 * np.mean(shares)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"tp": 2}, "no tp or cp for modules yet"), ({"pp": 2}, "an encoder on one stage")],
)
def test_what_it_does_not_run_is_refused(changes: dict[str, int], words: str) -> None:
    layout = two((2, 1), (0, 1, 2), 2, 4)
    first, second = layout.placements
    with pytest.raises(UsageError, match=words):
        require_runnable(replace(layout, placements=(replace(first, **changes), second)))
    assert torch.is_grad_enabled()
