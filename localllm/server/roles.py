"""The role that each route needs if the server has a key file (``localllm serve --keys``).

A route that is missing here needs an administrator's key.
"""

from __future__ import annotations

#: ``NONE`` is the role of requests without a key.
NONE, METRICS, CLIENT, ADMIN = "none", "metrics", "client", "admin"

#: The roles of keys that may use a route, by the role that the route needs.
MAY_USE: dict[str, tuple[str, ...]] = {
    NONE: (NONE, METRICS, CLIENT, ADMIN),
    METRICS: (METRICS, ADMIN),
    CLIENT: (CLIENT, ADMIN),
    ADMIN: (ADMIN,),
}

_ROUTES = {
    NONE: """
        GET /
        GET /health
        GET /v1/health
    """,
    METRICS: """
        GET /metrics
    """,
    CLIENT: """
        GET /openapi.json
        GET /v1/models
        GET /models
        GET /models/sse
        GET /running
        GET /v1/models/{name:path}
        POST /v1/chat/completions
        POST /chat/completions
        POST /api/v0/chat/completions
        POST /v1/chat/completions/control
        POST /v1/completions
        POST /api/v0/completions
        POST /v1/chat/completions/input_tokens
        POST /chat/completions/input_tokens
        POST /v1/responses
        POST /responses
        POST /v1/responses/input_tokens
        GET /v1/responses/{id}/input_items
        GET /v1/responses/{id}
        DELETE /v1/responses/{id}
        POST /v1/audio/transcriptions
        POST /audio/transcriptions
        POST /v1/embeddings
        POST /api/v0/embeddings
        POST /embedding
        POST /embeddings
        POST /pooling
        POST /api/embed
        POST /api/embeddings
        POST /v1/rerank
        POST /v1/reranking
        POST /rerank
        POST /reranking
        POST /v1/messages
        POST /v1/messages/count_tokens
        POST /api/chat
        POST /api/generate
        GET /api/tags
        GET /api/ps
        GET /api/version
        POST /api/show
        GET /api/v0/models
        GET /api/v0/models/{name:path}
        GET /api/v1/models
        POST /api/v1/chat
        GET /props
        GET /lora-adapters
        POST /tokenize
        POST /detokenize
        POST /apply-template
        POST /completion
        POST /completions
        POST /infill
    """,
    ADMIN: """
        GET /models/catalog
        GET /page/tools
        POST /page/tools/preview
        POST /page/tools/call
        POST /page/tools/restart
        POST /page/tools/undo
        POST /models/load
        POST /models/unload
        GET /unload
        POST /unload
        POST /api/v1/models/load
        POST /api/v1/models/unload
        POST /api/pull
        DELETE /api/delete
        POST /api/copy
        POST /api/create
        POST /api/push
        POST /api/blobs/{digest}
        GET /slots
        POST /slots/{id}
        POST /lora-adapters
    """,
}

#: Role by method and path.
ROLE_OF = {route.strip(): role for role, routes in _ROUTES.items() for route in routes.strip().splitlines()}


def role_of(method: str, path: str) -> str:
    """Return the role that a route needs.  ``path`` is the route's pattern."""
    return ROLE_OF.get(f"{method} {path}", ADMIN)
