"""A CUDA device made of CPU tensors, which knows what may run beside what.

Streams, events and threads have vector clocks. An operation on a stream is ordered behind what
its clock holds, and behind nothing else, however soon the CPU runs it here. So what would be a
race on a device is an error wherever the two meet:

    a kernel reads what another stream writes, without having waited for it
    a thread reads pinned memory before the copy into it has ended
    a block that another stream uses is freed without ``record_stream``
    pinned memory is asked for while the thread's device is another one

torch's own sanitizer (``TORCH_CUDA_SANITIZER=1``) finds the first of these on a device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    import pytest

Clock = dict[str, int]


class Race(AssertionError):
    """Two that are not ordered met."""


@dataclass
class Memory:
    """One storage: who wrote it last, and when by that one's clock."""

    tensor: torch.Tensor  # keeps the address from being used again
    on_device: bool
    owner: str  # the stream that allocated it
    writer: str = ""
    time: int = 0
    users: set[str] = field(default_factory=set)
    recorded: set[str] = field(default_factory=set)


def _join(own: Clock, other: Clock) -> None:
    for name, time in other.items():
        own[name] = max(own.get(name, 0), time)


class FakeCuda(TorchFunctionMode):
    """One device; ``log`` has what happened: (thread or stream, operation)."""

    def __init__(self, device: int) -> None:
        super().__init__()
        self.device = device
        self.clocks: dict[str, Clock] = {}
        self.memories: dict[int, Memory] = {}
        self.log: list[tuple[str, str]] = []
        self._local = threading.local()
        self._num_streams = 0

    # --- what persia calls ------------------------------------------------------------------

    def new_stream(self, device: Any) -> FakeStream:
        self._num_streams += 1
        return FakeStream(self, f"stream {self._num_streams}")

    def current_stream(self, device: Any = None) -> FakeStream:
        default = FakeStream(self, f"default of {threading.current_thread().name}")
        stream: FakeStream = getattr(self._local, "stream", default)
        return stream

    @contextmanager
    def use_stream(self, stream: FakeStream) -> Iterator[None]:
        before = self.current_stream()
        self._local.stream = stream
        with self.use_device(self.device):
            yield
        self._local.stream = before

    @contextmanager
    def use_device(self, device: Any) -> Iterator[None]:
        before = getattr(self._local, "device", 0)
        self._local.device = device if isinstance(device, int) else device.index
        yield
        self._local.device = before

    # --- clocks -----------------------------------------------------------------------------

    def clock(self, name: str) -> Clock:
        return self.clocks.setdefault(name, {name: 0})

    def order(self, before: str, after: str) -> None:
        """Note that one thread has handed over to another."""
        self.tick(before, "hand over")
        _join(self.clock(after), self.clock(before))

    @property
    def host(self) -> str:
        return threading.current_thread().name

    def tick(self, name: str, what: str) -> int:
        """Note an operation of a thread, or one that this thread starts on a stream."""
        self.log.append((name, what))
        clock = self.clock(name)
        _join(clock, self.clock(self.host))
        clock[name] += 1
        return clock[name]

    def read(self, memory: Memory, name: str, what: str) -> None:
        memory.users.add(name)
        if memory.writer and self.clock(name).get(memory.writer, 0) < memory.time:
            raise Race(f"{what} on {name} reads what {memory.writer} writes")

    def write(self, memory: Memory, name: str, time: int) -> None:
        memory.writer, memory.time = name, time
        memory.users.add(name)

    # --- memory -----------------------------------------------------------------------------

    def memory(self, tensor: torch.Tensor) -> Memory | None:
        with torch._C.DisableTorchFunction():
            return self.memories.get(tensor.untyped_storage().data_ptr())

    def add(self, tensor: torch.Tensor, *, on_device: bool) -> torch.Tensor:
        """Make a tensor the device's, or pinned."""
        with torch._C.DisableTorchFunction():
            address = tensor.untyped_storage().data_ptr()
        owner = self.current_stream().name if on_device else self.host
        memory = Memory(tensor, on_device, owner)
        self.write(memory, owner, self.tick(owner, "allocate"))
        self.memories[address] = memory
        return tensor

    def record_stream(self, tensor: torch.Tensor, stream: FakeStream) -> None:
        memory = self.memory(tensor)
        assert memory is not None
        memory.recorded.add(stream.name)

    def check_freed(self) -> None:
        """Check that the allocator knows of all streams that use a block."""
        for memory in self.memories.values():
            if memory.on_device and memory.users - {memory.owner} - memory.recorded:
                raise Race(f"used by {memory.users}, allocated by {memory.owner}, not recorded")

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            memory = self.memory(args[0])
            return memory is not None and memory.on_device
        if kwargs.pop("pin_memory", False):
            if getattr(self._local, "device", 0) != self.device:
                raise Race("pinned memory is allocated while another device is the thread's")
            return self.add(func(*args, **kwargs), on_device=False)
        if func is torch.Tensor.to and isinstance(args[1], torch.device):
            return self._to_device(args[0], kwargs)
        if func is torch.Tensor.copy_:
            return self._copy(func, args, kwargs)
        if func is torch.Tensor.numpy:
            memory = self.memory(args[0])
            if memory is not None:
                self.read(memory, self.host, "numpy")
            return func(*args)
        if func is torch.Tensor.item:  # a copy on this thread's stream, and a wait for it
            memory, stream = self.memory(args[0]), self.current_stream().name
            if memory is not None:
                self.tick(stream, "item")
                self.read(memory, stream, "item")
            return func(*args)
        return self._kernel(func, name, args, kwargs)

    def _to_device(self, tensor: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        assert kwargs.get("non_blocking"), "a copy that waits"
        source = self.memory(tensor)
        assert source is not None, "from memory that is not pinned, which waits"
        with torch._C.DisableTorchFunction():
            made = tensor.clone()
        stream = self.current_stream().name
        self.add(made, on_device=True)
        time = self.tick(stream, "copy to device")
        self.read(source, stream, "copy to device")
        memory = self.memory(made)
        assert memory is not None
        self.write(memory, stream, time)
        return made

    def _copy(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        assert kwargs.get("non_blocking"), "a copy that waits"
        into, source = self.memory(args[0]), self.memory(args[1])
        assert into is not None, "into memory that is not pinned, which waits"
        stream = self.current_stream().name
        time = self.tick(stream, "copy to host")
        if source is not None:
            self.read(source, stream, "copy to host")
        self.write(into, stream, time)
        return func(*args, **kwargs)

    def _kernel(
        self, func: Callable[..., Any], name: str, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        flat = [
            part
            for arg in (*args, *kwargs.values())
            for part in (arg if isinstance(arg, list | tuple) else [arg])
        ]
        memories = [self.memory(arg) for arg in flat if isinstance(arg, torch.Tensor)]
        used = [memory for memory in memories if memory is not None and memory.on_device]
        result = func(*args, **kwargs)
        if not used or not isinstance(result, torch.Tensor) or name.startswith("__"):
            return result
        stream = self.current_stream().name
        if self.memory(result) in used and not name.endswith("_"):
            return result  # a view
        time = self.tick(stream, name)
        for memory in used:
            self.read(memory, stream, name)
        if self.memory(result) is None:
            self.add(result, on_device=True)
        written = self.memory(result)
        assert written is not None
        self.write(written, stream, time)
        return result


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self._cuda, self.name = cuda, name

    def wait_stream(self, other: FakeStream) -> None:
        self._cuda.tick(self.name, f"wait for {other.name}")
        _join(self._cuda.clock(self.name), self._cuda.clock(other.name))

    def wait_event(self, event: FakeEvent) -> None:
        self._cuda.tick(self.name, "wait for event")
        _join(self._cuda.clock(self.name), event.clock)


class FakeEvent:
    def __init__(self, cuda: FakeCuda, blocking: bool = False) -> None:
        self._cuda, self.blocking = cuda, blocking
        self.clock: Clock = {}
        self.device: int | None = None

    def record(self, stream: FakeStream) -> None:
        self._cuda.tick(stream.name, "record event")
        self.clock, self.device = dict(self._cuda.clock(stream.name)), self._cuda.device

    def synchronize(self) -> None:
        assert self._cuda._local.device == self._cuda.device
        self._cuda.tick(self._cuda.host, "wait for event")
        _join(self._cuda.clock(self._cuda.host), self.clock)


@contextmanager
def fake_cuda(monkeypatch: pytest.MonkeyPatch, device: int = 1) -> Iterator[FakeCuda]:
    """Give torch one device with this number, for calls of this module's kind."""
    cuda = FakeCuda(device)
    monkeypatch.setattr(torch.cuda, "Stream", cuda.new_stream)
    monkeypatch.setattr(torch.cuda, "Event", lambda **options: FakeEvent(cuda, **options))
    monkeypatch.setattr(torch.cuda, "current_stream", cuda.current_stream)
    monkeypatch.setattr(torch.cuda, "stream", cuda.use_stream)
    monkeypatch.setattr(torch.cuda, "device", cuda.use_device)
    # Not by the mode: torch looks at the stream's class before it.
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda own, stream: cuda.record_stream(own, stream)
    )
    yield cuda
