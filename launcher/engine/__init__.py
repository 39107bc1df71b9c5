"""The engine core: who is served when, and the line between API servers and the core.

::

    API server                                     engine core process
    EngineClient ── DEALER ──► ROUTER ── Front ── CoreLoop ── EngineCore ── Scheduler ── BlockPool
                                                     │            │
                                  parent's channel ──┘            └── Executor ──► workers

=================  ================================================================================================
`messages`         what API server and core say to each other
`request`          one request, and the rules that refuse, clip and finish it
`kv_blocks`        which request holds which KV block
`scheduler`        the next plan; `scheduled`: a plan under way and the check of its answer
`kv_size`          how many blocks there are
`core`             `EngineCore`: executor + scheduler, no socket. The library uses it as it is
`front`            the core's socket and its clients; `core_loop`: the loop around socket, core and parent
`core_process`     the process's target: the order of its life
`connection`       the API server's socket; `client`: `EngineClient` on top of it; `calls`: its calls
`replay`           which requests are sent again when a core has died, and which is given up; `stream`: one of them
=================  ================================================================================================

**What comes in**: requests (prompt token ids and sampling parameters; for a replay the output so far), aborts, calls,
pings; from the parent `Stop`; from the executor the workers' specs, free memory and the output rank's tokens.

**What goes out**: to the workers one `StepPlan` a step, deltas only; to each API server one message a step with all its
requests' news; to the parent the steps of life, READY with `EngineInfo`.

**What always holds**

- The core never knows which executor it has; everything below `EngineCore` but `Executor` is free of I/O.
- A KV block is free or belongs to one request; a slot too. A request that has ended holds neither, however it ended.
- Running requests are older than waiting ones; the oldest always makes progress; a preempted one comes back as prompt +
  output and goes on exactly where it was.
- A request whose client is gone is aborted as soon as something is to be sent to it, which is every step that it runs.
- One thread of ours in the core process. Idle, it sits in one poll on ZMQ's descriptor, the parent's channel and the
  workers' deaths. It never waits for a client: what one does not take stays in its outbox.
- Every core → client message that tells of requests carries the generation; the client drops older ones.
- A request of a client that keeps its requests ends by its last token, its reader's leaving, an error of its own, as
  poison, or when the client is told that the core will not come back; never by the core's death alone. Its tokens are
  those of one undisturbed life: sampling is a function of prompt, seed and position.
- A core answers pings during a step, too. *Alive* (it answers) and *progress* (its steps end) are two things.

**Who writes and reads what**

=============================  ===================================  ==============================================
line                           writer → reader                      end of it
=============================  ===================================  ==============================================
``settings.address`` (ipc)     `EngineClient` ⇄ `Front`             client: requests wait for the next life, or end
                                                                    with `EngineDeadError`; calls end with it;
                                                                    core: that client's requests are aborted
parent's channel               parent → `CoreLoop`                  EOF reads as `Stop`
`Executor.watch_fds`           kernel → `CoreLoop`                  `ChildFailedError` ends the core
=============================  ===================================  ==============================================
"""
