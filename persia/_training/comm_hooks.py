"""Bagua's algorithms as torch runs them: communication hooks and averages of parameters.

    exchange     what DDP does with a bucket of gradients in each backward
    averaging    what happens to the parameters after a step of the optimizer

During a warm-up both are synchronous training: gradients are all-reduced in full precision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.model_averaging.averagers import (
    ModelAverager,
    PeriodicModelAverager,
)

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

Bucket: TypeAlias = Any  # dist.GradBucket, which torch does not show to type checkers
Exchange = Callable[[dist.ProcessGroup, Bucket], torch.futures.Future[torch.Tensor]]
Averager = Callable[[int, int, dist.ProcessGroup], ModelAverager]

# Values that share a lower bound and a step. Their 8 bytes are 1.6 % of the 512 codes.
BLOCK = 512
_HEAD_BYTES = 8
_LEVELS = 255


def encode(values: torch.Tensor) -> torch.Tensor:
    """Return ``values`` of shape (n,), n > 0, as bytes: per block a bound, a step, 8-bit codes.

    A block with a value that is not finite decodes to values that are not.
    """
    blocks = torch.nn.functional.pad(values.float(), (0, -values.numel() % BLOCK))
    blocks = blocks.view(-1, BLOCK)
    low, high = torch.aminmax(blocks, dim=1, keepdim=True)
    step = (high - low) / _LEVELS
    # A constant block has step 0, and any divisor will do.
    codes = (blocks - low) / step.clamp_min(torch.finfo(torch.float32).tiny)
    heads = torch.cat([low, step], dim=1).view(torch.uint8)
    return torch.cat([heads, codes.round_().to(torch.uint8)], dim=1).view(-1)


def decode(data: torch.Tensor, size: int) -> torch.Tensor:
    """Return the ``size`` float32 values that ``encode`` made bytes of."""
    blocks = data.view(-1, _HEAD_BYTES + BLOCK)
    heads = blocks[:, :_HEAD_BYTES].contiguous().view(torch.float32)
    return torch.addcmul(heads[:, :1], heads[:, 1:], blocks[:, _HEAD_BYTES:]).view(-1)[:size]


def _mean(gathered: list[torch.Tensor], size: int) -> torch.Tensor:
    """Return the mean over ranks; in rank order, so that all of them get the same bits."""
    total = torch.zeros(size, device=gathered[0].device)
    for data in gathered:
        total += decode(data, size)
    return total.div_(len(gathered))


def exchange_in_full(
    group: dist.ProcessGroup, bucket: Bucket
) -> torch.futures.Future[torch.Tensor]:
    """Average gradients as DDP does without a hook."""
    return default_hooks.allreduce_hook(group, bucket)


def exchange_bytes(
    group: dist.ProcessGroup, bucket: Bucket
) -> torch.futures.Future[torch.Tensor]:
    """Average gradients that travel as 8-bit codes."""
    buffer: torch.Tensor = bucket.buffer()
    mine = encode(buffer)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    work: Any = dist.all_gather(gathered, mine, group=group, async_op=True)

    def average(sent: torch.futures.Future[Any]) -> torch.Tensor:
        sent.value()  # raises what sending raised
        buffer.copy_(_mean(gathered, buffer.numel()))
        return buffer

    done: torch.futures.Future[torch.Tensor] = work.get_future().then(average)
    return done


def exchange_nothing(
    group: dist.ProcessGroup, bucket: Bucket
) -> torch.futures.Future[torch.Tensor]:
    """Leave each rank its own gradients."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


class DifferenceAverager(ModelAverager):
    """Averages what ranks added to their parameters since the last average, in 8-bit codes.

    What rounding leaves out of one average goes into the next, or a parameter whose changes
    are small beside its block's would stand still. Needs the ranks' parameters to be equal
    when it is made, and twice their memory.
    """

    def __init__(self, period: int, warmup_steps: int, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._period = period
        self._warmup_steps = warmup_steps

    def begin(self, parameters: list[torch.nn.Parameter]) -> None:
        """Take the parameters to average."""
        self._parameters = parameters
        self._common = self._flat()  # the same bits on all ranks
        self._left_out = torch.zeros_like(self._common)

    def _flat(self) -> torch.Tensor:
        with torch.no_grad():
            return torch.cat([p.detach().reshape(-1).float() for p in self._parameters])

    def average_parameters(self, params: object = None) -> None:
        """Count a step, and average if it is time to."""
        since = self.step - self._warmup_steps
        self.step += 1
        if since < 0 or since % self._period:
            return
        change = self._flat().sub_(self._common).add_(self._left_out)
        mine = encode(change)
        gathered = [
            torch.empty_like(mine) for _ in range(dist.get_world_size(self.process_group))
        ]
        dist.all_gather(gathered, mine, group=self.process_group)
        self._left_out = change.sub_(decode(mine, change.numel()))
        self._common += _mean(gathered, change.numel())
        with torch.no_grad():
            start = 0
            for parameter in self._parameters:
                part = self._common[start : start + parameter.numel()]
                parameter.copy_(part.view_as(parameter))
                start += parameter.numel()


@dataclass(frozen=True)
class Algorithm:
    """How ranks keep their dense nets together."""

    what: str  # runs, in words
    exchange: Exchange | None = None  # of gradients, after the warm-up; None leaves it to DDP
    averager: Averager | None = None  # makes what averages parameters, if anything does
    warmup_steps: int = 0  # optimizer steps of synchronous training at the beginning
    interval: int = 0  # steps from one average of parameters to the next

    @property
    def counts_steps(self) -> bool:
        """Whether it must see the optimizer's steps."""
        return self.averager is not None or self.warmup_steps > 0

    def tuned(self, warmup_steps: int | None, interval: int | None) -> Algorithm:
        """Return it with other numbers, where they are given and it has such."""
        if warmup_steps is None or self.exchange is None:
            warmup_steps = self.warmup_steps
        if interval is None or self.averager is None:
            interval = self.interval
        return replace(self, warmup_steps=warmup_steps, interval=interval)


# 100 steps of warm-up are Bagua's default for qadam. Bagua's decentralized averages in each
# step, which costs as much as all-reducing gradients; its async every 500 ms.
ALGORITHMS = {
    "gradient_allreduce": Algorithm("DDP: gradients are averaged in full precision"),
    "bytegrad": Algorithm("DDP: gradients are averaged as 8-bit codes", exchange_bytes),
    "qadam": Algorithm(
        "DDP: gradients are averaged in full precision for the first {warmup_steps} steps, "
        "then as 8-bit codes; the optimizer is yours, use torch.optim.Adam or AdamW",
        exchange_bytes,
        warmup_steps=100,
    ),
    "decentralized": Algorithm(
        "local steps: parameters are averaged every {interval} steps, gradients in the first "
        "{warmup_steps} only",
        exchange_nothing,
        PeriodicModelAverager,
        interval=4,
    ),
    "low_precision_decentralized": Algorithm(
        "local steps: changes of parameters are averaged as 8-bit codes every {interval} "
        "steps, gradients in the first {warmup_steps} only",
        exchange_nothing,
        DifferenceAverager,
        interval=4,
    ),
    "async": Algorithm(
        "post-local SGD: parameters are averaged every {interval} steps, gradients in the "
        "first {warmup_steps} only",
        exchange_nothing,
        PeriodicModelAverager,
        warmup_steps=100,
        interval=16,
    ),
}


def apply(
    algorithm: Algorithm,
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer | None,
) -> None:
    """Make a data-parallel model and its optimizer run an algorithm.

    The optimizer is hooked rather than wrapped: schedulers and scalers that know it go on
    working, and its state dict is the one it has under any other algorithm.
    """
    exchange = algorithm.exchange
    if exchange is None:
        return
    group = model.process_group
    steps = 0
    averager: ModelAverager | None = None
    if algorithm.averager is not None:
        # DDP would copy rank 0's buffers to all in each forward, and so keep ranks in step.
        model.broadcast_buffers = False
        averager = algorithm.averager(algorithm.interval, algorithm.warmup_steps, group)
        if isinstance(averager, DifferenceAverager):
            averager.begin([p for p in model.parameters() if p.requires_grad])

    def after_step(optimizer: torch.optim.Optimizer, args: object, more: object) -> None:
        nonlocal steps
        steps += 1
        if averager is not None:
            averager.average_parameters(optimizer.param_groups)  # type: ignore[no-untyped-call]

    def exchange_now(bucket: Bucket) -> torch.futures.Future[torch.Tensor]:
        is_warm = steps >= algorithm.warmup_steps
        return exchange(group, bucket) if is_warm else exchange_in_full(group, bucket)

    # A lambda: torch reads a function's annotations, and takes few spellings of them.
    model.register_comm_hook(None, lambda state, bucket: exchange_now(bucket))
    if optimizer is not None:
        optimizer.register_step_post_hook(after_step)
