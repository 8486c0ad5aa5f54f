"""Find the nearest neighbours of items by their embeddings, with an index of hnswlib.

persia-ckpt export run/checkpoint run/items.npz --feature item
python neighbours.py run/items.npz
"""

import sys

import hnswlib
import numpy as np

with np.load(sys.argv[1]) as file:
    ids, vectors = file["id"], file["vector"]  # u64 [n], ascending, and f32 [n, dim]

# Labels are places in ``ids``: hnswlib has signed ones, and ids may take all 64 bits.
index = hnswlib.Index(space="cosine", dim=vectors.shape[1])
index.init_index(max_elements=len(ids), ef_construction=200, M=16, random_seed=1)
index.add_items(vectors, np.arange(len(ids)))
index.set_ef(50)

asked = np.searchsorted(ids, np.arange(1, 6, dtype=np.uint64))
found, distances = index.knn_query(vectors[asked], k=6)
for place, near in zip(asked, found, strict=True):
    print(f"item {ids[place]}: near it are {', '.join(map(str, ids[near[1:]]))}")

exact = np.argsort(-vectors[asked] @ (vectors / np.linalg.norm(vectors, axis=1)[:, None]).T)
share = np.mean([np.isin(a, b[:6]).mean() for a, b in zip(found, exact, strict=True)])
print(f"{len(ids)} items, recall {share:.2f} of the exact search")
