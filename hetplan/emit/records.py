"""What an emitter is given and what it answers.

An emitter is a pure function from a `Job` to an `Engine`: the program each rank runs, files of its own and remarks.
Launchers wrap that program: they are pure functions from a `Launched` to files. All names are flat: a folder of a
hundred nodes can be mounted as one Kubernetes ConfigMap.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hetplan.plan.records import Layout
from hetplan.specs.cluster import Cluster
from hetplan.specs.model import Model
from hetplan.specs.workload import Workload

Files = Mapping[str, str]

PLAN_FILE = "plan.yaml"
MASTER_PORT = 29500


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A plan, placed on its cluster, with the texts that travel with it."""

    layout: Layout
    """Every stage names its devices."""
    cluster: Cluster
    model: Model
    workload: Workload
    plan_text: str
    plan_sha256: str
    peak_bytes: Mapping[tuple[int, int], float]
    """(row, physical stage) -> predicted peak of a device."""
    inputs: Files = field(default_factory=dict)
    """Files the plan names, as they lie beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One process of the job."""

    node: str
    index: int
    """Of its device in the box, in PCI order."""
    group: str
    row: int
    copy: int
    stage: int
    """Physical stage."""
    place: int
    """Index in the stage's mesh: tp fastest, then cp, then dp."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """One `torchrun` of the job: consecutive ranks on one node."""

    number: int
    """Its --node-rank."""
    node: str
    first_rank: int
    devices: tuple[int, ...]
    """Box index of each rank's device, in rank order."""

    @property
    def num_ranks(self) -> int:
        """Processes it starts."""
        return len(self.devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What one engine needs to run a plan."""

    name: str
    ranks: tuple[Rank, ...]
    program: tuple[str, ...] = ()
    """Words `torchrun` is given after its own options, quoted for a shell where they need it; empty: the engine starts
    its processes itself and `files` holds how."""
    prelude: str = ""
    """Shell lines that must run before `program` is put together."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables every rank gets; values are shell words."""
    fill_in: Mapping[str, str] = field(default_factory=dict)
    """Variables only the user knows -> what to write there."""
    files: Files = field(default_factory=dict)
    steps: tuple[str, ...] = ()
    """How to start it where `program` is empty."""
    notes: tuple[str, ...] = ()
    """What whoever launches it must know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A job with its engine and the agents that start its ranks."""

    job: Job
    engine: Engine
    agents: tuple[Agent, ...]

    @property
    def world_size(self) -> int:
        """Processes of the job."""
        return len(self.engine.ranks)

    @property
    def nodes(self) -> Mapping[str, tuple[Agent, ...]]:
        """Nodes in the order of their first rank, with their agents."""
        found: dict[str, list[Agent]] = {}
        for agent in self.agents:
            found.setdefault(agent.node, []).append(agent)
        return {node: tuple(agents) for node, agents in found.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """Nodes that are alike in what they hold and how many processes they start: one component of a launcher."""

    name: str
    groups: tuple[str, ...]
    nodes: tuple[str, ...]
    num_ranks: int
    """Processes on each of its nodes."""
    num_devices: int
    """Accelerators in each of its nodes, those without a rank included: launchers give nodes whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFiles:
    """What a launcher adds to the folder."""

    files: Files = field(default_factory=dict)
    steps: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
