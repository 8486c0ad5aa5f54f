"""Ask the server about a new item while it is trained, and show how its score moves."""

import argparse
import http.client
import json
import time
from pathlib import Path

import numpy as np
from click_log import NEW_ITEM

SHOWN_CHANGE = 0.03  # of the score, until another line is printed


def request(num_candidates=100):
    """Return one user with candidates, the new item first, as the protocol has it in JSON."""
    items = [NEW_ITEM, *range(1, num_candidates)]
    inputs = [
        ("user", "INT64", [1], [7]),  # of one sample: the same for all candidates
        ("item", "INT64", [num_candidates], items),
        ("seen_items.values", "INT64", [3], [1, 2, 3]),
        ("seen_items.offsets", "INT64", [2], [0, 3]),
        ("hour", "FP32", [1, 1], [0.5]),
    ]
    names = ("name", "datatype", "shape", "data")
    return {"inputs": [dict(zip(names, one, strict=True)) for one in inputs]}


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--port", type=int, default=8080)
parser.add_argument("--until", type=Path, required=True, help="ends when this file exists")
options = parser.parse_args()

connection = http.client.HTTPConnection("127.0.0.1", options.port, timeout=30)
body, begin = json.dumps(request()), time.monotonic()
took, version, shown = [], None, -1.0


def show(text):
    """Print a line with the seconds since the first request."""
    print(f"{time.monotonic() - begin:5.1f} s  {text}", flush=True)


while not options.until.exists():
    sent = time.perf_counter()
    connection.request("POST", "/v2/models/clicks/infer", body)
    response = connection.getresponse()
    answer = json.load(response)
    took.append((time.perf_counter() - sent) * 1e3)
    if response.status != 200:
        raise SystemExit(f"{response.status}: {answer['error']}")
    score = answer["outputs"][0]["data"][0]
    if answer["model_version"] != version:
        version = answer["model_version"]
        show(f"version {version} answers")
    if abs(score - shown) > SHOWN_CHANGE:
        print(
            f"{time.monotonic() - begin:5.1f} s  score of the new item {score:.3f}", flush=True
        )
        shown = score
    time.sleep(0.05)
p50, p99 = np.percentile(took, [50, 99])
print(
    f"{len(took)} requests of 100 candidates: p50 {p50:.1f} ms, p99 {p99:.1f} ms, none failed"
)
