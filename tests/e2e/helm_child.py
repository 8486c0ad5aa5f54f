"""Renders a chart by Helm's own code: values as JSON lines in, manifests as JSON lines out.

A process of its own, since the library brings Go's runtime. The first line out is what ``lint``
found. A value that the chart refuses is answered with the text of the error.
"""

from __future__ import annotations

import json
import sys

import helm_python as helm  # type: ignore[import-not-found]  # of `make helm`

if __name__ == "__main__":
    chart_path = sys.argv[1]
    print(json.dumps(helm.lint(chart_path, strict=True)), flush=True)
    with helm.Chart.load(chart_path) as chart:
        for line in sys.stdin:
            try:
                found = chart.render(json.loads(line), name="persia", namespace="persia-system")
            except helm.HelmError as exc:
                found = str(exc)
            print(json.dumps(found), flush=True)
