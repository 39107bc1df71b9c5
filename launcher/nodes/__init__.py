"""Several machines: who belongs to the launch, how they speak to each other, and when one of them counts as lost.

In: `NodeSettings`, frames from the network. Out: events for a node agent (`executor.node_agent`), frames. Nothing here
starts a process, imports torch, or unpickles: what came over a network is decoded into typed structs or dropped.
"""
