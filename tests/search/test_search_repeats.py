"""The same question gets the same plan, byte for byte; an interrupted or stopped search leaves a readable plan."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hetplan.catalog.load import load_cluster, load_model
from hetplan.costs.prices import price
from hetplan.plan.check import check
from hetplan.plan.limits import Limits
from hetplan.plan.read_plan import read_plan
from hetplan.search.book import Book
from hetplan.search.records import SearchRequest
from hetplan.search.solve import search
from hetplan.specs.workload import Workload

ROOT = Path(__file__).parents[2]
SPECS = ROOT / "cluster_specs"
SMALL = ("a800-4090-3090.yaml", "llama-2-13b", "--global-batch", "24", "--seq-len", "4096")
LARGE = ("two-generation-lab.yaml", "llama-3.1-8b", "--global-batch", "64", "--seq-len", "4096")
MIXED = ("mixed-workstation.yaml", "gpt2", "--global-batch", "32", "--seq-len", "1024", "--precision", "fp16")


def command(words, out, *more):
    cluster, *rest = words
    return [sys.executable, "-m", "hetplan", "search", str(SPECS / cluster), *rest, "-o", str(out), *more]


def run(words, out, *more, **environment):
    done = subprocess.run(
        command(words, out, *more),
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=120,
        cwd=ROOT,
        check=False,
    )
    assert "Traceback" not in done.stderr
    return done


@pytest.mark.parametrize("words", [SMALL, LARGE, MIXED], ids=lambda words: words[0])
def test_plans_are_the_same_bytes_whatever_the_hash_seed_and_the_threads(tmp_path, words):
    effort = ("--effort", "0.3", "--no-compare")
    plans = []
    for number, (seed, threads) in enumerate([("0", "1"), ("4242", "4")]):
        out = tmp_path / f"{number}.yaml"
        threads = {"OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads}
        assert run(words, out, *effort, PYTHONHASHSEED=seed, **threads).returncode == 0
        plans.append(out.read_bytes())
    assert plans[0] == plans[1]


def test_a_search_that_effort_cuts_short_repeats_itself(tmp_path):
    plans = []
    for seed in ("0", "77"):
        out = tmp_path / f"{seed}.yaml"
        done = run(LARGE, out, "--effort", "0.01", "--no-compare", PYTHONHASHSEED=seed)
        assert done.returncode == 0, done.stderr
        plans.append(out.read_bytes())
    assert plans[0] == plans[1]


INTERRUPT = """
import os, signal
from hetplan.search.book import Book
tell = Book.tell
def tell_then_interrupt(book):
    tell(book)
    if book.best is not None or NOW:
        os.kill(os.getpid(), signal.SIGINT)
Book.tell = tell_then_interrupt
from hetplan.cli.start import main
main()
"""


def interrupted(words, out, *, at_once):
    """Run a search that receives an interrupt as soon as it has a plan, or as soon as it begins."""
    script = INTERRUPT.replace("NOW", str(at_once))
    arguments = command(words, out, "--no-compare")[3:]
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=120, check=False
    )


def test_an_interrupted_search_writes_the_best_plan_so_far(tmp_path):
    out = tmp_path / "plan.yaml"
    done = interrupted(LARGE, out, at_once=False)
    assert (done.returncode, "Traceback" in done.stderr) == (130, False)
    plan = read_plan(out)
    assert plan.proof is not None
    assert plan.proof.status == "interrupted"
    assert plan.layout.num_samples == 64
    assert [path.name for path in tmp_path.iterdir()] == ["plan.yaml"]


def test_a_search_interrupted_before_it_has_a_plan_writes_nothing(tmp_path):
    done = interrupted(LARGE, tmp_path / "plan.yaml", at_once=True)
    assert (done.returncode, "Traceback" in done.stderr) == (130, False)
    assert list(tmp_path.iterdir()) == []


def test_a_time_limit_that_passes_before_any_plan_is_an_error(tmp_path):
    done = run(LARGE, tmp_path / "plan.yaml", "--time-limit", "0.001")
    assert done.returncode == 5
    assert "time limit" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_plan_that_a_time_limit_cut_short_says_so(monkeypatch):
    cluster = load_cluster(str(SPECS / LARGE[0]))[0]
    model = load_model(LARGE[1])[0]
    prices = price(cluster, model, Workload(seq_len=4096, global_batch=64))
    monkeypatch.setattr(Book, "elapsed_s", property(lambda book: 0.0 if book.best is None else 61.0))
    result = search(prices, SearchRequest(time_limit_s=60.0))
    assert result.proof.status == "limit"
    assert 0 <= result.proof.bound <= result.proof.value
    assert check(result.best.layout, prices, Limits()) == ()
