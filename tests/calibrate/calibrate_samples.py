"""Rows of published tables, restated: Narayanan 2021, arXiv:2104.04473, Table 1 (Megatron-LM on DGX A100)."""

from __future__ import annotations

from dataclasses import replace

from hetplan.calibrate.runs import Run

COMMON = Run(
    stratum="megatron-2021",
    kind="time",
    year="2021",
    vocab="51200",
    seq="2048",
    device="A100-SXM-80GB",
    devices_per_node="8",
    inter_net="8x HDR IB 200Gb/s",
    cp="1",
    ep="1",
    recompute="full",
    sharding="none",
    precision="fp16",
)


def table_row(
    name: str, shape: tuple[int, int, int], degrees: tuple[int, int, int, int], batch: tuple[int, int]
) -> Run:
    """One row: (layers, hidden, heads), (tp, pp, vpp, dp), (microbatch, global batch)."""
    layers, hidden, heads = shape
    tp, pp, vpp, dp = degrees
    return replace(
        COMMON,
        id=name,
        config_id=name,
        model=name,
        layers=str(layers),
        hidden=str(hidden),
        ffn=str(4 * hidden),
        heads=str(heads),
        kv_heads=str(heads),
        n_devices=str(tp * pp * dp),
        tp=str(tp),
        pp=str(pp),
        vpp=str(vpp),
        dp=str(dp),
        micro_batch=str(batch[0]),
        global_batch=str(batch[1]),
    )


GPT_18B = replace(table_row("GPT-18B", (40, 6144, 48), (8, 1, 1, 32), (8, 1024)), iter_time_s="9.399")
GPT_76B = replace(table_row("GPT-76B", (60, 10240, 80), (8, 4, 3, 32), (2, 1792)), iter_time_s="16.058")

SMALL = tuple(
    table_row(f"GPT-{hidden}-{tp}-{pp}-{micro}", (8, hidden, 16), (tp, pp, 1, 16 // (tp * pp)), (micro, 64))
    for hidden in (1024, 4096)
    for tp, pp in ((1, 1), (4, 2))
    for micro in (1, 4)
)
"""Made-up small runs, to be given times."""
