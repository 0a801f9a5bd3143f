"""The batch sampler trainers import, and the cost model that corrects itself."""

from __future__ import annotations

import numpy as np
import pytest

from hetplan.balance import BalancedBatchSampler, CostModel, Division, make_problem
from hetplan.errors import UsageError


def loads(samples: int = 96) -> np.ndarray:
    random = np.random.default_rng(0)
    return np.stack([random.lognormal(0, 1, samples), np.ones(samples)], axis=1)


def sampler(replica: int, **changes: object) -> BalancedBatchSampler:
    division = Division(global_batch=24, microbatches=(2, 3), speeds=(1.0, 1.5), **changes)  # type: ignore[arg-type]
    return BalancedBatchSampler(loads(), division, num_samples=96, replica=replica, seed=7)


def test_replicas_share_every_global_batch() -> None:
    first, second = list(sampler(0)), list(sampler(1))
    assert (len(first), len(second)) == (4 * 2, 4 * 3) == (len(sampler(0)), len(sampler(1)))
    for step in range(4):
        together = [i for part in first[2 * step : 2 * step + 2] + second[3 * step : 3 * step + 3] for i in part]
        assert len(set(together)) == len(together) == 24
    assert sorted(i for part in first + second for i in part) == list(range(96))


def test_epochs_differ_and_a_restart_goes_on_where_it_stopped() -> None:
    one = sampler(0)
    before = list(one)
    one.set_epoch(1)
    assert list(one) != before
    one.set_epoch(0, start_step=3)
    assert list(one) == before[6:]
    assert len(one) == 2
    assert one.state() == {"epoch": 0, "start_step": 3}


def test_microbatches_are_balanced() -> None:
    batch = np.arange(24)
    answer = sampler(0).answer(batch)
    table = loads()[batch]
    shares = make_problem(table, (2, 3), speeds=(1.0, 1.5)).loads_of(answer.bin_s)
    assert shares.max() <= 1.04 * answer.bound_s


def test_a_cap_is_kept() -> None:
    sizes = np.full(96, 10.0)
    parts = list(sampler(1, sizes=sizes, cap=60.0))
    assert max(len(part) for part in parts) <= 6


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(UsageError, match="replica 2 is not one of 2"):
        sampler(2)
    with pytest.raises(UsageError, match="a global batch of 24 needs as many samples"):
        BalancedBatchSampler(loads(), Division(global_batch=24, microbatches=(1,)), num_samples=10)


def test_torch_loads_with_it() -> None:
    torch = pytest.importorskip("torch")
    data = torch.arange(96)
    loader = torch.utils.data.DataLoader(data, batch_sampler=sampler(0))
    assert [batch.tolist() for batch in loader] == list(sampler(0))


def features(random: np.random.Generator) -> np.ndarray:
    tokens = random.lognormal(6.0, 0.8, 8)
    return np.array([8.0, tokens.sum(), (tokens**2).sum()])


def test_measured_steps_correct_the_model() -> None:
    random = np.random.default_rng(1)
    truth = np.array([[1e-3, 4e-6, 2e-9], [2e-3, 1e-5, 0.0]])
    model = CostModel(truth * np.array([[1.0, 2.0, 0.5], [1.0, 0.6, 1.0]]))
    for _ in range(200):
        sums = features(random)
        model.observe(sums, truth @ sums * random.normal(1.0, 0.02, 2))
    tests = np.array([features(random) for _ in range(50)])
    error = model.loads(tests) / (tests @ truth.T) - 1
    assert np.abs(error).mean() < 0.02
    assert np.abs(error).max() < 0.08


def test_a_stray_measurement_changes_nothing_and_a_lasting_one_is_believed() -> None:
    model = CostModel(np.array([[0.0, 1e-5, 0.0]]))
    sums = np.array([8.0, 4000.0, 4e6])
    for _ in range(20):
        model.observe(sums, np.array([0.04]))
    model.observe(sums, np.array([4.0]))
    assert model.loads(sums[None])[0, 0] == pytest.approx(0.04, rel=1e-6)
    for _ in range(60):
        model.observe(sums, np.array([0.4]))
    assert model.loads(sums[None])[0, 0] == pytest.approx(0.4, rel=0.05)


def test_a_module_without_a_measurement_keeps_its_cost() -> None:
    model = CostModel(np.array([[1e-3], [1e-3]]))
    model.observe(np.array([10.0]), np.array([0.02, np.nan]))
    assert model.loads(np.array([[10.0]]))[0, 1] == pytest.approx(0.01)
    assert model.loads(np.array([[10.0]]))[0, 0] > 0.012
