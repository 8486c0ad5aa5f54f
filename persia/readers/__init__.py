"""Readers of data where it is: each is an iterable of ``PersiaBatch``.

    ParquetReader, ArrowReader   folders of files, hive-partitioned or not
    CsvReader                    text with a header, by commas, tabs or else
    CriteoReader                 text: label, 13 numbers, 26 hexadecimal words
    TableReader                  a ``pyarrow.Table``, or a Hugging Face ``datasets.Dataset``
    TorchReader                  a ``torch.utils.data.DataLoader``

``Columns.batch`` makes the same of one request, and ``hash_text`` ids of texts.

They need pyarrow (``pip install pyarrow``) and no torch, so that a data-loader reads
with them as well as a trainer does. ``docs/readers.md`` is about them.
"""

from persia.embedding.text_ids import hash_text
from persia.readers._columns import Columns
from persia.readers._files import ArrowReader, ParquetReader
from persia.readers._reader import Reader
from persia.readers._tables import TableReader, TorchReader
from persia.readers._text import CriteoReader, CsvReader

__all__ = [
    "ArrowReader",
    "Columns",
    "CriteoReader",
    "CsvReader",
    "ParquetReader",
    "Reader",
    "TableReader",
    "TorchReader",
    "hash_text",
]
