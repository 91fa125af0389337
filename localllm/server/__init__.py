"""The server: HTTP APIs of OpenAI, Anthropic, Ollama and llama.cpp over models that are loaded on demand.

`localllm.server.app.App` is the application.  A request passes through these modules:

    monitor.Monitor     assigns an id, and at the end updates metrics, logs and traces
    http.Guard          checks Host, Origin, key and size
    keys, roles         read the key file; the role that each route needs
    app, bodies         select the handler, and convert the body to a struct
    openai, anthropic,
    ollama, llamacpp    convert the struct to a `GenerationJob`, and replies to the API's JSON by a `ReplyWriter`
    endpoint            performs the steps that these APIs share
    dispatcher          converts a `GenerationJob` to streams of a model, and starts `PendingReplies`
    models              selects the model, and loads it at the first request

The server needs the extra ``serve``: ``pip install localllm[serve]``.  Traces need the extra ``otel``.
"""
