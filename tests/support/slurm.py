"""A Slurm cluster of two machines in network namespaces, of Debian's packages slurm-wlm and munge."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from two_nodes import NODES

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "unshare")
NAMES = ("node1", "node2")
CONFIG = """
ClusterName=test
SlurmctldHost=node1
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool_%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SwitchType=switch/none
AccountingStorageType=accounting_storage/none
KillWait=60
NodeName=node1 CPUs={cores} State=UNKNOWN
NodeName=node2 CPUs={cores} State=UNKNOWN
PartitionName=all Nodes=node1,node2 Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """A running cluster; jobs are those of its one user."""

    def __init__(self, nodes: tuple[str, str], folder: Path) -> None:
        self._nodes, self._folder = nodes, folder

    def on(self, node: int, *words: str, env: dict[str, str] | None = None) -> list[str]:
        """The words that run a command on a node, under the node's own host name."""
        settings = {"SLURM_CONF": str(self._folder / "slurm.conf"), **(env or {})}
        named = f'hostname {NAMES[node]} && mount --bind {self._folder}/hosts /etc/hosts && exec "$@"'
        line = ["nsenter", f"--net=/run/netns/{self._nodes[node]}", "unshare", "--uts", "--mount"]
        return [*line, "bash", "-c", named, "_", "env", *(f"{key}={value}" for key, value in settings.items()), *words]

    def says(self, *words: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
        """What a command of Slurm answers on the first node."""
        done = subprocess.run(self.on(0, *words, env=env), cwd=cwd, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@contextmanager
def cluster(nodes: tuple[str, str], folder: Path) -> Iterator[Cluster]:
    """A cluster on two network namespaces; raise FileNotFoundError if Slurm is not installed."""
    for program in PROGRAMS:
        if shutil.which(program) is None:
            raise FileNotFoundError(f"{program} is not installed: apt-get install slurm-wlm munge")
    made = Cluster(nodes, folder)
    (munge := folder / "munge").mkdir(mode=0o711)
    (folder / "state").mkdir()
    (munge / "key").write_bytes(secrets.token_bytes(1024))
    (munge / "key").chmod(0o400)
    (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, cores=os.cpu_count()))
    hosts = "127.0.0.1 localhost\n" + "".join(f"{at} {name}\n" for at, name in zip(NODES, NAMES, strict=True))
    (folder / "hosts").write_text(hosts)
    paths = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        commands = [
            ["munged", "--foreground", "--force", *(f"--{key}={munge / value}" for key, value in paths.items())],
            made.on(0, "slurmctld", "-D"),
            *(made.on(node, "slurmd", "-D", "-N", NAMES[node]) for node in range(2)),
        ]
        with (folder / "daemons.txt").open("wb") as log:
            for command in commands:
                daemons.append(subprocess.Popen(command, stdout=log, stderr=log))
                time.sleep(0.5)
        until_s = time.monotonic() + 60
        while made.says("sinfo", "-h", "-t", "idle", "-o", "%D").strip() != "2":
            assert time.monotonic() < until_s, (folder / "daemons.txt").read_text()
            time.sleep(0.2)
        yield made
    finally:
        for daemon in daemons[::-1]:
            daemon.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            daemon.kill()
            daemon.wait()
