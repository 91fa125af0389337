"""Operations of models, and backends that compute them."""
