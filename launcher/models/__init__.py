"""The Transformers worker: any decoder-only Hugging Face model with a tensor-parallel plan, carried by transformers.

In: `WorkerSettings` (a model directory, this rank's place, its threads, device and limits), then one `StepPlan` per
step. Out: `KVCacheSpec` before service, one `StepOutput` per step from the output rank (TP rank 0), None from others.
One setting of its own: ``--worker-config all_reduce=symmetric`` (`launcher.parallel.symmetric`).

    worker     the worker protocol; nothing else knows the order of its calls
    load       directory → checked, sharded, proven module
    shard      transformers' tensor-parallel plan with our collectives
    paged      attention over a paged KV cache
    packed     the same in one kernel call per layer, on a GPU
    transfer   small copies between host and device that nobody waits for
    batch      a step's rows as flat columns (no torch)
    sampler    logits → tokens and logprobs; noise is a function of (seed, position)
    batch_sampler  the same for all rows at once, on a GPU
    card_memory    how much of a GPU is KV cache
    tiny       random models made on the spot
    demo       a real small model, fetched once
    preload    what the warm-start helper imports before it forks workers

What always holds:

- A model that would run wrong does not start: its layers must all reach the paged attention, every argument they hand
  it must be understood, and its logits must equal those by transformers' own attention (`load.prove`).
- All ranks apply every plan; the sampled tokens come back to all of them in a later plan. Only the output rank samples.
- In fp32 the tokens equal those of transformers' `generate`, however a prompt is cut and whatever else is in the batch.
- The environment is neither read nor written here. Libraries read some: HF_HUB_OFFLINE (nothing is fetched at start),
  GLOO_SOCKET_IFNAME, OMP_NUM_THREADS; whoever starts the process sets them.
"""
