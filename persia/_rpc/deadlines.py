"""By when whoever called this process wants the answer; its own calls take no longer.

A worker that asks parameter servers on somebody's behalf would otherwise go on for minutes
after that somebody has given up.
"""

from __future__ import annotations

import math
from contextvars import ContextVar

# Monotonic seconds. It belongs to the thread that serves the call; one that hands work to
# other threads runs it there in a copy of its context.
caller_deadline: ContextVar[float] = ContextVar("caller_deadline", default=math.inf)
