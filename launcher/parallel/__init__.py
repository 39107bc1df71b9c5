"""Who belongs together, how they meet, and how they add up.

In: a rendezvous URL, a `Layout` (sizes of the axes), this process's rank and device. Out: a `Groups` object, which is
passed to whoever communicates; from it, per kind of group (TP, PP, DP, EP …), a `Communicator`.

    ranks           which ranks form which group: arithmetic, nothing else (other rooms plan with it; imports no torch)
    rendezvous      ``file://`` or ``tcp://`` → the store where a group meets; never from the environment
    groups          joins the world, makes the groups, picks communicators, leaves
    communicators   what a communicator is; through torch's process group
    shared          through memory that the ranks of one machine share
    symmetric       through memory that its cards show to each other, when asked for; tried before it is trusted
    ways            which of its ways is the fastest for a size: arithmetic, no torch
    accord          what all ranks must be of one mind about
    symmetric_kernels   the device's part of it

What always holds:

- Every rank computes bit-equal sums, whatever the communicator.
- No call waits without an end: each has a timeout, and a dead peer ends it (pidfd here, a closed connection in gloo).
  A kernel on a GPU knows neither: there the death of its process does, which the parent brings about.
- Nothing is left behind on the machine: the shared segment is anonymous, the rendezvous file belongs to whoever chose
  its name. `Groups.close` waits for nobody (NCCL: for sums under way).
- This package's `__init__` imports nothing, so that planners may import `launcher.parallel.ranks` without torch.
"""
