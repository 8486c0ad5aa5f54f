"""Every name that the records need beside the public ones: a rename is followed here."""

from __future__ import annotations

from persia._core.ids.feature_batch import FeatureBatch
from persia._rpc.codec import ErrorOrigin
from persia._rpc.codec import error_from_body as from_body
from persia._rpc.codec import error_to_body as to_body
from persia._rpc.frame import PROTOCOL, Call, Failure, Reply, decode, encode
from persia._rpc.messages import EmbeddingWorker, Job, NNWorker, ParameterServer
from persia._rpc.methods import (
    HELLO,
    Hello,
    Method,
    embedding_worker,
    nn_worker,
    parameter_server,
    schema_text,
)
from persia.config import schema_fingerprint

__all__ = [
    "HELLO",
    "PROTOCOL",
    "Call",
    "EmbeddingWorker",
    "ErrorOrigin",
    "Failure",
    "FeatureBatch",
    "Hello",
    "Job",
    "Method",
    "NNWorker",
    "ParameterServer",
    "Reply",
    "decode",
    "embedding_worker",
    "encode",
    "from_body",
    "nn_worker",
    "parameter_server",
    "schema_fingerprint",
    "schema_text",
    "to_body",
]
