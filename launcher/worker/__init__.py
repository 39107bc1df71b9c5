"""The worker: the protocol that an engine builder implements, and the process around it.

In: `WorkerSettings` at birth; calls from the executor (`rpc`), plans above all (`step`).
Out: answers and errors (`rpc`); steps, progress and failures to the parent and the supervisor (`process/`).

What always holds
-----------------
* Methods of a worker run one at a time, in the main thread, in the order of the calls: the same on every rank.
* The parent is watched before anything slow happens, and in every wait.
* A rank that is not asked to reply is silent, unless the method raised: an error always travels.
* An exception in a call does not end the worker; one in its start does, with its traceback in the failure report.
* An idle worker uses no CPU.

Files: `base` (the protocol), `step` (plans and answers), `slots` (what a worker remembers between steps), `classes`
(worker classes by name), `rpc` (messages), `loop`, `main` (the process), `reference` (a worker without a model),
`faults` and `injury` (failures on demand).

Who writes and who reads: see `launcher.executor`. `loop.Mark` is written by the loop and read by whoever asks how long
the present call has been running.
"""
