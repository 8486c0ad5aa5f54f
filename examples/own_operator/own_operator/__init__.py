"""``interaction``, an operator of PyTorch in C++: compiled here, or brought by the wheel."""

from __future__ import annotations

from pathlib import Path

import torch

from persia.cpp_extension import (
    TorchBuilder,
    cached_load_prebuilt_extension,
    get_cpp_sources_list_from_folder,
)

_FOLDER = Path(__file__).parent

# The one place where the module has its name. In a checkout it is compiled by the first import;
# `pip wheel` puts it into the folder `prebuilt` of the wheel.
cached_load_prebuilt_extension(
    external_prebuilded_path=_FOLDER / "prebuilt",
    module_name="own_operator_native",
    builder=TorchBuilder(get_cpp_sources_list_from_folder(_FOLDER)),
)


def interaction(vectors: torch.Tensor) -> torch.Tensor:
    """Return the sum of v_i * v_j over all pairs of fields, [B, D], of vectors [B, F, D]."""
    return torch.ops.own_operator.interaction(vectors)


# What `torch.compile` and `torch.export` need to know: the shape without the numbers.
@torch.library.register_fake("own_operator::interaction")
def _(vectors: torch.Tensor) -> torch.Tensor:
    return vectors.new_empty(vectors.shape[0], vectors.shape[2])


@torch.library.register_fake("own_operator::interaction_backward")
def _(grad: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(vectors, memory_format=torch.contiguous_format)


def _backward(ctx, grad: torch.Tensor) -> torch.Tensor:
    return torch.ops.own_operator.interaction_backward(grad, *ctx.saved_tensors)


def _setup_context(ctx, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


torch.library.register_autograd(
    "own_operator::interaction", _backward, setup_context=_setup_context
)
