"""The dense net as a program: traced, compared with the model, written, and read again.

A model is called with dense tensors and embeddings; a program takes them flat, in this order:

    dense tensors [B, ...]
    of each feature: pooled [B, dim]; raw [B, fixed, dim + 1]; jagged [N, dim] and [B + 1]

and returns a tuple of outputs. Any B and any N may come.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import io
import json
import platform
import re
import tempfile
import threading
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from persia._serving.archives import check_archive, check_native, check_script
from persia._serving.bundle import ServedTensor
from persia._training.batch import Jagged, NamedList
from persia.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from torch.export import ExportedProgram

Format = Literal["export", "torchscript", "aot"]
Tensors = tuple[torch.Tensor, ...]
Program = Callable[..., Sequence[torch.Tensor]]
# Greatest |difference| of a program to its model, relative to values above 1.
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Layout:
    """How flat tensors become what a model is called with."""

    num_dense: int
    dense_names: tuple[str, ...]  # empty where they have none
    names: tuple[str, ...]  # of the id features
    kinds: tuple[str, ...]  # pooled, raw or jagged
    advice: ClassVar[str] = "; format='torchscript' may"  # where torch.export cannot trace

    def flatten(
        self, dense: Sequence[torch.Tensor], embeddings: Sequence[torch.Tensor | Jagged]
    ) -> Tensors:
        """Return a model's arguments as a program takes them."""
        found = list(dense)
        for one in embeddings:
            found += [one] if isinstance(one, torch.Tensor) else [one.values, one.offsets]
        return tuple(found)

    def build(
        self, tensors: Sequence[torch.Tensor]
    ) -> tuple[NamedList[torch.Tensor], NamedList[Any]]:
        """Return what a model is called with."""
        rest = iter(tensors)
        dense = NamedList([next(rest) for _ in range(self.num_dense)], self.dense_names)
        embeddings: list[Any] = [
            Jagged(next(rest), next(rest)) if kind == "jagged" else next(rest)
            for kind in self.kinds
        ]
        return dense, NamedList(embeddings, self.names)

    def call(self, model: Any, tensors: Sequence[torch.Tensor]) -> Any:
        """Return what a model makes of flat tensors."""
        return model(*self.build(tensors))

    def rows(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        """Return what a model of this layout, and its program, are called within."""
        return nullcontext()

    def finish(self, program: ExportedProgram) -> tuple[int, ...]:
        """Make a traced program one that is served; return which tensors it looks up."""
        return ()

    def is_edges(self) -> tuple[bool, ...]:
        """Return of each flat tensor whether it is the offsets of a jagged feature."""
        return self._marks({"jagged": (False, True)})

    def is_sized(self) -> tuple[bool, ...]:
        """Return of each flat tensor whether it has one entry a sample."""
        return self._marks({"jagged": (False, False)}, True)

    def _marks(
        self, special: Mapping[str, tuple[bool, bool]], usual: bool = False
    ) -> tuple[bool, ...]:
        found = [usual] * self.num_dense
        for kind in self.kinds:
            found += special.get(kind, (usual,))
        return tuple(found)

    def cut(self, tensors: Tensors, begin: int, end: int) -> Tensors:
        """Return samples ``begin:end`` of a batch."""
        found: list[torch.Tensor] = []
        for tensor, is_sized, is_edges in zip(
            tensors, self.is_sized(), self.is_edges(), strict=True
        ):
            if is_sized:
                found.append(tensor[begin:end].clone())
            elif is_edges:
                edges = tensor[begin : end + 1]
                found[-1] = found[-1][int(edges[0]) : int(edges[-1])].clone()
                found.append(edges - edges[0])
            else:
                found.append(tensor)
        return tuple(found)

    def double(self, tensors: Tensors) -> Tensors:
        """Return a batch with its samples twice."""
        found: list[torch.Tensor] = []
        for tensor, is_edges in zip(tensors, self.is_edges(), strict=True):
            twice = torch.cat([tensor, tensor[1:] + tensor[-1:]] if is_edges else [tensor] * 2)
            found.append(twice)
        return tuple(found)


class FlatModel(torch.nn.Module):
    """A model that takes flat tensors and returns a tuple."""

    def __init__(self, model: Any, layout: Layout) -> None:
        super().__init__()
        self.model = model
        self._layout = layout
        self.output_names: tuple[str, ...] = ()
        self.id_places: tuple[int, ...] = ()  # of tensors that are looked up, once traced

    def forward(self, *tensors: torch.Tensor) -> Tensors:
        found = self._layout.call(self.model, tensors)
        if isinstance(found, torch.Tensor):
            self.output_names = ("output",)
            return (found,)
        if isinstance(found, Mapping):
            names, outputs = tuple(map(str, found)), tuple(found.values())
        else:
            outputs = tuple(found)
            names = tuple(f"output_{number}" for number in range(len(outputs)))
        self.output_names = names
        return outputs


@dataclass(frozen=True)
class Traced:
    """A dense net that can be written, and what is known of it."""

    data: bytes
    outputs: tuple[ServedTensor, ...]
    is_batch_independent: bool
    min_samples: int
    max_difference: float
    processor: str = ""  # that it was compiled for
    id_places: tuple[int, ...] = ()  # of flat tensors that the program itself looks up


def copy_model(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a model as it is now, on the CPU, for evaluation.

    Raises:
        ConfigError: If it has parameters that a copy shares, as modules of ``persia.nn`` have.
    """
    copied = copy.deepcopy(getattr(model, "_orig_mod", model))
    own = {id(parameter) for parameter in model.parameters()}
    if any(id(parameter) in own for parameter in copied.parameters()):
        raise ConfigError(
            f"model {type(model).__name__}: has modules of persia.nn, which look up by "
            "themselves; write persia.nn.export(model, ...)"
        )
    return copied.to("cpu").eval().requires_grad_(False)


def trace(
    model: torch.nn.Module,
    layout: Layout,
    samples: Tensors,
    form: Format,
    tolerance: float = TOLERANCE,
) -> Traced:
    """Trace a model of the CPU in evaluation mode, and compare the program with it.

    ``samples`` is a batch of any size, as a program takes it.

    Raises:
        ConfigError: If the model cannot be traced, or the program computes something else.
    """
    flat = FlatModel(model, layout)
    batch = samples
    while num_samples(layout, batch) < 4:
        batch = layout.double(batch)
    size = num_samples(layout, batch)
    with torch.no_grad(), layout.rows(model):
        expected = _called(flat, batch, type(model).__name__)
        names = flat.output_names
        _check_outputs(expected, names, size)
        data = _WRITERS[form](flat, layout, batch)
        program = load_program(data, form, allow_native=True)
        largest = _compare(program, flat, [batch, layout.cut(batch, 0, size // 2)], tolerance)
        ones = [layout.cut(batch, 0, 1), layout.cut(batch, size - 1, size)]
        min_samples = 1
        try:
            largest = max(largest, _compare(program, flat, ones, tolerance))
        except ConfigError:
            min_samples = 2
        return Traced(
            data,
            tuple(served_tensor(name, one) for name, one in zip(names, expected, strict=True)),
            _is_independent(flat, layout, batch, expected),
            min_samples,
            largest,
            processor_name() if form == "aot" else "",
            flat.id_places,
        )


def served_tensor(name: str, tensor: torch.Tensor) -> ServedTensor:
    """Describe a tensor [B, ...]."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return ServedTensor(name, dtype, tuple(tensor.shape[1:]))


def num_samples(layout: Layout, tensors: Tensors) -> int:
    """Return how many samples a batch has."""
    for tensor, is_sized, is_edges in zip(
        tensors, layout.is_sized(), layout.is_edges(), strict=True
    ):
        if is_sized or is_edges:
            return len(tensor) - is_edges
    return 0


def _called(flat: FlatModel, batch: Tensors, name: str) -> Tensors:
    try:
        return tuple(flat(*batch))
    except Exception as exc:
        raise ConfigError(f"model {name}: cannot be called with a sample: {exc}") from exc


def _check_outputs(outputs: Sequence[Any], names: Sequence[str], size: int) -> None:
    for name, one in zip(names, outputs, strict=True):
        if not isinstance(one, torch.Tensor) or one.ndim == 0 or len(one) != size:
            shape = list(one.shape) if isinstance(one, torch.Tensor) else type(one).__name__
            raise ConfigError(
                f"model: output {name!r}: expected a tensor [{size}, ...] for {size} samples, "
                f"got {shape}"
            )
        if one.dtype == torch.bfloat16:
            raise ConfigError(f"model: output {name!r}: expected .float() of it, got bfloat16")


def _traced(flat: FlatModel, layout: Layout, batch: Tensors) -> ExportedProgram:
    from torch.export import Dim, export

    samples = Dim("batch", min=1)
    sizes: list[Any] = []
    for number, (is_sized, is_edges) in enumerate(
        zip(layout.is_sized(), layout.is_edges(), strict=True)
    ):
        size = samples if is_sized else samples + 1 if is_edges else Dim(f"n{number}", min=0)
        sizes.append({0: size})
    # Contiguous and apart: equal tensors would be taken for one.
    args = tuple(one.clone().contiguous() for one in batch)
    program = export(flat, args, dynamic_shapes=(tuple(sizes),), strict=False)
    program._guards_code = []  # code, of sizes that are compared with the model instead
    flat.id_places = layout.finish(program)
    return program


def _exported(flat: FlatModel, layout: Layout, batch: Tensors) -> bytes:
    from torch.export import save

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = _traced(flat, layout, batch)
            program._example_inputs = None  # they are data of the user's, and a pickle
            file = io.BytesIO()
            save(program, file)
    except Exception as exc:
        raise ConfigError(
            f"model: torch.export cannot trace it{layout.advice}: {str(exc).strip():.600}"
        ) from exc
    return file.getvalue()


def _compiled(flat: FlatModel, layout: Layout, batch: Tensors) -> bytes:
    """Compile for this processor, and for one thread, as a request is scored by one."""
    import torch._inductor

    try:
        with (
            warnings.catch_warnings(),
            tempfile.TemporaryDirectory(prefix="persia-aot-") as name,
        ):
            warnings.simplefilter("ignore")
            path = torch._inductor.aoti_compile_and_package(
                _traced(flat, layout, batch),
                package_path=str(Path(name) / "dense.pt2"),
                inductor_configs={"cpp.threads": 1},
            )
            return Path(path).read_bytes()
    except Exception as exc:
        raise ConfigError(
            "model: AOTInductor cannot compile it; it needs a C++ compiler: "
            f"{str(exc).strip():.600}"
        ) from exc


def _scripted(flat: FlatModel, layout: Layout, batch: Tensors) -> bytes:
    """Trace rather than script: a list with names is none of TorchScript's types."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.jit.trace(flat, batch, check_trace=False, strict=False)  # type: ignore[no-untyped-call]
            file = io.BytesIO()
            torch.jit.save(program, file)
    except Exception as exc:
        raise ConfigError(f"model: TorchScript cannot trace it: {exc!s:.600}") from exc
    return file.getvalue()


_WRITERS = {"export": _exported, "torchscript": _scripted, "aot": _compiled}


def _compare(
    program: Program, flat: FlatModel, batches: Sequence[Tensors], tolerance: float
) -> float:
    """Return the largest |difference|; refuse one above the tolerance."""
    largest = 0.0
    for batch in batches:
        expected = flat(*batch)
        try:
            found = program(*batch)
        except Exception as exc:
            raise ConfigError(
                f"the model's program cannot score {len(expected[0])} samples: {exc!s:.400}"
            ) from exc
        for name, one, other in zip(flat.output_names, expected, found, strict=True):
            if one.shape != other.shape or one.dtype != other.dtype:
                raise ConfigError(
                    f"output {name!r}: expected {one.dtype} {list(one.shape)} of the program, "
                    f"got {other.dtype} {list(other.shape)}"
                )
            if torch.equal(one, other) or not one.numel():
                continue
            difference = (one.double() - other.double()).abs()
            bound = tolerance * one.double().abs().clamp(min=1.0)
            if not bool((difference <= bound).all()):
                raise ConfigError(
                    f"output {name!r}: the program differs from the model by up to "
                    f"{float(difference.max()):.3g}, expected at most {tolerance:g}"
                )
            largest = max(largest, float(difference.max()))
    return largest


def _is_independent(
    flat: FlatModel, layout: Layout, batch: Tensors, expected: Sequence[torch.Tensor]
) -> bool:
    """Whether a sample's outputs stay, bit for bit, when the others and its place change.

    The batch keeps its size, so that the same kernels run; halves alone differ in rounding.
    """
    size = len(expected[0])
    half = size // 2
    head, tail = layout.cut(batch, 0, half), layout.cut(batch, half, size)
    sized = layout.is_sized()
    try:
        scaled = flat(*_joined(layout, head, tuple(map(_other, tail, sized))))
    except Exception:  # numbers that are ids, and no row has the others
        first = [
            one[:1].expand_as(one) if of else one for one, of in zip(tail, sized, strict=True)
        ]
        scaled = flat(*_joined(layout, head, tuple(first)))
    swapped = flat(*_joined(layout, tail, head))
    for one, other, moved in zip(expected, scaled, swapped, strict=True):
        if other.shape != one.shape or not torch.equal(one[:half], other[:half]):
            return False
        both = torch.cat([moved[size - half :], moved[: size - half]])
        if not torch.allclose(one, both, rtol=1e-4, atol=1e-6, equal_nan=True):
            return False
    return all(
        torch.allclose(one[:half], alone, rtol=1e-4, atol=1e-6, equal_nan=True)
        for one, alone in zip(expected, flat(*head), strict=True)
    )


def _other(tensor: torch.Tensor, is_sized: bool) -> torch.Tensor:
    """Return another tensor of the same shape that a model takes as well."""
    if tensor.is_floating_point():
        return tensor * 1.5 + 0.25
    return tensor[:1].expand_as(tensor) if is_sized else tensor


def _joined(layout: Layout, first: Tensors, second: Tensors) -> Tensors:
    return tuple(
        torch.cat([one, other[1:] + one[-1:]] if is_edges else [one, other])
        for one, other, is_edges in zip(first, second, layout.is_edges(), strict=True)
    )


# --- reading ----------------------------------------------------------------------------------


def load_program(
    data: bytes,
    form: str,
    place: str = "program",
    *,
    allow_native: bool = False,
    processor: str = "",
) -> Program:
    """Return a program from the bytes of its file.

    But for ``aot`` it runs no code but torch's operators on tensors.

    Args:
        data: The file.
        form: One of ``Format``.
        place: Its name, for errors.
        allow_native: Whether to load ``aot``, which is machine code: it may do anything.
        processor: That ``aot`` was compiled for; "" is not compared.

    Raises:
        CheckpointError: If it is no such file, or has more in it than a program has, or is
            not allowed.
    """
    try:
        if form == "aot":
            return _load_compiled(data, place, allow_native, processor)
        if form == "torchscript":
            check_script(data, place)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return torch.jit.load(io.BytesIO(data), map_location="cpu")  # type: ignore[no-any-return, no-untyped-call]
        check_archive(data, place)
        return _load_exported(data)
    except CheckpointError:
        raise
    except Exception as exc:
        raise CheckpointError(f"{place}: cannot be read as a program: {exc!s:.400}") from exc


def processor_name() -> str:
    """Return the kind of processor that compiled programs are for."""
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def _load_compiled(data: bytes, place: str, allow_native: bool, processor: str) -> Program:
    if not allow_native:
        raise CheckpointError(
            f"{place}: is machine code, which may do anything: expected --allow-native "
            "(allow_native=True), for a repository whose writers are trusted"
        )
    check_native(data, place)
    if processor not in ("", processor_name()):
        raise CheckpointError(
            f"{place}: was compiled for {processor:.80}, this is {processor_name()}"
        )
    import torch._inductor

    # torch reads it by a name: a file of our own has the bytes whose checksum was compared.
    with (
        warnings.catch_warnings(),
        tempfile.TemporaryDirectory(prefix="persia-aot-") as name,
    ):
        warnings.simplefilter("ignore")
        path = Path(name) / "dense.pt2"
        path.write_bytes(data)
        called: Program = torch._inductor.aoti_load_package(str(path))
    return called


# Weights of a traced program, and what in its file says nothing of the graph.
_WEIGHT = re.compile(r"[^/]+/data/weights/(weight_[0-9]+)")
_IDENTITY = ".data/serialization_id"
_HINT = re.compile(rb'"hint": ?\{[^{}]*\}')  # a symbol's size in the sample that was traced
_MAX_GRAPHS = 8


@dataclass(frozen=True)
class _Graph:
    """The graph of a program, to be called with other weights."""

    module: Callable[..., Sequence[torch.Tensor]]
    weights: Mapping[str, torch.Tensor]  # on the device "meta", by their members
    fixed: tuple[str | torch.Tensor, ...]  # first arguments: a weight's member, or a constant

    def bind(self, weights: Mapping[str, torch.Tensor]) -> Program:
        """Return the program with these weights."""
        fixed = (weights[one] if isinstance(one, str) else one for one in self.fixed)
        return functools.partial(self.module, *fixed)

    def takes(self, members: Mapping[str, bytes]) -> bool:
        """Return whether these bytes can be its weights."""
        return {name: like.nbytes for name, like in self.weights.items()} == {
            name: len(data) for name, data in members.items()
        }

    def read(self, member: str, data: bytes) -> torch.Tensor:
        """Return a weight from its bytes."""
        like = self.weights[member]
        # Cloned: torch's own memory has the alignment that its kernels are fastest with.
        return torch.frombuffer(bytearray(data), dtype=like.dtype).reshape(like.shape).clone()


_graphs: dict[bytes, _Graph] = {}  # by all of a file but the weights
_graphs_lock = threading.Lock()  # guards it: versions of several models are loaded at once
_load_lock = threading.Lock()  # held in torch.export.load, whose state is the process's


def _load_exported(data: bytes) -> Program:
    """Read a program, or the weights alone where a graph like its own was read before.

    torch takes 10 ms and more to make a graph, in Python: no request would be answered for as
    long at each version, and the versions of a training differ in their weights.
    """
    from torch.export import load

    archive = zipfile.ZipFile(io.BytesIO(data))
    digest, weights = hashlib.sha256(), {}
    for name in sorted(archive.namelist()):
        if found := _WEIGHT.fullmatch(name):
            weights[found[1]] = archive.read(name)
        elif not name.endswith(_IDENTITY):
            content = _HINT.sub(b"", archive.read(name))
            digest.update(f"{name} {len(content)} ".encode())
            digest.update(content)
    key = digest.digest()
    with _graphs_lock:
        graph = _graphs.get(key)
    if graph is not None and graph.takes(weights):
        return graph.bind({name: graph.read(name, one) for name, one in weights.items()})
    with _load_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        called, graph = _direct(load(io.BytesIO(data)), _members(archive))
    if graph is not None and graph.takes(weights):
        with _graphs_lock:
            while len(_graphs) >= _MAX_GRAPHS:
                del _graphs[next(iter(_graphs))]
            _graphs[key] = graph
    return called


def _members(archive: zipfile.ZipFile) -> dict[str, str]:
    """Return the member of each weight, by the weight's name."""
    for name in archive.namelist():
        if name.endswith("/data/weights/model_weights_config.json"):
            config = json.loads(archive.read(name))["config"]
            return {weight: one["path_name"] for weight, one in config.items()}
    return {}


def _direct(
    program: ExportedProgram, members: Mapping[str, str]
) -> tuple[Program, _Graph | None]:
    """Return a program to be called with its flat tensors alone, and its graph if it has one.

    ``program.module()`` compares every size of every call with symbols in Python, which takes
    four times as long as a small net. A request's sizes are compared when it is decoded, and
    those that tracing took for granted were compared with the model at export.
    """
    from torch.export.graph_signature import InputKind, OutputKind

    signature, state = program.graph_signature, program.state_dict
    held = {**state, **program.constants}
    num_inputs = sum(one.kind is InputKind.USER_INPUT for one in signature.input_specs)
    num_fixed = len(signature.input_specs) - num_inputs
    targets = [str(one.target) for one in signature.input_specs[:num_fixed]]
    if any(one not in held for one in targets) or any(
        one.kind is not OutputKind.USER_OUTPUT for one in signature.output_specs
    ):  # it changes its own tensors, or has inputs of another kind
        return program.module(check_guards=False), None
    called = functools.partial(program.graph_module.forward, *(held[one] for one in targets))
    if any(
        name not in members or not one.numel() or not one.is_contiguous()
        for name, one in state.items()
    ):
        return called, None
    weights = {members[name]: one.detach().to("meta") for name, one in state.items()}
    fixed = tuple(members[one] if one in state else held[one] for one in targets)
    return called, _Graph(program.graph_module.forward, weights, fixed)
