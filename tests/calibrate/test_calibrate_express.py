"""Rows of a table as clusters, models and layouts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from calibrate_samples import COMMON, GPT_18B, GPT_76B

from hetplan.calibrate.architectures import model_of
from hetplan.calibrate.express import precision_of, setup_of, sharding_of
from hetplan.calibrate.hardware import cluster_of, device_called, network_of, nics_of
from hetplan.calibrate.stages import cut_of, even_cut
from hetplan.errors import UsageError
from hetplan.specs.model import Table, model_params


def test_a_published_row_becomes_its_layout() -> None:
    setup = setup_of(GPT_76B)
    assert setup.layout.schedule == "interleaved"
    assert setup.layout.num_devices == 1024
    assert setup.layout.num_samples == 1792
    assert {stage.num_layers for stage in setup.layout.replicas[0].stages[1:-1]} == {5}
    assert setup.workload.attention == "materialised"
    assert not setup.workload.sequence_parallel
    assert model_params(setup.model) == pytest.approx(76.1e9, rel=0.01)


@pytest.mark.parametrize(
    ("text", "nics", "gbit"),
    [
        ("8x HDR IB 200Gb/s", 8, 200.0),
        ("4x Omni-Path 100Gb/s per node (recalled)", 4, 100.0),
        ("3200Gb/s node", 8, 400.0),
        ("1600 Gb/s node RoCE", 8, 200.0),
        ("400Gb/s per GPU", 8, 400.0),
        ("1x EDR IB 100Gb/s per node", 1, 100.0),
        ("8x200Gb/s RoCE, 3-tier Clos", 8, 200.0),
        ("3x p3.8xlarge 10Gb/s + 1x g4dn.12xlarge 50Gb/s", 1, 10.0),
        ("Ethernet", 8, None),
    ],
)
def test_networks_are_read_from_their_line(text: str, nics: int, gbit: float | None) -> None:
    assert nics_of(text, 8) == (nics, gbit)


def test_a_network_that_prints_no_rate_is_that_of_the_reference_system() -> None:
    run = replace(COMMON, device="GH200-96GB", n_devices="8", devices_per_node="4", inter_net="Slingshot-11")
    network = network_of(run, cluster_of(run).groups)
    assert (network.kind, network.nics_per_node, network.bandwidth_bytes_per_s) == ("slingshot", 4, 25e9)


def test_several_kinds_of_device_make_several_groups() -> None:
    run = replace(COMMON, device="V100-16GBx12+T4x4", n_devices="16", devices_per_node="4")
    groups = cluster_of(run).groups
    assert [(group.device.name, group.num_devices, len(group.nodes)) for group in groups] == [
        ("V100-SXM2-16GB", 12, 3),
        ("T4", 4, 1),
    ]


def test_unknown_devices_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match="Z9000"):
        device_called("Z9000")


@pytest.mark.parametrize(
    ("layers", "stages", "cut"),
    [(8, 4, (2, 2, 2, 2)), (22, 8, (2, 3, 3, 3, 3, 3, 3, 2)), (22, 24, (0, *(1,) * 22, 0)), (61, 4, (16, 15, 15, 15))],
)
def test_layers_are_cut_evenly_with_embedding_and_head_as_layers(
    layers: int, stages: int, cut: tuple[int, ...]
) -> None:
    assert even_cut(layers, stages) == cut


@pytest.mark.parametrize(
    ("notes", "cut"),
    [
        ("layer boundaries [0, 7, 14, 20, 30] over 30 units (0-1 embed, 2-25 blocks, 26-29 head)", (5, 7, 6, 6)),
        ("stage0:12L[A100-SXM-80GB/tp4]; stage1:14L[A100-SXM-80GB/tp4]; grad-reduce 0.1 s", (11, 13)),
        ("3 stages, layers [8, 10, 8] (26/26 units incl. embed+head)", (7, 10, 7)),
    ],
)
def test_cuts_are_read_from_notes(notes: str, cut: tuple[int, ...]) -> None:
    assert cut_of(replace(COMMON, notes=notes, n_devices="16"), 24, len(cut)).decoders == cut


def test_named_devices_make_rows_of_unlike_replicas() -> None:
    run = replace(
        GPT_18B,
        layers="24",
        hidden="1024",
        heads="16",
        ffn="4096",
        device="RTX-2080x4+RTX-3090x2+Titan-RTXx2",
        n_devices="8",
        devices_per_node="8",
        tp="2",
        pp="2",
        dp="2",
        micro_batch="2",
        global_batch="16",
        notes="stage0:12L[RTX-3090/tp2,RTX-2080/tp2]; stage1:14L[Titan-RTX/tp2,RTX-2080/tp2]",
    )
    replicas = setup_of(run).layout.replicas
    assert {tuple(stage.group for stage in replica.stages) for replica in replicas} == {
        ("RTX-3090", "Titan-RTX"),
        ("RTX-2080", "RTX-2080"),
    }
    assert all(replica.num_microbatches == 4 for replica in replicas)


def test_vocabularies_are_padded_to_the_tp_group() -> None:
    model = model_of(replace(GPT_18B, vocab="50257", tp="8"))
    (table, *_) = [operator for operator in model.chain[0].operators if isinstance(operator, Table)]
    assert table.rows == 51200


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tier": "C"}, "unpublished"),
        ({"precision": "nvfp4"}, "4-bit"),
        ({"model": "Nemotron_3_Super"}, "cannot be expressed"),
        ({"layers": ""}, "dimensions"),
        ({"micro_batch": ""}, "microbatch"),
        ({"global_batch": ""}, "global batch"),
        ({"n_devices": ""}, "number of devices"),
        ({"global_batch": "1000"}, "no multiple"),
        ({"source": "Container; LoRA Performance"}, "low-rank"),
    ],
)
def test_what_cannot_be_expressed_says_why(changes: dict[str, str], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        setup_of(replace(GPT_18B, **changes))


@pytest.mark.parametrize(
    ("sharding", "pp", "expected"),
    [
        ("zero1?", "1", "optimizer"),
        ("fsdp2(zero3)", "1", "full"),
        ("fsdp-SHARD_GRAD_OP", "1", "gradients"),
        ("zero2", "8", "optimizer"),
        ("none", "1", "none"),
    ],
)
def test_sharding_is_read(sharding: str, pp: str, expected: str) -> None:
    assert sharding_of(replace(COMMON, sharding=sharding, pp=pp)) == expected


@pytest.mark.parametrize(("device", "precision"), [("A100-SXM-80GB", "tf32"), ("RTX-2080", "fp32")])
def test_mixed_single_precision_means_tf32_where_devices_have_it(device: str, precision: str) -> None:
    run = replace(COMMON, device=device, n_devices="8", precision="fp32?/amp")
    assert precision_of(run, cluster_of(run)) == precision
