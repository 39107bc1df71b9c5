"""Facts about this machine, read once and frozen. Reading is all that happens here; deciding is `plan/`'s.

Comes in: /proc, /sys and /dev below a `root`, so that a test can show a made-up machine. Goes out: `HostFacts`, and
single facts for those who need one (memory headroom, control-group limits).

What always holds: a fact that cannot be read is a fact too. Limits that are not there are no limits, and no reader here
raises because of one. Nothing is imported for a fact, no driver library is loaded and no device is touched, so that
the process that reads stays small, has one thread, and may fork.

Files: `facts` (the struct and its reader), `limits` (memory, CPU quota, processes), `control_groups` (versions 1 and
2), `numa`, `gpus`, `visible` (the variables that hide devices, as a table), `process_state` (what makes a fork of this
process unsafe), `interfaces` (addresses and routes, read for a launch over several nodes only), `files` (reading the
kernel's text files).
"""

from launcher.host.facts import HostFacts, read_host
from launcher.host.gpus import Gpu, gpus_present, torch_cuda
from launcher.host.limits import Headroom, cpu_quota, memory_headroom, memory_headroom_of, processes_free
from launcher.host.numa import NumaNode

__all__ = [
    "Gpu",
    "Headroom",
    "HostFacts",
    "NumaNode",
    "cpu_quota",
    "gpus_present",
    "memory_headroom",
    "memory_headroom_of",
    "processes_free",
    "read_host",
    "torch_cuda",
]
