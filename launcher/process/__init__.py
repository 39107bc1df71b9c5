"""The process room: how children come to be, are heard, judged, stopped and reaped. It imports no other room.

What comes in: `ProcessSpec`s (from `plan`), a stop (a signal, the control socket), reports. What goes out: an
`Outcome`, lines for the screen and for systemd.

Who speaks to whom::

    supervisor ──channel──► API server              birth, TreeState, Drain, Stop  /  reports up
    supervisor ──channel──► engine core             birth, Stop                    /  reports up
    engine core ──channel─► worker                  birth, Handover, Stop          /  reports up
    supervisor ──channel──► node agent              birth, TreeState, Drain, Stop  /  reports up, Leave
    node agent ──channel──► worker                  as an engine core (nodes other than node 0)
    supervisor ◄─status──── worker                  the same reports, so that a dead core loses nothing
    supervisor ◄─output──── every process           its fds 1 and 2, line by line
    supervisor ──channel──► helper                  Fork, Guard, Unguard, Stop     /  reports up

A *channel* is a socket pair: whole messages with descriptors, EOF when the process at the other end is gone. It is the
only descriptor that a child is born with, under every start method; everything else comes over it.

Files: `spec`, `reports`, `lifecycle`, `causes`, `stop` are data, tables and pure rules. `channel`, `signals`, `kernel`,
`procfs`, `oom`, `sd_notify`, `listen` each wrap one thing of the system. `spawn` + `child` + `context` + `failing`,
with `numa` (binding) and `reseed` (random state), are the birth and the child's side; `nursery` is the parent's.
`helper` (+ `helper_client`), `sessions`, `tree`, `wires`, `verdict`, `recovery`, `start_lines` (a slow start in words)
and `supervisor` are the supervisor's.

What always holds:

- A child is only signalled through the pidfd of a process that we started, or that was checked to be of our launch.
- A child watches its parent before its first slow step (parent-death signal; EOF of the channel).
- A signal handler only wakes (one exception, explained in `helper`).
- A failure is data (`errors.Failure`); which one is the cause is decided once, in `causes`.
- When `Supervisor.run` returns, no process, descriptor or zombie of the launch is left; when it is killed, the helper
  sees to that within 2 s.
"""
