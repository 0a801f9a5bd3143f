"""`hetplan catalog`: what ships with hetplan, each number with its source."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hetplan.cli.options import JsonFlag

if TYPE_CHECKING:
    pass

Shelf = Literal["devices", "networks", "models", "calibrations"]


def catalog(
    shelf: Annotated[Shelf, typer.Argument(metavar="devices|networks|models|calibrations", show_default=False)],
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="One entry, with its sources.", show_default=False)
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """List what ships with hetplan, or show one entry."""
    from hetplan.cli.output import show, show_json

    document, text = _SHELVES[shelf](name)
    if as_json:
        show_json(document)
    else:
        show(text)


def _devices(name: str | None) -> tuple[dict[str, Any], str]:
    from hetplan.catalog.devices import device_names, find_device
    from hetplan.report.catalogs import device_document, device_table, device_text

    if name is not None:
        device = find_device(name)
        return device_document(device), device_text(device)
    devices = [find_device(entry) for entry in device_names()]
    return {"devices": [device_document(device) for device in devices]}, device_table(devices)


def _networks(name: str | None) -> tuple[dict[str, Any], str]:
    from hetplan.catalog.networks import find_link, link_names
    from hetplan.report.catalogs import link_document, link_table

    links = [find_link(name)] if name is not None else [find_link(entry) for entry in link_names()]
    documents = [link_document(link) for link in links]
    return ({"networks": documents} if name is None else documents[0]), link_table(links, sourced=name is not None)


def _calibrations(name: str | None) -> tuple[dict[str, Any], str]:
    from hetplan.catalog.load import calibration_names, calibration_text_of, load_calibration
    from hetplan.report.catalogs import calibration_document, calibration_table

    if name is not None:
        calibration, source = load_calibration(name)
        return calibration_document(source.name, calibration), calibration_text_of(name)
    known = {entry: load_calibration(entry)[0] for entry in calibration_names()}
    documents = [calibration_document(entry, calibration) for entry, calibration in known.items()]
    return {"calibrations": documents}, calibration_table(known)


def _models(name: str | None) -> tuple[dict[str, Any], str]:
    from hetplan.catalog.models import find_model, model_names
    from hetplan.report.catalogs import model_document, model_table, model_text

    if name is not None:
        model = find_model(name)
        return model_document(model), model_text(model)
    models = [find_model(entry) for entry in model_names()]
    return {"models": [model_document(model) for model in models]}, model_table(models)


_SHELVES = {"devices": _devices, "networks": _networks, "models": _models, "calibrations": _calibrations}
