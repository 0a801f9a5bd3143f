"""Hosts as network and name spaces of holder processes: nothing has a name outside of them, nothing is left over.

A holder is a process that sleeps in its own network and host-name space and dies with this program
(`PR_SET_PDEATHSIG`), however this program ends; the kernel then takes down its links. Each site has a switch (a bridge
in a space of its own), each host a veth pair to it, shaped at both ends with tbf, and two sites meet on a relay.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bed_spec import Bed

SKIPPED = 77
"""Exit code of what cannot run here, as test drivers know it."""
TOOLS = ("ip", "tc", "nsenter", "unshare", "hostname")
MTU = 9000
GSO_BYTES = 16384
"""Segments handed to a shaped port at once: larger ones would pass it in one burst."""
QUEUE_MS = 250
FAST_BYTES_PER_S = 0.5e9
"""Ports faster than this keep the kernel's own segment size."""
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


class UnsupportedError(Exception):
    """The kernel or the user's rights do not allow a testbed here."""


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def is_root() -> bool:
    """Whether this process is root, be it of a user namespace."""
    return os.geteuid() == 0


def require_tools() -> None:
    """Refuse a machine without the programs that make networks.

    Raises:
        UnsupportedError: one is missing, or this is not Linux.
    """
    if not sys.platform.startswith("linux"):
        raise UnsupportedError("network namespaces need Linux")
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise UnsupportedError(f"these programs are missing: {', '.join(missing)}")


def enter_user_namespace() -> None:
    """Run this program again as root of a user namespace; returns only where it already is, or where root is real.

    Raises:
        UnsupportedError: the kernel does not let this user make one.
    """
    if is_root():
        return
    words = ["unshare", "--user", "--map-root-user", "--mount"]
    tried = subprocess.run([*words, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        raise UnsupportedError(f"not root, and no user namespace: {tried.stderr.strip()}")
    os.execvp(words[0], [*words, sys.executable, *sys.argv])


def run(words: Sequence[str]) -> str:
    """Run a program that must succeed.

    Raises:
        UnsupportedError: it fails; the message says how.
    """
    done = subprocess.run(list(words), capture_output=True, text=True, check=False)
    if done.returncode:
        raise UnsupportedError(f"{' '.join(words)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


class Space:
    """The network and host-name space of one holder."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._holder = subprocess.Popen(
            ["unshare", "--net", "--uts", "sh", "-c", 'hostname "$0" && echo ready && exec sleep infinity', name],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            preexec_fn=die_with_parent,
            start_new_session=True,
        )
        if self._holder.stdout is None or self._holder.stdout.readline().strip() != "ready":
            _, error = self._holder.communicate()
            raise UnsupportedError(f"no network namespace: {error.strip()}")
        self.run("ip", "link", "set", "lo", "up")

    @property
    def pid(self) -> int:
        """The holder."""
        return self._holder.pid

    def words(self, *command: str) -> list[str]:
        """Return the command line that runs a command in this space."""
        return ["nsenter", "--target", str(self.pid), "--net", "--uts", "--", *command]

    def run(self, *command: str) -> str:
        """Run a command in this space."""
        return run(self.words(*command))

    def close(self) -> None:
        """End the holder; its links go with it."""
        self._holder.kill()
        self._holder.wait()


class Network:
    """All spaces of a bed, wired up."""

    def __init__(self, bed: Bed) -> None:
        self.hosts: dict[str, Space] = {}
        self.addresses: dict[str, str] = {}
        self._spaces: list[Space] = []
        self._relay: subprocess.Popen[str] | None = None
        try:
            self._build(bed)
        except BaseException:
            self.close()
            raise

    def _build(self, bed: Bed) -> None:
        switches = {site: self._space(f"switch-{site}") for site in bed.sites}
        for switch in switches.values():
            switch.run("ip", "link", "add", "name", "br0", "mtu", str(MTU), "type", "bridge")
            switch.run("ip", "link", "set", "br0", "up")
        for number, (host, group) in enumerate(bed.hosts(), start=1):
            space = self._space(host)
            self.hosts[host], self.addresses[host] = space, f"10.71.0.{number}"
            _plug(switches[group.site], space, (number, self.addresses[host], group.rate_bytes_per_s))
        if bed.line is not None:
            self._bridge([switches[site] for site in bed.sites], bed.line.rate_bytes_per_s, bed.line.delay_s)

    def _space(self, name: str) -> Space:
        space = Space(name)
        self._spaces.append(space)
        return space

    def _bridge(self, switches: list[Space], rate_bytes_per_s: float, delay_s: float) -> None:
        program = Path(__file__).parent / "relay.py"
        pids = [str(switch.pid) for switch in switches]
        self._relay = subprocess.Popen(
            [sys.executable, str(program), *pids, str(rate_bytes_per_s), str(delay_s)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=die_with_parent,
            start_new_session=True,
        )
        if self._relay.stdout is None or self._relay.stdout.readline().strip() != "ready":
            _, error = self._relay.communicate()
            raise UnsupportedError(f"the relay between sites did not start: {error.strip().splitlines()[-1:]}")
        for switch in switches:
            switch.run("ip", "link", "set", "line", "mtu", str(MTU), "master", "br0", "up")

    @property
    def relay_pid(self) -> int | None:
        """The relay's process, where there is one."""
        return self._relay.pid if self._relay else None

    def close(self) -> None:
        """Take everything down."""
        if self._relay is not None:
            self._relay.kill()
            self._relay.wait()
        for space in self._spaces:
            space.close()


def _plug(switch: Space, host: Space, port: tuple[int, str, float]) -> None:
    """Join a host to its site's switch by a shaped link."""
    number, address, rate = port
    near = f"port{number}"
    words = ["ip", "link", "add", "name", near, "mtu", str(MTU), "type", "veth"]
    switch.run(*words, "peer", "name", "eth0", "mtu", str(MTU), "netns", str(host.pid))
    switch.run("ip", "link", "set", near, "master", "br0", "up")
    host.run("ip", "addr", "add", f"{address}/24", "dev", "eth0")
    host.run("ip", "link", "set", "eth0", "up")
    _tune(host)
    for space, device in ((switch, near), (host, "eth0")):
        _shape(space, device, rate)


def _tune(host: Space) -> None:
    """Use the congestion control with the least jitter on a shaped link, where the kernel has it; keep its window.

    A connection that has been idle for a while would otherwise start over with ten segments: on a line of 20 ms each
    message of a pipeline took another round trip.
    """
    for name, value in (("tcp_congestion_control", "reno"), ("tcp_slow_start_after_idle", "0")):
        host.run("sh", "-c", f"echo {value} > /proc/sys/net/ipv4/{name} || true")


def _shape(space: Space, device: str, rate_bytes_per_s: float) -> None:
    slow = rate_bytes_per_s <= FAST_BYTES_PER_S
    if slow:
        space.run("ip", "link", "set", "dev", device, "gso_max_size", str(GSO_BYTES))
    burst = GSO_BYTES + 1024 if slow else int(max(65536 + 4096, rate_bytes_per_s * 1e-3))
    words = ["tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", f"{int(rate_bytes_per_s * 8)}bit"]
    space.run(*words, "burst", str(burst), "latency", f"{QUEUE_MS}ms")


def environment_of(
    base: Mapping[str, str], place: tuple[int, int], local: tuple[int, int], master: tuple[str, int]
) -> dict[str, str]:
    """Return the environment of one rank (its number and of how many, on all hosts and on its own) as torchrun does."""
    (rank, num_ranks), (address, port) = place, master
    return {
        **base,
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(local[0]),
        "LOCAL_WORLD_SIZE": str(local[1]),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
