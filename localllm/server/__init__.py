"""The server: HTTP APIs of OpenAI, Anthropic, Ollama and llama.cpp over models that are loaded on demand.

`localllm.server.app.make_app` makes it.  A request takes this way:

    http.Guard          who may ask: Host, Origin, key, size
    openai, anthropic,
    ollama, llamacpp    one API each: its JSON into a `GenerationJob`, and `PendingReplies` into its JSON
    dispatcher          a `GenerationJob` into streams of a model, and those into parts of replies
    models              which model, loaded when it is first asked for

It needs the extra ``serve``: ``pip install localllm[serve]``.
"""
