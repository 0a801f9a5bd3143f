"""What is emitted for a trainer reads back as the plan it was made from."""

from emit_samples import cluster, files, group, job, layout, replica, stage
from test_emit_golden import CASES

from hetplan.specs.importers.facts import SourceText
from hetplan.specs.importers.layout_settings import Pipeline, read_settings


def settings(work, engine, launcher="torchrun", *, name="common.sh"):
    return read_settings(SourceText(name=name, text=files(work, engine, launcher)[name]))


def test_megatron_options_read_back():
    found = settings(*CASES["megatron-slurm"])
    assert (found.trainer, found.tp, found.pp, found.num_layers) == ("megatron", 2, 2, 16)
    assert (found.first_layers, found.last_layers, found.layout) == (11, None, None)
    assert (found.micro_batch, found.global_batch, found.seq_len, found.sharding) == (1, 16, 4096, "optimizer")


def test_a_megatron_layout_string_reads_back():
    a100 = group("a100", "A100-SXM4-80GB", 1, 4)
    edges = ((0, 3), (3, 6), (6, 12), (12, 18))
    plan = layout(replica(*(stage("a100", first, end, recompute="full") for first, end in edges)))
    found = settings(job(cluster(a100), plan), "megatron")
    assert found.layout == "Et*2|t*3|t*6|t*5L" and found.recompute == "full"


def test_flagscale_meshes_read_back():
    found = settings(*CASES["flagscale"], name="train-hetero.yaml")
    assert found.meshes == (8, 1, 1, 1, 1, 4, 1, 1, 2, 1)
    assert found.stage_layers == (23, 9)
    assert (found.micro_batch, found.global_batch) == (2, 8)


def test_hexiscale_lists_read_back():
    found = settings(*CASES["hexiscale"])
    like = Pipeline(tp=(2, 1), layers=(23, 9), num_samples=6, num_microbatches=6)
    assert found.pipelines == (like, like, Pipeline(tp=(2, 2), layers=(17, 15), num_samples=4, num_microbatches=2))
