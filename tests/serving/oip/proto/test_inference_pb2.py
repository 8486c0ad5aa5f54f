"""The messages in Python are those of the .proto; ``python -m`` this module writes them."""

from __future__ import annotations

import base64
import sys
import textwrap
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

from persia._serving.oip import proto

FOLDER = Path(proto.__file__).parent
TARGET = FOLDER / "inference_pb2.py"


def compiled(folder: Path) -> bytes:
    from grpc_tools import protoc

    out = folder / "descriptor"
    words = ["protoc", f"-I{FOLDER}", f"--descriptor_set_out={out}", "inference.proto"]
    assert protoc.main(words) == 0
    (file,) = FileDescriptorSet.FromString(out.read_bytes()).file
    return bytes(file.SerializeToString(deterministic=True))


def generated(data: bytes) -> str:
    names = sorted(one.name for one in FileDescriptorProto.FromString(data).message_type)
    classes = "\n".join(f'{name} = _message("{name}")' for name in names)
    text = textwrap.indent(
        "\n".join(f'"{line}"' for line in textwrap.wrap(base64.b64encode(data).decode(), 86)),
        "    ",
    )
    return f'''"""Messages of inference.proto, which this is generated of.

They are in a pool of their own: a program may have another client's messages of these names.
"""

from __future__ import annotations

import base64
from typing import Any

from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

_DESCRIPTOR = (
{text}
)
_pool = DescriptorPool()
_pool.AddSerializedFile(base64.b64decode(_DESCRIPTOR))


def _message(name: str) -> Any:
    return GetMessageClass(_pool.FindMessageTypeByName(f"inference.{{name}}"))


{classes}
'''


def test_generated_is_what_the_proto_says(tmp_path: Path) -> None:
    assert TARGET.read_text() == generated(compiled(tmp_path))


def test_fields_are_those_of_the_published_protocol() -> None:
    # The client's own messages were generated of the published file and its extensions.
    from tritonclient.grpc import service_pb2

    from persia._serving.oip.proto import inference_pb2

    names = [name for name, one in vars(inference_pb2).items() if hasattr(one, "FromString")]
    assert len(names) > 20
    for name in names:
        _compare(getattr(inference_pb2, name).DESCRIPTOR, getattr(service_pb2, name).DESCRIPTOR)


def _compare(ours: object, theirs: object) -> None:
    known = theirs.fields_by_name  # type: ignore[attr-defined]
    for field in ours.fields:  # type: ignore[attr-defined]
        if field.name == "properties":  # the published protocol's only
            continue
        other = known[field.name]
        assert (field.number, field.type) == (other.number, other.type), field.full_name
    for nested in ours.nested_types:  # type: ignore[attr-defined]
        if nested.name == "PropertiesEntry":
            continue
        _compare(nested, theirs.nested_types_by_name[nested.name])  # type: ignore[attr-defined]


if __name__ == "__main__":
    TARGET.write_text(generated(compiled(Path(sys.argv[1]))))
