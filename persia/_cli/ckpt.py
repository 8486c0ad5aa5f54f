"""``persia-ckpt``: inspect, verify, compare, convert, export, import, reshard checkpoints."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from persia._cli.errors import HELP, OneLineGroup, example
from persia._cli.export import FORMATS, export, export_vectors
from persia._cli.import_rows import FORMS, import_rows, optimizer_of, source_of
from persia._cli.texts import texts_of
from persia._files.catalog import chain, find, ids, load
from persia._files.manifest import TIME, Manifest, now
from persia._files.open import open_storage
from persia._files.rows import Progress, rewrite, verify
from persia._files.storage import Storage
from persia._files.summary import compare, summarise
from persia._files.writer_lock import sole_writer
from persia._metrics.format import byte_size, count
from persia.config import OPTIMIZERS
from persia.version import __version__

which = click.option(
    "--id", "identity", help="Of the checkpoint, or its number; the latest by default."
)


@click.group(
    cls=OneLineGroup,
    context_settings=HELP,
    **example("persia-ckpt inspect /checkpoints"),
)
@click.version_option(__version__, prog_name="persia-ckpt")
def cli() -> None:
    """Look at checkpoints, check them, and get them elsewhere.

    URL is the folder that dump_checkpoint was given: a path, s3://bucket/folder, ...
    """


@cli.command("inspect", **example("persia-ckpt inspect /checkpoints --biggest 10"))
@click.argument("url")
@which
@click.option("--quick", is_flag=True, help="Read the manifests only, not the rows.")
@click.option(
    "--biggest",
    type=click.IntRange(0),
    default=3,
    show_default=True,
    help="Rows shown of each group.",
)
@click.option(
    "--texts",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with a text a line, shown where its hash is an id; of any number of features.",
)
def inspect_command(
    url: str, identity: str | None, quick: bool, biggest: int, texts: tuple[Path, ...]
) -> None:
    """Show what a checkpoint holds: rows, features, norms, ages, the biggest rows."""
    storage = open_storage(url)
    manifests = _chain(storage, identity)
    _show(storage, manifests)
    if quick:
        return
    with _bar("reading", manifests, rows_only=True) as progress:
        groups = summarise(storage, manifests, biggest, progress)
    last = manifests[-1].schema
    clocks = {
        group.name: last.policies[last.tables[group.table].policy][1] for group in last.groups
    }
    of_ids = [group for name, group in groups.items() if name not in last.hashes]
    shown = {id_ for group in of_ids for _, id_ in group.biggest}
    known = texts_of(shown, texts, 64 - last.prefix_bits)
    for name, group in groups.items():
        click.echo(
            f"  {name}: {group.rows:,} rows, {byte_size(group.bytes)}, norm mean "
            f"{group.norm_mean:.4g} max {group.norm_max:.4g}"
            + (f", {group.not_finite:,} not finite" if group.not_finite else "")
            + (f", oldest use {group.oldest:,} {clocks[name]} ago" if clocks[name] else "")
        )
        what = "hash" if name in last.hashes else "id"
        for norm, id_ in group.biggest:
            # Quoted: a text may hold what a terminal would obey.
            words = " or ".join(map(repr, known.get(id_, ()))) if what == "id" else ""
            text = f"    {what} {id_}: norm {norm:.4g}"
            click.echo(text + (f", {words}" if words else ""))
    if texts:
        click.echo(f"  {len(known)} of the {len(shown)} ids shown have a text")


@cli.command("verify", **example("persia-ckpt verify s3://bucket/folder --all"))
@click.argument("url")
@which
@click.option("--all", "everything", is_flag=True, help="Every checkpoint in the folder.")
def verify_command(url: str, identity: str | None, everything: bool) -> None:
    """Check every file: size, checksum, dtypes, shapes, that each sign is where it belongs."""
    storage = open_storage(url)
    found: list[str | None] = [*ids(storage)] if everything else []
    # In an empty folder the latest is looked for, and not found.
    for each in found or [identity]:
        manifests = _chain(storage, each)
        with _bar("verifying", manifests) as progress:
            verify(storage, manifests[-1].id, progress)
        files = sum(len(manifest.all_files()) for manifest in manifests)
        whole = "is whole" if files == 1 else "are whole"
        click.echo(f"{manifests[-1].id}: {count(files, 'file')} {whole}")


@cli.command("diff", **example("persia-ckpt diff /monday /tuesday"))
@click.argument("before")
@click.argument("after")
@click.option("--before-id", help="Of the checkpoint in BEFORE; the latest by default.")
@click.option("--after-id", help="Of the checkpoint in AFTER; the latest by default.")
def diff_command(before: str, after: str, before_id: str | None, after_id: str | None) -> None:
    """Compare two checkpoints row by row; exits with 1 if they differ."""
    one, two = open_storage(before), open_storage(after)
    chains = _chain(one, before_id), _chain(two, after_id)
    first, second = chains[0][-1], chains[1][-1]
    if differing := first.schema.differences(second.schema):
        raise click.ClickException(
            f"their feature groups differ, so their signs mean other ids: {differing}"
        )
    with _bar("comparing", [*chains[0], *chains[1]], rows_only=True) as progress:
        groups = compare((one, chains[0]), (two, chains[1]), progress)
    click.echo(f"step {first.step} -> {second.step}")
    is_equal = True
    for name, group in groups.items():
        is_equal &= not (group.only_before or group.only_after or group.changed)
        click.echo(
            f"  {name}: {group.equal:,} equal, {group.changed:,} changed (by up to "
            f"{group.largest:.4g}), {group.only_before:,} gone, {group.only_after:,} new"
        )
    if not is_equal:
        raise SystemExit(1)


@cli.command("convert", **example("persia-ckpt convert /checkpoints tables/ --to parquet"))
@click.argument("url")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--to", "form", type=click.Choice(FORMATS), required=True)
@which
@click.option("--group", "groups", multiple=True, help="Feature groups; all by default.")
def convert_command(
    url: str, folder: Path, form: str, identity: str | None, groups: tuple[str, ...]
) -> None:
    """Write rows as plain tables: ids, groups, values as float32, optimizer states."""
    storage = open_storage(url)
    manifests = _chain(storage, identity)
    with _bar("converting", manifests, rows_only=True) as progress:
        files = export(storage, manifests, folder, form, groups, progress)
    click.echo(f"{sum(files.values()):,} rows in {count(len(files), 'file')} in {folder}")


@cli.command("export", **example("persia-ckpt export /models/ctr items.npz --feature item"))
@click.argument("url")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--feature", required=True, help="Whose ids and vectors; of its group, all ids.")
@which
def export_command(url: str, file: Path, feature: str, identity: str | None) -> None:
    """Write the vectors of one feature for a nearest-neighbour search.

    FILE ends with .parquet (columns id and vector) or .npz (arrays id and vector), by
    ascending id.
    """
    storage = open_storage(url)
    manifests = _chain(storage, identity)
    with _bar("exporting", manifests, rows_only=True) as progress:
        rows, dim = export_vectors(storage, manifests, file, feature, progress)
    click.echo(f"{rows:,} vectors of dim {dim} in {file}")


@cli.command(
    "import",
    **example(
        "persia-ckpt import /models/new items.parquet --feature item "
        "--embedding-config slots.yml --optimizer adagrad"
    ),
)
@click.argument("url")
@click.argument("source", type=click.Path(exists=True, path_type=Path))
@click.option("--feature", required=True, help="Whose rows they become; of its group, all.")
@click.option(
    "--embedding-config",
    "config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    required=True,
    help="YAML file of the job that is to load the checkpoint.",
)
@click.option(
    "--optimizer",
    type=click.Choice([*OPTIMIZERS]),
    metavar="NAME",
    required=True,
    help="That the job trains with, as adagrad: rows begin with its state.",
)
@click.option(
    "--optimizer-option",
    "optimizer_options",
    multiple=True,
    metavar="NAME=VALUE",
    help="Of the optimizer, as initial_accumulator_value=0.1.",
)
@click.option(
    "--from", "form", type=click.Choice(FORMS), help="What SOURCE is, if its name does not say."
)
@click.option(
    "--key", help="Name of the tensor of a state dict, or of the table of a DCP folder."
)
@click.option(
    "--ids",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help=".npy file with the id of each row, or JSON object {id: row}; else its number is.",
)
@click.option(
    "--columns",
    nargs=2,
    default=("id", "vector"),
    show_default=True,
    metavar="ID VECTOR",
    help="Of Parquet files.",
)
@click.option(
    "--old-config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Embedding config of the original PERSIA's job.",
)
@click.option(
    "--old-optimizer",
    metavar="NAME",
    help="Of that job, if it is the same: the state of rows is taken over.",
)
def import_command(
    url: str,
    source: Path,
    feature: str,
    config: Path,
    optimizer: str,
    optimizer_options: tuple[str, ...],
    form: str | None,
    **options: Any,
) -> None:
    """Write rows that another program wrote as a checkpoint into the folder URL.

    SOURCE is a NumPy file (.npz with arrays id and vector, or .npy of vectors and --ids), a
    Parquet file or a folder of them, a state dict of torch.save (--key), a folder of
    torch.distributed.checkpoint, as of TorchRec (--key), or one of the original PERSIA's
    dump_checkpoint (--old-config).

    Rows of the latest checkpoint in URL are kept, so that feature after feature is imported
    into one folder. All rows are in memory meanwhile.
    """
    opened = source_of(source, form, feature, **options)
    settings = optimizer_of(optimizer, optimizer_options)
    for note in opened.notes:
        click.echo(f"{source}: {note}", err=True)
    identity, rows, total = import_rows(url, opened, feature, config, settings)
    click.echo(f"{identity}: {rows:,} rows of {feature} from {source}, {total:,} in all")


@cli.command("reshard", **example("persia-ckpt reshard /checkpoints /smaller --servers 2"))
@click.argument("url")
@click.argument("target")
@click.option("--servers", type=click.IntRange(1), help="As many as before by default.")
@which
def reshard_command(url: str, target: str, servers: int | None, identity: str | None) -> None:
    """Write a checkpoint whole into the folder TARGET, as that number of servers would.

    Any number of servers loads any checkpoint: this makes each read its own part only. Deltas
    become one full checkpoint, so it also copies and compacts.
    """
    storage, out = open_storage(url), open_storage(target)
    if out.is_same(storage):
        raise click.ClickException(
            f"{target}: expected another folder than the checkpoint's own, where the training "
            "that writes there would remove it"
        )
    manifests = _chain(storage, identity)
    own = manifests[-1].id
    with sole_writer(out), _bar("writing", manifests, rows_only=True) as progress:
        manifest = rewrite(storage, out, own, num_servers=servers, progress=progress)
    of_whom = count(manifest.num_servers, "server")
    click.echo(f"{manifest.id}: {manifest.num_rows:,} rows of {of_whom}")


def _chain(storage: Storage, name: str | None) -> list[Manifest]:
    return chain(storage, None if name is None else find(storage, name))


@contextmanager
def _bar(
    what: str, manifests: list[Manifest], *, rows_only: bool = False
) -> Iterator[Progress]:
    total = sum(
        sum(part.num_bytes for part in manifest.parts) if rows_only else manifest.num_bytes
        for manifest in manifests
    )
    with tqdm(total=total, desc=what, unit="B", unit_scale=True, disable=None) as bar:
        update: Callable[[int], object] = bar.update
        yield update


def _show(storage: Storage, manifests: list[Manifest]) -> None:
    last = manifests[-1]
    created, today = (datetime.datetime.strptime(one, TIME) for one in (last.created, now()))
    servers = count(last.num_servers, "server")
    click.echo(f"checkpoint {last.id} in {storage.url}")
    click.echo(f"  step {last.step}, by {servers}, PERSIA {last.writer}")
    click.echo(f"  created {last.created}, {str(today - created).partition('.')[0]} ago")
    for manifest in manifests:
        deleted = sum(entry.num_signs for entry in manifest.deleted)
        click.echo(
            f"  {manifest.kind} {manifest.id}: {manifest.num_rows:,} rows"
            + (f", {deleted:,} deleted" if manifest.kind == "delta" else "")
            + f", {count(len(manifest.all_files()), 'file')}, {byte_size(manifest.num_bytes)}"
        )
    for name, file in sorted(last.files.items()):
        click.echo(f"  file {name}: {byte_size(file.num_bytes)}")
    for number, group in enumerate(last.schema.groups):
        table = last.schema.tables[group.table]
        features = [name for name, its in last.schema.features.items() if its == group.name]
        click.echo(
            f"  group {number} {group.name}: features {', '.join(features)}; dim {table.dim} "
            f"{table.dtype}, {table.optimizer} with {table.state_words} words of state"
        )
    for identity in ids(storage):
        if identity != last.id:
            other = load(storage, identity)
            click.echo(f"  also here: {other.kind} {identity} of step {other.step}")
