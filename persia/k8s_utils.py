"""``persia-k8s-utils``: training jobs on Kubernetes.

persia-k8s-utils render -f job.yml | kubectl apply -f -
persia-k8s-utils gencrd --output jobs.persia.com.yaml
persia-k8s-utils operator
persia-k8s-utils server --port 8080
persia-k8s-utils top JOB
persia-k8s-utils doctor JOB
"""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import click

from persia._cli.errors import HELP, OneLineGroup, Refused, example
from persia._cli.log import set_up_logging
from persia._k8s.crd import crd
from persia._k8s.plan import ENGINES, SERVER, TRAINER
from persia._k8s.render import OLDEST, as_yaml, render
from persia._k8s.spec import read_job
from persia.errors import ConfigError, PersiaError
from persia.version import __version__


@click.group(
    "persia-k8s-utils",
    cls=OneLineGroup,
    context_settings=HELP,
    **example("persia-k8s-utils render -f job.yml"),
)
@click.version_option(__version__, prog_name="persia-k8s-utils")
def cli() -> None:
    """Write training jobs for Kubernetes, and run them there."""


def _version(text: str) -> tuple[int, int]:
    """Return a version of Kubernetes, as people or kubectl write it."""
    found = re.fullmatch(r"v?(\d+)\.(\d+)(\.\d+.*)?", text)
    if found is None or (version := (int(found[1]), int(found[2]))) < OLDEST:
        raise ConfigError(
            f"--kubernetes: expected a version as 1.31, from 1.{OLDEST[1]} on, got {text!r}"
        )
    return version


def _images(server_image: str | None, nn_worker_image: str | None) -> dict[str, str]:
    """Return the image of each role that has one, by the role's name."""
    found = {"data-loader": server_image, "embedding-worker": server_image}
    found |= {SERVER.role: server_image, TRAINER.role: nn_worker_image}
    return {role: image for role, image in found.items() if image}


@cli.command("render", **example("persia-k8s-utils render -f job.yml --engine jobset"))
@click.option(
    "--filename",
    "-f",
    required=True,
    type=click.Path(path_type=Path),
    help="YAML file with one PersiaJob.",
)
@click.option(
    "--engine",
    type=click.Choice(tuple(ENGINES)),
    help="What the objects are of; engine of the job if not given, or native.",
)
@click.option(
    "--kubernetes",
    default="1.21",
    show_default=True,
    metavar="VERSION",
    help="Oldest version of the cluster.",
)
@click.option(
    "--keys",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of persia-launcher keys; a Secret is made of it. Without: no encryption.",
)
@click.option("--server-image", help="Image of roles without torch that name none.")
@click.option("--nn-worker-image", help="Image of nn-workers that name none.")
@click.option(
    "--run-id",
    help="PERSIA_RUN_ID of the job; if not given, native has a new one each time.",
)
def render_command(
    filename: Path,
    engine: str | None,
    kubernetes: str,
    keys: Path | None,
    server_image: str | None,
    nn_worker_image: str | None,
    run_id: str | None,
) -> None:
    """Write the objects of a PersiaJob, for `| kubectl apply -f -`.

    They need no operator, and no rights in the cluster but those to create them.
    """
    try:
        version = _version(kubernetes)
        job = read_job(filename)
        plan, objects = render(
            job,
            engine,
            kubernetes=version,
            keys=keys,
            images=_images(server_image, nn_worker_image),
            run_id=run_id,
        )
    except ConfigError as error:
        raise Refused(str(error)) from error
    for note in plan.notes:
        click.echo(f"{filename}: {note.message}", err=True)
    click.echo(as_yaml(objects), nl=False)


@cli.command("gencrd", **example("persia-k8s-utils gencrd --output jobs.persia.com.yaml"))
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write; printed if not given.",
)
def gencrd(output: Path | None) -> None:
    """Write the CustomResourceDefinition of PersiaJobs."""
    text = as_yaml([crd()])
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as exc:
        raise Refused(f"--output: cannot write {output}: {exc.strerror}") from exc
    click.echo(output)


def _need(*libraries: str) -> None:
    """Refuse, in one line, where a library of the extra is not installed."""
    for name in libraries:
        if find_spec(name) is None:
            todo = "pip install 'persia[k8s]'"
            raise Refused(f"expected {name}, which is not installed: {todo}")


@cli.command("operator", **example("persia-k8s-utils operator --namespace training"))
@click.option(
    "--namespace",
    "namespaces",
    multiple=True,
    help="Namespace with jobs, and may be given several times; all if not given.",
)
@click.option("--server-image", help="Image of roles without torch that name none.")
@click.option("--nn-worker-image", help="Image of nn-workers that name none.")
@click.option("--once", is_flag=True, help="Look at every job once, and exit.")
def operator(
    namespaces: tuple[str, ...],
    server_image: str | None,
    nn_worker_image: str | None,
    once: bool,
) -> None:
    """Make PersiaJobs run: create what they need, keep their status, and end them.

    Reaches the cluster by its pod's service account, or as kubectl is configured.
    """
    _need("kopf", "aiohttp")
    from persia._k8s.operator import run_operator

    set_up_logging("persia-operator")
    try:
        run_operator(namespaces, _images(server_image, nn_worker_image), is_once=once)
    except PersiaError as error:  # also of an API that does not answer at first
        raise Refused(str(error)) from error


@cli.command("server", **example("persia-k8s-utils server --port 8080"))
@click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen.")
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True)
@click.option(
    "--token-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File with the token that callers must show; without it, on loopback, one is made "
    "and printed.",
)
def server(host: str, port: int, token_file: Path | None) -> None:
    """Serve the routes of the original's scheduler: apply, delete and list jobs over HTTP."""
    _need("kopf", "aiohttp", "starlette", "uvicorn")
    from persia._k8s.server import find_token, run_server

    set_up_logging("persia-server")
    try:
        token = find_token(host, token_file)
        if token_file is None:
            click.echo(f"Authorization: Bearer {token}")
        run_server(host, port, token)
    except ConfigError as error:
        raise Refused(str(error)) from error


_namespace = click.option(
    "--namespace", "-n", metavar="NAME", help="Of the job; kubectl's own if not given."
)


def _options(namespace: str | None) -> list[str]:
    return [] if namespace is None else [f"--namespace={namespace}"]


@cli.command("top", **example("persia-k8s-utils top adult --namespace training"))
@click.argument("job")
@_namespace
@click.option("--once", is_flag=True, help="Print one frame and exit; 1 if no process answers.")
@click.option(
    "--interval",
    type=click.FloatRange(0.1, 3600),
    default=2.0,
    show_default=True,
    help="Seconds between two frames, and of which rates are.",
)
def top(job: str, namespace: str | None, once: bool, interval: float) -> None:
    """Show a job that runs in a cluster, as `persia-launcher top` does.

    kubectl forwards the metrics' ports of the pods that run.
    """
    from persia._k8s.forward import exit_on_signals, top_of_job

    exit_on_signals()
    try:
        sys.exit(top_of_job(job, _options(namespace), interval_s=interval, is_once=once))
    except ConfigError as error:
        raise Refused(str(error)) from error


@cli.command("doctor", **example("persia-k8s-utils doctor adult --embedding-config slots.yml"))
@click.argument("job")
@_namespace
@click.option(
    "--embedding-config",
    type=click.Path(path_type=Path),
    help="YAML file; PERSIA_EMBEDDING_CONFIG, or embedding_config.yml here or in config/.",
)
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def doctor(
    job: str, namespace: str | None, embedding_config: Path | None, as_json: bool
) -> None:
    """Compare the servers of a job in a cluster with this version and this embedding config.

    As `persia-launcher doctor` does for others, through kubectl, with the keys in the job's
    Secret. Exits with 1 if one differs or a pod does not run.
    """
    from persia._cli.doctor import print_report
    from persia._k8s.forward import doctor_of_job, exit_on_signals

    exit_on_signals()
    try:
        report = doctor_of_job(job, _options(namespace), embedding_config)
    except ConfigError as error:
        raise Refused(str(error)) from error
    print_report(report, as_json=as_json)
    sys.exit(report.status)


if __name__ == "__main__":
    cli()
