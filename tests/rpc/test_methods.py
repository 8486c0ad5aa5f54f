"""The tables of the methods of each role."""

from __future__ import annotations

from persia._rpc import messages
from persia._rpc.methods import embedding_worker, nn_worker, parameter_server


def test_the_tables_have_every_method_of_the_protocols() -> None:
    for role, protocol in (
        (parameter_server(), messages.ParameterServer),
        (embedding_worker(), messages.EmbeddingWorker),
        (nn_worker(), messages.NNWorker),
    ):
        declared = {
            name for name, f in vars(protocol).items() if callable(f) and name[0] != "_"
        }
        assert role.methods.keys() == declared | {"hello", "finish_job", "job_status"}
