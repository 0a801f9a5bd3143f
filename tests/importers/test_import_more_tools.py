"""Other forms of the same facts: `amd-smi topology`, the plain `nvidia-smi` table, Slurm's JSON; whole or refused."""

import json

import pytest

from hetplan.errors import SpecError
from hetplan.specs.importers.detect import read_facts
from hetplan.specs.importers.facts import SourceText

# The form of https://rocm.docs.amd.com/projects/amdsmi/en/latest/how-to/amdsmi-cli-tool.html (topology)
AMD_TOPOLOGY = """\
ACCESS TABLE:
             0000:0a:00.0 0000:15:00.0
0000:0a:00.0 ENABLED      ENABLED
0000:15:00.0 ENABLED      ENABLED

WEIGHT TABLE:
             0000:0a:00.0 0000:15:00.0
0000:0a:00.0 0            15
0000:15:00.0 15           0

LINK TYPE TABLE:
             0000:0a:00.0 0000:15:00.0
0000:0a:00.0 SELF         XGMI
0000:15:00.0 XGMI         SELF
"""
# The form nvidia-smi has printed since driver 530
SMI = """\
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 550.54.15              Driver Version: 550.54.15      CUDA Version: 12.4     |
|-----------------------------------------+------------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |
|                                         |                        |               MIG M. |
|=========================================+========================+======================|
|   0  NVIDIA A100-SXM4-80GB          On  |   00000000:07:00.0 Off |                    0 |
| N/A   30C    P0             60W /  400W |       4MiB /  81920MiB |      0%      Default |
|                                         |                        |             Disabled |
+-----------------------------------------+------------------------+----------------------+
|   1  NVIDIA GeForce RTX 3090        Off |   00000000:0A:00.0 Off |                  N/A |
| 30%   30C    P8             20W /  350W |       4MiB /  24576MiB |      0%      Default |
|                                         |                        |                  N/A |
+-----------------------------------------+------------------------+----------------------+

+-----------------------------------------------------------------------------------------+
| Processes:                                                                              |
|  No running processes found                                                             |
+-----------------------------------------------------------------------------------------+
"""
# Fields of https://slurm.schedmd.com/rest_api.html (v0.0.40, nodes), those that are read
NODES = {
    "nodes": [
        {
            "name": "gpu01",
            "gres": "gpu:a100:4(S:0-1)",
            "sockets": 2,
            "cores": 32,
            "real_memory": 512000,
            "state": ["IDLE"],
            "partitions": ["gpu", "all"],
        },
        {"name": "gpu02", "gres": "gpu:a100:4", "real_memory": 512000, "state": ["IDLE", "DRAIN"]},
    ],
    "meta": {"Slurm": {"release": "23.11.4"}},
}
SINFO = {
    "sinfo": [
        {
            "nodes": {"nodes": ["gpu01", "gpu02"], "total": 2},
            "node": {"state": ["IDLE"]},
            "gres": {"total": "gpu:h100:8"},
            "memory": {"minimum": 1000000, "maximum": 1000000},
            "partition": {"name": "gpu"},
        }
    ]
}


def facts(text):
    return read_facts(SourceText(name="told.txt", text=text))


def test_amd_smi_names_devices_by_address():
    (sheet,) = facts(AMD_TOPOLOGY).sheets
    assert [card.count for card in sheet.cards] == [2]
    assert (sheet.wiring.family, sheet.wiring.is_full) == ("xgmi", True)
    (pcie,) = facts(AMD_TOPOLOGY.replace("XGMI", "PCIE")).sheets
    assert pcie.wiring.family == "none"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (AMD_TOPOLOGY.rsplit("\n", 2)[0], 12),
        (AMD_TOPOLOGY.replace("XGMI         SELF", "XGMI         XGMI"), 14),
        (AMD_TOPOLOGY.replace("SELF         XGMI", "SELF         XGM"), 13),
        (AMD_TOPOLOGY.split("LINK TYPE TABLE:\n")[0] + "LINK TYPE TABLE:\n", 11),
    ],
)
def test_damaged_amd_tables_are_refused_at_their_line(text, line):
    with pytest.raises(SpecError) as caught:
        facts(text)
    assert caught.value.location.line == line


def test_the_plain_table_of_nvidia_smi_names_cards_memory_and_power():
    (sheet,) = facts(SMI).sheets
    found = [(c.product, c.count, round(c.usable_memory_bytes / 2**20), c.power_limit_w) for c in sheet.cards]
    assert found == [("NVIDIA A100-SXM4-80GB", 1, 81920, 400.0), ("NVIDIA GeForce RTX 3090", 1, 24576, 350.0)]


def test_old_tables_cut_names_short():
    """Before driver 530 columns were narrower: the name ends in dots."""
    old = SMI.replace("NVIDIA A100-SXM4-80GB          On ", "NVIDIA A100-SXM...  On           ")
    (sheet,) = facts(old).sheets
    assert sheet.cards[0].product == "NVIDIA A100-SXM"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            SMI.split("|   1  ")[0] + "|   1  NVIDIA GeForce RTX 3090        Off |   00000000:0A:00.0 Off |",
            "the text is cut",
        ),
        (SMI.replace("|   1  NVIDIA", "|   2  NVIDIA"), "GPU 2 where GPU 1 was expected"),
        (SMI.replace("|             Disabled |", "|              Enabled |"), "MIG is enabled"),
        (SMI.split("|   0  ")[0], "describes no GPU"),
    ],
)
def test_damaged_tables_of_nvidia_smi_are_refused(text, words):
    with pytest.raises(SpecError, match=words):
        facts(text)


def test_slurm_nodes_as_json():
    first, second = facts(json.dumps(NODES)).sheets
    assert (first.nodes, first.group, first.cores, first.unusable) == (("gpu01",), "gpu", 64, None)
    assert first.cards[0].count == 4 and first.cards[0].product == "a100"
    assert first.host_memory_bytes == 512000 * 2**20
    assert "DRAIN" in second.unusable


def test_sinfo_as_json_and_wrapped_numbers():
    sheets = facts(json.dumps(SINFO)).sheets
    assert [sheet.nodes for sheet in sheets] == [("gpu01",), ("gpu02",)]
    assert all(sheet.cards[0].count == 8 and sheet.group == "gpu" for sheet in sheets)
    wrapped = {"nodes": [NODES["nodes"][0] | {"real_memory": {"set": True, "infinite": False, "number": 512000}}]}
    (sheet,) = facts(json.dumps(wrapped)).sheets
    assert sheet.host_memory_bytes == 512000 * 2**20


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (json.dumps(NODES)[:-30], "not valid JSON"),
        (json.dumps({"nodes": [{"gres": "gpu:1"}]}), "a node has no name"),
        (json.dumps({"nodes": [{"name": "n1", "gres": "gpu:a100"}]}), "is not like gpu:a100:8"),
        (json.dumps({"nodes": [{"name": "n1", "gres": 4}]}), "gres is no text"),
        (json.dumps({"sinfo": [{"nodes": {"nodes": 3}}]}), "no list of nodes"),
    ],
)
def test_damaged_slurm_documents_are_refused(text, words):
    with pytest.raises(SpecError, match=words):
        facts(text)


def test_kubernetes_lists_are_not_taken_for_slurm():
    nodes = [
        {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n"}, "status": {"capacity": {"nvidia.com/gpu": "2"}}}
    ]
    (sheet,) = facts(json.dumps({"apiVersion": "v1", "kind": "List", "items": nodes, "nodes": [{"name": "x"}]})).sheets
    assert sheet.nodes == ("n",)
