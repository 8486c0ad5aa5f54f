"""Every batch reaches the model in the order in which its training began."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from persia._rpc.messages import FeatureOrder, IDFeatures, LookupResult
from persia._training.batch import DeviceTransfer, NamedList
from persia._training.feature_order import SharedOrder, check_ranks
from persia.ctx import InferCtx, TrainCtx, eval_ctx
from persia.data import DataLoader
from persia.embedding import EmbeddingConfig
from persia.embedding.data import (
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
)
from persia.embedding.optim import SGD
from persia.errors import CheckpointError, ConfigError, DataError

from .conftest import LOCKSTEP, MakeCtx, Net, fail_at, loss_of, step, wait
from .fakes import DIM, FIXED, NUM_IDS, SpyRanks, SpyWorker

SIZE = 4
DENSE = ("age", "price")
LABELS = ("click", "buy")


def batch_of(
    names: Sequence[str],
    *,
    dense: Sequence[str | None] = DENSE,
    labels: Sequence[str | None] = LABELS,
    requires_grad: bool = True,
) -> PersiaBatch:
    """A batch whose values follow from the names, whatever their order is."""
    ids: list[Any] = []
    for name in names:
        values = (np.arange(SIZE, dtype=np.uint64) + np.uint64(len(name))) % np.uint64(NUM_IDS)
        if name == "user":
            ids.append(IDTypeFeatureWithSingleID(name, values))
        else:
            ids.append(IDTypeFeature(name, [values[: n + 1] for n in range(SIZE)]))
    return PersiaBatch(
        ids,
        [
            NonIDTypeFeature(np.full((SIZE, 1), len(name or ""), np.float32), name)
            for name in dense
        ],
        [Label(np.full((SIZE, 1), name == "click", np.float32), name) for name in labels],
        requires_grad=requires_grad,
    )


def train_on(ctx: TrainCtx, batch: PersiaBatch) -> None:
    """One step, to the end of its update: lookups for training do not wait for one."""
    step(ctx, ctx.get_embedding_from_data(batch))
    ctx.get_embedding_size()


def given_to_the_model(batch: Any) -> list[list[bytes]]:
    return [
        [part.detach().numpy().tobytes() for part in parts]
        for parts in (batch.embedding_tensors, batch.non_id_type_tensors, batch.labels)
    ]


def test_a_swapped_evaluation_equals_one_in_the_order_of_training(make_ctx: MakeCtx) -> None:
    with make_ctx() as ctx:
        for batch in DataLoader([batch_of(("user", "tags"))], **LOCKSTEP):
            step(ctx, batch)
        with eval_ctx(model=ctx.model) as evaluation:
            outputs, inputs = [], []
            for swapped in (False, True):
                back = -1 if swapped else 1
                batch = evaluation.get_embedding_from_data(
                    batch_of(
                        ("user", "tags")[::back],
                        dense=DENSE[::back],
                        labels=LABELS[::back],
                        requires_grad=False,
                    )
                )
                assert batch.feature_names == ("user", "tags")
                inputs.append(given_to_the_model(batch))
                outputs.append(evaluation.forward(batch)[0])
    assert inputs[0] == inputs[1]
    assert torch.equal(*outputs)


def test_training_itself_keeps_the_order_of_its_first_batch(make_ctx: MakeCtx) -> None:
    results = []
    for orders in (("user", "tags"), ("user", "tags")), (("user", "tags"), ("tags", "user")):
        with make_ctx(embedding_worker=SpyWorker()) as ctx:
            losses = [
                step(ctx, batch).item()
                for batch in DataLoader([batch_of(names) for names in orders], **LOCKSTEP)
            ]
            ctx.get_embedding_size()  # waits for the updates
            rows = ctx.get_embedding_from_data(batch_of(("tags", "user")))
            results.append((losses, given_to_the_model(rows)))
    assert results[0] == results[1]


def test_what_the_model_receives_has_names(ctx: TrainCtx) -> None:
    batch = ctx.get_embedding_from_data(batch_of(("user", "tags")))
    dense, embeddings, labels = ctx.prepare_features(batch)
    assert labels is not None
    assert embeddings["tags"] is embeddings[1] is batch.embedding_tensors["tags"]
    assert dense["price"] is dense[1]
    assert labels["buy"] is labels[1]
    assert embeddings[:1] == [embeddings["user"]]
    with pytest.raises(DataError, match=r"^'price': expected one of .* names, got user, tags$"):
        embeddings["price"]
    step(ctx, batch)


@pytest.mark.parametrize("names", [(None, None), ("age", None)])
def test_arrays_without_names_of_their_own_keep_their_places(
    ctx: TrainCtx, names: Sequence[str | None]
) -> None:
    unnamed = batch_of(("user", "tags"), dense=names)
    first = ctx.get_embedding_from_data(unnamed)
    with pytest.raises(DataError, match=r"'age': .* got no names: give each its own by name="):
        first.non_id_type_tensors["age"]
    # Neither side has names to compare.
    named = ctx.get_embedding_from_data(batch_of(("user", "tags"), dense=DENSE[::-1]))
    assert named.non_id_type_tensors.names == DENSE[::-1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"names": ("user",)},
            r"^feature 'tags': expected in every batch, .*; got user; "
            r"allow_missing=\['tags'\] gives zeros in its place$",
        ),
        (
            {"names": ("user", "tags", "jag")},
            r"^feature 'jag': expected only what the model is trained with, which is user, "
            r"tags; leave it out, or give the context features=\[\.\.\.\] with it$",
        ),
        (
            {"dense": ("age", "prize")},
            r"^dense feature 'price': expected .*; got age, prize, did you mean 'prize'\?$",
        ),
        ({"labels": ("click",)}, r"^label 'buy': expected in every batch, .*; got click$"),
    ],
)
def test_a_batch_with_other_names_is_refused_and_leaves_nothing(
    ctx: TrainCtx, worker: SpyWorker, change: dict[str, Any], message: str
) -> None:
    train_on(ctx, batch_of(("user", "tags")))
    for requires_grad in (True, False):
        with pytest.raises(DataError, match=message):
            ctx.get_embedding_from_data(
                batch_of(**{"names": ("user", "tags"), **change}, requires_grad=requires_grad)
            )
    with pytest.raises(DataError, match=message):
        list(DataLoader([batch_of(**{"names": ("user", "tags"), **change})], **LOCKSTEP))
    assert worker.buffer.stats()["in_flight"] == 0
    assert ctx.stats()["staleness"] == 0


def test_tensors_keep_their_names_on_a_device() -> None:
    tensors = NamedList([torch.ones(1), torch.zeros(1)], DENSE)
    moved = DeviceTransfer(torch.device("cpu"))._move(tensors)
    assert (moved, moved.names) == (tensors, DENSE)


def test_zeros_stand_for_what_may_be_missing(make_ctx: MakeCtx, worker: SpyWorker) -> None:
    names = ("user", "tags", "seq", "jag")
    with make_ctx(num_features=4, allow_missing=["tags", "seq", "jag"]) as ctx:
        train_on(ctx, batch_of(names))
        batch = ctx.get_embedding_from_data(batch_of(("user",)))
        assert batch.feature_names == names
        tags, seq, jag = (batch.embedding_tensors[name] for name in names[1:])
        assert isinstance(tags, torch.Tensor)
        assert isinstance(seq, torch.Tensor)
        assert torch.equal(tags, torch.zeros(SIZE, DIM))
        assert torch.equal(seq, torch.zeros(SIZE, FIXED, DIM + 1))
        assert [part.tolist() for part in jag] == [[], [0] * (SIZE + 1)]
        step(ctx, batch)
        ctx.get_embedding_size()  # waits for the update
        assert [each.name for each in worker.gradients[-1].gradients] == ["user"]
        with (
            eval_ctx(model=ctx.model, allow_missing=["tags"]) as evaluation,
            pytest.raises(DataError, match="feature 'seq': expected in every batch"),
        ):
            evaluation.get_embedding_from_data(batch_of(("user",), requires_grad=False))


def test_a_context_can_be_given_the_order(make_ctx: MakeCtx, worker: SpyWorker) -> None:
    with make_ctx(features=["tags", "user"]) as ctx:
        batch = ctx.get_embedding_from_data(batch_of(("user", "tags")))
        assert batch.feature_names == ("tags", "user")
        step(ctx, batch)
        with eval_ctx(model=ctx.model) as evaluation:
            found = evaluation.get_embedding_from_data(batch_of(("user", "tags")))
            assert found.feature_names == ("tags", "user")
    # Another model over the same rows, which receives more.
    with make_ctx(num_features=3, features=["user", "tags", "seq"]) as ctx:
        train_on(ctx, batch_of(("seq", "tags", "user")))
    assert worker.feature_order() == FeatureOrder(("user", "tags", "seq"), DENSE, LABELS)


@pytest.mark.parametrize("given", ["user", ["user", "user"], [1], 3])
@pytest.mark.parametrize("name", ["features", "allow_missing"])
def test_names_that_are_no_list_of_names(make_ctx: MakeCtx, name: str, given: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: expected "):
        make_ctx(**{name: given})


def test_the_order_of_a_set_is_none(make_ctx: MakeCtx) -> None:
    """Two ranks, or training and serving, would have other orders."""
    with pytest.raises(ConfigError, match=r"^features: expected a list of feature names, got"):
        make_ctx(features={"user", "tags"})
    make_ctx(allow_missing={"user", "tags"})

    class Others(SpyRanks):
        def agree(self, code: int) -> list[int]:
            return [super().agree(code)[0], code + 1]

    check_ranks(SpyRanks(), ["user", "tags"])
    with pytest.raises(
        ConfigError, match=r"^features: .* every rank, got \['user'\] .* rank 1 "
    ):
        check_ranks(Others(), ["user"])


def test_a_checkpoint_keeps_the_order(make_ctx: MakeCtx, tmp_path: Path) -> None:
    names = ("user", "tags")
    with make_ctx() as ctx:
        train_on(ctx, batch_of(names))
        output = ctx.forward(ctx.get_embedding_from_data(batch_of(names)))[0]
        ctx.dump_checkpoint(tmp_path)
    for loads in ("load_checkpoint", "load_embedding"):
        with InferCtx(embedding_worker=SpyWorker(), model=ctx.model) as infer:
            getattr(infer, loads)(tmp_path)
            batch = infer.get_embedding_from_data(batch_of(names[::-1]))
            assert batch.feature_names == names
            assert torch.equal(infer.forward(batch)[0], output)
    with make_ctx(embedding_worker=SpyWorker()) as again:
        again.load_checkpoint(tmp_path)
        batch = again.get_embedding_from_data(batch_of(names[::-1]))
        assert batch.feature_names == names
    # Rows alone may begin another model.
    another = make_ctx(embedding_worker=SpyWorker())
    another.load_embedding(tmp_path)
    with another:
        another.load_embedding(tmp_path)
        batch = another.get_embedding_from_data(batch_of(names[::-1]))
        assert batch.feature_names == names[::-1]
        loss_of(*another.forward(batch))


def test_the_order_that_a_context_is_given_holds_where_none_is_known(
    worker: SpyWorker,
) -> None:
    with InferCtx(embedding_worker=worker, features=["tags", "user"]) as infer:
        worker.configure(EmbeddingConfig().settings())
        worker.register_optimizer(SGD(lr=0.1).settings())
        batch = infer.get_embedding_from_data(batch_of(("user", "tags"), requires_grad=False))
        assert batch.feature_names == ("tags", "user")


def test_a_batch_that_fails_fixes_no_order(make_ctx: MakeCtx) -> None:
    """As the first one in a notebook, with a name that is put right then."""
    with make_ctx() as ctx:
        with pytest.raises(DataError, match="'tag' is not in the embedding config"):
            ctx.get_embedding_from_data(batch_of(("tag", "user")))
        train_on(ctx, batch_of(("user", "tags")))
    worker = SpyWorker()
    worker.before_lookup = fail_at(0, DataError("its ids are wrong"))
    with make_ctx(embedding_worker=worker) as ctx:
        with pytest.raises(DataError, match="its ids are wrong"):
            ctx.get_embedding_from_data(batch_of(("user",)))
        train_on(ctx, batch_of(("user", "tags")))
    with make_ctx(embedding_worker=SpyWorker(), features=["user", "tag"]) as ctx:
        with pytest.raises(DataError, match=r"^feature 'tag': .* did you mean 'tags'\?"):
            ctx.get_embedding_from_data(batch_of(("user", "tags")))
        assert ctx.embedding_worker.feature_order() is None


def test_the_batch_that_is_taken_first_fixes_the_order(make_ctx: MakeCtx) -> None:
    """Also where another one's lookup ends before its own, and one may lack a feature."""
    second_has_ended = threading.Event()

    class Late(SpyWorker):
        def lookup_direct(self, features: IDFeatures) -> LookupResult:
            result = super().lookup_direct(features)
            if features.batch_id == 0 and features.requires_grad:
                wait(second_has_ended)
            return result

        def fix_feature_order(
            self, order: FeatureOrder, replaces: FeatureOrder | None
        ) -> FeatureOrder:
            second_has_ended.set()
            return super().fix_feature_order(order, replaces)

    names = ("tags", "user", "seq")
    data = [batch_of(names), batch_of(names[1::-1], dense=DENSE[::-1])]
    with make_ctx(3, embedding_worker=Late(), allow_missing=["seq"]) as ctx:
        for batch in DataLoader(data, num_workers=2, embedding_staleness=None):
            assert batch.feature_names == names
            assert batch.non_id_type_tensors.names == DENSE
            step(ctx, batch)


@pytest.mark.parametrize("features", [None, ["user", "tags"]])
def test_ranks_with_other_orders_train_by_one(
    make_ctx: MakeCtx, worker: SpyWorker, features: list[str] | None
) -> None:
    """Each rank has a context of its own, and only the embedding-worker is shared."""
    if features is not None:  # instead of those of another model
        worker.fix_feature_order(FeatureOrder(("jag",), (), ()), None)
    found = []
    for back in (1, -1):
        with make_ctx(embedding_worker=SameServers(worker), features=features) as ctx:
            batch = ctx.get_embedding_from_data(
                batch_of(("user", "tags")[::back], dense=DENSE[::back], labels=LABELS[::back])
            )
            found.append(given_to_the_model(batch))
    assert found[0] == found[1]


def test_an_order_is_replaced_though_others_come_meanwhile(make_ctx: MakeCtx) -> None:
    others = [FeatureOrder((name,), (), ()) for name in ("seq", "jag")]

    class Contested(SpyWorker):
        def fix_feature_order(
            self, order: FeatureOrder, replaces: FeatureOrder | None
        ) -> FeatureOrder:
            if others:
                self._order = others.pop()
            return super().fix_feature_order(order, replaces)

    with make_ctx(embedding_worker=Contested(), features=["user", "tags"]) as ctx:
        train_on(ctx, batch_of(("tags", "user")))
        order = FeatureOrder(("user", "tags"), DENSE, LABELS)
        assert ctx.embedding_worker.feature_order() == order


def test_the_order_is_asked_for_until_it_is_known(make_ctx: MakeCtx) -> None:
    asked: list[FeatureOrder | None] = []

    class Counting(SpyWorker):
        def feature_order(self) -> FeatureOrder | None:
            asked.append(super().feature_order())
            return asked[-1]

        def fix_feature_order(
            self, order: FeatureOrder, replaces: FeatureOrder | None
        ) -> FeatureOrder:
            asked.append(order)
            return super().fix_feature_order(order, replaces)

    worker = Counting()
    with make_ctx(embedding_worker=worker) as ctx:
        # An evaluation fixes nothing.
        ctx.get_embedding_from_data(batch_of(("tags", "user"), requires_grad=False))
        for _ in range(3):
            train_on(ctx, batch_of(("user", "tags")))
    assert asked == [None, FeatureOrder(("user", "tags"), DENSE, LABELS)]


def test_an_order_that_is_fixed_while_it_is_asked_for() -> None:
    order = FeatureOrder(("user", "tags"), (), ())

    class Asked(SpyWorker):
        def feature_order(self) -> FeatureOrder | None:
            before = super().feature_order()
            shared.fix(order, order.__eq__)
            return before

    shared = SharedOrder(Asked())
    assert shared.get() == order


class SameServers:
    """What another rank has of an embedding-worker: not the object."""

    def __init__(self, worker: SpyWorker) -> None:
        self._worker = worker

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)


def test_arrays_without_names_are_refused_where_names_are_trained(ctx: TrainCtx) -> None:
    """Their places may be others than those of training, as if two had been swapped."""
    train_on(ctx, batch_of(("user", "tags")))
    with pytest.raises(DataError, match=r"^dense feature 'age': .* got none by name$"):
        ctx.get_embedding_from_data(batch_of(("user", "tags"), dense=(None,)))
    expected = r"s: expected names, .* with {0}; got 2 without .* its own by name='{1}'$"
    for requires_grad in (True, False):
        for given, what, names in (
            ({"dense": (None, None)}, "dense feature", DENSE),
            ({"dense": (None, "price")}, "dense feature", DENSE),
            ({"labels": (None, None)}, "label", LABELS),
        ):
            message = "^" + what + expected.format(", ".join(names), names[0])
            with pytest.raises(DataError, match=message):
                ctx.get_embedding_from_data(
                    batch_of(("user", "tags"), **given, requires_grad=requires_grad)
                )


def test_one_array_needs_no_name(make_ctx: MakeCtx) -> None:
    with make_ctx(model=Net(num_dense=1)) as ctx:
        train_on(ctx, batch_of(("user", "tags"), dense=("age",)))
        step(ctx, ctx.get_embedding_from_data(batch_of(("user", "tags"), dense=(None,))))


def test_rows_are_read_without_dense_features_and_no_model_is_called(ctx: TrainCtx) -> None:
    train_on(ctx, batch_of(("user", "tags")))
    with eval_ctx(model=ctx.model) as evaluation:
        rows = evaluation.get_embedding_from_data(
            batch_of(("user", "tags"), dense=(), labels=(), requires_grad=False)
        )
        assert (rows.non_id_type_tensors, rows.labels) == ([], None)
        assert rows.feature_names == ("user", "tags")
        for call in (evaluation.forward, ctx.forward, evaluation.prepare_features):
            with pytest.raises(DataError, match=r"^dense feature 'age': .* got none by name$"):
                call(rows)


class Summing(torch.nn.Module):
    """Takes any number of features."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(DIM, 1)

    def forward(self, dense: Any, embeddings: Any) -> torch.Tensor:
        output: torch.Tensor = self.layer(sum(embeddings))
        return output


@pytest.fixture
def saved(make_ctx: MakeCtx, tmp_path: Path) -> Path:
    """A checkpoint of a model that receives user, tags."""
    with make_ctx(embedding_worker=SpyWorker()) as ctx:
        train_on(ctx, batch_of(("user", "tags")))
        ctx.dump_checkpoint(tmp_path)
    return tmp_path


def test_a_checkpoint_of_another_order_than_the_context_was_given(
    make_ctx: MakeCtx, saved: Path
) -> None:
    message = r"features user, tags, in this order, and .* features=\['tags', 'user'\]"
    with make_ctx(features=["tags", "user"]) as ctx:
        with pytest.raises(CheckpointError, match=message):
            ctx.load_checkpoint(saved)
        assert ctx.get_embedding_size() == [0]
        ctx.load_embedding(saved)  # rows alone: it is another model
        train_on(ctx, batch_of(("user", "tags")))
        order = ctx.embedding_worker.feature_order()
        assert order is not None
        assert order.ids == ("tags", "user")
    # With one more it may be a model that the rows are new to.
    with make_ctx(model=Summing(), embedding_worker=SpyWorker()) as ctx:
        train_on(ctx, batch_of(("user", "tags")))
        ctx.dump_checkpoint(saved)
    names = ("jag", "tags", "user")
    with make_ctx(model=Summing(), features=names, allow_missing=["jag"]) as ctx:
        ctx.load_checkpoint(saved)
        with eval_ctx(model=ctx.model, allow_missing=["jag"]) as evaluation:
            swapped = batch_of(("user", "tags"), dense=DENSE[::-1], requires_grad=False)
            batch = evaluation.get_embedding_from_data(swapped)
            assert batch.feature_names == names
            assert batch.non_id_type_tensors.names == DENSE


def test_the_order_comes_with_the_model_alone(make_ctx: MakeCtx, saved: Path) -> None:
    names = ("user", "tags")
    # Of rows named one by one the model is loaded, too, as its page says.
    with make_ctx() as ctx:
        train_on(ctx, batch_of(names[::-1]))
        ctx.load_checkpoint(saved, features=names)
        batch = ctx.get_embedding_from_data(batch_of(names[::-1]))
        assert batch.feature_names == names
    # Some rows may be another model's.
    with InferCtx(embedding_worker=SpyWorker()) as infer:
        infer.load_embedding(saved, features=names[:1])
        batch = infer.get_embedding_from_data(batch_of(names[::-1]))
        assert batch.feature_names == names[::-1]
    # An evaluation that loads rows for a model that is being trained changes nothing of it.
    with make_ctx(embedding_worker=SpyWorker()) as ctx:
        train_on(ctx, batch_of(names[::-1]))
        with eval_ctx(model=ctx.model) as evaluation:
            evaluation.load_embedding(saved)
        batch = ctx.get_embedding_from_data(batch_of(names))
        assert batch.feature_names == names[::-1]


def test_a_checkpoint_without_an_order_says_so(
    make_ctx: MakeCtx, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make_ctx() as ctx:
        ctx.update_times = 1  # as one of an earlier version that has trained
        ctx.dump_checkpoint(tmp_path)
    knows = SpyWorker()
    knows.fix_feature_order(FeatureOrder(("user", "tags"), (), ()), None)
    for features, worker, warns in (
        (None, SpyWorker(), True),
        (["user", "tags"], SpyWorker(), False),
        (None, knows, False),
    ):
        caplog.clear()
        with InferCtx(embedding_worker=worker, model=Net(), features=features) as infer:
            infer.load_checkpoint(tmp_path)
        assert ("Give the context features=[...]" in caplog.text) is warns
