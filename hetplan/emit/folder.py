"""The folder every engine and launcher has in common: scripts, environments, preflight, the plan, a README.

site.sh            what only the user knows (FILL_IN), once a group
env-NODE.sh        networks of one node
common.sh          the program, and the refusal to start with a FILL_IN left
launch-NODE.sh     one `torchrun` line (or a few) with this node's own number of processes
preflight.py       run by `launch-NODE.sh preflight`, with expected.json
plan.yaml          the plan, with the files it names beside it
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hetplan.emit.fabric import Fabric, fabric_of, node_environment, site_questions, used_groups
from hetplan.emit.ranks import components_of
from hetplan.emit.records import MASTER_PORT, PLAN_FILE, Agent, Launched, Rank
from hetplan.emit.shell import FILL_IN, SOURCED, array, comment, exports, quoted, script
from hetplan.specs.cluster import Cluster, Group

_PREFLIGHT = Path(__file__).parent / "templates" / "preflight.py.txt"
VISIBLE = {"NVIDIA": "CUDA_VISIBLE_DEVICES", "AMD": "HIP_VISIBLE_DEVICES", "Huawei": "ASCEND_RT_VISIBLE_DEVICES"}
"""Variable by which each vendor's runtime chooses and orders devices; others are asked by NVIDIA's name."""


def job_fabric(launched: Launched) -> Fabric:
    """Return the networks of a job."""
    return fabric_of(launched.job.cluster, used_groups(launched), len(launched.nodes))


def base_files(launched: Launched) -> dict[str, str]:
    """Return the files every folder has."""
    job = launched.job
    files = {PLAN_FILE: job.plan_text, **job.inputs, **launched.engine.files}
    fabric = job_fabric(launched)
    for component in components_of(launched.job, launched.engine.ranks):
        for node in component.nodes:
            files[f"env-{node}.sh"] = node_environment(fabric, component, node)
    files["site.sh"] = _site(launched, fabric)
    files["expected.json"] = expected_text(launched)
    files["preflight.py"] = _PREFLIGHT.read_text(encoding="utf-8")
    return files


def node_scripts(launched: Launched) -> dict[str, str]:
    """Return what starts the ranks, node by node."""
    files = {"common.sh": _common(launched)}
    for node, own in launched.nodes.items():
        files[f"launch-{node}.sh"] = _launch(launched, node, own)
    return files


def _site(launched: Launched, fabric: Fabric) -> str:
    head = launched.agents[0].node if len(launched.nodes) > 1 else "127.0.0.1"
    text = SOURCED + comment("What only you know about this site. Every FILL_IN must go; values set outside win.")
    text += "\n" + comment("Where rank 0 runs: a name or address that every node reaches, and a free port there.")
    text += f'export MASTER_ADDR="${{MASTER_ADDR:-{head}}}"\n'
    text += f'export MASTER_PORT="${{MASTER_PORT:-{MASTER_PORT}}}"\n'
    questions = [*site_questions(fabric, used_groups(launched)), *launched.engine.fill_in.items()]
    for name, question in questions:
        text += "\n" + comment(question) + f'export {name}="${{{name}:-{FILL_IN}}}"\n'
    return text


def _common(launched: Launched) -> str:
    engine = launched.engine
    text = SOURCED + comment("Read by every launch script: the site, the program, what must hold before it starts.")
    text += "# shellcheck disable=SC1091\nsource ./site.sh\n"
    text += exports(engine.environment) + "\n"
    text += 'if [ "${1:-train}" = preflight ]; then\n'
    text += "    PROGRAM=(preflight.py)\nelse\n"
    lines = [*engine.prelude.splitlines(), *array("PROGRAM", engine.program).splitlines()]
    text += "".join(f"    {line}\n" for line in lines)
    text += "fi\n\n" + comment("Refuses to start while a value is still to be filled in.")
    text += (
        "ready() {\n"
        "    local missing\n"
        f"    missing=$(env | grep -E '^[A-Z0-9_]+=.*{FILL_IN}' | cut -d= -f1 | sort | tr '\\n' ' ' || true)\n"
        '    if [ -n "$missing" ]; then\n'
        '        echo "fill in (site.sh or the node\'s env file): $missing" >&2\n'
        "        exit 2\n"
        "    fi\n"
        "}\n"
    )
    return text


def _launch(launched: Launched, node: str, agents: Sequence[Agent]) -> str:
    ranks = ", ".join(_span(agent) for agent in agents)
    purpose = (
        f"Starts rank {ranks} of {launched.world_size} on node {node}.\n"
        "Without an argument it trains; `preflight` checks the node instead."
    )
    start = [_torchrun(launched, agent) for agent in agents]
    head = [
        "# shellcheck disable=SC1091",
        'source ./common.sh "${1:-train}"',
        "# shellcheck disable=SC1091",
        f"source ./env-{node}.sh",
        "ready",
    ]
    if len(start) == 1:
        return script(purpose, [*head, start[0]])
    together = [f'{line} &\npids+=("$!")' for line in start]
    wait = 'for _ in "${pids[@]}"; do\n    wait -n || { kill "${pids[@]}" 2>/dev/null; exit 1; }\ndone'
    return script(purpose, [*head, "pids=()", *together, wait])


def _span(agent: Agent) -> str:
    last = agent.first_rank + agent.num_ranks - 1
    return str(agent.first_rank) if last == agent.first_rank else f"{agent.first_rank}-{last}"


def _torchrun(launched: Launched, agent: Agent) -> str:
    name = visible_variable(launched, agent)
    devices = ",".join(map(str, agent.devices))
    order = "CUDA_DEVICE_ORDER=PCI_BUS_ID " if name == "CUDA_VISIBLE_DEVICES" else ""
    return (
        f"{order}{name}={devices} torchrun --nnodes={len(launched.agents)} --node-rank={agent.number} "
        f"--nproc-per-node={agent.num_ranks} \\\n"
        '    --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" "${PROGRAM[@]}"'
    )


def visible_variable(launched: Launched, agent: Agent) -> str:
    """Return the variable that chooses the devices of an agent."""
    group = launched.engine.ranks[agent.first_rank].group
    return VISIBLE.get(launched.job.cluster.group(group).device.vendor, "CUDA_VISIBLE_DEVICES")


def expected_text(launched: Launched) -> str:
    """Return what the preflight holds the job to, a line a stage and a rank."""
    stages = dict.fromkeys((rank.row, rank.stage) for rank in launched.engine.ranks)
    number = {key: i for i, key in enumerate(stages)}
    group = {(rank.row, rank.stage): rank.group for rank in launched.engine.ranks}
    rows = [_expected_stage(launched, key, group[key]) for key in stages]
    ranks = [_expected_rank(rank, number) for rank in launched.engine.ranks]
    parts = [
        f'  "world_size": {launched.world_size}',
        f'  "plan_sha256": "{launched.job.plan_sha256}"',
        '  "stages": [\n' + ",\n".join(f"    {json.dumps(row)}" for row in rows) + "\n  ]",
        '  "ranks": [\n' + ",\n".join(f"    {json.dumps(row)}" for row in ranks) + "\n  ]",
    ]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _expected_stage(launched: Launched, key: tuple[int, int], group: str) -> dict[str, Any]:
    device = launched.job.cluster.group(group).device
    return {
        "row": key[0],
        "stage": key[1],
        "group": group,
        "device": device.name,
        "names": [device.name, *device.aliases] if device.aliases else [],
        "peak_bytes": round(launched.job.peak_bytes[key]),
    }


def _expected_rank(rank: Rank, number: dict[tuple[int, int], int]) -> dict[str, Any]:
    return {
        "node": rank.node,
        "index": rank.index,
        "stage": number[rank.row, rank.stage],
        "copy": rank.copy,
        "place": rank.place,
    }


def node_notes(launched: Launched) -> Iterator[str]:
    """Yield what is unusual about the nodes of a job."""
    nodes = launched.nodes
    many = [node for node, agents in nodes.items() if len(agents) > 1]
    if many and launched.engine.program:
        yield f"ranks come back to node {', '.join(many)}: its script starts one torchrun for each run of ranks"
    for node, groups in shared_hosts(launched.job.cluster).items():
        if node in nodes:
            names = ", ".join(f"{group.name} ({group.device.name})" for group in groups)
            yield (
                f"node {node} holds unlike cards, counted in the order {names}; its device order keeps each "
                "tensor-parallel group alike (the preflight checks every rank's card)"
            )


def shared_hosts(cluster: Cluster) -> dict[str, list[Group]]:
    """Return the hosts that several groups share."""
    found: dict[str, list[Group]] = {}
    for group in cluster.groups:
        for node in group.nodes:
            found.setdefault(node, []).append(group)
    return {node: groups for node, groups in found.items() if len(groups) > 1}


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def readme(launched: Launched, how: Sequence[str], notes: Sequence[str]) -> str:
    """Return the folder's README: what it runs, how, and what to know."""
    job = launched.job
    lines = [
        f"# {job.model.name} on {job.cluster.name}, run by {launched.engine.name}",
        "",
        f"Plan: `{PLAN_FILE}`, sha256 `{job.plan_sha256}`.",
        f"{launched.world_size} processes on {_count(len(launched.nodes), 'node')}; "
        f"{job.workload.global_batch} samples of {job.workload.seq_len} tokens a step.",
        "",
        "## Run",
        "",
        *(f"{i}. {step}" for i, step in enumerate(how, 1)),
    ]
    if notes:
        lines += ["", "## To know", "", *(f"- {note}" for note in notes)]
    lines += ["", "## Nodes", "", "| node | ranks | processes |", "|---|---|--:|"]
    for node, own in launched.nodes.items():
        spans = ", ".join(_span(agent) for agent in own)
        lines.append(f"| {node} | {spans} | {sum(agent.num_ranks for agent in own)} |")
    return "\n".join(lines) + "\n"


def shell_word(text: str) -> str:
    """Return a word for a shell, `$VARIABLE`s left alive inside double quotes."""
    return f'"{text}"' if "$" in text else quoted(text)
