"""A heterogeneous cluster on one Linux machine: hosts are namespaces, links are shaped, devices are slowed.

    python scripts/testbed/testbed.py check BED.yaml                    can this machine and user make it? (77: no)
    python scripts/testbed/testbed.py cluster BED.yaml                  the cluster file it stands for
    python scripts/testbed/testbed.py run BED.yaml -- profile MODEL ... a hetplan command, a rank a device

See `bed_spec` for the file, `bed_kernel` for the network, `paced` for the devices. Nothing outlives the program.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from bed_kernel import (
    SKIPPED,
    Network,
    UnsupportedError,
    die_with_parent,
    enter_user_namespace,
    environment_of,
    require_tools,
)
from bed_quota import Quotas
from bed_spec import Bed, cluster_of, read_bed

from hetplan.errors import HetplanError

PORT = 29655
POLL_S = 0.05


class Testbed:
    """A bed that is up while the block runs."""

    def __init__(self, bed: Bed) -> None:
        self.bed = bed
        self._folder = tempfile.TemporaryDirectory(prefix="hetplan-testbed-")
        self._network: Network | None = None
        self._quotas: Quotas | None = None
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._runs = 0

    def __enter__(self) -> Self:
        require_tools()
        try:
            self._network = Network(self.bed)
            self._quotas = Quotas(self.bed)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_ranks()
        if self._quotas is not None:
            self._quotas.close()
        if self._network is not None:
            self._network.close()
        self._folder.cleanup()

    def run(
        self, words: Sequence[str], *, timeout_s: float = 600.0, shown: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a hetplan command as one rank a device; return what rank 0 said and the worst exit code."""
        if self._network is None or self._quotas is None:
            raise RuntimeError("the testbed is not up")
        places = list(self.bed.ranks())
        address = self._network.addresses[places[0][0]]
        self._runs += 1
        paths = [Path(self._folder.name) / f"{self._runs}-{rank}" for rank in range(len(places))]
        for rank, (host, slot, group) in enumerate(places):
            program = [sys.executable, str(Path(__file__).parent / "paced.py")]
            speed = group.speed if self.bed.throttle == "pace" else 1.0
            command = self._network.hosts[host].words(*program, str(speed), *words)
            environment = environment_of(
                os.environ, (rank, len(places)), (slot, group.num_devices), (address, PORT + self._runs % 200)
            )
            self._ranks.append(self._start(command, environment, paths[rank], rank))
        code = self._wait(timeout_s)
        said = [(path.with_suffix(".out").read_text(), path.with_suffix(".err").read_text()) for path in paths]
        if shown:
            sys.stdout.write(said[0][0])
            for (host, _, _), (_, error) in zip(places, said, strict=True):
                for line in error.splitlines():
                    sys.stderr.write(f"{host}: {line}\n")
        return subprocess.CompletedProcess(list(words), code, said[0][0], "".join(error for _, error in said))

    def _start(
        self, command: list[str], environment: dict[str, str], path: Path, number: int
    ) -> subprocess.Popen[bytes]:
        quotas = self._quotas

        def before() -> None:
            die_with_parent()
            if quotas is not None:
                quotas.join(number)

        with path.with_suffix(".out").open("wb") as out, path.with_suffix(".err").open("wb") as err:
            return subprocess.Popen(
                command,
                env=environment,
                stdout=out,
                stderr=err,
                stdin=subprocess.DEVNULL,
                preexec_fn=before,
                start_new_session=True,
            )

    def _wait(self, timeout_s: float) -> int:
        """Wait for all ranks; where one fails or time is up, end the others."""
        until_s = time.monotonic() + timeout_s
        code = 0
        while self._ranks:
            codes = [rank.poll() for rank in self._ranks]
            failed = [c for c in codes if c not in (None, 0)]
            if failed or time.monotonic() > until_s:
                time.sleep(1.0)
                code = failed[0] if failed else 124
                break
            if all(c == 0 for c in codes):
                break
            time.sleep(POLL_S)
        self._end_ranks()
        return int(code or 0)

    def _end_ranks(self) -> None:
        for rank in self._ranks:
            if rank.poll() is None:
                os.killpg(rank.pid, signal.SIGKILL)
            rank.wait()
        self._ranks.clear()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("check", "cluster", "run"))
    parser.add_argument("bed", type=Path, metavar="BED")
    parser.add_argument("words", nargs="*", metavar="WORD", help="the hetplan command, after --")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        bed = read_bed(given.bed)
        if given.what == "cluster":
            sys.stdout.write(cluster_of(bed))
            return 0
        enter_user_namespace()
        with Testbed(bed) as up:
            if given.what == "check":
                print(f"{bed.name}: {len(list(bed.hosts()))} hosts, {bed.throttle}; this machine can make it")
                return 0
            return up.run(given.words).returncode
    except HetplanError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except UnsupportedError as error:
        print(f"no testbed here: {error}", file=sys.stderr)
        return SKIPPED
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
