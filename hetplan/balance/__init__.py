"""Samples of unequal size onto microbatches and replicas, batch by batch; needs numpy, nothing else of hetplan."""

from hetplan.balance.assign import balance
from hetplan.balance.bounds import lower_bound
from hetplan.balance.degrees import SequenceCost, plan_degrees, static_degrees
from hetplan.balance.online import CostModel
from hetplan.balance.order import flow_shop_s, order_microbatches
from hetplan.balance.problem import Assignment, Problem, make_problem
from hetplan.balance.sampler import BalancedBatchSampler, Division
from hetplan.balance.segments import plan_segments, static_cut

__all__ = [
    "Assignment",
    "BalancedBatchSampler",
    "CostModel",
    "Division",
    "Problem",
    "SequenceCost",
    "balance",
    "flow_shop_s",
    "lower_bound",
    "make_problem",
    "order_microbatches",
    "plan_degrees",
    "plan_segments",
    "static_cut",
    "static_degrees",
]
