"""Faults of containers at random moments: killed, crashed, paused, cut off; and back again.

    hand 0   embedding_worker 2 killed ... started     data_loader 1 cut off ... connected
    hand 1        embedding_parameter_server 1 paused ... goes on     ...

Two hands, so that faults overlap. A container is in one hand at a time, and none lets go of it
before it runs and is connected. So of three servers one keeps the volume of the rows mounted.
Training has to go on before a hand does harm again, however slow the machine is: more faults
than can be healed would show nothing. If it does not, the error says who waits for what.
"""

from __future__ import annotations

import random
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from subprocess import CompletedProcess

Run = Callable[[Sequence[str]], CompletedProcess[str]]
Container = tuple[str, int]

NUM_HANDS = 2
# Seconds between faults of a hand, and of a fault.
PAUSE_S, FAULT_S = (0.5, 4.0), (0.2, 12.0)
BACK_S = 60.0
# Within which training goes on, with one other fault at most.
GO_ON_S = 240.0
# Of these last seconds is said who waits for what if it does not.
LOOK_S = 20.0
# Docker starts one so often that crashes, and 20 times at most, as the stack says.
MAX_CRASHES = 15
# What kills all processes of a container but the first, which ends with their status. Detached:
# the command's own status is gone with the container.
CRASH = ("sh", "-c", "kill -9 -1")
# What the dense net has learned goes with the nn-worker: it is not started again.
NOT_KILLED = ("nn_worker",)


@dataclass(eq=False)
class Chaos:
    """Does harm to containers, and undoes it."""

    _run: Run  # a command; ends the test if it fails
    _name: Callable[[str, int], str]  # of a container
    _network: str  # from which containers are cut off
    _replicas: Mapping[str, int]  # containers of each service
    _progress: Callable[[], int]  # batches that are trained
    # Which processes have logged in this number of seconds that they wait.
    _waits: Callable[[float], str]
    _seed: int  # of what happens, by hand; the moments depend on the machine

    def __post_init__(self) -> None:
        counts = self._replicas.items()
        self._free = [(one, n + 1) for one, number in counts for n in range(number)]
        self._lock = threading.Lock()  # guards what is above and the counts
        self.counts: Counter[tuple[str, str]] = Counter()  # by service and fault
        self.deaths: Counter[Container] = Counter()
        self._crashes: Counter[Container] = Counter()
        self._longest_s = 0.0  # until training went on
        self._is_over = threading.Event()
        self._failures: list[BaseException] = []

    def __str__(self) -> str:
        each = ", ".join(f"{n} {who} {fault}" for (who, fault), n in self.counts.items())
        longest = f"{self._longest_s:.0f} s at most until training went on"
        return f"{self.counts.total()} faults ({each}), {longest}"

    def go_on_for(self, seconds: float) -> None:
        """Do harm for so long, then heal everything.

        Raises:
            BaseException: What ended a hand.
        """
        hands = [threading.Thread(target=self._hand, args=(n,)) for n in range(NUM_HANDS)]
        for hand in hands:
            hand.start()
        self._is_over.wait(seconds)
        self._is_over.set()
        for hand in hands:
            hand.join()
        for failure in self._failures:
            raise failure

    def _hand(self, number: int) -> None:
        dice = random.Random(f"{self._seed} {number}")
        try:
            while not self._is_over.wait(dice.uniform(*PAUSE_S)):
                with self._lock:
                    one = self._free.pop(dice.randrange(len(self._free)))
                    fault = self._fault(one, dice)
                    self.counts[one[0], fault.__name__] += 1
                    self.deaths[one] += fault in (self.killed, self.crashed)
                print(f"{time.strftime('%X')} {one[0]} {one[1]} {fault.__name__}", flush=True)
                fault(one, dice.uniform(*FAULT_S))
                with self._lock:
                    self._free.append(one)
                self._wait_for_progress(f"{one[0]} {one[1]} was {fault.__name__}")
        except BaseException as failure:
            self._failures.append(failure)
            self._is_over.set()

    def _fault(self, one: Container, dice: random.Random) -> Callable[[Container, float], None]:
        if one[0] in NOT_KILLED:
            return dice.choice((self.paused, self.cut))
        fault = dice.choice((self.killed, self.crashed, self.paused, self.cut))
        if fault == self.crashed:
            self._crashes[one] += 1
            if self._crashes[one] > MAX_CRASHES:
                return self.killed
        return fault

    def _wait_for_progress(self, after: str) -> None:
        before, begin = self._progress(), time.monotonic()
        while self._progress() == before and not self._is_over.wait(0.1):
            if time.monotonic() > begin + GO_ON_S:
                stands = f"training stands at {before}, {GO_ON_S:g} s after {after}"
                raise TimeoutError(f"{stands}:\n{self._waits(LOOK_S)}")
        with self._lock:
            self._longest_s = max(self._longest_s, time.monotonic() - begin)

    def _docker(self, *words: str) -> str:
        return self._run(["docker", *words]).stdout.strip()

    # --- what may happen; each ends with a container that runs and is connected --------------

    def killed(self, one: Container, seconds: float) -> None:
        name = self._name(*one)
        self._docker("kill", "--signal", "KILL", name)
        self._is_over.wait(seconds / 2)
        self._docker("start", name)

    def crashed(self, one: Container, seconds: float) -> None:
        """All processes but the first are killed, which ends with their status."""
        name = self._name(*one)
        now = time.time()
        self._docker("exec", "--detach", name, *CRASH)
        if not self._starts(name, now, now + BACK_S):
            state = self._docker("inspect", "-f", "{{.State.Status}}", name)
            raise TimeoutError(f"{name} was not started again: {state}")

    def paused(self, one: Container, seconds: float) -> None:
        name = self._name(*one)
        self._docker("pause", name)
        self._is_over.wait(seconds)
        self._docker("unpause", name)

    def cut(self, one: Container, seconds: float) -> None:
        """It may come back under an address that another one had."""
        name = self._name(*one)
        self._docker("network", "disconnect", self._network, name)
        self._is_over.wait(seconds)
        self._docker("network", "connect", "--alias", one[0], self._network, name)

    def _starts(self, name: str, since: float, until: float) -> bool:
        """Wait for Docker to say that it has started a container; ends by itself at the end."""
        words = ["docker", "events", "--since", f"{since:.3f}", "--until", f"{until:.3f}"]
        words += ["--filter", f"container={name}", "--filter", "event=start"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as events:
            found = events.stdout is not None and bool(events.stdout.readline())
            events.terminate()
        return found
