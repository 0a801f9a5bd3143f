"""`hetplan profile`: a calibration measured on the machines at hand."""

from __future__ import annotations

import os
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hetplan.cli.options import JsonFlag, Quiet, parse_counts
from hetplan.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hetplan.profiling.agenda import Progress
    from hetplan.profiling.place import Place
    from hetplan.profiling.records import Survey
    from hetplan.profiling.survey import Request
    from hetplan.specs.cluster import Cluster, Device, Precision
    from hetplan.specs.model import Model

DEFAULT_SEQ_LEN = 1024


def profile(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="The model to plan: its own layers are measured.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="FILE", help="Write the calibration there.")
    ] = None,
    cluster_out: Annotated[
        Path | None,
        typer.Option("--cluster-out", metavar="FILE", help="Write a cluster file of the machines measured there."),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster", metavar="FILE", help="Cluster YAML whose groups (by host name) and networks these are."
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few shapes and short rounds: under a minute.")] = False,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option("--device", help="What to measure; cuda: ROCm as well.")
    ] = "auto",
    name: Annotated[
        str | None,
        typer.Option(
            "--name", metavar="NAME", help="Call the device so.  [default: the catalog's or the driver's name]"
        ),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", metavar="N", min=1, help="Processes to start here.  [default: GPUs, or up to 4 cores]"),
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", metavar="N", min=1, help="CPU threads of a rank.  [default: its share]")
    ] = None,
    seq_len: Annotated[
        int | None,
        typer.Option("--seq-len", metavar="S", min=1, help="Tokens a sample.  [default: the model's, at most 1024]"),
    ] = None,
    micro_batch: Annotated[str, typer.Option("--micro-batch", metavar="LIST", help="Microbatches.")] = "1,2,4,8",
    tp: Annotated[str, typer.Option("--tp", metavar="LIST", help="Tensor-parallel degrees.")] = "1,2",
    precision: Annotated[
        Literal["auto", "fp32", "bf16", "fp16", "tf32"],
        typer.Option("--precision", help="Of products and layers; auto: bf16 on GPUs, fp32 on CPUs."),
    ] = "auto",
    no_sequence_parallel: Annotated[
        bool, typer.Option("--no-sequence-parallel", help="Measure tp without sequence parallelism.")
    ] = False,
    speed: Annotated[
        float,
        typer.Option("--speed", metavar="X", min=0.01, max=1.0, help="This rank runs slowed to a share of its core."),
    ] = 1.0,
    merge: Annotated[
        list[Path] | None,
        typer.Option("--merge", metavar="FILE", help="Measure nothing: merge calibrations of several hosts; repeat."),
    ] = None,
    as_json: JsonFlag = False,
    quiet: Quiet = False,
) -> None:
    """Measure devices, whole layers of a model, and the links between ranks.

    Starts its own ranks on this machine; under torchrun or srun each rank calls the same command and the first writes.
    A device nothing is known of is defined by what was measured; --cluster-out writes it down with the machines.
    """
    from hetplan.cli.output import require_writable

    require_writable(out)
    require_writable(cluster_out)
    if merge:
        _merge(merge, out)
        return
    _require_torch()
    from hetplan.profiling.place import place_of

    place = place_of(os.environ)
    wishes = {
        "seq_len": seq_len,
        "samples": parse_counts(micro_batch, "--micro-batch"),
        "tps": parse_counts(tp, "--tp"),
        "precision": precision,
        "quick": quick,
        "sequence_parallel": not no_sequence_parallel,
    }
    setting = _Setting(cluster, model)
    request = setting.request(device, name, wishes, speed)
    survey = _survey(place, request, ranks, threads, quiet)
    if place is None or place.rank == 0:
        _report(survey, setting, out, cluster_out, as_json)


def _require_torch() -> None:
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise UsageError("measuring needs torch; install hetplan[torch], or the torch that fits your GPU")


class _Setting:
    """The files the user named."""

    def __init__(self, cluster: str | None, model: str | None) -> None:
        from hetplan.catalog.load import load_cluster, load_model

        self.cluster: Cluster | None = load_cluster(cluster)[0] if cluster else None
        self.model: Model | None = load_model(model)[0] if model else None

    def group_of(self, host: str) -> str | None:
        """Return the cluster file's group of a host.

        Raises:
            UsageError: the cluster file has no such host.
        """
        if self.cluster is None:
            return None
        for group in self.cluster.groups:
            if host in group.nodes:
                return group.name
        known = ", ".join(group.nodes[0] for group in self.cluster.groups)
        raise UsageError(f"cluster {self.cluster.name} has no node {host!r} (it has {known} ...)")

    def request(
        self, device: Literal["auto", "cpu", "cuda"], name: str | None, wishes: Mapping[str, object], speed: float
    ) -> Request:
        """Return what to measure on this host."""
        import socket
        from typing import Any, cast

        from hetplan.profiling.machine import torch_device
        from hetplan.profiling.shapes import Wish
        from hetplan.profiling.survey import Request

        group = self.group_of(socket.gethostname())
        if group is not None and self.cluster is not None and name is None:
            name = self.cluster.group(group).device.name
        given = cast(dict[str, Any], dict(wishes))
        on_cpu = torch_device(device, 0) == "cpu"
        precision = given.pop("precision")
        longest = (self.model.max_seq_len if self.model else None) or DEFAULT_SEQ_LEN
        given["seq_len"] = given["seq_len"] or min(longest, DEFAULT_SEQ_LEN)
        chosen: Precision = precision if precision != "auto" else "fp32" if on_cpu else "bf16"
        return Request(
            device=device,
            name=name,
            wish=Wish(precisions=(chosen,), **given),
            model=self.model,
            group=group,
            speed=speed,
        )


def _survey(place: Place | None, request: Request, ranks: int | None, threads: int | None, quiet: bool) -> Survey:
    from hetplan.profiling.machine import num_devices
    from hetplan.profiling.start import survey_as_rank, survey_here

    line = _Line(drawn=not quiet and sys.stderr.isatty() and os.environ.get("TERM") != "dumb")
    try:
        if place is not None:
            return survey_as_rank(place, request, threads, line)
        return survey_here(ranks or num_devices(request.device), request, threads, line)
    finally:
        line.wipe()


class _Line:
    """One line on stderr that says what is measured and how long it still takes."""

    def __init__(self, *, drawn: bool) -> None:
        self._drawn, self._width = drawn, 0

    def __call__(self, progress: Progress) -> None:
        """Draw where the measurements stand."""
        if not self._drawn:
            return
        left = f", {progress.left_s:.0f} s left" if progress.left_s is not None else ""
        text = f"{100 * progress.done:3.0f} %  {progress.name}{left}"[:79]
        sys.stderr.write("\r" + text.ljust(self._width))
        sys.stderr.flush()
        self._width = max(self._width, len(text))

    def wipe(self) -> None:
        """Leave an empty line."""
        if self._width:
            sys.stderr.write("\r" + " " * self._width + "\r")
            sys.stderr.flush()


def _report(survey: Survey, setting: _Setting, out: Path | None, cluster_out: Path | None, as_json: bool) -> None:
    from hetplan.cli.output import show, show_json, write_whole
    from hetplan.profiling.express import Known, calibration_of
    from hetplan.profiling.here import cluster_text
    from hetplan.profiling.network_figures import Networks
    from hetplan.profiling.story import document, story
    from hetplan.specs.read_calibration import calibration_text

    networks = Networks(
        cluster=setting.cluster,
        group_of={r.machine.host: setting.group_of(r.machine.host) or "" for r in survey.ranks},
    )
    known = Known(devices=_known_devices(survey, setting), networks=networks, provenance=_provenance(survey))
    calibration, devices = calibration_of(survey, setting.model, known)
    text = calibration_text(calibration)
    if cluster_out is not None:
        new = {name: device for name, device in devices.items() if name not in known.devices}
        write_whole(cluster_out, cluster_text(survey, new, "here"))
    if out is not None:
        write_whole(out, text)
    if as_json:
        show_json(document(survey, text))
    elif out is None:
        show(text)
    else:
        written = [str(path) for path in (out, cluster_out) if path is not None]
        show(f"{story(survey, calibration, devices)}\n\nwritten: {', '.join(written)}")


def _known_devices(survey: Survey, setting: _Setting) -> dict[str, Device]:
    """Return the nominal figures of devices the cluster file or the catalog knows."""
    from hetplan.catalog.devices import find_device
    from hetplan.errors import HetplanError

    found: dict[str, Device] = {}
    if setting.cluster is not None:
        found = {group.device.name: group.device for group in setting.cluster.groups}
    for name in {report.machine.device for report in survey.ranks} - found.keys():
        try:
            found[name] = find_device(name)
        except HetplanError:
            continue
    return found


def _provenance(survey: Survey) -> dict[str, str]:
    from hetplan.profiling.network_figures import sharing_notes
    from hetplan.profiling.story import spread_note

    first = survey.ranks[0].machine
    hosts = list(dict.fromkeys(report.machine.host for report in survey.ranks))
    notes = sharing_notes(survey)
    found = {
        "command": shlex.join(["hetplan", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "software": first.software,
        "driver": first.driver,
        "hosts": ", ".join(hosts),
        "ranks": str(len(survey.ranks)),
        "spread": spread_note(survey),
    }
    return {**found, **({"sharing": "; ".join(notes)} if notes else {})}


def _merge(paths: list[Path], out: Path | None) -> None:
    from hetplan.catalog.load import load_calibration
    from hetplan.cli.output import show, write_whole
    from hetplan.profiling.merge import merged
    from hetplan.specs.read_calibration import calibration_text

    text = calibration_text(merged([(path.name, load_calibration(path)[0]) for path in paths]))
    if out is None:
        show(text)
        return
    write_whole(out, text)
    show(f"{len(paths)} calibrations merged; written: {out}")
