"""Small texts in the form each tool prints; those that restate a public file name it."""

from hetplan.catalog.devices import device_names, find_device
from hetplan.catalog.networks import find_link, link_names
from hetplan.specs.importers.cluster_text import cluster_text
from hetplan.specs.importers.detect import read_facts
from hetplan.specs.importers.facts import Catalog, SourceText
from hetplan.specs.importers.merge import merge
from hetplan.specs.read_cluster import cluster_from_text


def _latency_of(kind, rate):
    links = [find_link(name) for name in link_names()]
    return next(((x.latency_s, x.name) for x in links if x.family == kind and x.bandwidth_bytes_per_s == rate), None)


CATALOG = Catalog(find_device=find_device, devices=tuple(map(find_device, device_names())), latency_of=_latency_of)

TOPO_PARTIAL = """\
        GPU0    GPU1    GPU2    GPU3    CPU Affinity
GPU0     X      NV1     SYS     SYS     0-7
GPU1    NV1      X      SYS     SYS     0-7
GPU2    SYS     SYS      X      NV1     8-15
GPU3    SYS     SYS     NV1      X      8-15

Legend:
  X   = Self
"""
TOPO_PCIE = """\
        GPU0    GPU1    CPU Affinity    NUMA Affinity   GPU NUMA ID
GPU0     X      PHB     0-47    0               N/A
GPU1    PHB      X      0-47    0               N/A
"""
TOPO_NICS = """\
\tGPU0\tGPU1\tNIC0\tNIC1\tNIC2\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tNV12\tPXB\tSYS\tSYS\t0-63\t0\t\tN/A
GPU1\tNV12\t X \tSYS\tPXB\tSYS\t0-63\t0\t\tN/A
NIC0\tPXB\tSYS\t X \tSYS\tSYS
NIC1\tSYS\tPXB\tSYS\t X \tSYS
NIC2\tSYS\tSYS\tSYS\tSYS\t X

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_1
  NIC2: mlx5_bond_0
"""
TOPO_FUSED = TOPO_NICS.replace("GPU1\tNV12\t X \tSYS\tPXB\t", "GPU1\tNV12\t X \tSYSPXB\t")
NVLINK_STATUS = "".join(
    f"GPU {gpu}: NVIDIA A100-SXM4-80GB (UUID: GPU-{gpu})\n" + "".join(f"\t Link {n}: 25 GB/s\n" for n in range(12))
    for gpu in range(2)
)
QUERY = """\
index, name, memory.total [MiB], power.limit [W]
0, NVIDIA A100-SXM4-80GB, 81920 MiB, 400.00 W
1, NVIDIA A100-SXM4-80GB, 81920 MiB, 350.00 W
"""
QUERY_MIXED = """\
name, memory.total [MiB]
NVIDIA L4, 23034 MiB
NVIDIA L4, 23034 MiB
NVIDIA A100-SXM4-40GB, 40960 MiB
NVIDIA A100-SXM4-40GB, 40960 MiB
"""
FULL_QUERY = """\
==============NVSMI LOG==============

Driver Version                            : 550.54
Attached GPUs                             : 1
GPU 00000000:07:00.0
    Product Name                          : NVIDIA H100 80GB HBM3
    MIG Mode
        Current                           : Disabled
        Pending                           : Disabled
    FB Memory Usage
        Total                             : 81559 MiB
        Reserved                          : 551 MiB
    BAR1 Memory Usage
        Total                             : 131072 MiB
    GPU Power Readings
        Power Draw                        : 72.00 W
        Current Power Limit               : 700.00 W
"""
# https://github.com/ROCm/rocm_smi_lib: form of `rocm-smi --showtopo`
SHOWTOPO = """\
======================= ROCm System Management Interface =======================
=========================== Weight between two GPUs ============================
       GPU0         GPU1
GPU0   0            15
GPU1   15           0

========================== Link Type between two GPUs ==========================
       GPU0         GPU1
GPU0   0            XGMI
GPU1   XGMI         0

================================== Numa Nodes ==================================
GPU\t[0]          : (Topology) Numa Node: 0
"""
# https://github.com/Azure/azhpc-images: topology/ncv4-topo.xml, two of its four CPUs
NCCL_XML = """\
<system version="1">
  <cpu numaid="0" arch="x86_64" vendor="AuthenticAMD">
    <pci busid="0001:00:00.0" class="0x030200" vendor="0x10de" device="0x20b5" link_width="0">
      <gpu dev="0" sm="80" rank="0" gdr="1">
        <nvlink target="0001:00:00.0" count="12" tclass="0x030200"/>
      </gpu>
    </pci>
    <nic>
      <net name="eth0" dev="0" speed="100000" port="0" latency="0.000000" guid="0x0" maxconn="65536" gdr="0"/>
    </nic>
  </cpu>
  <cpu numaid="1" arch="x86_64" vendor="AuthenticAMD">
    <pci busid="0002:00:00.0" class="0x030200" vendor="0x10de" device="0x20b5" link_width="0">
      <gpu dev="1" sm="80" rank="1" gdr="1">
        <nvlink target="0002:00:00.0" count="12" tclass="0x030200"/>
      </gpu>
    </pci>
  </cpu>
</system>
"""
# https://github.com/Azure/azhpc-images: topology/ndv4-topo.xml, one of its four CPUs
PCI_XML = """\
<system version="1">
  <cpu numaid="0" arch="x86_64" vendor="AuthenticAMD">
    <pci busid="ffff:ff:01.0" class="0x060400" link_speed="16 GT/s" link_width="16">
      <pci busid="0003:00:00.0" class="0x030200" link_speed="16 GT/s" link_width="16"/>
      <pci busid="0103:00:00.0" class="0x020700" link_speed="16 GT/s" link_width="16"/>
      <pci busid="0004:00:00.0" class="0x030200" link_speed="16 GT/s" link_width="16"/>
      <pci busid="0104:00:00.0" class="0x020700" link_speed="16 GT/s" link_width="16"/>
    </pci>
  </cpu>
</system>
"""
SYSFS = "".join(
    f"{name}/hca_type: MT4129\n{name}/ports/1/link_layer: {layer}\n"
    f"{name}/ports/1/rate: {rate}\n{name}/ports/1/state: {state}\n"
    for name, layer, rate, state in (
        ("mlx5_0", "InfiniBand", "400 Gb/sec (4X NDR)", "4: ACTIVE"),
        ("mlx5_1", "InfiniBand", "400 Gb/sec (4X NDR)", "4: ACTIVE"),
        ("mlx5_2", "InfiniBand", "10 Gb/sec (4X SDR)", "1: DOWN"),
        ("mlx5_bond_0", "Ethernet", "200 Gb/sec (2X NDR)", "4: ACTIVE"),
    )
)
IBSTAT = """\
CA 'mlx5_0'
\tCA type: MT4123
\tNumber of ports: 1
\tPort 1:
\t\tState: Active
\t\tPhysical state: LinkUp
\t\tRate: 200
\t\tLink layer: InfiniBand
"""
DEVINFO = """\
hca_id:\tmlx5_0
\ttransport:\t\t\tInfiniBand (0)
\t\tport:\t1
\t\t\tstate:\t\t\tPORT_ACTIVE (4)
\t\t\tactive_width:\t\t4X (2)
\t\t\tactive_speed:\t\t50.0 Gbps (64)
\t\t\tlink_layer:\t\tInfiniBand
"""
# https://github.com/NVIDIA/topograph: its simulated models, shortened
TREE = """\
# switch.3.1=core
SwitchName=core Switches=leaf-[1-2]
SwitchName=leaf-1 Nodes=srv[1101-1104]
SwitchName=leaf-2 Nodes=srv[1201-1204]
"""
BLOCKS = """\
BlockName=rack11 Nodes=srv[1101-1108]
BlockName=rack12 Nodes=srv[1201-1208]
BlockSizes=8,16
"""
NVL_YAML = """\
switches:
  core:
    labels:
      topology.kubernetes.io/region: us-east
    switches:
    - spine-1
  spine-1:
    labels:
      topology.kubernetes.io/zone: zone1
    switches:
    - leaf-1-1
    - leaf-1-2
blocks:
- switch: leaf-1-1
  nodes:
  - node[1101-1118]
  annotations:
    accelerator.topology.test/domain: nvl-1-1
- switch: leaf-1-2
  nodes:
  - node[1201-1218]
  annotations:
    accelerator.topology.test/domain: nvl-1-2
"""
# https://slurm.schedmd.com/topology.yaml.html: form of the file
SLURM_YAML = """\
---
- topology: tree
  cluster_default: true
  tree:
    switches:
      - switch: root
        children: s[1-2]
      - switch: s1
        nodes: n[01-02]
      - switch: s2
        nodes: n[03-04]
"""
SINFO = """\
NODELIST PARTITION GRES CPUS MEMORY STATE
a01 a100* gpu:nvidia_a100-sxm4-80gb:8(S:0-1) 128 1031000 idle
a02 a100* gpu:nvidia_a100-sxm4-80gb:8(S:0-1) 128 1031000 drained
v01 v100 gpu:v100:4 40 385000 mixed
c01 cpu (null) 64 256000 idle
"""
SCONTROL = """\
NodeName=a01 Arch=x86_64 CoresPerSocket=64
   CPUAlloc=0 CPUTot=256 CPULoad=0.10
   Gres=gpu:nvidia_a100-sxm4-80gb:8(S:0-1)
   RealMemory=1031000 AllocMem=0 FreeMem=900000 Sockets=2 Boards=1
   State=IDLE ThreadsPerCore=2 TmpDisk=0 Weight=1
   Partitions=a100

NodeName=a02 Arch=x86_64 CoresPerSocket=64
   Gres=gpu:nvidia_a100-sxm4-80gb:8(S:0-1)
   RealMemory=1031000 Sockets=2 Boards=1
   State=DOWN*+DRAIN ThreadsPerCore=2
   Partitions=a100
"""
# https://docs.arch.jhu.edu: available partitions of the DSAI cluster, shortened
PARTITIONS = """\
| partition | nodes | GPUs/node | CPU cores/node | CPU |
|---|---|---|---|---|
| l40s | 8 | 8 x L40S 48 GB | 124 | EPYC 9534 |
| a100 | 11 | 8 x A100 80 GB | 88 | EPYC 7443 |
| nvl | 16 | 4 x H100-NVL 96 GB, NDR | 124 | EPYC 9534 |
"""
# https://github.com/NVIDIA/k8s-device-plugin: README of GPU feature discovery, shortened
LABELS = """\
With both deployed you should now see labels on your nodes:
apiVersion: v1
    labels:
      nvidia.com/cuda.driver.major: "455"
      nvidia.com/gpu.count: "1"
      nvidia.com/gpu.memory: "39538"
      nvidia.com/gpu.product: A100-SXM4-40GB
      ...
"""
SKYPILOT = """\
name: train
num_nodes: 2
resources:
  accelerators: H100-SXM5-80GB:8
  region: us-east-1
run: |
  torchrun train.py
"""
ALL = {
    "nvidia-topo": TOPO_NICS,
    "nvidia-nvlink": NVLINK_STATUS,
    "nvidia-query": QUERY,
    "nvidia-q": FULL_QUERY,
    "rocm-showtopo": SHOWTOPO,
    "nccl-xml": NCCL_XML,
    "ib-sysfs": SYSFS,
    "ibstat": IBSTAT,
    "ibv-devinfo": DEVINFO,
    "slurm-topology-conf": TREE,
    "slurm-topology-yaml": NVL_YAML,
    "sinfo": SINFO,
    "scontrol": SCONTROL,
    "partition-table": PARTITIONS,
    "k8s-labels": LABELS,
    "skypilot": SKYPILOT,
}


def node(name, labels, **fields):
    """A node as `kubectl get nodes -o json` lists it."""
    status = {"capacity": {"cpu": "96", "memory": "1056270148Ki", **fields.pop("capacity", {})}}
    return {"kind": "Node", "metadata": {"name": name, "labels": labels}, "status": status, **fields}


def facts(text, name="file", form=None, keys=None):
    return read_facts(SourceText(name=name, text=text), form, keys)


def draft(*texts):
    return merge([facts(text, f"file{i}") for i, text in enumerate(texts)], CATALOG)


def written(*texts):
    """The cluster file some sources give."""
    return cluster_text(draft(*texts), CATALOG, "case").text


def loaded(text):
    return cluster_from_text(text, "case.yaml", find_device)
