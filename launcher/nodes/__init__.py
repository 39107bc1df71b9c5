"""Several machines: who belongs to the launch, how they speak to each other, and when one of them counts as lost.

In: `NodeSettings`, frames from the network. Out: events for a node agent (`executor.node_agent`), frames. Nothing here
starts a process, imports torch, or unpickles: what came over a network is decoded into typed structs or dropped::

    node 0                                                              node 1, 2, …
    Leader ── Membership (table)                                        Follower ── Line (finds and holds the line)
       └─ ROUTER ◄── master port, TCP, one frame a message ──────────────► DEALER ─┘
       └─ Gate (thread: ZAP)     Join, Beat, Leaving  →                    Names (thread), Probe: why it does not work
                                 ←  Accepted, Refused, LeaderBeat, StartGroup, EndGroup

================  =====================================================================================================
`messages`        every word, also those between node 0's agent and its engine core, and on the data link; the decoder
`membership`      node 0's table: a node's `seat` and an event → `actions`. `agreement`: who can never fit, in words
`leader`          socket and table; non-blocking, for an agent's poll loop. `follower`, `line`: the other end
`events`          what those two give their agent
`sockets`         every option of a network socket, how to wait on one, what happens to its connections (`Watcher`)
`secure`, `gate`  keys by node rank from the one cluster key; who gets in. `key_file`: that key's file
`reach`           why node 0 cannot be reached. `closing`: who was at the other end. `addresses`, `words`: spelling
================  =====================================================================================================

`key_file` and `addresses` know no ZMQ: the command line and the plan read them.

What always holds:

- A follower's agent is in one group at most, and a group is named by (launch id, generation). A node that was given up
  and wakes is told that its group is over (*fenced*); it comes back as a new life.
- Node 0's agent may be killed at any time: the followers' beats and the core's `OpenGroup` build its table again.
- A peer that says nothing is lost after `silence_limit`, by each side's own clock; time in which we ourselves were
  stopped does not count. A connection that falls is only a hint: ZMQ makes it again.
- With a key a node can speak only for its own rank, and nobody gets in while no gate answers. Without one everybody may
  join who can reach the port: said once, loudly.
- No frame raises, and none that is not understood is kept: it is counted in `dropped`. What strangers say costs no
  memory, and at most one log line a second.
"""
