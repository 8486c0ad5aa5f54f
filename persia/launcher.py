"""``persia-launcher``: one command per role, and commands to prepare and observe a job.

    persia-launcher embedding-parameter-server --embedding-config slots.yml
    persia-launcher embedding-worker --embedding-config slots.yml
    persia-launcher data-loader data_loader.py
    persia-launcher nn-worker train.py --nproc-per-node 2
    persia-launcher serve models/
    persia-launcher keys DIRECTORY | init DIRECTORY | doctor | top | report

Options of a command may stand anywhere; what is not one goes to the script, and so does
everything after ``--``. When the training script ends, every other role ends with its status.
"""

from __future__ import annotations

import atexit
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

from persia import env
from persia._cli.doctor import examine, print_report, rows_of, write_project
from persia._cli.errors import HELP, OneLineGroup, Refused, ScriptCommand, example
from persia._cli.export_model import export_checkpoint
from persia._cli.log import set_up_logging
from persia._cli.report import combine
from persia._cli.scripts import Script, run_data_loader, run_nn_worker
from persia._cli.serve import add_options, run_serve
from persia._cli.top import DEADLINE_S, list_targets, run_top
from persia._cluster.connect import current_lists
from persia._cluster.process import (
    Options,
    run_embedding_worker,
    run_parameter_server,
)
from persia._metrics.top_view import need_rich
from persia._process_exit import end_with_launcher, note_end
from persia._rpc.curve import KEY_NAMES, make_keys
from persia.config import OPTIMIZERS
from persia.errors import ConfigError, PersiaError
from persia.logger import get_logger
from persia.version import __version__

Command = TypeVar("Command", bound=Callable[..., Any])

# By name: ``python -m persia.launcher`` makes this module ``__main__``.
_logger = get_logger("persia.launcher")


@click.group(
    "persia-launcher",
    cls=OneLineGroup,
    context_settings=HELP,
    **example("persia-launcher doctor"),
)
@click.version_option(__version__, prog_name="persia-launcher")
def cli() -> None:
    """Start one process of a training job, check what it needs, or look at it."""


def _run_replica(
    role: str, index: int | None, size: int | None, run: Callable[[int, int], int]
) -> NoReturn:
    """As ``_run``; numbers that are not given are those of the environment."""
    known = 0, 1
    refused: ConfigError | None = None
    if index is None or size is None:
        try:
            known = env.replica()
        except ConfigError as error:
            refused = error
    number = known[0] if index is None else index
    count = known[1] if size is None else size

    def start() -> int:
        if refused is not None:
            raise refused
        return run(number, count)

    _run(role if refused else f"{role} {number}", start)


def _run(who: str, run: Callable[[], int]) -> NoReturn:
    """Exit with the status that ``run`` returns; an error of PERSIA is one line."""
    set_up_logging(who)
    env.warn_of_misspelled()
    end_with_launcher()
    try:
        current_lists()  # before anything is started that needs one of them
        status = run()
    except PersiaError as error:
        # No traceback: the message says what to change, or which process did not answer.
        _logger.error("%s", error)
        status = 2 if isinstance(error, ConfigError) else 1
        note_end(status, f"{type(error).__name__}: {error}\n")
    except Exception:
        text = traceback.format_exc()
        sys.stderr.write(text)
        status = 1
        note_end(status, text)
    for number in (signal.SIGTERM, signal.SIGINT):
        # Honcho stops the rest of a job while this process exits.
        atexit.register(signal.signal, number, signal.SIG_IGN)
    sys.exit(status)


def _script(words: Sequence[str], entry: env.Variable[Path | None], line: str) -> Script:
    if words and not words[0].startswith("-"):
        return Script(Path(words[0]), tuple(words[1:]))
    path = entry()
    if path is None:
        raise ConfigError(
            f"expected a script: name it, or set {entry.name}. Example: persia-launcher {line}"
        )
    return Script(path, tuple(words))


def _replica_options(command: Command) -> Command:
    for name, least, text in (
        ("--replica-size", 1, "Number of processes of this role; REPLICA_SIZE, or 1."),
        ("--replica-index", 0, "Number of this process, from 0; REPLICA_INDEX, or 0."),
    ):
        command = click.option(name, type=click.IntRange(least), help=text)(command)
    return command


def _server_options(default_port: int) -> Callable[[Command], Command]:
    path, port = click.Path(path_type=Path), click.IntRange(0, 65535)
    listed = f"if not given, as the list of addresses says, or {default_port}."

    def add(command: Command) -> Command:
        command = _replica_options(command)
        for which, default in (
            ("global", env.global_config_path),
            ("embedding", env.embedding_config_path),
        ):
            text = f"YAML file; PERSIA_{which.upper()}_CONFIG if not given."
            option = click.option(f"--{which}-config", type=path, default=default, help=text)
            command = option(command)
        text = "Where to listen; PERSIA_LISTEN_HOST, or 127.0.0.1."
        command = click.option("--host", help=text)(command)
        return click.option("--port", type=port, help=f"Where to listen; {listed}")(command)

    return add


@cli.command(
    "nn-worker",
    cls=ScriptCommand,
    **example("persia-launcher nn-worker train.py --nproc-per-node 2"),
)
@click.option(
    "--nproc-per-node",
    type=click.IntRange(1),
    default=env.num_ranks_per_node,
    help="Number of ranks on this node; PET_NPROC_PER_NODE, or 1.",
)
@click.option(
    "--node-rank",
    type=click.IntRange(0),
    default=env.node_rank,
    help="Number of this node, from 0; PET_NODE_RANK, SLURM_NODEID, or 0.",
)
@click.option(
    "--nnodes",
    type=click.IntRange(1),
    default=env.num_nodes,
    help="Number of nodes; PET_NNODES, SLURM_STEP_NUM_NODES, or 1.",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(0),
    default=env.max_restarts,
    help="Times that ranks which fail are started again; PET_MAX_RESTARTS, or 0.",
)
@click.argument("filepath", nargs=-1, type=click.UNPROCESSED)
def nn_worker(
    nproc_per_node: int,
    node_rank: int,
    nnodes: int,
    max_restarts: int,
    filepath: tuple[str, ...],
) -> None:
    """Run a training script by torchrun, and end the job with its status.

    FILEPATH is the script and its arguments; PERSIA_NN_WORKER_ENTRY if not given.
    """

    def run() -> int:
        script = _script(filepath, env.nn_worker_entry, "nn-worker train.py")
        return run_nn_worker(
            script,
            nproc_per_node=nproc_per_node,
            node_rank=node_rank,
            nnodes=nnodes,
            max_restarts=max_restarts,
        )

    _run(f"nn-worker node {node_rank}", run)


@cli.command(
    "data-loader",
    cls=ScriptCommand,
    **example("persia-launcher data-loader data_loader.py"),
)
@_replica_options
@click.argument("filepath", nargs=-1, type=click.UNPROCESSED)
def data_loader(
    replica_index: int | None, replica_size: int | None, filepath: tuple[str, ...]
) -> None:
    """Run a data-loader's script, and stay until the job has ended.

    FILEPATH is the script and its arguments; PERSIA_DATALOADER_ENTRY if not given.
    """

    def run(index: int, size: int) -> int:
        script = _script(filepath, env.data_loader_entry, "data-loader data_loader.py")
        return run_data_loader(script, replica_index=index, replica_size=size)

    _run_replica("data-loader", replica_index, replica_size, run)


def _serve(
    role: str,
    run: Callable[[Options], int],
    replica_index: int | None,
    replica_size: int | None,
    **options: Any,
) -> NoReturn:
    def start(index: int, size: int) -> int:
        return run(Options(replica_index=index, replica_size=size, **options))

    _run_replica(role, replica_index, replica_size, start)


@cli.command(
    "embedding-worker",
    **example("persia-launcher embedding-worker --embedding-config slots.yml"),
)
@_server_options(8887)
def embedding_worker(**options: Any) -> None:
    """Serve an embedding-worker until the job has ended."""
    _serve("embedding-worker", run_embedding_worker, **options)


@cli.command(
    "embedding-parameter-server",
    **example("persia-launcher embedding-parameter-server --embedding-config slots.yml"),
)
@_server_options(8888)
def embedding_parameter_server(**options: Any) -> None:
    """Serve an embedding-parameter-server until the job has ended."""
    _serve("embedding-parameter-server", run_parameter_server, **options)


@cli.command("serve", **example("persia-launcher serve models/ --http-port 8080"))
@click.argument("repository", type=click.Path(path_type=Path))
@add_options
def serve(repository: Path, **options: Any) -> None:
    """Serve the models of REPOSITORY by the Open Inference Protocol, HTTP and gRPC.

    REPOSITORY has a folder for each model, and in it one for each version. New versions are
    taken while requests come. Ends with SIGTERM, after the requests in flight.
    """
    _run("serve", lambda: run_serve(repository, **options))


@cli.command("keys", **example("persia-launcher keys keys/"))
@click.argument("directory", type=click.Path(path_type=Path))
@click.option(
    "--name",
    "names",
    multiple=True,
    help="Of one more data key, instead of all; serve-NAME is one for serving.",
)
@click.option("--owner", type=click.IntRange(0), help="Number of the user they are for.")
def keys(directory: Path, names: tuple[str, ...], owner: int | None) -> None:
    """Make the keys of a job in DIRECTORY: of its servers, for control, data and serving.

    PERSIA_KEYS names the directory to processes. A key that is there stays.
    """
    for path in make_keys(directory, names or KEY_NAMES, owner):
        click.echo(path)


@cli.command("top", **example("persia-launcher top --once"))
@click.argument("address", nargs=-1)
@click.option("--once", is_flag=True, help="Print one frame and exit; 1 if no process answers.")
@click.option(
    "--interval",
    type=click.FloatRange(0.1, 3600),
    default=2.0,
    show_default=True,
    help="Seconds between two frames, and of which rates are.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(0.1, 600),
    default=DEADLINE_S,
    show_default=True,
    help="Seconds after which a process is said not to answer.",
)
def top(address: tuple[str, ...], once: bool, interval: float, timeout: float) -> None:
    """Show a running job: who is there, how fast, and which stage holds the others back.

    ADDRESS is host:port of metrics that the lists of addresses do not lead to, such as those
    of data-loaders on other machines.
    """
    try:
        targets = list_targets(address)
        sys.exit(run_top(targets, interval_s=interval, deadline_s=timeout, is_once=once))
    except ConfigError as error:
        raise Refused(str(error)) from error


@cli.command(
    "doctor",
    **example("persia-launcher doctor --embedding-config slots.yml --sample part.parquet"),
)
@click.option(
    "--embedding-config",
    type=click.Path(path_type=Path),
    help="YAML file; PERSIA_EMBEDDING_CONFIG, or embedding_config.yml here or in config/.",
)
@click.option(
    "--global-config",
    type=click.Path(path_type=Path),
    help="YAML file; PERSIA_GLOBAL_CONFIG, or global_config.yml here or in config/.",
)
@click.option(
    "--sample",
    type=click.Path(path_type=Path),
    help="Data: .npz, .parquet, a PersiaBatch's bytes, or a data-loader's script, of which the "
    "first batch is taken; PERSIA_DATALOADER_ENTRY, or data_loader.py here.",
)
@click.option(
    "--optimizer",
    type=click.Choice(sorted(OPTIMIZERS)),
    default="adagrad",
    show_default=True,
    help="Of the rows, as the script chooses it.",
)
@click.option(
    "--rows", multiple=True, metavar="FEATURE=NUMBER", help="Rows expected, such as user=2e9."
)
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def doctor(rows: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Check an installation and a configuration before a job, and say what to do.

    Exits with 1 if a job would fail of something.
    """
    try:
        if not as_json:
            need_rich()  # before checks of up to a minute
        report = examine(rows=rows_of(rows), **options)
        print_report(report, as_json=as_json)
    except ConfigError as error:
        raise Refused(str(error)) from error
    sys.exit(report.status)


@cli.command("init", **example("persia-launcher init clicks"))
@click.argument("directory", type=click.Path(path_type=Path))
def init(directory: Path) -> None:
    """Write a project into DIRECTORY that trains as it is, to be changed into one's own."""
    try:
        written = write_project(directory)
    except ConfigError as error:
        raise Refused(str(error)) from error
    for path in written:
        click.echo(path)
    click.echo(
        f"next: cd {shlex.quote(str(directory))}; persia-launcher doctor; python train.py; "
        "honcho start"
    )


@cli.command("report", **example("persia-launcher report monday.json tuesday.html"))
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    default="runs.html",
    show_default=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="The page; one that is there is replaced.",
)
def report(files: tuple[Path, ...], output: Path) -> None:
    """Show runs in one page: their curves over each other, and in what they differ.

    FILES are what TrainCtx(report=...) wrote, pages or .json, at most eight.
    """
    try:
        combine(files, output)
    except ConfigError as error:
        raise Refused(str(error)) from error
    click.echo(output)


@cli.command(
    "export",
    **example(
        "persia-launcher export /ckpt --model net:make --output models/ctr --sample one.bin"
    ),
)
@click.argument("checkpoint")
@click.option("--model", "factory", required=True, metavar="MODULE:FACTORY", help="Makes it.")
@click.option(
    "--output",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of the model in a repository; the version is a folder in it.",
)
@click.option(
    "--sample",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="PersiaBatch.to_bytes() of a batch like those that will be scored.",
)
@click.option(
    "--embedding-config",
    type=click.Path(dir_okay=False, path_type=Path),
    help="YAML file; PERSIA_EMBEDDING_CONFIG if not given.",
)
@click.option("--dense-filename", default="dense.pt", show_default=True)
@click.option(
    "--format",
    type=click.Choice(("export", "torchscript", "aot")),
    default="export",
    show_default=True,
    help="Of the dense net's program; aot is compiled for this processor.",
)
@click.option(
    "--missing",
    type=click.Choice(("zeros", "initial", "mean")),
    default="zeros",
    show_default=True,
    help="What an id without a row is.",
)
@click.option("--keep-last", type=click.IntRange(1), default=3, show_default=True)
@click.option(
    "--triton",
    type=click.Path(file_okay=False, path_type=Path),
    help="Model repository of NVIDIA Triton, to which the version is copied as well.",
)
def export(
    checkpoint: str,
    factory: str,
    output: Path,
    sample: Path,
    embedding_config: Path | None,
    dense_filename: str,
    triton: Path | None,
    **options: Any,
) -> None:
    """Write the model of CHECKPOINT and its rows as a version that can be served.

    CHECKPOINT is the folder or URL that dump_checkpoint was given.
    """
    try:
        version = export_checkpoint(
            *(checkpoint, factory, output, sample, embedding_config, dense_filename),
            triton,
            options,
        )
    except PersiaError as error:
        raise Refused(str(error)) from error
    click.echo(output / str(version))


if __name__ == "__main__":
    cli()
