"""A Slurm of one node, started from nothing in a folder of its own; everything it starts ends with it."""

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
CONFIGURATION = """\
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SchedulerType=sched/builtin
SelectType=select/cons_tres
ReturnToService=2
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 RealMemory=1000 Gres=gpu:{devices} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_no_slurm():
    """Why a Slurm cannot be started here; empty: it can."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (slurm-wlm, munge)"
    return "" if os.geteuid() == 0 else "a Slurm of one's own needs root"


def two_ports():
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        second.bind(("127.0.0.1", 0))
        return first.getsockname()[1], second.getsockname()[1]


class SlurmNode:
    """One node with some devices; a context in which jobs run."""

    def __init__(self, folder: Path, devices: int) -> None:
        self.folder, self.devices = folder, devices
        self.host = socket.gethostname().split(".")[0]
        self.environment = os.environ | {"PATH": PATH, "SLURM_CONF": str(folder / "slurm.conf")}
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self):
        folder = self.folder
        for name in ("state", "spool"):
            (folder / name).mkdir(parents=True)
        text = CONFIGURATION.format(host=self.host, folder=folder, ports=two_ports(), devices=self.devices)
        (folder / "slurm.conf").write_text(text)
        for number in range(self.devices):
            (folder / f"device{number}").touch()
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/device[0-{self.devices - 1}]\n")
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o400)
        munge = [f"--{name}={folder}/munge.{end}" for name, end in MUNGE.items()]
        try:
            self._start(["munged", "--foreground", "--force", *munge])
            self._until(lambda: (folder / "munge.socket").exists())
            self._start(["slurmctld", "-D", "-f", str(folder / "slurm.conf")])
            self._start(["slurmd", "-D", "-N", self.host, "-f", str(folder / "slurm.conf")])
            self._until(lambda: " idle" in self.say("sinfo", "-h", "-o", "%n %t"))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for process in reversed(self._started):
            process.terminate()
        for process in self._started:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()

    def say(self, *words, **options):
        done = subprocess.run(
            words,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            **options,
        )
        return done.stdout

    def run(self, script, folder, environment, timeout_s=300.0):
        """Submit a script from a folder and wait for its end; return what it printed and its exit code's word."""
        said = subprocess.run(
            ["sbatch", "--parsable", "--wait", "--export=ALL", "--output=job.log", script],
            cwd=folder,
            env=self.environment | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        log = folder / "job.log"
        return said.returncode, said.stdout + (log.read_text() if log.exists() else "")

    def _start(self, words):
        with (self.folder / f"{words[0]}.out").open("wb") as out:
            self._started.append(
                subprocess.Popen(words, env=self.environment, stdout=out, stderr=subprocess.STDOUT, cwd=self.folder)
            )

    def _until(self, holds, timeout_s=30.0):
        end = time.monotonic() + timeout_s
        while not holds():
            dead = [process.args for process in self._started if process.poll() is not None]
            if dead or time.monotonic() > end:
                logs = {path.name: path.read_text()[-1500:] for path in self.folder.glob("*.[lo][ou][gt]")}
                raise RuntimeError(f"Slurm does not come up: {dead or self.say('sinfo', '-Nel')}: {logs}")
            time.sleep(0.1)


MUNGE = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
