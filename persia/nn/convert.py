"""``convert``: torch's embeddings anywhere in a model become PERSIA's."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from persia._modules.homes import write_rows
from persia.embedding import Constant, InitialValues, Normal
from persia.errors import ConfigError
from persia.logger import get_logger
from persia.nn.base import RowModule
from persia.nn.gather import gather
from persia.nn.modules import Embedding, EmbeddingBag, TableModule

if TYPE_CHECKING:
    from collections.abc import Iterator

_logger = get_logger("persia.nn")


def convert(
    model: nn.Module,
    *,
    min_rows: int = 0,
    initialization: InitialValues | None = None,
    prefix: str = "",
) -> nn.Module:
    """Replace ``nn.Embedding`` and ``nn.EmbeddingBag`` in a model; return the model.

    Their weights become rows 0, 1, ... of a table that is named after the module's place, such
    as ``embedding_dict.user``, and any other id gets a row when it is trained. Give the rows an
    optimizer of ``persia.optim``; the model's own would step weights that are not used.

    Left as they are, with a line in the log: modules with ``max_norm`` or
    ``scale_grad_by_freq``, subclasses with a ``forward`` of their own, modules with hooks; with
    a warning, those whose weight another module has as well. A model that is converted already
    is returned as it is.

    Args:
        model: Any model; its other modules and parameters stay.
        min_rows: Replace those with at least as many rows.
        initialization: What new rows are drawn from. None is a normal distribution with mean
            and deviation of the weights that are there.
        prefix: Put before the names of tables, to tell several models of a process apart.

    Raises:
        ConfigError: If it is no module, or nothing was replaced, now or before.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"convert: expected a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, nn.Embedding | nn.EmbeddingBag):
        holder = nn.ModuleDict({"embedding": model})
        convert(holder, min_rows=min_rows, initialization=initialization, prefix=prefix)
        return holder["embedding"]
    replaced: dict[int, TableModule] = {}
    reasons: list[str] = []
    tied: list[str] = []
    users = _users_of_weights(model)
    for path, parent, name, module in list(_embeddings(model)):
        if id(module) not in replaced:
            weight: Any = module.weight
            if len(users[id(weight)]) > 1 and len(weight) >= min_rows:
                tied.append(path)
                continue
            reason = _why_not(module, min_rows)
            if reason:
                reasons.append(f"{path} {reason}")
                continue
            replaced[id(module)] = _replacement(module, prefix + path, initialization)
        setattr(parent, name, replaced[id(module)])
    if reasons:
        _logger.info("not converted: %s", "; ".join(reasons))
    shared = _of_tied(tied)
    if shared:
        _logger.warning("not converted: %s", shared)
    if replaced:
        gather(model)
    else:
        _check_converted(model, [*reasons, *([shared] if shared else [])])
    return model


def _check_converted(model: nn.Module, reasons: list[str]) -> None:
    """Refuse a model in which nothing is converted, now or before."""
    if not any(isinstance(one, RowModule) for one in model.modules()):
        raise ConfigError(
            "convert: expected a model with nn.Embedding or nn.EmbeddingBag, got "
            f"{type(model).__name__} with none to replace{': ' if reasons else ''}"
            f"{'; '.join(reasons)}"
        )


def _of_tied(paths: list[str]) -> str:
    """Say what to write where other modules have the weight of an embedding; "" of none."""
    if not paths:
        return ""
    return (
        f"{', '.join(paths)}: its weight is another module's too, so it stays in memory and "
        "has no new ids; in place of a tied output write torch.nn.functional.linear(h, "
        f"model.{paths[0]}.weight), and convert then"
    )


def _embeddings(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Module]]:
    """Yield path, parent, name and module of each embedding, as often as it is in the model."""
    for path, parent in model.named_modules(remove_duplicate=True):
        for name, module in parent.named_children():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                yield f"{path}.{name}".lstrip("."), parent, name, module


def _users_of_weights(model: nn.Module) -> dict[int, set[int]]:
    """Return by id of a parameter the ids of the modules that have it."""
    users: dict[int, set[int]] = defaultdict(set)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users[id(parameter)].add(id(module))
    return users


def _why_not(module: Any, min_rows: int) -> str:
    """Return why a module is left as it is; "" if it is replaced."""
    kind = nn.Embedding if isinstance(module, nn.Embedding) else nn.EmbeddingBag
    weight = module.weight
    if not isinstance(weight, torch.Tensor) or len(weight) < min_rows:
        return f"has fewer than {min_rows} rows"
    if type(module).forward is not kind.forward:
        return f"is a {type(module).__name__} with a forward of its own"
    if module.max_norm is not None or module.scale_grad_by_freq:
        return "has max_norm or scale_grad_by_freq"
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        return "has hooks"
    if "weight" not in module._parameters:
        return "has a weight that is computed"
    return ""


def _replacement(module: Any, path: str, initialization: InitialValues | None) -> TableModule:
    """Return the module that takes its place, with its weights as rows."""
    weight = module.weight.detach()
    padding = module.padding_idx
    name = re.sub(r"[^0-9A-Za-z_.-]", "_", path)
    initial = initialization or _distribution(weight, padding)
    found: TableModule
    if isinstance(module, nn.Embedding):
        found = Embedding(
            len(weight),
            weight.shape[1],
            padding,
            name=name,
            initialization=initial,
            is_new=True,
        )
    else:
        found = EmbeddingBag(
            len(weight),
            weight.shape[1],
            mode=module.mode,
            include_last_offset=module.include_last_offset,
            padding_idx=padding,
            name=name,
            initialization=initial,
            is_new=True,
        )
    values = weight.to("cpu", torch.float32, copy=True).contiguous().numpy()
    write_rows(found._tables[0], np.arange(len(values), dtype=np.uint64), values)
    found.anchor.requires_grad_(module.weight.requires_grad)
    found.to(weight.device, weight.dtype).train(module.training)
    _warn_of_use(module.weight, found.table_name)
    return found


def _distribution(weight: torch.Tensor, padding: int | None) -> InitialValues:
    """Return what rows like these could have been drawn from."""
    keep_rows = torch.ones(len(weight), dtype=torch.bool, device=weight.device)
    if padding is not None:
        keep_rows[padding] = False
    values = weight[keep_rows].double()
    if not values.numel():
        return Normal(0.0, 1.0)
    mean = float(values.mean())
    deviation = float(values.std(correction=0))
    return Normal(mean, deviation) if deviation > 0 else Constant(mean)


def _warn_of_use(weight: torch.Tensor, table: str) -> None:
    """Say, once, that something in the model still uses a weight that was replaced."""
    if not weight.requires_grad:
        return

    def warn(_: torch.Tensor) -> None:
        handle.remove()
        _logger.warning(
            "table %r: the loss still uses the weight that convert has replaced, which is not "
            "trained any more: a list of parameters, as for a penalty, was made before; for a "
            "penalty on rows write weight_decay= of the optimizer of persia.optim (said once)",
            table,
        )

    handle = weight.register_hook(warn)  # type: ignore[no-untyped-call]
