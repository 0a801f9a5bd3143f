"""vLLM: the layer split of a plan for serving, one server a replica (`VLLM_PP_LAYER_PARTITION`).

A server on several nodes is started on each of them with its node's number, all but the first without an API; its
nodes must start equally many processes.
"""

from __future__ import annotations

from collections.abc import Iterator

from hetplan.emit.megatron import stage_decoders
from hetplan.emit.ranks import agents_of, ranks_of
from hetplan.emit.records import MASTER_PORT, Agent, Engine, Job, Rank
from hetplan.emit.shell import script
from hetplan.errors import CheckFailedError

API_PORT = 8000


def emit_vllm(job: Job) -> Engine:
    """Return scripts that serve the model with the plan's stages.

    Raises:
        CheckFailedError: vLLM cannot run the stages.
    """
    replica = job.layout.replicas[0]
    counts = stage_decoders(job.model, replica)
    if not all(counts):
        raise CheckFailedError(f"vllm cannot run a stage without a decoder layer (layers {counts})")
    if any(stage.dp > 1 for stage in replica.stages):
        raise CheckFailedError("vllm cannot split samples inside a stage (dp)")
    ranks = ranks_of(job, "replicas")
    files: dict[str, str] = {}
    for number, own in enumerate(_servers(ranks)):
        files |= dict(_server(job, number, own, counts))
    return Engine(
        name="vllm",
        ranks=ranks,
        fill_in={"MODEL": "model to serve: a Hugging Face name or folder"},
        files=files,
        steps=(
            "Fill in `site.sh`, and put this folder on every node.",
            "On every node: `bash serve-NUMBER-NODE.sh` of each server it is part of.",
        ),
        notes=("the plan was made for training: its microbatches, sharding and times say nothing about serving",),
    )


def _servers(ranks: tuple[Rank, ...]) -> list[tuple[Rank, ...]]:
    found: dict[tuple[int, int], list[Rank]] = {}
    for rank in ranks:
        found.setdefault((rank.row, rank.copy), []).append(rank)
    return [tuple(own) for own in found.values()]


def _server(job: Job, number: int, ranks: tuple[Rank, ...], counts: tuple[int, ...]) -> Iterator[tuple[str, str]]:
    agents = agents_of(ranks)
    sizes = [agent.num_ranks for agent in agents]
    if len(set(sizes)) > 1 or len({agent.node for agent in agents}) < len(agents):
        words = ", ".join(f"{agent.node}: {agent.num_ranks}" for agent in agents)
        raise CheckFailedError(f"vllm cannot start unequal numbers of processes on the nodes of one server ({words})")
    for agent in agents:
        yield f"serve-{number}-{agent.node}.sh", _serve(job, number, agents, agent, counts)


def _serve(job: Job, number: int, agents: tuple[Agent, ...], agent: Agent, counts: tuple[int, ...]) -> str:
    stage = job.layout.replicas[0].stages[0]
    words = [
        'vllm serve "$MODEL"',
        f"--tensor-parallel-size {stage.tp}",
        f"--pipeline-parallel-size {len(counts)}",
        f"--max-model-len {job.workload.seq_len}",
        f"--port {API_PORT + number}",
    ]
    if len(agents) > 1:
        head = f"--master-addr {agents[0].node} --master-port {MASTER_PORT + number}"
        words += [f"--nnodes {len(agents)} --node-rank {agent.number}", head]
        words += ["--headless"] if agent.number else []
    lines = [
        "# shellcheck disable=SC1091",
        "source ./site.sh",
        "# shellcheck disable=SC1091",
        f"source ./env-{agent.node}.sh",
        'if env | grep -qE "^[A-Z0-9_]+=.*FILL_IN"; then\n    echo "fill in site.sh" >&2\n    exit 2\nfi',
        f"export VLLM_PP_LAYER_PARTITION={','.join(map(str, counts))}",
        f"export CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES={','.join(map(str, agent.devices))}",
        " \\\n    ".join(words),
    ]
    return script(f"Server {number} on node {agent.node}: stages of {', '.join(map(str, counts))} layers.", lines)
