"""From the command line and the facts of the host to a frozen plan, before any process is started.

    LaunchConfig ─┐
    HostFacts ────┼→ make_plan ──────────────────────────────→ LaunchPlan → serve, library, `xserve plan`
    model files ──┘   │ choices   each decision by itself        processes  a ProcessSpec each
                      │ budget    threads, KV cache, memory      helper     what the forkserver imports
                      │ front     ports, keys, sockets           notes      lines for the log
                      └ processes the process table              decisions  value and origin of each setting

Comes in: typed settings (`launcher.config`), facts (`launcher.host`), and files: config.json, weight headers, API keys.
Goes out: data. Settings of each role are the payload of its `ProcessSpec`; nothing is decided again in a child.

What always holds:

- The environment is not read here (`launcher.envs` and `launcher.host` do), nothing is bound, started or imported:
  torch and transformers are looked up by name at most. Only `model_source` starts a program, for a model that is not
  here, and waits for it.
- `decide` is pure. The same facts give the same plan, so a test shows it any machine.
- A launch that cannot work is refused here, with one line that holds the value and what to do instead.
- Everything that must differ between two launches on one machine (sockets, rendezvous files) lies in the run directory;
  what must differ between two lives of an engine core carries its generation.

Files: `plan` (the result, and the two halves), `choices`, `budget`, `devices` and `placement` (which device and which
NUMA node each worker gets), `front`, `environment`, `names`, `processes`, `resolved` (decisions that several processes
share), `settings` (every flag with its origin, every limit), `checkpoint` and `weights` (a model directory),
`architectures` and `support` (which models run right), `model_source` (hub ids), `show` (tables and JSON, without
secrets).
"""

from launcher.plan.plan import Helper, LaunchPlan, decide, make_plan, preload
from launcher.plan.processes import settings_of
from launcher.plan.resolved import Decision, Files, Place

__all__ = ["Decision", "Files", "Helper", "LaunchPlan", "Place", "decide", "make_plan", "preload", "settings_of"]
