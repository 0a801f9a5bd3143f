"""`hetplan search` for a job of which only the traffic is known: its stages and replicas laid over single devices."""

from __future__ import annotations

from pathlib import Path

from hetplan.errors import UsageError


def states_volumes(model_name: str) -> bool:
    """Return whether a model file states traffic and nothing else."""
    from hetplan.catalog.load import load_model

    path = Path(model_name)
    return path.suffix in (".yaml", ".yml") and path.is_file() and load_model(model_name)[0].volumes is not None


def search_traffic(
    inputs: tuple[str, str], calibration: Path | None, out: Path | None, effort: float, *, as_json: bool
) -> None:
    """Find the best placement, write it and show it.

    Raises:
        InfeasibleError: the devices do not suffice, or do not reach each other.
    """
    from hetplan.catalog.load import load_calibration, load_cluster, load_model
    from hetplan.cli.output import show, show_json, write_whole
    from hetplan.report.placements import placement_document, placement_file, placement_text
    from hetplan.search.geo import search_volumes
    from hetplan.search.geo_network import pairs_of

    cluster, cluster_source = load_cluster(inputs[0])
    model, model_source = load_model(inputs[1])
    if model.volumes is None:
        raise UsageError(f"{inputs[1]} states no volumes")
    constants = load_calibration(calibration)[0] if calibration else None
    result = search_volumes(pairs_of(cluster, constants), model.volumes, effort)
    if out is not None:
        sources = ((each.name, each.sha256) for each in (cluster_source, model_source))
        write_whole(out, placement_file(result, *sources))
    if as_json:
        show_json(placement_document(result))
    else:
        show(placement_text(result, model.name, model.volumes))
