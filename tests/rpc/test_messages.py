"""Bytes of each message of a realistic batch, as the encoder writes them.

The bound is the payload of the arrays, 5 % and 4 KiB; N ids, D distinct ones, F features,
B samples, values of w bytes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from persia._core.ids.feature_batch import FeatureBatch
from persia._rpc.frame import Call, Reply, encode
from persia._rpc.messages import BatchGradients, IDFeatures, SlotGradient
from persia._rpc.methods import Role, embedding_worker, parameter_server
from persia.config import EmbeddingSchema
from tests.support.services import make_servers, make_worker

B, F, DIM, HINT, SIGN = 4096, 26, 16, 4, 8
SCHEMA = EmbeddingSchema.load({"slots_config": {f"slot{n}": {"dim": DIM} for n in range(F)}})


def size(message: Call | Reply) -> int:
    return sum(len(part) for part in encode(message))


def called(role: Role, method: str, *arguments: Any) -> int:
    return size(Call(1, method, 300_000, *role.methods[method].write_arguments(arguments)))


def answered(role: Role, method: str, result: Any) -> int:
    return size(Reply(1, 1 << 62, *role.methods[method].write_result(result)))


def check(got: int, payload: int) -> None:
    assert payload <= got <= 1.05 * payload + 4096


def ids_of(rng: Any, num_ids: int) -> Any:
    """Few ids are most of them, as in clicks."""
    return (rng.zipf(1.3, num_ids) % (1 << 40)).astype(np.uint64)


def registered(*features: FeatureBatch) -> int:
    return called(embedding_worker(), "register", IDFeatures(features, 7, True))


@pytest.mark.parametrize(("num_ids", "width"), [(8, 2), (20, 4)])
def test_loader_to_worker_several_ids_for_each_sample(num_ids: int, width: int) -> None:
    """Their lengths come beside: one byte for each sample, below 5 % from ten ids on."""
    rng = np.random.default_rng(6)
    ids = rng.permutation(B * num_ids) if width == 4 else ids_of(rng, B * num_ids)
    offsets = np.arange(0, (B + 1) * num_ids, num_ids, dtype=np.int64)
    feature = FeatureBatch.from_csr("slot0", ids.astype(np.uint64), offsets)
    assert (feature.num_distinct >= 65_536) == (width == 4)
    check(registered(feature), 8 * feature.num_distinct + width * feature.num_ids + B)


def test_wide_numbers_where_there_are_many_distinct_ids() -> None:
    for distinct, width in ((256, 1), (257, 2), (65_536, 2), (65_537, 4)):
        batch = FeatureBatch.from_single("a", np.arange(distinct, dtype=np.uint64))
        assert 0 <= registered(batch) - (8 + width) * distinct < 200


def noted(server: Any) -> list[tuple[str, Any, int, int]]:
    """What a server is asked from now on, and the bytes of that and of its answers."""
    role, seen = parameter_server(), []

    def note(method: str, ask: Any, request: Any) -> Any:
        reply = ask(request)
        asked, sent = called(role, method, request), answered(role, method, reply)
        seen.append((method, request, asked, sent))
        return reply

    for method in ("lookup", "update"):
        setattr(server, method, partial(note, method, getattr(server, method)))
    return seen


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_the_other_hops(dtype: Any) -> None:
    """Rows and outputs are f32, and sent once; gradients as the trainer sends them."""
    servers = make_servers(2, SCHEMA)
    seen = [noted(server) for server in servers]
    worker = make_worker(servers, SCHEMA)
    role = embedding_worker()
    rng = np.random.default_rng(5)
    single = tuple(FeatureBatch.from_single(f"slot{n}", ids_of(rng, B)) for n in range(F))
    ref = worker.register(IDFeatures(single, 7, True))
    result = worker.lookup(ref, True)
    num_rows = sum(feature.num_distinct for feature in single)
    assert num_rows < 0.75 * B * F  # so each is sent once, and the number of each sample's
    check(answered(role, "lookup", result), DIM * 4 * num_rows + 2 * B * F)
    assert called(role, "lookup", ref, True) <= 4096
    gradients = tuple(
        SlotGradient(output.name, np.ones((B, DIM), dtype)) for output in result.outputs
    )
    update = BatchGradients(ref, (5, 7), gradients)
    check(called(role, "update", update), DIM * np.dtype(dtype).itemsize * B * F)
    assert answered(role, "update", worker.update(update)) <= 4096
    for (looking, request, asked, sent), (updating, update_, asked_too, sent_too) in seen:
        assert (looking, updating) == ("lookup", "update")
        num_signs = sum(len(table.signs) for table in request.tables)
        check(asked, SIGN * num_signs)
        check(sent, (DIM * 4 + HINT) * num_signs)
        assert sum(len(table.signs) for table in update_.tables) == num_signs
        check(asked_too, (SIGN + HINT + DIM * 4) * num_signs)
        assert sent_too <= 4096
    worker.close()
