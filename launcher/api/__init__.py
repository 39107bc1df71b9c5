"""The HTTP front: OpenAI-style requests in, tokens to and from the engine cores, text out. One process each.

::

                     ┌─ middleware: figures, key, size of the body
    client ──HTTP──▶ routes ─▶ completions / chat ──▶ stream ──SSE or JSON──▶ client
                                 │ schema, sampling, prompts       ▲
                                 ▼                                 │ pieces of text
                               sequence (detokenize, stop strings)─┘
                                 │ generate(…)         ▲ RequestOutput
                                 ▼                     │
                               engine.client ⇄ ZMQ ⇄ engine core

What comes in: a listening socket, bound and held by the supervisor (descriptor ``http``); `ApiSettings`; on the channel
`TreeState`, `Drain`, `Stop`. What goes out: READY as soon as the socket is served, before any engine is up; `Drained`.

==============  ======================================================================================
file            holds
==============  ======================================================================================
`server`        the process: serve, connect, load the tokenizer, obey the parent
`routes`        which path answers what; every refusal becomes an answer here
`gate`          the table of when requests are taken
`state`         what requests share: gate, engines, tokenizer, requests in flight and their limit
`schema`        every parameter and its fate; `sampling`, `prompts` turn the request into the engine's terms
`completions`   one endpoint each, with `chat`; `logprobs` in both styles
`sequence`      tokens of one choice become pieces of text; `detokenize` is its arithmetic
`stream`        run the work while somebody wants it; server-sent events
`tokenizer`     the reference one and a model directory's; `errors`, `metrics`, `middleware` say it themselves
==============  ======================================================================================

What always holds:

- A parameter that would change the answer is obeyed or refused by name, never ignored.
- However a request ends (complete, stop string, client gone, cut at the end of a drain, error), its iterator of the
  engine client is closed before its place is given away: no sequence outlives its request in the core.
- No piece of text holds half a character, nor any character of a stop string. `usage` counts the tokens up to and with
  the one that completed the stop string, whatever the engine computed beyond.
- ``/livez`` answers as long as the process does; ``/readyz`` is 200 exactly when a request would be answered now.
- With restarts (`ApiSettings.restart`) a request that was admitted outlives its engine core: it waits, is sent again,
  and its answer goes on to the token where it was. New ones are taken meanwhile, up to `max_waiting` in all. Nobody
  waits longer than until the tree says that it stops or has failed, or a drain's time is over.
- Only the event loop's thread touches state; long texts are encoded on two threads that touch the tokenizer alone.
- The process installs no signal handlers and never imports torch.
"""
