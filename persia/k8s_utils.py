"""``persia-k8s-utils``: training jobs on Kubernetes.

persia-k8s-utils render -f job.yml | kubectl apply -f -
persia-k8s-utils gencrd --output jobs.persia.com.yaml
"""

from __future__ import annotations

from pathlib import Path

import click

from persia._cli.errors import HELP, OneLineGroup, Refused, example
from persia._k8s.crd import crd
from persia._k8s.plan import ENGINES, SERVER, TRAINER
from persia._k8s.render import as_yaml, render
from persia._k8s.spec import read_job
from persia.errors import ConfigError
from persia.version import __version__


@click.group(
    "persia-k8s-utils",
    cls=OneLineGroup,
    context_settings=HELP,
    **example("persia-k8s-utils render -f job.yml"),
)
@click.version_option(__version__, prog_name="persia-k8s-utils")
def cli() -> None:
    """Write training jobs for Kubernetes."""


def _version(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    try:
        return int(major), int(minor)
    except ValueError as exc:
        raise ConfigError(f"--kubernetes: expected a version as 1.31, got {text!r}") from exc


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
def render_command(
    filename: Path,
    engine: str | None,
    kubernetes: str,
    keys: Path | None,
    server_image: str | None,
    nn_worker_image: str | None,
) -> None:
    """Write the objects of a PersiaJob, for `| kubectl apply -f -`.

    They need no operator, and no rights in the cluster but those to create them.
    """
    try:
        plan, objects = render(
            read_job(filename),
            engine,
            kubernetes=_version(kubernetes),
            keys=keys,
            images=_images(server_image, nn_worker_image),
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


if __name__ == "__main__":
    cli()
