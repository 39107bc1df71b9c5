"""Carries the engine core's calls to the workers, wherever they are.

In: calls of the engine core (`base.Executor`), the worker's settings, for `mp` the workers' `ProcessSpec`s.
Out: answers in rank order or of one rank, as values or futures; errors of the kinds that `base.Executor` lists.

What always holds
-----------------
* Every rank executes every call, in the order of sending; futures settle in that order.
* The first error of any rank is the call's outcome, whether that rank was to answer or not. An error that comes after
  the answer fails the oldest call under way, or else the next one. The death of a worker comes before all of these.
* An answer that comes too late is dropped; it carries its call's number and is never taken for another's.
* No wait is deaf: each hears the answers, the workers' deaths and its deadline at once, and uses no CPU.
* `uni`, `mp` and `mp-nodes` give the same tokens and raise the same errors (over several nodes with node and host; no
  callables and no pickle there).

Files: `base` (the interface, and which class a backend's name means), `uniproc`, `multiproc`, `replies` (calls and
answers as a table, no I/O), `hangs` (who is late), `local_group` (the workers of one machine).

Several nodes: `multinode` (the engine core's side) with `far_ranks` (what it knows of the others), `outside` (its
sockets: `core_link`, `agent_line`); `relay` (the other nodes' side) with `data_link`, `gather` (answers put together);
`frames` (what travels between them), `waits` (one sleep for rings and sockets); `node_agent`, `leader_agent`,
`agent_life` (the agents).

Who writes and who reads
------------------------
==================  ==============================  ================================  ===============================
what                writer                          reader                            its end means
==================  ==============================  ================================  ===============================
calls ring          engine core                     every worker, each its cursor     `ShutdownCall`: end in order
answer ring of r    worker r                        engine core                       nothing; the pidfd tells
channel of r        worker r up, engine core down   the other one (`process/`)        EOF: the process is gone
pidfd of r          the kernel                      engine core                       worker r is gone
data link of k      engine core down, node k's      the other one                     the node is lost, or the core
                    agent up
agent line          engine core and node 0's        the other one                     nothing: an agent that comes again
                    agent                                                             is told of the group
==================  ==============================  ================================  ===============================

Whoever is the workers' parent creates their rings (the engine core; on other nodes the agent) after they are started,
and passes the descriptors at step ``queues``.
"""
