"""The control plane: finding an instance, and talking to its supervisor.

In: questions of `xserve status` and `xserve stop`, other processes of the same user (or root). Out: one reply each.

Files::

    places.py     where run directories may stand; which of them can be trusted (owner, mode, length)
    run_dir.py    the run directory: claim, lock, instance.json, list, find, remove, reclaim
    protocol.py   requests and replies, one JSON object a line; no I/O
    server.py     `ControlServer`, in the supervisor's poll loop
    client.py     `status` and `stop`, blocking under a deadline

Who reads and writes what::

    lock            held (flock) by the supervisor as long as it lives; everybody else only tries it
    instance.json   written by the supervisor (a whole new file each time), read by clients
    control.sock    supervisor listens; a client writes one request line, reads one reply line, then EOF

Always true: live = the lock is held, whatever pid files say. Only the holder of the lock removes files. A client can
neither block the supervisor nor make it grow. The directory is 0700 and the socket 0600; the peer's uid is checked too.
EOF before a reply: the supervisor is gone (then the lock is free), or it dropped a client that was too slow.
"""
