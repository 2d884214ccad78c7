# The command `tollgate`. Each command imports what it needs when it runs: `tollgate dev` supervises a stack of
# processes and should weigh little itself.

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from datetime import date as Day
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from gateway.run.tuning import import_leanly, import_redis, put_off_collecting, spare_what_stays
from gateway.terminal.config_path import ConfigOption, find_config
from gateway.terminal.printing import Format, FormatOption, counted

if TYPE_CHECKING:
    from gateway.config.file import ConfigFaults
    from gateway.core.settings import Settings

# Commands that are imported when they are meant: each a name in a module.
COMMANDS = {name: (f"gateway.commands.{name}", "command") for name in ("teams", "keys", "owners", "batch", "usage")}
COMMANDS |= {name: (f"gateway.commands.{name}", "command") for name in ("calls", "explain")}
COMMANDS |= {"admin-keys": ("gateway.commands.keys", "admin_command")}
COMMANDS |= {name: ("gateway.remote.login", name) for name in ("login", "logout")}
COMMANDS |= {name: ("gateway.remote.views", name) for name in ("models", "breakers", "limits")}
COMMANDS |= {"ps": ("gateway.remote.views", "replicas"), "audit-log": ("gateway.remote.views", "audit_log")}
COMMANDS |= {"provider-keys": ("gateway.remote.provider_keys", "command")}
COMMANDS |= {"fleet": ("gateway.placing.command", "command")}
COMMANDS |= {"init": ("gateway.commands.init_config", "command")}
COMMANDS |= {"chat": ("gateway.remote.chat", "command"), "doctor": ("gateway.doctor.command", "command")}

OF_A_DEPLOYMENT = ("admin_keys", "database_url", "key_pepper", "redis_url")
FOR_DEV = "\nA file of sections alone is for `tollgate dev --config`: add --dev"


class Commands(TyperGroup):
    """All commands. What an option's type refuses is told with what would be right."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that is meant."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as exc:
            exc.message = _what_is_right(exc)
            raise


app = typer.Typer(
    name="tollgate", cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None
)
config_app = typer.Typer(no_args_is_help=True, help="The configuration file.")
app.add_typer(config_app, name="config")


def main() -> None:
    """Run the command line."""
    # Others import the database modules, or what asks over HTTP: they are left out where one of these is meant.
    words = sys.argv[1:] or os.environ.get("COMP_WORDS", "").split()[1:]  # as a shell asks what could follow
    if not (words and words[0] in {command.name for command in app.registered_commands}):
        put_off_collecting()
        import_leanly()
        add_commands(words[0] if words else None)
        spare_what_stays()
    app()


def _what_is_right(exc: typer.BadParameter) -> str:
    """Return what to say of an option or argument; typer has pydantic's words for numbers."""
    errors: Callable[[], list[dict[str, Any]]] = getattr(exc.__cause__, "errors", list)
    for fault in errors():
        found = fault["input"]
        match fault["type"]:
            case "int_parsing":
                return f"expected a whole number, found {found!r}"
            case "float_parsing":
                return f"expected a number, found {found!r}"
            case "greater_than_equal":
                return f"{fault['ctx']['ge']:g} is the least, found {found}"
            case "less_than_equal":
                return f"{fault['ctx']['le']:g} is the most, found {found}"
    return exc.message


def _say_version(is_asked: bool) -> None:
    if is_asked:
        from gateway.core.version import VERSION

        typer.echo(f"tollgate {VERSION}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version")
    ] = False,
) -> None:
    """One OpenAI-compatible endpoint for a company: quotas, routing, exact cost, and a GPU engine of its own."""


@app.command("dev")
def dev(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Where the gateway listens, on 127.0.0.1")] = 8000,
    data_dir: Annotated[Path, typer.Option(help="Where the stack keeps its data and its keys")] = Path(".tollgate"),
    config: Annotated[Path | None, typer.Option(help="Providers, models, … that join the demo model")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON when ready, nothing else")] = False,
) -> None:
    """Run everything on this machine: Postgres, Redis, the demo model, a worker and a gateway."""
    from gateway.dev.stack import run_stack

    raise typer.Exit(run_stack(port, data_dir, config, as_json))


@app.command("serve")
def serve(
    config: ConfigOption = None,
    host: Annotated[str, typer.Option(help="The address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    workers: Annotated[int, typer.Option(min=1, help="Processes that share the port")] = 1,
    fd: Annotated[int | None, typer.Option(hidden=True, help="A listening socket handed down by the parent")] = None,
) -> None:
    """Run the gateway. SIGTERM drains it, a second one ends it at once; SIGHUP has the file read again."""
    import socket

    from gateway.run import serving
    from protocol.serving.listening import open_socket

    put_off_collecting()
    path = find_config(config)
    _hold_hangups()
    settings = _load(path)
    try:
        listener = open_socket(host, port) if fd is None else socket.socket(fileno=fd)
    except OSError as exc:
        _fail(f"{host}:{port} cannot be had: {exc.strerror}")
    if fd is None:
        _check_schema(settings)
    if workers == 1:
        import_leanly()
        import_redis()
        raise typer.Exit(serving.serve(path, settings, listener, is_shared=fd is not None))
    raise typer.Exit(serving.serve_with_workers(path, listener, workers, settings))


@app.command("work")
def work(
    config: ConfigOption = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Batch requests at once")] = 16,
    check: Annotated[
        bool, typer.Option("--check", help="Only say, by the exit status, whether one is working")
    ] = False,
    metrics_port: Annotated[int | None, typer.Option(min=1, max=65535, help="Show metrics to Prometheus here")] = None,
    metrics_host: Annotated[str, typer.Option(help="The address to show them on")] = "127.0.0.1",
) -> None:
    """Run a worker: batch work, and the deployment's chores."""
    from gateway.run.heartbeat import is_working
    from protocol.serving.listening import open_socket

    put_off_collecting()
    path = find_config(config)
    _hold_hangups()
    settings = _load(path)
    if check:
        raise typer.Exit(int(not is_working(settings)))
    import_leanly()
    import_redis()
    from gateway.run.worker import run_worker

    _check_schema(settings)
    metrics_at = None if metrics_port is None else (metrics_host, metrics_port)
    if metrics_at is not None:
        try:
            open_socket(*metrics_at).close()
        except OSError as exc:
            _fail(f"{metrics_host}:{metrics_port} cannot be had: {exc.strerror}")
    raise typer.Exit(run_worker(path, settings, concurrency, metrics_at))


@app.command("migrate")
def migrate(
    config: ConfigOption = None,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for a database that starts")] = 0.0,
) -> None:
    """Bring the database's schema to this version."""
    settings = _load(find_config(config))
    from gateway.commands.migrate import IsNewer, IsUnreleased, TableInUse, migrate_when_reachable

    try:
        migrate_when_reachable(settings.database_url, wait)
    except IsNewer as exc:
        typer.echo(str(exc))
    except (IsUnreleased, TableInUse) as exc:
        _fail(str(exc))
    except OSError as exc:
        _fail(f"Postgres cannot be reached: {exc}")


@app.command("audit")
def audit(
    config: ConfigOption = None,
    date: Annotated[str | None, typer.Option(metavar="YYYY-MM-DD", help="A UTC day; else today and yesterday")] = None,
) -> None:
    """Compare ledger, daily sums, leases and balances; print where they differ and exit 1."""
    from gateway.commands.audit import run_audit

    try:
        day = None if date is None else Day.fromisoformat(date)
    except ValueError as exc:
        raise typer.BadParameter(f"--date is a UTC day such as 2026-04-05; found {date!r}") from exc
    raise typer.Exit(run_audit(_load(find_config(config), 4), day))  # 1 says that they differ


@app.command("journal")
def journal(
    files: Annotated[list[Path], typer.Argument(help="Quarantined or kept files of DATA_DIR/journal, by their names")],
) -> None:
    """Print the calls of quarantined or kept journal files: how each ended, a line of JSON a call."""
    from gateway.commands.journal import print_calls

    raise typer.Exit(print_calls(files))


@config_app.command("check")
def check_config(
    file: Annotated[Path, typer.Argument(help="tollgate.yaml")],
    dev: Annotated[bool, typer.Option("--dev", help="As `tollgate dev --config` reads it: any sections alone")] = False,
) -> None:
    """Say everything that is wrong with a configuration file, with lines, and exit 1; or that nothing is."""
    settings = _load_for_dev(file) if dev else _load(file, more=FOR_DEV)
    from gateway.config.offers import all_priced

    for one in settings.left_out:
        typer.echo(f"{file}: {one.line()}")
    for provider in settings.providers.values():
        if unpriced := all_priced(provider)[1]:
            typer.echo(f"{file}: provider {provider.name} is without models of no known price: {', '.join(unpriced)}")
    typer.echo(
        f"{file}: fine: {counted(len(settings.models), 'model')} at {counted(len(settings.providers), 'provider')}"
    )


@app.command("import")
def import_config(
    file: Annotated[Path, typer.Argument(help="LiteLLM's config.yaml, or Portkey's config as JSON")],
    out: Annotated[Path, typer.Option(help="The file to write; it must not be there yet")] = Path("tollgate.yaml"),
    name: Annotated[str, typer.Option(help="What callers ask for, where the file does not say: Portkey's")] = "default",
) -> None:
    """Write another gateway's configuration as tollgate.yaml, and say line by line what is not in it."""
    from gateway.commands.import_config import import_file

    raise typer.Exit(import_file(file, out, name))


@app.command("complexity")
def complexity() -> None:
    """Score requests: {"prompt"} or {"messages"} a line in, {"small_suffices": 0..1} a line out."""
    from gateway.scoring.score_lines import score_complexity

    raise typer.Exit(0 if score_complexity(sys.stdin, sys.stdout) else 1)


@app.command("evaluate")
def evaluate(
    outcomes: Annotated[Path, typer.Option(help='JSON lines: {"prompt" or "messages", "small": 0..1, "large": 0..1}')],
    qualities: Annotated[
        bool, typer.Option("--qualities", help="A line for each quality that a route may ask")
    ] = False,
    format: FormatOption = Format.TABLE,
) -> None:
    """Judge where `auto` would send prompts of yours, of which you know how a small and a large model did; or, of lines
    with {"text", "flag": true or false}, which texts of yours the content policy's classifiers flag."""
    from gateway.scoring.evaluate import evaluate as evaluate_file

    evaluate_file(outcomes, format, qualities)


@app.command("moderate")
def moderate() -> None:
    """Score texts: {"text"} a line in, {"flagged", "categories": {…: 0..1}} a line out."""
    from gateway.scoring.score_lines import score_safety

    raise typer.Exit(0 if score_safety(sys.stdin, sys.stdout) else 1)


def add_commands(named: str | None = None) -> None:
    """Add the command ``named``, or all where it is none of them: each imports what the others do not need."""
    for name in (named,) if named in COMMANDS else COMMANDS:
        module, attribute = COMMANDS[name]
        command = getattr(import_module(module), attribute)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)


def _load(path: Path, status: int = 1, more: str = "") -> Settings:
    from gateway.config.file import ConfigFaults, load_settings

    try:
        return load_settings(path, os.environ)
    except ConfigFaults as exc:
        _fail(f"{exc}{more if more and _is_of_sections(path, exc) else ''}", status)


def _is_of_sections(path: Path, refused: ConfigFaults) -> bool:
    """Return whether a refused file has sections, and nothing of what a deployment's own has beside them."""
    from gateway.dev.config import read_tree

    tree, _ = read_tree(path)
    told = {fault.path for fault in refused.faults if fault.message.startswith("missing")}
    is_misspelt = any(fault.message.startswith("unknown key") and "." not in fault.path for fault in refused.faults)
    return tree is not None and bool(tree.entries) and told.issuperset(OF_A_DEPLOYMENT) and not is_misspelt


def _load_for_dev(path: Path) -> Settings:
    from gateway.config.file import ConfigFaults, load_settings
    from gateway.dev.config import read_tree, settings_to_check

    tree, faults = read_tree(path)
    try:
        settings = load_settings(path, os.environ, settings_to_check(tree))
    except ConfigFaults as exc:
        faults += exc.faults  # those of reading are among them again
    if faults:
        _fail(str(ConfigFaults(path, faults)))
    return settings


def _hold_hangups() -> None:
    """Block SIGHUP, which would kill, until a handler is installed: the file may change after we have read it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})


def _check_schema(settings: Settings) -> None:
    from gateway.storage.schema import schema_fault

    if (fault := schema_fault(settings.database_url)) is not None:
        _fail(fault)


def _fail(words: str, status: int = 1) -> NoReturn:
    print(words, file=sys.stderr)
    raise typer.Exit(status)


if __name__ == "__main__":
    main()
