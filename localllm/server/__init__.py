"""The server: HTTP APIs of OpenAI, Anthropic, Ollama and llama.cpp over models that are loaded on demand.

`localllm.server.app.make_app` creates it.  A request passes through these modules:

    http.Guard          checks Host, Origin, key and size
    openai, anthropic,
    ollama, llamacpp    convert the API's JSON to a `GenerationJob`, and `PendingReplies` to the API's JSON
    dispatcher          converts a `GenerationJob` to streams of a model, and starts `PendingReplies`
    models              selects the model, and loads it at the first request

The server needs the extra ``serve``: ``pip install localllm[serve]``.
"""
