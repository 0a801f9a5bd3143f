"""The `hetplan` command: one file a command, one place where errors become a line on stderr and an exit code."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

import hetplan
from hetplan.cli import (
    calibrate,
    catalog,
    check,
    data,
    diff,
    emit,
    env,
    estimate,
    explain,
    fit,
    import_,
    profile,
    replan,
    report,
    search,
    simulate,
    size,
    sweep,
)
from hetplan.cli import run as run_command
from hetplan.cli.output import complain, remark, show
from hetplan.cli.start import INTERRUPTED, was_interrupted
from hetplan.errors import HetplanError

INTERNAL_ERROR = 1
app = typer.Typer(
    name="hetplan",
    help="Plan parallel training of large models on clusters whose parts differ.",
    epilog="Exit codes: 0 ok; 1 internal error; 2 usage or bad file; 3 infeasible; 4 check failed; "
    "5 effort spent and no plan found; 6 a running job failed; 130 interrupted.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    search.search,
    estimate.estimate,
    explain.explain,
    check.check,
    diff.diff,
    replan.replan,
    simulate.simulate,
    report.report,
    emit.emit,
    size.size,
    sweep.sweep,
    fit.fit,
    calibrate.calibrate,
    data.data,
    profile.profile,
    run_command.run,
    catalog.catalog,
    env.env,
):
    app.command()(command)
app.command("import")(import_.import_)


def _show_version(asked: bool) -> None:
    if asked:
        show(f"hetplan {hetplan.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Plan parallel training of large models on clusters whose parts differ."""


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code."""
    debug = "--debug" in arguments
    try:
        words = [word for word in arguments if word != "--debug"]
        code = app(args=words or ["--help"], prog_name="hetplan", standalone_mode=False)
    except HetplanError as error:
        _trace(shown=debug)
        complain(error)
        return error.exit_code
    except typer.TyperException as error:
        _trace(shown=debug)
        complain(_usage_text(error))
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the last line of defence: nobody gets a traceback unasked
        if not was_interrupted():
            return _defect(error, debug=debug)
        code = INTERRUPTED
    if code == INTERRUPTED:
        complain("interrupted")
    return code if isinstance(code, int) else 0


def _usage_text(error: typer.TyperException) -> str:
    """Return what is wrong with the command line, and where it is explained."""
    context = getattr(error, "ctx", None)
    message = error.format_message().replace("Value error, ", "").rstrip(".")
    return f"{message}; see `{context.command_path} --help`" if context is not None else message


def _trace(*, shown: bool) -> None:
    if shown:
        remark(traceback.format_exc().rstrip())


def _defect(error: Exception, *, debug: bool) -> int:
    _trace(shown=debug)
    complain(
        f"internal error ({type(error).__name__}: {error}); this is a defect of hetplan: "
        "please report it with the output of the same command and --debug"
    )
    return INTERNAL_ERROR
