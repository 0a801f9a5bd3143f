"""Bugs of each kind an executor can have, planted inside the ranks: the comparison must see every one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from hetplan.runtime import executor, experts, model, pipeline
from hetplan.runtime.buckets import Bucket
from hetplan.runtime.executor import Executor
from hetplan.runtime.linear import Deferred
from hetplan.runtime.pieces import BucketPlan
from hetplan.runtime.pipeline import Pipeline
from hetplan.runtime.ranks import Task

Plant = Callable[[], AbstractContextManager[None]]
PLANTED: dict[str, Plant] = {}


def planted(function: Callable[[], AbstractContextManager[Any]]) -> Callable[[], AbstractContextManager[Any]]:
    """Register a bug under its function's name."""

    @contextmanager
    def plant() -> Iterator[None]:
        with function():
            yield

    PLANTED[function.__name__] = plant
    return function


@planted
def replicated_gradients_count_once_a_tp_rank() -> AbstractContextManager[Any]:
    true = model.model_parameters
    return patch.object(model, "model_parameters", lambda *a: tuple(replace(h, copies_of_gradient=1) for h in true(*a)))


@planted
def tied_tables_are_not_summed() -> AbstractContextManager[Any]:
    return _without_groups_of(".tokens.")


@planted
def one_layers_gradient_group_is_forgotten() -> AbstractContextManager[Any]:
    return _without_groups_of("layers.2.")


def _without_groups_of(word: str) -> AbstractContextManager[Any]:
    true = executor.bucket_plans

    def plans(*args: Any, **words: Any) -> tuple[BucketPlan, ...]:
        found: list[BucketPlan] = []
        for plan in true(*args, **words):
            chosen = tuple(piece for piece in plan.pieces if word in piece.name)
            others = tuple(piece for piece in plan.pieces if word not in piece.name)
            if others:
                found.append(replace(plan, pieces=others))
            if chosen:
                found += [replace(plan, ranks=(rank,), pieces=chosen) for rank in plan.ranks]
        return tuple(found)

    return patch.object(executor, "bucket_plans", plans)


@planted
def replicas_are_averaged_whatever_their_samples() -> AbstractContextManager[Any]:
    true = Executor.gradients_of

    def gradients_of(self: Executor, samples: Any) -> Any:
        answer = true(self, samples)
        own = self.task.replica(self.seat)
        factor = self.task.global_batch / (own.num_samples * len(self.task.layout.replicas))
        for gradient in self.gradients.values():
            gradient.mul_(factor)
        return answer

    return patch.object(Executor, "gradients_of", gradients_of)


@planted
def resharding_sends_the_first_rows_to_everyone() -> AbstractContextManager[Any]:
    true = executor.messages

    def messages(*args: Any) -> Any:
        return tuple(replace(m, sent=tuple((0, b - a) for a, b in m.sent)) for m in true(*args))

    return patch.object(executor, "messages", messages)


@planted
def recomputed_layers_pass_gradients_by() -> AbstractContextManager[Any]:
    def checkpoint(run: Any, rows: torch.Tensor, tokens: Any, **_: Any) -> torch.Tensor:
        return run(rows.detach(), tokens) + rows - rows.detach()

    return patch.object(model, "checkpoint", checkpoint)


@planted
def last_shard_of_the_optimizer_is_not_updated() -> AbstractContextManager[Any]:
    true = Bucket.start_gather

    def start_gather(self: Bucket) -> None:
        if self.part == self.parts - 1 and self.parts > 1:
            self.master.mul_(0.99)
        true(self)

    return patch.object(Bucket, "start_gather", start_gather)


@planted
def experts_get_rows_in_the_order_they_came() -> AbstractContextManager[Any]:
    return patch.object(experts, "_regrouped", lambda counts: torch.arange(sum(sum(row) for row in counts)))


@planted
def last_deferred_weight_gradient_is_lost() -> AbstractContextManager[Any]:
    true = Deferred.run

    def run(self: Deferred) -> None:
        if len(self._passes) == 1:
            self._passes.clear()
        else:
            true(self)

    return patch.object(Deferred, "run", run)


@planted
def each_rank_clips_by_its_own_norm() -> AbstractContextManager[Any]:
    true = Executor._sum
    return patch.object(Executor, "_sum", lambda self, square, loss: (square, true(self, square, loss)[1]))


@planted
def backward_takes_another_microbatchs_activations() -> AbstractContextManager[Any]:
    true = Pipeline._backward

    def backward(self: Pipeline, action: Any, gradient: Any) -> None:
        other = (action.stage, action.microbatch ^ 1)
        own = (action.stage, action.microbatch)
        if action.stage == 0 and other in self._held:
            self._held[own], self._held[other] = self._held[other], self._held[own]
        true(self, action, gradient)

    return patch.object(Pipeline, "_backward", backward)


@planted
def all_replicas_read_the_same_samples() -> AbstractContextManager[Any]:
    return patch.object(Task, "first_sample", lambda self, seat: 0)


@planted
def cp_ranks_read_neighbouring_halves() -> AbstractContextManager[Any]:
    def halves(seq_len: int, cp: int, cp_rank: int) -> Any:
        return ((cp_rank * seq_len // cp, (cp_rank + 1) * seq_len // cp),)

    return patch.object(executor, "position_ranges", halves)


@planted
def gradients_going_back_are_halved() -> AbstractContextManager[Any]:
    true = Pipeline._send

    def send(self: Pipeline, key: Any, rows: torch.Tensor, messages: Any) -> None:
        true(self, key, rows * 0.5 if key[0] == "B" else rows, messages)

    return patch.object(pipeline.Pipeline, "_send", send)
