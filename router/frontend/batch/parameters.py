"""The fields of ``POST /v1/batches``; a part of ``docs/parameters.md`` is written of them."""

from router.frontend.api.bodies.fields import Fields

BATCH = Fields(
    title="`POST /v1/batches`",
    honoured={
        "input_file_id": "a file that was sent with purpose batch",
        "endpoint": "where each line goes",
        "completion_window": "1h to 999h; left out: 24h",
        "metadata": "up to 16 texts, told again with the batch",
    },
    accepted={"output_expires_after": "files of answers stay for clients.batch.keep_days"},
)

TABLE = (BATCH,)
