"""A module that leaves everything behind that a forked child must not inherit. Preloaded by a test's helper."""

import os
import random
import signal
import socket

import numpy
import setproctitle
import torch

random.seed(1)
numpy.random.seed(1)
torch.manual_seed(1)
PIPE = os.pipe()
os.set_inheritable(PIPE[0], True)
SOCKET = socket.socket()
SOCKET.bind(("127.0.0.1", 0))
SOCKET.listen()
for number in (signal.SIGUSR1, signal.SIGHUP, signal.SIGCHLD):
    signal.signal(number, lambda *_: None)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
setproctitle.setproctitle("dirty")
