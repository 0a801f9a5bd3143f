"""`hetplan import`: what other tools print and store, as cluster, model, calibration or plan files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetplan.cli.import_layers import KINDS as LAYER_KINDS
from hetplan.cli.import_layers import layer_text
from hetplan.cli.options import CalibrationFile, GlobalBatch, SeqLen, one_of
from hetplan.errors import HetplanError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hetplan.cli.inputs import WorkloadWords
    from hetplan.specs.cluster import Network, NetworkKind
    from hetplan.specs.importers.facts import Catalog, Facts
    from hetplan.specs.importers.kubernetes import LabelKeys
    from hetplan.specs.importers.layout_settings import LayoutSettings
    from hetplan.specs.importers.merge import Draft

KINDS = ("cluster", "model", "calibration", "plan", "here", *LAYER_KINDS)


def import_(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="KIND",
            show_default=False,
            help="What to make: cluster, model, calibration or plan; here: a cluster file of this machine; "
            "layer-times, layer-model: a calibration or model of measured layers. "
            "The name of a format (`hetplan import formats` lists them) reads all files as that format.",
        ),
    ],
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[GROUP=]FILE...", show_default=False, help="What tools printed; one group's with GROUP=."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", metavar="FILE", help="Write it here.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the cluster or model.")] = None,
    device: Annotated[
        str | None, typer.Option("--device", metavar="NAME", help="The device, where the files do not say which.")
    ] = None,
    nodes: Annotated[
        str | None, typer.Option("--nodes", metavar="LIST|N", help="Names of the nodes; their number for calibration.")
    ] = None,
    site_label: Annotated[
        list[str] | None, typer.Option("--site-label", metavar="KEY", help="Kubernetes label of a node's site.")
    ] = None,
    domain_label: Annotated[
        list[str] | None, typer.Option("--domain-label", metavar="KEY", help="Label of its fast-link domain.")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", metavar="CLUSTER", help="Calibration, plan: where it was measured or runs."),
    ] = None,
    network: Annotated[
        str | None, typer.Option("--network", metavar="NAME", help="Calibration: the network that was measured.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", metavar="MODEL", help="Plan: the model.")] = None,
    groups: Annotated[
        str | None, typer.Option("--groups", metavar="LIST", help="Plan: groups of the meshes or stages, in order.")
    ] = None,
    global_batch: GlobalBatch = None,
    seq_len: SeqLen = None,
    calibration: CalibrationFile = None,
    where: Annotated[
        list[str] | None, typer.Option("--where", metavar="COLUMN=VALUE", help="Layers: only rows of that value.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Layers: what the files do not say; see the README."),
    ] = None,
) -> None:
    """Read what other tools print; what they leave open is marked `# QUESTION:`."""
    from hetplan.cli.output import require_writable

    require_writable(out)
    paths = files or []
    if kind == "formats":
        _show_formats()
        return
    if kind == "here":
        text = _here(device, name)
    elif not paths:
        raise UsageError(f"hetplan import {kind} needs at least one file")
    elif kind in LAYER_KINDS:
        text = layer_text(kind, paths, (where or (), settings or ()), (name, device), seq_len)
    elif kind == "model":
        text = _model(paths, name)
    elif kind == "calibration":
        text = _calibration(paths, (cluster, network), device, nodes)
    elif kind == "plan":
        from hetplan.cli.inputs import WorkloadWords

        words = WorkloadWords(global_batch=global_batch, seq_len=seq_len)
        text = _plan(paths, (cluster, model), words, calibration, groups)
    else:
        text = _cluster(
            kind, paths, _keys(site_label, domain_label), (device, nodes), name or (out.stem if out else None)
        )
    _deliver(text, out)


def _deliver(text: str, out: Path | None) -> None:
    from hetplan.cli.output import remark, show, write_whole

    if out is None:
        show(text)
    else:
        write_whole(out, text)
    num = text.count("# QUESTION: ")
    if num:
        remark(f"note: {num} {'questions are' if num > 1 else 'question is'} left open, marked '# QUESTION:'")


def _show_formats() -> None:
    from hetplan.cli.output import show
    from hetplan.specs.importers.detect import CLUSTER_FORMATS

    width = max(map(len, CLUSTER_FORMATS))
    lines = [f"{name:<{width}}  {one.what}" for name, one in CLUSTER_FORMATS.items()]
    show("\n".join(["Formats that describe nodes, told from a file's content:", *lines]))


def _catalog() -> Catalog:
    from hetplan.catalog.devices import device_names, find_device
    from hetplan.catalog.networks import find_link, link_names
    from hetplan.specs.importers.facts import Catalog

    def latency_of(kind: NetworkKind, bytes_per_s: float) -> tuple[float, str] | None:
        links = [find_link(name) for name in link_names()]
        return next(
            (
                (link.latency_s, link.name)
                for link in links
                if link.family == kind and abs(link.bandwidth_bytes_per_s - bytes_per_s) < 0.01 * bytes_per_s
            ),
            None,
        )

    return Catalog(
        find_device=find_device, devices=tuple(find_device(name) for name in device_names()), latency_of=latency_of
    )


def _keys(site: Sequence[str] | None, domain: Sequence[str] | None) -> LabelKeys:
    from hetplan.specs.importers.kubernetes import DEFAULT_KEYS

    keys = replace(DEFAULT_KEYS, site=tuple(site)) if site else DEFAULT_KEYS
    return replace(keys, domain=tuple(domain)) if domain else keys


def _cluster(
    kind: str, paths: Sequence[str], keys: LabelKeys, answers: tuple[str | None, str | None], name: str | None
) -> str:
    """Return the cluster file of some files.

    Raises:
        SpecError: a file is damaged or of no known format.
        UsageError: two files disagree, or there is no such kind or format.
    """
    from hetplan.specs.importers.detect import CLUSTER_FORMATS
    from hetplan.specs.importers.merge import merge

    form = None if kind == "cluster" else one_of(kind, "KIND", [*KINDS, "formats", *CLUSTER_FORMATS])
    catalog = _catalog()
    draft = merge([_facts(path, form, keys) for path in paths], catalog)
    return _drafted(_answered(draft, catalog, answers), catalog, name)


def _facts(path: str, form: str | None, keys: LabelKeys) -> Facts:
    """Return what `[GROUP=]FILE` says."""
    from hetplan.specs.importers.detect import read_facts
    from hetplan.specs.importers.facts import read_source
    from hetplan.specs.importers.merge import tagged

    group, equals, rest = path.partition("=")
    if not equals or "/" in group or Path(path).exists():
        return read_facts(read_source(Path(path)), form, keys)
    return tagged(read_facts(read_source(Path(rest)), form, keys), group)


def _answered(draft: Draft, catalog: Catalog, answers: tuple[str | None, str | None]) -> Draft:
    """Return a draft with what the command line says of the device and the nodes, where the files do not.

    Raises:
        UsageError: the answer suits no group, or several.
    """
    from hetplan.specs.hostlist import expand_hostlist
    from hetplan.specs.importers.facts import Cards

    device, nodes = answers
    groups = list(draft.groups)
    if device is not None:
        name = catalog.find_device(device).name
        unknown = [g for g in groups if g.cards is not None and catalog.device(g.cards.product) is None]
        if not unknown:
            raise UsageError(f"--device {device}: the files already say which device each group has, or not how many")
        groups = [
            replace(g, cards=replace(g.cards, product=name)) if g in unknown and isinstance(g.cards, Cards) else g
            for g in groups
        ]
    if nodes is not None:
        open_ = [g for g in groups if not g.nodes]
        if len(open_) != 1:
            raise UsageError(f"--nodes {nodes}: {len(open_)} groups have nodes without names; it can answer for one")
        names = expand_hostlist(nodes)
        if open_[0].is_counted and len(names) != open_[0].num_nodes:
            raise UsageError(f"--nodes names {len(names)} nodes, the files count {open_[0].num_nodes}")
        seen = tuple(open_[0].sheet.source.split(", ")) if not open_[0].is_counted and len(names) > 1 else ()
        groups = [
            replace(g, nodes=names, num_nodes=len(names), is_counted=True, looked_at=seen) if g is open_[0] else g
            for g in groups
        ]
    return replace(draft, groups=tuple(groups))


def _drafted(draft: Draft, catalog: Catalog, name: str | None) -> str:
    """Return the text of a draft; a remark says when it cannot be planned with before it is answered."""
    from hetplan.catalog.devices import find_device
    from hetplan.cli.output import remark
    from hetplan.specs.importers.cluster_text import cluster_text
    from hetplan.specs.read_cluster import cluster_from_text

    written = cluster_text(draft, catalog, name or draft.name or "imported")
    try:
        cluster_from_text(written.text, "the file", find_device)
    except HetplanError as error:
        remark(f"note: it cannot be planned with yet: {error}")
    return written.text


def _here(device: str | None, name: str | None) -> str:
    """Return the cluster file of this machine."""
    from hetplan.cli.here import look_here
    from hetplan.cli.output import remark
    from hetplan.specs.importers.merge import merge

    found = look_here()
    for text in found.remarks:
        remark(f"note: {text}")
    catalog = _catalog()
    draft = _answered(merge(found.facts, catalog), catalog, (device, None))
    return _drafted(replace(draft, remarks=(*draft.remarks, *found.remarks)), catalog, name or "here")


def _model(paths: Sequence[str], name: str | None) -> str:
    """Return a model file that holds a Hugging Face configuration.

    Raises:
        SpecError: the file is no configuration of a known family.
    """
    from hetplan.catalog.models import find_model_config
    from hetplan.specs.decode import document_from_text
    from hetplan.specs.importers.facts import read_source
    from hetplan.specs.importers.settings_text import model_text
    from hetplan.specs.read_model import model_from_text

    if len(paths) != 1:
        raise UsageError(f"a model has one configuration, {len(paths)} files are given")
    path = Path(paths[0])
    source = read_source(path)
    fields = document_from_text(source.text, source.name, "")
    if fields.has("hetplan"):
        raise fields.error("this is a hetplan file already", "hetplan")
    model = model_from_text(source.text, path, find_model_config)
    text = model_text(name or model.name, fields.raw_mapping(), source.name)
    model_from_text(text, path.with_suffix(".yaml"), find_model_config)
    return text


def _calibration(
    paths: Sequence[str], where: tuple[str | None, str | None], device: str | None, nodes: str | None
) -> str:
    """Return the calibration some measurements of links give.

    Raises:
        SpecError: a file is damaged, or no measurement of links.
        UsageError: the network or device is not known.
    """
    from hetplan.cli.options import parse_counts
    from hetplan.specs.importers.facts import read_source
    from hetplan.specs.importers.link_calibration import Nominal, link_calibration
    from hetplan.specs.importers.nccl_tests import CollectiveLog, read_group_bandwidths, read_log

    sources = [read_source(Path(path)) for path in paths]
    measured = [read_group_bandwidths(s) if s.text.lstrip().startswith("{") else read_log(s) for s in sources]
    products = {product for one in measured if isinstance(one, CollectiveLog) for product in one.products}
    counts = parse_counts(nodes, "--nodes")
    if counts is not None and len(counts) != 1:
        raise UsageError(f"--nodes: expected the number of nodes that took part, found {nodes}")
    product = device or (products.pop() if len(products) == 1 else None)
    catalog = _catalog()
    nominal = Nominal(
        device=catalog.find_device(product) if product else None,
        network=_network(*where),
        num_nodes=counts[0] if counts else None,
    )
    return link_calibration(measured, nominal).text


def _network(cluster: str | None, name: str | None) -> Network | None:
    from hetplan.catalog.load import load_cluster

    if cluster is None:
        if name is not None:
            raise UsageError("--network needs --cluster, which says what the network is sold as")
        return None
    networks = {network.name: network for network in load_cluster(cluster)[0].networks}
    if name is None and len(networks) != 1:
        raise UsageError(f"--network: which of {', '.join(networks) or 'no networks'} was measured?")
    return networks[one_of(name, "--network", list(networks)) if name is not None else next(iter(networks))]


def _plan(
    paths: Sequence[str],
    inputs: tuple[str | None, str | None],
    words: WorkloadWords,
    calibration: Path | None,
    groups: str | None,
) -> str:
    """Return the plan, or the settings of a layout where cluster and model are not given.

    Raises:
        SpecError: the file decides no layout.
        UsageError: the settings contradict themselves, the model or the cluster.
    """
    from hetplan.plan.imported import stage_counts, virtual_stages
    from hetplan.specs.importers.facts import read_source
    from hetplan.specs.importers.layout_settings import read_settings
    from hetplan.specs.importers.settings_text import settings_text

    if len(paths) != 1:
        raise UsageError(f"a plan has one file of settings, {len(paths)} are given")
    settings = read_settings(read_source(Path(paths[0])))
    cluster, model = inputs
    if (cluster is None) != (model is None):
        raise UsageError("a plan needs both --cluster and --model")
    if cluster is None or model is None:
        return settings_text(settings, stage_counts(settings), virtual_stages(settings))
    batch = settings.global_batch if settings.global_batch and settings.global_batch > 0 else None
    words = replace(words, global_batch=words.global_batch or batch, seq_len=words.seq_len or settings.seq_len)
    return _made_plan(settings, (cluster, model), words, calibration, tuple(groups.split(",")) if groups else None)


def _made_plan(
    settings: LayoutSettings,
    inputs: tuple[str, str],
    words: WorkloadWords,
    calibration: Path | None,
    groups: tuple[str, ...] | None,
) -> str:
    from hetplan.cli.inputs import load_job, plan_of
    from hetplan.cli.output import remark
    from hetplan.plan.check import check
    from hetplan.plan.estimate import estimate
    from hetplan.plan.imported import imported_grid, mesh_groups, uneven_layout
    from hetplan.plan.layouts import grid_layout
    from hetplan.plan.limits import ENGINES
    from hetplan.plan.text import plan_text
    from hetplan.specs.importers.settings_text import device_names_of

    job = load_job(*inputs, words, calibration, is_used=lambda name: name in (groups or (name,)))
    prices = job.prices
    devices = {group.name: group.device.name for group in job.cluster.groups}
    if settings.pipelines or settings.meshes:
        own = groups or (mesh_groups(settings, device_names_of(_catalog(), devices)) if settings.meshes else ())
        if not own:
            raise UsageError(f"--groups: on which group does each stage run? There are {', '.join(devices)}")
        layout = uneven_layout(settings, prices, own)
    else:
        num_layers = sum(layer.kind == "decoder" for layer in job.model.chain)
        layout = grid_layout(prices, imported_grid(settings, num_layers, groups))
    stages = [stage for replica in layout.replicas for stage in replica.stages]
    limits = replace(
        ENGINES["hetplan"],
        cp=tuple({stage.cp for stage in stages}),
        stage_dp=tuple({stage.dp for stage in stages}),
        schedules=(layout.schedule,),
        tp_within_node=False,
    )
    violations = check(layout, prices, limits)
    senseless = [violation for violation in violations if violation.unpriceable]
    if senseless:
        raise UsageError(f"{settings.source}: {senseless[0]}")
    for violation in violations:
        remark(f"note: the plan breaks a rule: {violation}")
    return plan_text(plan_of(job, layout, estimate(layout, prices), None))
