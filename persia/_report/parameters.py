"""What a run is run with, as text by name: model, optimizers, embedding config."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from persia._rpc.messages import HyperParameters
    from persia.config import EmbeddingSchema
    from persia.embedding.optim import Optimizer

# Of a torch optimizer, without effect on what is learned.
_TECHNICAL = {"params", "foreach", "capturable", "differentiable", "fused"}


def parameters(
    model: Any,
    embedding_optimizer: Optimizer,
    dense_optimizer: Any,
    settings: HyperParameters,
    schema: EmbeddingSchema | None,
    others: Mapping[str, object],
) -> dict[str, str]:
    """Return them in the order in which a page lists them."""
    found: dict[str, object] = {"model": type(model).__name__, "model parameters": "-"}
    if callable(getattr(model, "parameters", None)):
        count = sum(one.numel() for one in model.parameters())
        found["model parameters"] = f"{count:,}"
    chosen = embedding_optimizer.settings()
    found["embedding optimizer"] = type(embedding_optimizer).__name__
    found |= _under("embedding optimizer", chosen.options)
    found["dense optimizer"] = type(dense_optimizer).__name__
    groups = getattr(dense_optimizer, "param_groups", None) or ()
    for number, group in enumerate(groups):
        who = "dense optimizer" if len(groups) == 1 else f"dense optimizer, group {number}"
        found |= _under(who, {key: of for key, of in group.items() if key not in _TECHNICAL})
    found |= others
    initial = settings.initialization
    found["initial values"] = _with_options(initial.method, initial.options)
    found["admit_probability"] = settings.admit_probability
    found["weight_bound"] = settings.weight_bound
    found["seed of rows"] = settings.seed
    found |= {} if schema is None else _of_schema(schema)
    return {name: _as_text(value) for name, value in found.items()}


def _of_schema(schema: EmbeddingSchema) -> dict[str, object]:
    found: dict[str, object] = {"feature_index_prefix_bit": schema.prefix_bits}
    for name, slot in schema.slots.items():
        words = [f"dim {slot.dim}", slot.pooling, schema.tables[slot.table].dtype]
        if slot.pooling == "raw":
            words.append(f"sample_fixed_size {slot.sample_fixed_size}")
            words.append(f"padding {slot.padding}")
        if slot.id_hash is not None:
            words.append(f"ids hashed by {slot.id_hash}")
        if slot.hash_stack_rounds:
            words.append(f"{slot.hash_stack_rounds} rounds of {slot.hash_stack_size} rows")
        if slot.group != name:
            words.append(f"group {slot.group}")
        found[f"slot {name}"] = ", ".join(words)
    for table in schema.tables:
        for what in ("optimizer", "eviction", "admission"):
            setting = getattr(table.settings, what)
            for group in schema.groups_of(table.number) if setting is not None else ():
                found[f"{what} of group {group}"] = _given(setting)
    return found


def _given(setting: Any) -> str:
    """Return a group's keys and values, as a file has them, without those left out."""
    keys = dataclasses.asdict(setting)
    keys |= keys.pop("options", {})
    return ", ".join(f"{key} {_as_text(of)}" for key, of in keys.items() if of is not None)


def _under(name: str, options: Mapping[str, object]) -> dict[str, object]:
    return {f"{name}: {option}": value for option, value in options.items()}


def _with_options(name: str, options: Mapping[str, object]) -> str:
    return f"{name}({', '.join(f'{key}={_as_text(of)}' for key, of in options.items())})"


def _as_text(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
